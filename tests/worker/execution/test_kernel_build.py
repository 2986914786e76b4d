"""Kernels compiled ahead, without a GPU: which they are, and that a launch finds them without a C compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from architecture_of import architecture_of

from modelserve.published import published_model
from modelserve.termination import TerminationReason
from modelserve_worker.__main__ import main
from modelserve_worker.terminal_error import TerminalError

# Two layers of the 31B model: one of each kind, with its real heads.
COMMON = """
import json, sys
from pathlib import Path
from modelserve.model.architecture import ModelArchitecture
from modelserve.engine_args import EngineArgs
from modelserve.published import published_model
from modelserve_worker.startup import kernel_build, kernel_trace
from modelserve_worker.kernels.compiling.bundles import preload
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, kept
folder, cuda = Path(sys.argv[1]), sys.argv[2]
whole = published_model("hf://google/gemma-4-31B").architecture.model_dump()
architecture = ModelArchitecture.model_validate(whole | {"full_attention_layers": (1,), "num_hidden_layers": 2})
args = EngineArgs(model="", max_num_seqs=8, max_num_batched_tokens=64, tensor_parallel_size=int(sys.argv[3]))
cheap = ("combine", "residual_norm", "gated_gelu")
def depends(launch):
    return json.loads(launch.specialization)["options"].get("launch_pdl", False)
"""
BUILD = """
launches = kernel_trace.kernel_launches(architecture, args, capability=90)
assert all(depends(each) for each in launches if not isinstance(each, CudaSource)), "a launch breaks the chain"
kernel_build._begin(str(folder), kernel_build._cuda_library_folder(Path(cuda)), 90)
for launch in launches:
    if isinstance(launch, CudaSource) or launch.kernel in cheap:
        kernel_build._compile(launch)
print(json.dumps([each.file if isinstance(each, CudaSource) else each.kernel for each in launches]))
"""
NAMES = """
args = args.model_copy(update={"max_num_batched_tokens": 256})  # too many rows for one small sum
launches = kernel_trace.kernel_launches(architecture, args, capability=90)
print(json.dumps([each.file if isinstance(each, CudaSource) else each.kernel for each in launches]))
"""
CONSTANTS = """
import importlib, triton, triton.language as tl
compiled = []
def note(self, key, signature, device, constexprs, *rest, **options):
    compiled.append((self.__name__, [getattr(each, "value", each) for each in constexprs.values()]))
triton.JITFunction._do_compile = note
for dtype in ("auto", "int8", "fp8_e4m3", "fp8_e5m2"):
    args = EngineArgs(model="", kv_cache_dtype=dtype, max_num_seqs=1, max_num_batched_tokens=64)
    for launch in kernel_trace.kernel_launches(architecture, args, capability=90):
        if not isinstance(launch, CudaSource):
            triton.runtime.driver.set_active(kernel_trace.TargetDriver(90))
            preload(getattr(importlib.import_module(launch.module), launch.kernel), launch.specialization)
wrong = sorted({name for name, constants in compiled if any(isinstance(each, tl.dtype) for each in constants)})
formats = sorted({each for _, constants in compiled for each in constants if isinstance(each, str)})
print(json.dumps([wrong, formats]))
"""
QUANTISED = """
from modelserve.model.weight_format import WeightFormat
whole = published_model("hf://google/gemma-4-26B-A4B").architecture.model_dump()
architecture = ModelArchitecture.model_validate(whole | {"full_attention_layers": (1,), "num_hidden_layers": 2})
args = EngineArgs(model="", max_num_seqs=1, max_num_batched_tokens=1280)
formats = {
    "int4": WeightFormat(stored="int4", scales="group", group_size=32),
    "fp8": WeightFormat(stored="fp8", scales="channel", fp8_activations=True),
}
name, capability = sys.argv[4], int(sys.argv[5])
launches = kernel_trace.kernel_launches(architecture, args, capability=capability, weight_format=formats[name])
triton_launches = [each for each in launches if not isinstance(each, CudaSource)]
assert capability < 90 or all(map(depends, triton_launches)), "a launch breaks the chain"
kernels = {each.kernel for each in triton_launches}
kernels |= {each.file for each in launches if isinstance(each, CudaSource)}
found = sorted(each for each in kernels if each.startswith((name, "integer", "round", "linear")))
print(json.dumps(found))
"""
ASSISTANT = """
from modelserve.published import assistant_of
from modelserve.sizing.speculation import Speculation
kernel_trace.read_speculation = lambda args, architecture: Speculation(2, assistant_of("31B"))
args = args.model_copy(update={"drafter": "its-assistant", "num_speculative_tokens": 2})
with_it = set(kernel_trace.kernel_launches(architecture, args, capability=90))
kernel_trace.AssistantDrafter.run = lambda self, size: None
without = set(kernel_trace.kernel_launches(architecture, args, capability=90))
assert without < with_it
print(json.dumps([each.file if isinstance(each, CudaSource) else each.kernel for each in with_it - without]))
"""
LAST_ROWS = """
from modelserve.sizing.cuda_graphs import FEW_LAST_ROWS
from modelserve_worker.step.input_batch import StepPacker
from modelserve_worker.kernels.products.hopper import linear_rows_sm90
assert linear_rows_sm90.ROWS[-1] == FEW_LAST_ROWS
whole = published_model("hf://google/gemma-4-E4B").architecture.model_dump()
changes = {"full_attention_layers": (1, 3), "num_hidden_layers": 4, "num_kv_shared_layers": 2}
architecture = ModelArchitecture.model_validate(whole | changes)
args = EngineArgs(model="", max_num_seqs=64, max_num_batched_tokens=128)
views, traced = StepPacker.mixed_views, set()
def note(self, rows, last):
    traced.add((rows, last))
    return views(self, rows, last)
StepPacker.mixed_views = note
kernel_trace.kernel_launches(architecture, args, capability=90)
print(json.dumps(sorted(traced)))
"""
TABLE = """
from modelserve.sizing.backends.launches import decode_launches
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.backends.table import LIBRARY
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve.model.weight_format import WeightFormat
from modelserve_worker.startup import kernel_trace
from modelserve_worker.kernels.compiling.launching import noted_by
FORMATS = {
    "bf16": None, "int4": WeightFormat(stored="int4", scales="group", group_size=32),
    "int4_asym": WeightFormat(stored="int4", scales="group", group_size=32, symmetric=False),
    "fp8": WeightFormat(stored="fp8", scales="channel", fp8_activations=True),
}
around = ["step_tokens", "rotations", "embed", "rms_norm", "linear_rows", "cluster_rows", "per_layer_inputs"]
steps, run, context = [], kernel_trace._run, kernel_trace.launches_go_to
def noted_run(model, attention, step, *rest):
    steps.append([step.chunks is None, len(step.positions), []])
    run(model, attention, step, *rest)
def noted(found, *rest):
    def both(launch, *more):
        if steps:
            steps[-1][2].append(launch.entry if isinstance(launch, CudaSource) else launch.kernel)
        return found(launch, *more)
    return context(both, *rest)
kernel_trace._run, kernel_trace.launches_go_to = noted_run, noted
def differences(variant, capability, kv, weights):
    steps.clear()
    whole = published_model(f"hf://google/gemma-4-{variant}").architecture.model_dump()
    changes = {"full_attention_layers": (1,), "num_hidden_layers": 2, "num_kv_shared_layers": 0}
    architecture = ModelArchitecture.model_validate(whole | changes)
    args = EngineArgs(model="", max_num_seqs=72, max_num_batched_tokens=128, kv_cache_dtype=kv)
    layout = KVCacheLayout.least(architecture)
    stored = KVCacheDtype.BFLOAT16 if kv == "auto" else KVCacheDtype(kv)
    table = resolve(capability, architecture, Formats(FORMATS[weights], stored, layout))
    launches = kernel_trace.kernel_launches(
        architecture, args, capability=capability, weight_format=FORMATS[weights]
    )
    wrong = []
    for decodes, rows, names in steps:
        counted = dict(decode_launches(table, architecture, rows=rows, ranks=1))
        counted.pop(LIBRARY, None)
        found = {name: names.count(name) for name in names}
        for name in around:  # of the step's beginning and of its head
            found[name] = counted[name] = 0
        found, counted = ({k: v for k, v in each.items() if v} for each in (found, counted))
        if decodes and found != counted:
            wrong.append([rows, found, counted])
    launched = {each.entry if isinstance(each, CudaSource) else each.kernel for each in launches}
    return [wrong[:2], len(steps), sorted(launched - table.kernels()), sorted(table.kernels() - launched)]
cases = (case.split("/") for case in sys.argv[4:])
print(json.dumps([differences(variant, int(capability), kv, weights) for variant, capability, kv, weights in cases]))
"""
KERNEL_NAMES = """
import importlib, pkgutil
import modelserve_worker.kernels as package
from triton.runtime.jit import JITFunction
from modelserve_worker.kernels.compiling import kernel_cache
kernel_cache.name_alike()
found = {}
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    if module.name.endswith("_triton"):
        for function in vars(importlib.import_module(module.name)).values():
            if isinstance(function, JITFunction):
                found[f"{function.__module__}.{function.__name__}"] = function
print(json.dumps({name: found[name].cache_key for name in sorted(found, reverse=sys.argv[4] == "reversed")}))
"""
LAUNCH = """
import ctypes, os, triton
from triton.backends.nvidia import driver as nvidia
from modelserve_worker.kernels.compiling import kernel_cache
triton.knobs.cache.manager_class = kernel_cache.ShippedFirst
kernel_cache.name_alike()
if os.path.exists(f"{cuda}/libcuda.so.1"):
    ctypes.CDLL(f"{cuda}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    sys.setdlopenflags(os.RTLD_LAZY)
    triton.knobs.nvidia.libcuda_path = cuda
assert kernel_cache.c_compiler() is None
hits = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: hits.append((src.fn.__name__, cache_hit))
compile = triton.JITFunction._do_compile
def only_cheap(self, *arguments, **options):
    if self.__name__ not in cheap:
        return None
    triton.knobs.runtime.jit_cache_hook = None
    kernel = compile(self, *arguments, **options)
    nvidia.CudaLauncher(kernel.src, kernel.metadata)
    return kernel
triton.JITFunction._do_compile = only_cheap
from modelserve_worker.kernels.compiling import cuda_kernel
cuda_kernel.compiled = None  # whoever compiles now fails
for launch in kernel_trace.kernel_launches(architecture, args, capability=90):
    hits.append((launch.file, bool(kept(launch))))
print(json.dumps(hits))
"""


def run(code: str, *arguments: str | Path, **environment: str) -> Any:
    variables = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CC")}
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code, *map(str, arguments)],
        env=variables | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_kernel_has_one_name_whatever_was_named_before_it(tmp_path: Path) -> None:
    """Or a process would not find what another one has compiled, which meets kernels in its own order."""
    forwards, backwards = (run(KERNEL_NAMES, tmp_path, tmp_path, "1", order) for order in ("in order", "reversed"))
    assert len(forwards) > 80
    assert forwards == backwards


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """(a folder with some kernels, one with a library of the driver's name, all kernels that a start-up launches)."""
    folder, cuda = tmp_path_factory.mktemp("shipped"), tmp_path_factory.mktemp("cuda")
    names = run(BUILD, folder, cuda, "1")
    assert isinstance(names, list)
    return folder, cuda, names


def test_every_kernel_that_a_start_up_needs_is_found(built: tuple[Path, Path, list[str]]) -> None:
    """One launch each: start of a step, elementwise, prepare and commit, attention of both kinds, sampling, its end."""
    assert set(built[2]) == {
        "step_tokens", "rotations", "accept_tokens", "embed", "rms_norm", "residual_norm", "prepare",
        "commit", "combine", "expand_keys", "sliding_chunk_sm90.cu", "sliding_decode_sm90.cu",
        "decode_stream_sm90.cu", "v_only_decode_sm90.cu", "global_chunk_sm90.cu", "linear_rows_sm90.cu",
        "cluster_rows_sm90.cu",
        "_select_chunks", "_draw_rows", "_scale_chunks", "_weigh_chunks", "_draw_filtered_rows", "_report_chunks",
        "_report_rows",
    }  # fmt: skip
    # What starts after the embedding reads these without waiting.
    assert max(map(built[2].index, ("step_tokens", "rotations"))) < built[2].index("embed")


def test_several_ranks_launch_kernels_that_sum_and_merge_over_ranks(
    built: tuple[Path, Path, list[str]], tmp_path: Path
) -> None:
    shared = run(NAMES, tmp_path, tmp_path, "2")
    assert isinstance(shared, list)
    assert set(shared) - set(built[2]) - {"gated_gelu"} == {"_merge_parts", "peer_sums.cu", "peer_rows.cu"}
    assert {"_select_chunks", "_draw_rows"} <= set(shared)


def test_what_is_compiled_ahead_has_the_constants_of_its_launch(tmp_path: Path) -> None:
    """Of every cache type. Triton takes a constant that is named as one of its types for the type, and a kernel that
    asks for the name then takes another branch, under the name of the right kernel."""
    wrong, formats = run(CONSTANTS, tmp_path, tmp_path, "1")
    assert wrong == []
    assert formats == ["bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"]


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "capability", "kernels"), [
    ("int4", 89, ["int4_dequantise", "int4_expert_products", "int4_product"]),
    ("int4", 90, ["int4_expert_products", "integer_rows_sm90.cu", "linear_int4_sm90.cu", "linear_rows_sm90.cu"]),
    ("fp8", 90, ["fp8_expert_products", "fp8_product", "linear_rows_sm90.cu", "round_inputs", "round_precision"]),
])  # fmt: skip
def test_kernels_of_quantised_models_are_found(tmp_path: Path, name: str, capability: int, kernels: list[str]) -> None:
    """INT4 with more rows than the fused kernel takes, and FP8 whose inputs are rounded, in a model with experts."""
    assert run(QUANTISED, tmp_path, tmp_path, "1", name, str(capability)) == kernels


def test_the_table_names_what_steps_launch_and_how_often(tmp_path: Path) -> None:
    """Of every captured step of decodes, kernel by kernel; and no kernel of a step is missing in the table."""
    cases = (
        "31B/90/auto/bf16", "26B-A4B/90/auto/bf16", "E4B/90/auto/bf16", "31B/90/auto/int4", "31B/90/auto/int4_asym",
        "12B/89/auto/fp8",
    )  # fmt: skip
    for case, (wrong, steps, unnamed, idle) in zip(cases, run(TABLE, tmp_path, tmp_path, "1", *cases), strict=True):
        assert wrong == [], case
        assert steps > 20
        assert unnamed == [], case
        # What no step of this size or kind needs: sizes past 128 rows, few rows that others take, rows of images.
        of_more = {"int4_dequantise", "int4_product", "linear_int4", "round_inputs", "deal_slots", "copy_rows"}
        of_more |= {"gated_gelu"}  # and gates of a product that leaves them
        of_more |= {"split_decode", "split_decode_v_only"}  # and decodes with drafts, where others have Hopper's
        assert set(idle) <= of_more, case


def test_targets_are_built_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in one call find what each finds alone, in its own process."""
    from modelserve.engine_args import EngineArgs
    from modelserve.model.weight_format import int4
    from modelserve_worker.startup import kernel_build

    processes: list[list[int]] = []

    class Process:
        """In this one: notes for which targets it is."""

        def __init__(self, _processes: int, **_: Any) -> None:
            processes.append([])

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, *_: Any, capability: int, **__: Any) -> Any:
            processes[-1].append(capability)
            return SimpleNamespace(result=lambda: 2)

    monkeypatch.setattr(kernel_build, "ProcessPoolExecutor", Process)
    monkeypatch.setattr(kernel_build, "c_compiler", lambda: "cc")
    architecture = architecture_of("31B", form="")
    built = kernel_build.build_kernels(
        architecture, EngineArgs(model=""), weight_format=int4(32), output=tmp_path, capabilities=[80, 90],
        processes=1,
    )  # fmt: skip
    assert (built, processes) == (4, [[80], [90]])


def test_steps_of_few_last_rows_are_traced_as_well(tmp_path: Path) -> None:
    """As many as the kernel of few rows takes."""
    traced = run(LAST_ROWS, tmp_path, tmp_path, "1")
    assert {(rows, last) for rows, last in traced if rows > 20} == {(64, 32), (64, 64), (128, 32), (128, 64)}


def test_drafts_of_an_assistant_are_traced_as_well(tmp_path: Path) -> None:
    """Its widths are not the target's: products, norms and queries are specialised anew."""
    assert {"prepare", "rms_norm", "linear_rows_sm90.cu"} <= set(run(ASSISTANT, tmp_path, tmp_path, "1"))


def test_launches_of_another_process_hit_what_was_shipped_without_a_compiler(
    built: tuple[Path, Path, list[str]], tmp_path: Path
) -> None:
    """From a folder that was moved since, and with nothing written to the pod's own."""
    folder, cuda, names = built
    moved = tmp_path / "shipped"
    moved.symlink_to(folder)
    own = tmp_path / "own"
    paths = {"MODELSERVE_KERNELS_DIR": str(moved), "TRITON_CACHE_DIR": str(own), "PATH": str(tmp_path)}
    hits = run(LAUNCH, folder, cuda, "1", **paths)
    assert isinstance(hits, list)
    cheap = [name for name in names if name in ("combine", "residual_norm", "gated_gelu") or name.endswith(".cu")]
    assert sorted(hits) == sorted([name, True] for name in cheap)
    assert not own.exists() or not list(own.iterdir())


def test_a_missing_compiler_is_said_and_other_errors_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.build import compile_module_from_src

    from modelserve_worker.kernels.compiling.kernel_cache import compilations

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(TerminalError, match="no C compiler to build its launcher") as caught, compilations():
        compile_module_from_src("int x;", "x")
    assert caught.value.reason is TerminationReason.KernelsUnavailable
    with pytest.raises(RuntimeError, match="device-side assert"), compilations():
        raise RuntimeError("device-side assert")


def test_an_entry_with_a_part_missing_is_made_again_in_the_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelserve_worker.kernels.compiling.kernel_cache import ShippedFirst

    shipped, own = tmp_path / "shipped", tmp_path / "own"
    (shipped / "KEY").mkdir(parents=True)
    (shipped / "KEY" / "a.cubin").write_bytes(b"shipped")
    monkeypatch.setenv("MODELSERVE_KERNELS_DIR", str(shipped))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(own))
    cache = ShippedFirst("KEY")
    assert cache.get_file("a.cubin") == str(shipped / "KEY" / "a.cubin")
    assert cache.get_group("a.json") is None
    assert cache.put(b"made", "b.cubin") == str(own / "KEY" / "b.cubin")
    assert [path.name for path in (shipped / "KEY").iterdir()] == ["a.cubin"]


def test_the_driver_is_where_this_process_has_it_from(tmp_path: Path) -> None:
    """An image need have neither ldconfig nor its cache of libraries."""
    from modelserve_worker.kernels.compiling.kernel_cache import driver_folder

    maps = "7f00-7f10 r--p 00000000 00:2a 1234 /usr/lib/libc.so.6\n7f10-7f20 rw-p 00000000 00:00 0\n{}"
    driver = tmp_path / "with a space" / "libcuda.so.580.159.04"
    mapped = maps.format(f"7f20-7f30 r-xp 00000000 00:2b 99    {driver}\n")
    assert driver_folder(mapped) is None, "there is no libcuda.so.1 to link against"
    driver.parent.mkdir()
    (driver.parent / "libcuda.so.1").touch()
    assert driver_folder(mapped) == str(driver.parent)
    assert driver_folder(maps.format("")) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "hf://google/gemma-4-31B"], "--target"),
        (["--model", "hf://google/gemma-4-31B", "--target", "sm_70"], "at least sm_80"),
        (["--model", "hf://google/gemma-4-31B", "--target", "sm_90", "--dtype", "float32"], "plain PyTorch"),
        (["--model", "/absent", "--target", "sm_90"], "cannot be read"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert published_model("hf://google/gemma-4-31B") is not None
    assert main(["kernels", *arguments]) == 2
    assert said in capsys.readouterr().err
