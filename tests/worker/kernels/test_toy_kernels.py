"""A product and an attention kernel are a row and a launch each: sized, shown, timed, compiled ahead, run, traced."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from attention_tables import attention_table
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens
from paged_logits import Forced, Traffic, geometry_of, replay
from test_kernel_path import check, padding_rows_hold_anything  # noqa: F401 (a fixture)

from modelserve.model.weight_format import TextLinear
from modelserve.sizing.backends import attention_kernels, products, registry, resolve
from modelserve.sizing.backends.table import Backend, KernelTable, Operation
from modelserve_worker.kernels.attention import triton_launches
from modelserve_worker.kernels.compiling.dependent_launch import launch, launch_dependents, wait_for_prerequisites
from modelserve_worker.kernels.operations import Operations

ADA, SHARED, LAUNCH, CALLS = 89, 48 << 10, "test_toy_kernels:", list[str]()
PROGRAM = """
import json, sys; sys.path[:0] = sys.argv[2:]
import test_toy_kernels as toy
toy.products.PRODUCTS.insert(0, toy.PRODUCT); toy.attention_kernels.ATTENTION.insert(0, toy.ATTENTION)
from modelserve.cli.__main__ import main; from modelserve.engine_args import EngineArgs
from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.speed.engine_rates import engine_rates
from modelserve.planning.speed.product_time import many_decodes_seconds
from modelserve.sizing.activation import activation_terms; from rank_of import rank_of
from modelserve.published import published_model; from modelserve_worker.startup.kernel_trace import kernel_launches
main(["plan", "-f", sys.argv[1], "--accelerator", "NVIDIA-L40S:8", "--accelerator", "NVIDIA-H200:1", "--kernels"])
whole, gpus = published_model("hf://google/gemma-4-31B-it").architecture.model_dump(), (toy.ADA, 90)
model = ModelArchitecture.model_validate(whole | {"full_attention_layers": (1,), "num_hidden_layers": 2})
rates, args = engine_rates((9, 0)), EngineArgs(model="", max_num_seqs=4, max_num_batched_tokens=64)
held = [activation_terms(model, rank_of(model, capability=g))[0].get("products", 0) for g in gpus]
seconds = [many_decodes_seconds(model, rates, divmod(g, 10), ranks=1, weight_format=None)[-1][1] for g in gpus]
traced = [{getattr(each, "kernel", "") for each in kernel_launches(model, args, capability=g)} for g in gpus]
toys = (seconds[0] - 6 * rates.library_seconds) / rates.wide_seconds  # beside three other products a layer
print(json.dumps([held, round(toys, 6), seconds[1], [{"toy_product", "toy_decode"} <= each for each in traced]]))
"""


@triton.jit
def toy_product(x, weight, result, sums, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents()
    wait_for_prerequisites()
    at, place = tl.arange(0, BLOCK), tl.program_id(1) * OUTPUTS + tl.program_id(0)
    row = tl.load(x + tl.program_id(1) * INPUTS + at, at < INPUTS, other=0.0).to(tl.float32)
    column = tl.load(weight + tl.program_id(0) * INPUTS + at, at < INPUTS, other=0.0).to(tl.float32)
    tl.store(sums + place, tl.sum(row * column))
    tl.store(result + place, tl.load(sums + place))


@triton.jit
def toy_decode(output):
    launch_dependents()
    wait_for_prerequisites()
    tl.store(output, tl.load(output))


def multiply(x, weight, *, shared):
    CALLS.append("product")
    result, size = x.new_empty(x.shape[0], len(weight)), {"INPUTS": x.shape[1], "OUTPUTS": len(weight)}
    block, sums = triton.next_power_of_2(x.shape[1]), shared.named("toy_sums", 3 << 20).view(torch.float32)
    launch(toy_product, (len(weight), x.shape[0]), x.contiguous(), weight, result, sums, **size, BLOCK=block)
    return result


def decode(q, output, step, **layer):
    CALLS.append("attention")
    triton_launches.decode_attention(q, output, step, **layer)
    launch(toy_decode, (1,), output)


PRODUCT = registry.ProductKernel(
    "toy_product", Backend.TRITON, lambda m: 4 * (m.capability == ADA and m.linear is TextLinear.OUTPUT),
    LAUNCH + "multiply", ("shared",), shared_bytes=SHARED, buffer=lambda _: ("toy_sums", 3 << 20),
    extra=(1, "wide_seconds"),
)  # fmt: skip
ATTENTION = attention_kernels.AttentionKernel(
    (Operation.DECODE_ATTENTION,), Backend.TRITON, LAUNCH + "decode", lambda a: 2 * (a.capability == ADA),
    lambda _: ("split_decode", "combine", "toy_decode"), splits=True, shared_bytes=lambda _: SHARED,
)  # fmt: skip


def test_a_plan_shows_what_they_hold_and_one_gpu_compiles_them_ahead() -> None:
    example = Path(__file__).parents[3] / "docs/examples/gemma4-31b.yaml"
    command = [sys.executable, "-c", PROGRAM, str(example), *sys.path]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    *page, found = done.stdout.splitlines()
    texts = "\n".join(page).split(", tensor parallel size ")
    (ada,) = (text for text in texts if "on compute capability 8.9" in text)
    (hopper,) = (text for text in texts if "on compute capability 9.0" in text)
    assert "toy_product (triton); 48 KiB shared, 3 MiB toy sums" in ada, done.stderr
    assert "combine + toy_decode (triton); 48 KiB shared" in ada
    assert "toy" not in hopper
    assert json.loads(found) == [[3 << 20, 0], 2.0, 0.0, [True, False]], "bytes planned, 2 products' time, both traced"


def test_a_real_step_launches_them(tmp_path: Path, monkeypatch) -> None:
    make_checkpoint("31B", tmp_path, seed=2, head_dim=64, global_head_dim=128)
    plain = load_checkpoint(tmp_path)
    monkeypatch.setattr(attention_kernels, "ATTENTION", [ATTENTION, *attention_kernels.ATTENTION])
    attention = attention_table(plain.architecture, geometry_of(plain), capability=ADA).choices
    others = resolve.resolve(None, plain.architecture, resolve.Formats()).choices
    multiplied = dict.fromkeys((None if c.subject == "head" else c.subject, *c.shape) for c in others if any(c.shape))
    matrices = (registry.Matrix(*matrix, weight_format=None, capability=ADA) for matrix in multiplied)
    linear = [c for each in matrices for c in registry.choices_of(each, [PRODUCT, *products.PRODUCTS])]
    kept = (choice for choice in others if not choice.subject)
    table = KernelTable(ADA, "fast", on_kernels=True, choices=(*attention, *kept, *linear))
    model = load_checkpoint(tmp_path, operations=Operations(table, torch.device("cpu")))
    requests = [Forced(tuple(random_tokens(length, seed=length)), length - 1) for length in (6, 5)]
    done = replay(model, Traffic(tuple(requests), chunk=3, max_num_seqs=2), narrowed=True, audited=True, table=table)
    check(done, requests, tmp_path)
    assert set(sys.modules["test_toy_kernels"].CALLS) == {"product", "attention"}
