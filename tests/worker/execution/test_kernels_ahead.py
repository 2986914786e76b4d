"""Kernels compiled beside the loading of weights: who waits for whom, and that nothing depends on it but the time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from model_checkpoints import COMMON, VARIANTS

import modelserve
from modelserve.engine_args import EngineArgs
from modelserve_worker.kernels.compiling import cuda_kernel, kernel_cache
from modelserve_worker.kernels.compiling.kept_files import sealed, write_whole
from modelserve_worker.startup import kernels_ahead
from modelserve_worker.startup.container_limits import cores
from modelserve_worker.startup.nvml import InstalledGPU

H200 = InstalledGPU("NVIDIA-H200", 143_771, (9, 0))
WITHIN_S = 60.0

# One layer of a kind is traced where there are many of it; the launches of all of them are the same.
TRACE = """
import json, sys
from modelserve.model.architecture import ModelArchitecture
from modelserve.engine_args import EngineArgs
from modelserve.published import published_model
from modelserve_worker.startup import kernel_trace
variant, changes, settings, capability = json.loads(sys.argv[1])
whole = published_model(f"hf://google/gemma-4-{variant}").architecture.model_dump()
architecture = ModelArchitecture.model_validate(whole | changes)
args = EngineArgs(model="", max_num_seqs=8, max_num_batched_tokens=64, **settings)
heard = []
run, passed_by = kernel_trace._run_unlike_layers, []
def noted(model):
    run(model)
    passed_by.append(sum("forward" in vars(layer) for layer in model.decoder_layers()))
kernel_trace._run_unlike_layers = noted
few = kernel_trace.kernel_launches(architecture, args, capability=capability, found=heard.append)
kernel_trace._run_unlike_layers = lambda model: None
every = kernel_trace.kernel_launches(architecture, args, capability=capability)
assert heard == few, "each is heard of once, in order"
print(json.dumps([passed_by[0], len(every), sorted(map(repr, set(every) ^ set(few)))]))
"""
STARTER = """
import sys, time
from modelserve.engine_args import EngineArgs
from modelserve_worker.startup import kernels_ahead
from modelserve_worker.startup.nvml import InstalledGPU
kernels_ahead.first_gpu = lambda _: InstalledGPU("NVIDIA-H200", 143_771, (9, 0))
kernels_ahead.cores = lambda: 2.0
args = EngineArgs(model=sys.argv[1], max_num_seqs=1, max_num_batched_tokens=64)
print(kernels_ahead.start_kernels_ahead(args), flush=True)
time.sleep(600)
"""

# Of a start's launches those that the cache has not, by the names that a process gives them which has compiled nothing.
MISSING = """
import importlib, json, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from modelserve.engine_args import EngineArgs
from modelserve.inspection import read_architecture
from modelserve_worker.startup.kernel_trace import kernel_launches
from modelserve_worker.kernels.compiling import cuda_kernel, kernel_cache
from modelserve_worker.kernels.compiling.bundles import preload
args = EngineArgs(model=sys.argv[1], max_num_seqs=1, max_num_batched_tokens=64)
launches = kernel_launches(read_architecture(Path(args.model)), args, capability=90)
kernel_cache.name_alike()
backend, missing = make_backend(GPUTarget("cuda", 90, 32)), []
def look(source, *, target, options):
    key = get_cache_key(source, backend, backend.parse_options(options), get_cache_invalidating_env_vars())
    name = triton.runtime.cache.hashlib.sha256(key.encode()).hexdigest()
    if get_cache_manager(name).get_group(f"{source.fn.__name__}.json") is None:
        missing.append(source.fn.__name__)
cuda_kernel.compiled = lambda source: missing.append(source.file) or (b"", "")
for launch in launches:
    if isinstance(launch, cuda_kernel.CudaSource):
        cuda_kernel.kept(launch)
    else:
        function = getattr(importlib.import_module(launch.module), launch.kernel)
        function.device_caches[90]
        function.compile = look
        preload(function, launch.specialization)
print(json.dumps([len(launches), missing]))
"""


def environment(**variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return inherited | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables


@pytest.mark.drawn
@pytest.mark.parametrize(("variant", "changes", "settings", "capability"), [
    ("31B", {"num_hidden_layers": 9, "full_attention_layers": (3, 8)}, {}, 90),
    ("31B", {"num_hidden_layers": 8, "full_attention_layers": (3, 6)}, {"kv_cache_dtype": "int8"}, 80),
    ("26B-A4B", {"num_hidden_layers": 6, "full_attention_layers": (2, 5)}, {"tensor_parallel_size": 2}, 90),
    ("E4B", {"num_hidden_layers": 12, "full_attention_layers": (2, 5, 8, 11), "num_kv_shared_layers": 6}, {}, 90),
    ("E2B", {"num_hidden_layers": 12, "full_attention_layers": (2, 5, 8, 11), "num_kv_shared_layers": 5}, {}, 90),
])  # fmt: skip
def test_a_layer_of_each_kind_launches_what_all_layers_do(
    variant: str, changes: dict[str, object], settings: dict[str, object], capability: int
) -> None:
    case = json.dumps([variant, changes, settings, capability])
    done = subprocess.run(
        [sys.executable, "-c", TRACE, case], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    passed_by, launches, differing = json.loads(done.stdout.splitlines()[-1])
    assert passed_by >= 3
    assert launches > 15
    assert differing == []


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


@pytest.fixture
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSERVE_KERNELS_DIR", str(tmp_path / "shipped"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_cache")
def test_a_missing_kernel_is_waited_for_while_others_compile(
    lock: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is there, or they have ended. What is there waits for nobody, and without a lock nobody waits."""
    kernel_cache.ShippedFirst("THERE").put(b"cubin", "a.cubin")
    missing, polls = kernel_cache.ShippedFirst("MISSING"), list[int]()
    with lock.open("rb") as holder, caplog.at_level(logging.INFO):
        fcntl.flock(holder, fcntl.LOCK_EX)
        kernel_cache.wait_for_compilers(lock)

        def compile_meanwhile(_: float) -> None:
            polls.append(len(polls))
            if len(polls) == 3:
                missing.put_group("b.json", {"b.cubin": missing.put(b"cubin", "b.cubin")})
            if len(polls) == 5:
                (lock.parent / "cache" / "b.cubin").write_bytes(sealed(b"of NVRTC"))
            if len(polls) == 8:
                fcntl.flock(holder, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", compile_meanwhile)
        assert kernel_cache.ShippedFirst("THERE").get_file("a.cubin") is not None
        assert polls == []
        assert list(missing.get_group("b.json") or ()) == ["b.cubin"]
        assert len(polls) == 3
        assert cuda_kernel._in_cache("b.cubin") == b""
        assert kernel_cache.awaited(lambda: cuda_kernel._in_cache("b.cubin")) == b"of NVRTC"
        assert len(polls) == 5
        assert missing.get_file("c.so") is None
        assert len(polls) == 8
    assert "they are done" in caplog.text
    assert missing.get_file("c.so") is None
    assert len(polls) == 8


@pytest.mark.usefixtures("_cache")
def test_a_lock_that_is_held_for_too_long_or_that_is_gone_keeps_nobody(
    lock: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = kernel_cache.ShippedFirst("MISSING")
    monkeypatch.setattr(kernel_cache, "COMPILERS_DEADLINE_S", 0.0)
    with lock.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        kernel_cache.wait_for_compilers(lock)
        assert missing.get_group("b.json") is None
        assert "this process compiles for itself" in caplog.text
    kernel_cache.wait_for_compilers(lock.with_name("gone"))
    assert missing.get_group("b.json") is None
    kernel_cache.wait_for_compilers(lock)
    assert missing.get_group("b.json") is None


def checkpoint(folder: Path, *, dtype: str = "bfloat16") -> EngineArgs:
    """Settings for a folder that holds no more than a config.json, of four layers with heads that kernels take."""
    text = COMMON | VARIANTS["31B"] | {"head_dim": 64, "global_head_dim": 256, "num_hidden_layers": 4}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    config = {"model_type": "gemma4", "dtype": dtype, "eos_token_id": [1], "text_config": text}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return EngineArgs(model=str(folder), max_num_seqs=1, max_num_batched_tokens=64)


def until(true: Callable[[], bool], within_s: float = WITHIN_S) -> bool:
    deadline = time.monotonic() + within_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def descendants(parent: int) -> set[int]:
    """Processes that `parent` started, and theirs."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = stat.read_text().rpartition(")")[2].split()
            if after_name[0] != "Z":
                parents[int(stat.parent.name)] = int(after_name[1])
    found, last = {parent}, set[int]()
    while found != last:
        last, found = found, found | {child for child, its in parents.items() if its in found}
    return found - {parent}


@pytest.mark.parametrize(("dtype", "present", "said"), [("float32", True, None), ("bfloat16", False, "ended with 1")])
def test_whoever_compiles_lets_go_of_the_lock_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: str, present: bool,
    said: str | None,
) -> None:  # fmt: skip
    """With nothing to compile, and for a checkpoint that cannot be read."""
    args = checkpoint(tmp_path / "model", dtype=dtype)
    if not present:
        (tmp_path / "model" / "config.json").unlink()
    monkeypatch.setattr(kernels_ahead, "first_gpu", lambda _: H200)
    monkeypatch.setattr(kernels_ahead, "cores", lambda: 2.0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with caplog.at_level(logging.INFO):
        lock = kernels_ahead.start_kernels_ahead(args)
        assert lock is not None
        kernel_cache.wait_for_compilers(lock)
        assert kernel_cache.awaited(lambda: None) is None
        assert until(lambda: not lock.exists())
        assert until(lambda: not any(each.name == "kernels-ahead" for each in threading.enumerate()))
    assert "compiles for itself" not in caplog.text
    assert ("when they are first launched" in caplog.text) is (said is not None)
    assert said is None or said in caplog.text


def first_line_of_starter(model: str, variables: dict[str, str]) -> str:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, model], env=variables, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        line = starter.stdout.readline().strip()
        starter.send_signal(signal.SIGKILL)
    return line


def test_a_complete_cache_is_named_by_all_that_its_kernels_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by where the model lies. Of a model that cannot be read there is no name."""
    args = checkpoint(tmp_path / "model")
    name = kernels_ahead.complete_name(args, 90)
    assert name == kernels_ahead.complete_name(checkpoint(tmp_path / "elsewhere"), 90)
    others = {
        kernels_ahead.complete_name(args, 80),
        kernels_ahead.complete_name(args.model_copy(update={"max_num_seqs": 2}), 90),
        kernels_ahead.complete_name(checkpoint(tmp_path / "float32", dtype="float32"), 90),
    }
    versions = kernels_ahead.version
    monkeypatch.setattr(kernels_ahead, "version", lambda name: versions(name) + "1" * (name == "nvidia-cuda-nvrtc"))
    others.add(kernels_ahead.complete_name(args, 90))
    monkeypatch.setattr(kernels_ahead, "version", versions)
    assert kernels_ahead.complete_name(args, 90) == name
    monkeypatch.setenv("TRITON_DEBUG", "1")
    others.add(kernels_ahead.complete_name(args, 90))
    monkeypatch.delenv("TRITON_DEBUG")
    monkeypatch.setattr(modelserve, "__path__", [str(tmp_path / "model")])  # as if it had other sources
    others.add(kernels_ahead.complete_name(args, 90))
    assert len(others - {name}) == 6
    assert kernels_ahead.complete_name(EngineArgs(model="absent"), 90) == ""


@pytest.mark.usefixtures("_cache")
def test_a_cache_is_complete_where_all_that_was_listed_is_there(tmp_path: Path) -> None:
    """In it or shipped, as long as it was; a list that is damaged, or another release's empty one, says nothing."""
    marker = tmp_path / "cache" / "modelserve-complete-1"
    files = [tmp_path / "cache" / name for name in ("KEY/a.cubin", "b.cubin")] + [tmp_path / "shipped" / "c.cubin"]
    names = {"KEY/a.cubin", "b.cubin", "c.cubin"}
    for file in files:
        write_whole(file, b"cubin")
    kernels_ahead._mark_complete(marker, names | {"lost"})
    assert not marker.exists(), "a file went elsewhere"
    kernels_ahead._mark_complete(marker, names)
    assert kernels_ahead.is_complete(marker)
    for file in files:
        file.write_bytes(b"cub")
        assert not kernels_ahead.is_complete(marker)
        file.unlink()
        assert not kernels_ahead.is_complete(marker)
        write_whole(file, b"cubin")
    assert kernels_ahead.is_complete(marker)
    whole = marker.read_bytes()
    for damaged in (b"", whole[:-1], bytes(len(whole)), sealed(b"[]"), sealed(b"{}")):
        marker.write_bytes(damaged)
        assert not kernels_ahead.is_complete(marker)


@pytest.mark.parametrize("variables", [{}, {"TRITON_HOME": "/home"}, {"TRITON_CACHE_DIR": "/cache"}], ids=str)
def test_the_cache_folder_is_the_compilers(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = "import triton; print(triton.knobs.cache.dir)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert kernels_ahead.cache_folder() == Path(done.stdout.strip())


@pytest.mark.parametrize("killed", [False, True])
def test_kernels_are_in_the_cache_when_the_lock_is_free_and_nothing_outlives_its_starter(
    tmp_path: Path, killed: bool
) -> None:
    """One that is waited for, and one that is killed while others compile for it."""
    model, cache = checkpoint(tmp_path / "model").model, tmp_path / "cache"
    variables = environment(TRITON_CACHE_DIR=str(cache), MODELSERVE_KERNELS_DIR=str(tmp_path / "none"))
    started: set[int] = set()
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, model], env=variables, stdout=subprocess.PIPE, text=True
    ) as starter:
        try:
            assert starter.stdout is not None
            lock = Path(starter.stdout.readline().strip())
            assert lock.is_file()
            assert until(lambda: any(cache.glob("*/__grp__*")))
            started |= descendants(starter.pid)
            assert len(started) >= 3, "one that traces, and two that compile"
            if not killed:
                assert until(lambda: not lock.exists(), 300.0)
                made = {path.stem for path in cache.glob("*/__grp__*.json")}
                assert {"__grp__embed", "__grp__rms_norm", "__grp___draw_rows"} <= made
                assert any(cache.glob("*.cubin"))
                assert len(list(cache.glob("modelserve-complete-*"))) == 1
        finally:
            starter.send_signal(signal.SIGKILL)
    assert until(lambda: not any(Path(f"/proc/{each}").exists() for each in started)), "a process outlives"
    lock.unlink(missing_ok=True)
    if not killed:
        assert first_line_of_starter(model, variables) == "None", "all is in the cache"
        done = subprocess.run(
            [sys.executable, "-c", MISSING, model], env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        launches, missing = json.loads(done.stdout.splitlines()[-1])
        assert (launches > 15, missing) == (True, [])
        next(cache.glob("modelserve-complete-*")).unlink()
    restarted = Path(first_line_of_starter(model, variables))
    assert restarted.suffix == ".lock"
    restarted.unlink(missing_ok=True)


def test_nothing_is_compiled_ahead_without_a_gpu_or_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(model="absent")
    monkeypatch.setattr(kernels_ahead, "first_gpu", lambda _: None)
    assert kernels_ahead.start_kernels_ahead(args) is None
    monkeypatch.setattr(kernels_ahead, "first_gpu", lambda _: H200)
    assert kernels_ahead.start_kernels_ahead(args.model_copy(update={"device": "cpu"})) is None
    monkeypatch.setattr(kernels_ahead, "cores", lambda: 1.5)
    assert kernels_ahead.start_kernels_ahead(args) is None


def test_cores_are_those_of_the_container(tmp_path: Path) -> None:
    machine = len(os.sched_getaffinity(0))
    assert cores(cgroup=tmp_path) == machine
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores(cgroup=tmp_path) == machine
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    assert cores(cgroup=tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores(cgroup=tmp_path) == machine
    (tmp_path / "cpu.max").write_text("25000 100000\n")
    assert cores(cgroup=tmp_path) == 0.25
    (tmp_path / "cpu.max").write_text(f"{100_000 * (machine + 1)} 100000\n")
    assert cores(cgroup=tmp_path) == machine
