"""Log probabilities of an engine under mixed traffic, and transformers' own, both against transformers in float32.

    python tests/bench logprobs_under_traffic --variant 31B --layers 6 --variant E4B --layers 30 [--drafts]
    python tests/bench logprobs_under_traffic --device cpu --variant 31B --variant E4B --variant 26B-A4B

Many requests at once: prompts of 1 to --longest tokens in chunks, decodes beside them, steps captured and so padded,
prompts that are scored token by token, prompts that begin with cached rows, a pool with room for fewer than may run,
and preemptions. transformers then reads every prompt with its answer in one pass without a cache. Compared are the log
probabilities of all tokens that the engine gave one of: |ours - float32| beside |transformers in bfloat16 - float32|,
over the same tokens. Weights are random and exact in bfloat16. With --drafts the same
requests come again to an engine with a drafter that is right half of the time. Exits 1 where the ratio of the two means
exceeds 1.1. On the CPU small models are computed in float32: it exits 1 where a log probability is off by more than
2e-4.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from exact_traffic import Exactly, Said, requests
from model_checkpoints import COMMON, VARIANTS
from torch import Tensor
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
from true_drafter import TrueDrafter

from bench.deadline import add_deadline, within
from modelserve.engine_args import EngineArgs
from modelserve.model.architecture import ModelArchitecture
from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.kernels.compiling.kernel_cache import use_kernel_cache
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM as OurGemma4
from modelserve_worker.models.gemma4_checkpoint import text_name, weight_sources
from modelserve_worker.request import Request
from modelserve_worker.startup.device import device_facts, kernel_table

RATIO_LIMIT, FLOAT32_LIMIT = 1.1, 2e-4
SEQUENCES = 16
ROOM = 12.0  # longest requests that the pool is for: fewer than run at once
KINDS = ("scored prompts", "answers", "after a preemption", "behind a prefix", "all")
PREEMPTED_EVERY = 12  # steps, the youngest, as where the pool is out


@dataclass(frozen=True)
class Load:
    """What is asked: so many prompts of 1 to `longest` tokens, with answers of up to `answers`, in `chunk`s."""

    count: int
    longest: int
    answers: int
    chunk: int


class Distances:
    """|difference| to float32 of tokens, by what became of their requests: [N] of ours, and of transformers in bfloat16
    where that was asked."""

    def __init__(self) -> None:
        self.ours: dict[str, list[Tensor]] = {}
        self.theirs: dict[str, list[Tensor]] = {}

    def add(self, said: Said, *, exact: Tensor, theirs: Tensor | None) -> None:
        """`exact`, `theirs`: [tokens - 1], log probabilities of all tokens of a request but the first."""
        answer = slice(len(exact) - len(said.tokens), None)
        ours = torch.tensor([each.logprob for each in said.logprobs], device=exact.device)
        names = [
            "answers",
            *(["after a preemption"] * (said.preempted > 0)),
            *(["behind a prefix"] * (said.cached > 0)),
        ]
        parts = [(name, answer, ours) for name in names]
        if said.prompt:
            parts.append(("scored prompts", slice(None, answer.start), torch.tensor(said.prompt[0]).to(exact.device)))
        for name, part, found in parts:
            kinds = [name, "all"] if name in ("answers", "scored prompts") else [name]
            for kind in kinds:
                self.ours.setdefault(kind, []).append((found - exact[part]).abs())
                if theirs is not None:
                    self.theirs.setdefault(kind, []).append((theirs[part] - exact[part]).abs())

    def lines(self) -> Iterator[str]:
        for kind in KINDS:
            if kind not in self.ours:
                continue
            ours = torch.cat(self.ours[kind])
            line = f"{kind:20} {len(ours):6} tokens | ours mean {ours.mean():.3e} max {ours.max():.3e}"
            if kind in self.theirs:
                theirs = torch.cat(self.theirs[kind])
                line += f" | transformers mean {theirs.mean():.3e} max {theirs.max():.3e}"
                line += f" | ratio {ours.mean() / theirs.mean():.3f}, of max {ours.max() / theirs.max():.2f}"
            yield line

    def near_enough(self) -> bool:
        ours = torch.cat(self.ours["all"])
        if not self.theirs:
            return float(ours.max()) <= FLOAT32_LIMIT
        return float(ours.mean() / torch.cat(self.theirs["all"]).mean()) <= RATIO_LIMIT


def reduced_config(variant: str, layers: int) -> Gemma4TextConfig:
    """The published geometry with its first `layers` layers; as many layers share as are left of those that do."""
    facts = published_model(f"hf://google/gemma-4-{variant}")
    assert facts is not None, f"{variant} is not published"
    full = facts.architecture
    moe = {
        "enable_moe_block": True,
        "num_experts": full.num_experts,
        "top_k_experts": full.top_k_experts,
        "moe_intermediate_size": full.moe_intermediate_size,
    }
    return Gemma4TextConfig(
        vocab_size=full.vocab_size,
        hidden_size=full.hidden_size,
        intermediate_size=full.intermediate_size,
        num_hidden_layers=layers,
        layer_types=[full.kind(layer).value for layer in range(layers)],
        num_attention_heads=full.num_attention_heads,
        num_key_value_heads=full.num_key_value_heads,
        num_global_key_value_heads=full.num_global_key_value_heads if full.attention_k_eq_v else None,
        head_dim=full.head_dim,
        global_head_dim=full.global_head_dim,
        attention_k_eq_v=full.attention_k_eq_v,
        num_kv_shared_layers=max(0, layers - full.first_shared_layer),
        use_double_wide_mlp=full.use_double_wide_mlp,
        hidden_size_per_layer_input=full.hidden_size_per_layer_input,
        vocab_size_per_layer_input=full.vocab_size_per_layer_input or full.vocab_size,
        sliding_window=full.sliding_window,
        final_logit_softcapping=full.final_logit_softcapping,
        **(moe if full.num_experts else {}),
    )


def randomise(model: torch.nn.Module, *, seed: int) -> None:
    """Unit-gain matrices, everything else 1 +- 0.2, attention scores of variance about 1; rounded to bfloat16."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            noise = torch.empty(tensor.shape, device=device).normal_(generator=generator)
            if tensor.dim() > 1:
                noise.mul_(tensor.shape[-1] ** -0.5)
            else:
                is_qk = name.endswith(("q_norm.weight", "k_norm.weight"))
                noise.mul_(0.2).add_(1.0).mul_(tensor.shape[0] ** -0.25 if is_qk else 1.0)
            tensor.copy_(noise.bfloat16())


def round_weights(model: torch.nn.Module) -> None:
    """What loading in bfloat16 gives: saved tensors in bfloat16, position tables still float32."""
    saved = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved:
            tensor.data = tensor.data.bfloat16()


def small_config(variant: str) -> Gemma4TextConfig:
    return Gemma4TextConfig(**COMMON | VARIANTS[variant] | {"num_hidden_layers": len(VARIANTS[variant]["layer_types"])})


def reference_model(config: Gemma4TextConfig, *, device: torch.device, seed: int) -> Gemma4ForCausalLM:
    """In float32, with random weights that are exact in bfloat16."""
    config._attn_implementation = "eager"
    with device:
        model = Gemma4ForCausalLM(config).eval()
    randomise(model, seed=seed)
    return model


@torch.no_grad()
def our_model(reference: Gemma4ForCausalLM, *, device: torch.device, dtype: torch.dtype) -> OurGemma4:
    """With the weights of `reference`, which never leave the device."""
    name = str(dtype).removeprefix("torch.")
    architecture = ModelArchitecture.from_config(reference.config.to_dict() | {"dtype": name})
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype(name), layout=KVCacheLayout.least(architecture), tensor_parallel_size=1
    )
    table = kernel_table(device_facts(device), architecture, geometry, EngineArgs(model="random"))
    model = OurGemma4(architecture, Placement(device, dtype, operations=Operations(table, device)))
    tensors = {text_name(each): tensor for each, tensor in reference.state_dict().items()}
    for source in weight_sources(model):
        assert tensors[source.name].shape == source.shape, source.name
        for region in source.regions:
            part = tensors[source.name].narrow(region.dim, region.source, region.length)
            source.parameter.narrow(region.dim, region.target, region.length).copy_(part)
    for _, matrix in model.stored_matrices():
        matrix.loaded()
    return model


def engines(model: OurGemma4, load: Load) -> Exactly:
    name = str(model.dtype).removeprefix("torch.")
    geometry = cache_geometry(
        model.architecture, dtype=KVCacheDtype(name), layout=KVCacheLayout.least(model.architecture),
        tensor_parallel_size=1,
    )  # fmt: skip
    longest = load.longest + load.answers + 8
    return Exactly(model, geometry, longest, SEQUENCES, model.placement.device, room=ROOM)


def wanted(load: Load, vocab_size: int) -> list[Request]:
    return requests(load.count, longest_prompt=load.longest, most_tokens=load.answers, vocab_size=vocab_size, alike=2)


def answered(model: OurGemma4, load: Load, *, drafts: bool) -> Iterator[tuple[str, dict[str, Said]]]:
    """What was said, without drafts and with them."""
    device, vocab_size = model.placement.device, model.architecture.vocab_size
    run, captured = engines(model, load).run, device.type == "cuda"
    few = Load(2, load.longest, 4, load.chunk)
    run(wanted(few, vocab_size), chunk=load.chunk)  # every kernel runs before it is captured
    options = {
        "chunk": load.chunk, "order": 1, "prefix_caching": True, "preempted_every": PREEMPTED_EVERY,
        "captured": captured,
    }  # fmt: skip
    said = run(wanted(load, vocab_size), **options)
    yield "no drafts", said
    if drafts:
        drafter = TrueDrafter(
            {name: one.tokens for name, one in said.items()}, num_tokens=4, right=0.5, slots=SEQUENCES,
            longest=load.longest + load.answers + 8, vocab_size=vocab_size, device=device,
        )  # fmt: skip
        yield "drafts", run(wanted(load, vocab_size), **options, drafter=drafter, ahead=True)


@torch.inference_mode()
def teacher_forced(model: Gemma4ForCausalLM, ids: Sequence[int], *, needed: int) -> Tensor:
    """float32 [len(ids) - 1]: transformers' log probabilities of all tokens but the first, of which the last `needed`
    are numbers."""
    device = next(model.parameters()).device
    logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False, logits_to_keep=needed + 1).logits[
        0, :-1
    ]
    targets = torch.tensor(ids[-needed:], device=device)
    found = torch.full((len(ids) - 1,), torch.nan, device=device)
    for rows in torch.arange(needed, device=device).split(256):
        part = logits[rows].float()
        found[len(found) - needed + rows] = part.gather(1, targets[rows, None])[:, 0] - part.logsumexp(1)
    return found


def log_probabilities(model: Gemma4ForCausalLM, asked: Sequence[Request], said: dict[str, Said]) -> dict[str, Tensor]:
    found = {}
    for request in asked:
        one = said[request.request_id]
        ids = [*request.prompt_token_ids, *one.tokens]
        needed = len(ids) - 1 if one.prompt else len(one.tokens)
        found[request.request_id] = teacher_forced(model, ids, needed=needed)
    return found


def release() -> None:
    """Leave the device's free memory to others."""
    gc.collect()
    torch.cuda.empty_cache()


def compare(
    variant: str,
    layers: int | None,
    load: Load,
    *,
    device: torch.device,
    seed: int,
    drafts: bool,
    ours: Callable[..., OurGemma4] = our_model,
) -> bool:
    """Prints the distances of one model as they are known; whether they are small enough."""
    on_gpu, began = device.type == "cuda", time.monotonic()
    config = reduced_config(variant, layers) if on_gpu and layers else small_config(variant)
    reference = reference_model(config, device=device, seed=seed)
    release()
    model = ours(reference, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    print(f"{variant}: weights after {time.monotonic() - began:.0f} s", flush=True)
    runs = dict(answered(model, load, drafts=drafts))
    print(f"{variant}: answered after {time.monotonic() - began:.0f} s", flush=True)
    del model
    release()
    asked = wanted(load, config.vocab_size)
    exact = {how: log_probabilities(reference, asked, said) for how, said in runs.items()}
    theirs: dict[str, dict[str, Tensor]] = {}
    if on_gpu:
        round_weights(reference)
        theirs = {how: log_probabilities(reference, asked, said) for how, said in runs.items()}
    near = True
    for how, said in runs.items():
        distances = Distances()
        for name, one in said.items():
            distances.add(one, exact=exact[how][name], theirs=theirs[how][name] if on_gpu else None)
        near &= distances.near_enough()
        preempted = sum(one.preempted > 0 for one in said.values())
        cached = sum(one.cached > 0 for one in said.values())
        print(
            f"{variant}, {config.num_hidden_layers} layers, {how}: {len(said)} requests, {preempted} of them preempted"
        )
        print(f"  and {cached} behind a prefix", *distances.lines(), sep="\n  ", flush=True)
    return near


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", required=True)
    parser.add_argument("--layers", action="append", type=int, help="of each variant, on a GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--longest", type=int, help="tokens of a prompt: 1600 on a GPU, 400 on the CPU")
    parser.add_argument("--answers", type=int, default=64, help="most tokens of one")
    parser.add_argument("--chunk", type=int, help="rows of a step: 512 on a GPU, 128 on the CPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drafts", action="store_true")
    add_deadline(parser)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        use_kernel_cache()
    longest, chunk = (1600, 512) if device.type == "cuda" else (400, 128)
    load = Load(args.requests, args.longest or longest, args.answers, args.chunk or chunk)
    layers = args.layers or [None] * len(args.variant)
    far = []
    with within(args.deadline) as spent:
        for variant, count in zip(args.variant, layers, strict=True):
            if not compare(variant, count, load, device=device, seed=args.seed, drafts=args.drafts):
                far.append(variant)
            release()
    return spent.code(far)
