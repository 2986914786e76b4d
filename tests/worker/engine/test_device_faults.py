"""What of a GPU's errors ends the engine at once, in the words of every library that tells them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda.bindings import driver, runtime

from modelserve_worker.device_faults import LASTING_FAULTS, device_lost
from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.kernels.compiling.cuda_kernel import checked
from modelserve_worker.request import FinishReason, Request, SamplingParams

CODES = sorted(LASTING_FAULTS)
PASSING = [1, 2, 100, 304, 400, 701, 720, 801, 900]  # of one call: memory that is short, a launch that asks too much


def sentence(code: int) -> str:
    _, text = runtime.cudaGetErrorString(runtime.cudaError_t(code))
    return str(text.decode())


def _cuda_error(code: int) -> torch.cuda.CudaError:
    """As PyTorch makes it where there is a driver: a machine without one has no cudart in it."""
    error = torch.cuda.CudaError.__new__(torch.cuda.CudaError)
    RuntimeError.__init__(error, f"{sentence(code)} ({code})")
    return error


def wordings(code: int) -> list[Exception]:
    """As PyTorch, its cudart, Triton, NCCL and this package's calls of the driver say it."""
    name = runtime.cudaError_t(code).name
    link = f"Search for `{name}' in https://docs.nvidia.com/cuda for more information."
    told = [
        torch.AcceleratorError(f"CUDA error: {sentence(code)}\n{link}"),
        _cuda_error(code),
        RuntimeError(f"Triton Error [CUDA]: {sentence(code)}"),
        RuntimeError(f"NCCL error: ncclUnhandledCudaError\nLast error:\nCuda failure {code} '{sentence(code)}'"),
    ]
    with pytest.raises(RuntimeError) as raised:
        checked((driver.CUresult(code),))
    return [*told, raised.value]


@pytest.mark.parametrize("code", CODES)
def test_a_fault_that_lasts_is_known_in_every_wording(code: int) -> None:
    assert driver.CUresult(code).name == f"CUDA_ERROR_{LASTING_FAULTS[code].driver}"
    assert runtime.cudaError_t(code).name == f"cudaError{LASTING_FAULTS[code].runtime}"
    assert LASTING_FAULTS[code].sentence in sentence(code)
    for error in wordings(code):
        dead = device_lost(error)
        assert isinstance(dead, EngineDead), repr(error)
        assert f"({code})" in str(dead)


def test_all_that_cuda_says_of_itself_to_last_is_among_them() -> None:
    lasting = {each.value for each in driver.CUresult if "must be terminated and relaunched" in _words(each.__doc__)}
    assert len(lasting) > 8
    assert lasting <= set(CODES)


def _words(text: str | None) -> str:
    return " ".join((text or "").split())


@pytest.mark.parametrize("code", PASSING)
def test_a_fault_of_one_call_is_none(code: int) -> None:
    assert [device_lost(error) for error in wordings(code)] == [None] * len(wordings(code))


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), RuntimeError("misaligned address"),
    ValueError("an illegal memory access was encountered"), RuntimeError("step 700 failed"),
], ids=str)  # fmt: skip
def test_words_that_no_gpu_said_are_none(error: Exception) -> None:
    assert device_lost(error) is None


def test_what_an_error_came_of_counts_and_a_code_is_enough() -> None:
    inner = RuntimeError("CUDA: CUDA_ERROR_ECC_UNCORRECTABLE (214)")
    outer = RuntimeError("the copies do not start")
    outer.__cause__ = inner
    assert device_lost(outer) is not None
    coded = torch.AcceleratorError("something else")
    coded.error_code = 700
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in str(device_lost(coded))


@pytest.mark.parametrize("where", ["launch_errors", "result_errors"])
def test_a_step_that_meets_one_ends_the_engine_at_once(build_engine: Callable[..., Engine], runner, where: str) -> None:  # type: ignore[no-untyped-def]
    """The first step, not the third; others of its process would all fail."""
    engine = build_engine()
    for name in "ab":
        engine.add(Request(name, (10, 11), SamplingParams(seed=0, max_tokens=5)))
    getattr(runner, where)[1] = torch.AcceleratorError(f"CUDA error: {sentence(700)}")
    with pytest.raises(EngineDead, match=r"CUDA_ERROR_ILLEGAL_ADDRESS \(700\).*must be restarted"):
        all(engine.step() is not None for _ in range(3))
    assert engine.steps_done == 1
    assert not [batch for batch in runner.batches if batch.step > 2], "no step is launched behind it"


def test_a_step_that_fails_otherwise_fails_its_requests_alone(build_engine: Callable[..., Engine], runner) -> None:  # type: ignore[no-untyped-def]
    engine = build_engine()
    engine.add(Request("a", (10, 11), SamplingParams(seed=0, max_tokens=5)))
    runner.result_errors[1] = torch.AcceleratorError(f"CUDA error: {sentence(701)}")
    reasons = []
    while engine.has_work:
        reasons += [output.finish_reason for output in engine.step()]
    assert reasons[-1] is FinishReason.ERROR
