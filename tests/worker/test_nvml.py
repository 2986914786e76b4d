"""What NVML is asked, over a library that the test writes; and what a worker started by hand makes of its answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from architecture_of import architecture_of

from modelserve.engine_args import EngineArgs
from modelserve.hardware import CATALOGUE
from modelserve.planning.worker_settings import STEP_SETTINGS, planned_args
from modelserve_worker.startup import nvml

FAILED = 6
MIB = 1 << 20


class Library:
    """An NVML of two GPUs, whose first has the UUID GPU-1."""

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 1
        return 0 if uuid == b"GPU-1" else FAILED

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0 if index < 2 else FAILED

    def nvmlDeviceGetName(self, handle: Any, name: Any, length: int) -> int:
        name.value = {1: b"NVIDIA H200", 2: b"NVIDIA L4"}[handle.value]
        assert len(name.value) < length
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = {1: (9, 0), 2: (8, 9)}[handle.value]
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> int:
        assert memory._obj.version == 0x2000028
        memory._obj.used, memory._obj.total = 77, {1: 143_771, 2: 23_034}[handle.value] * MIB
        return 0


class OldLibrary(Library):
    """Of a driver without the second version of a call."""

    @property
    def nvmlDeviceGetMemoryInfo_v2(self) -> Any:
        raise AttributeError


def loads(library: Library | None) -> Callable[[str], Library]:
    def load(name: str) -> Library:
        if library is None:
            raise OSError(name)
        return library

    return load


def test_what_is_used_is_asked_of_the_library_and_a_stranger_to_it_uses_nothing() -> None:
    library = Library()
    assert [nvml.used_bytes(uuid, load=loads(library)) for uuid in ("GPU-1", "GPU-2")] == [77, 0]
    assert library.open == 0
    assert nvml.used_bytes("GPU-1", load=loads(None)) == 0


@pytest.mark.parametrize(("visible", "product"), [
    (None, "NVIDIA-H200"), ("1", "NVIDIA-L4"), ("1,0", "NVIDIA-L4"), ("GPU-1", "NVIDIA-H200"), ("", None), ("7", None),
    ("MIG-9", None),
])  # fmt: skip
def test_the_first_gpu_is_the_first_that_a_process_may_see(visible: str | None, product: str | None) -> None:
    library = Library()
    found = nvml.first_gpu({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, load=loads(library))
    assert (found.product if found else None) == product
    assert library.open == 0


@pytest.mark.parametrize("library", [None, OldLibrary()])
def test_without_the_library_or_with_an_old_one_there_is_no_first_gpu(library: Library | None) -> None:
    assert nvml.first_gpu({}, load=loads(library)) is None


def sizes(args: EngineArgs, model: str, gpu: str = "NVIDIA-H200") -> tuple[int, ...]:
    settled = planned_args(args, architecture_of(model, form=""), CATALOGUE[gpu])
    return tuple(getattr(settled, name) for name in STEP_SETTINGS)


def test_what_a_worker_is_not_told_it_takes_as_a_plan_has_it(tmp_path: Path) -> None:
    args = EngineArgs(model=str(tmp_path))
    assert sizes(args, "E4B") == (8192, 2048, 256)
    assert sizes(args, "26B-A4B") == (8192, 4096, 256)
    assert sizes(args, "31B") == (8192, 512, 128)
    assert sizes(args, "E4B", "NVIDIA-L4") == (2048, 256, 64)


def test_what_it_is_told_stays_and_what_would_shorten_the_context_asked_for_is_not_taken(tmp_path: Path) -> None:
    told = EngineArgs(model=str(tmp_path), max_num_seqs=16, max_num_batched_tokens=1024)
    assert sizes(told, "E4B") == (1024, 1024, 16)
    least = EngineArgs(model=str(tmp_path), max_model_len=262_144, gpu_memory_utilization=0.5)
    assert sizes(least, "31B") == (2048, 512, 64), "as they are where such a plan does not fit"
