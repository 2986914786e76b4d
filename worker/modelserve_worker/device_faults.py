"""Tells errors of a GPU that end the process from those that fail one call. Torch-free.

CUDA says of some errors that they leave the process in a state in which every further call returns the same one, until
it is started anew; hardware's own errors (memory, NVLink) and a context that is gone are no better. Each library words
them in its own way: PyTorch with the runtime's name and sentence, Triton and NCCL with the sentence, the driver's calls
of this package with the driver's name (`kernels/compiling/cuda_kernel.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from modelserve_worker.engine_client import EngineDead


class LastingFault(NamedTuple):
    """As the driver and the runtime name it, and the runtime's sentence."""

    driver: str
    runtime: str
    sentence: str


LASTING_FAULTS = {
    214: LastingFault("ECC_UNCORRECTABLE", "ECCUncorrectable", "uncorrectable ECC error encountered"),
    220: LastingFault(
        "NVLINK_UNCORRECTABLE", "NvlinkUncorrectable", "uncorrectable NVLink error detected during the execution"
    ),
    226: LastingFault("CONTAINED", "Contained", "Invalid access of peer GPU memory over nvlink or a hardware error"),
    700: LastingFault("ILLEGAL_ADDRESS", "IllegalAddress", "an illegal memory access was encountered"),
    702: LastingFault("LAUNCH_TIMEOUT", "LaunchTimeout", "the launch timed out and was terminated"),
    709: LastingFault("CONTEXT_IS_DESTROYED", "ContextIsDestroyed", "context is destroyed"),
    710: LastingFault("ASSERT", "Assert", "device-side assert triggered"),
    714: LastingFault("HARDWARE_STACK_ERROR", "HardwareStackError", "hardware stack error"),
    715: LastingFault("ILLEGAL_INSTRUCTION", "IllegalInstruction", "an illegal instruction was encountered"),
    716: LastingFault("MISALIGNED_ADDRESS", "MisalignedAddress", "misaligned address"),
    717: LastingFault(
        "INVALID_ADDRESS_SPACE", "InvalidAddressSpace", "operation not supported on global/shared address space"
    ),
    718: LastingFault("INVALID_PC", "InvalidPc", "invalid program counter"),
    719: LastingFault("LAUNCH_FAILED", "LaunchFailure", "unspecified launch failure"),
    721: LastingFault("TENSOR_MEMORY_LEAK", "TensorMemoryLeak", "tensor memory not completely freed"),
    810: LastingFault("MPS_CLIENT_TERMINATED", "MpsClientTerminated", "the MPS client has been terminated"),
    911: LastingFault(
        "EXTERNAL_DEVICE", "ExternalDevice", "an async error has occured in external entity outside of CUDA"
    ),
}
"""By CUresult, which is cudaError_t, too."""


def device_lost(error: BaseException) -> EngineDead | None:
    """The end of the engine where `error`, or what it came of, is such a fault of its GPU."""
    for each in _chain(error):
        code = _code(each)
        if code is not None:
            return EngineDead(
                f"the GPU failed for good with CUDA_ERROR_{LASTING_FAULTS[code].driver} ({code}): what this process "
                "asked of it from now on would fail, too. The worker must be restarted; where the same node fails "
                "again, look for Xid errors in its kernel log and at `nvidia-smi -q`"
            )
    return None


def _code(error: BaseException) -> int | None:
    stated = getattr(error, "error_code", None)  # of a torch.AcceleratorError
    if isinstance(stated, int) and stated in LASTING_FAULTS:
        return stated
    text = str(error)
    if "cuda" not in f"{type(error).__name__} {text}".lower():
        return None
    for code, fault in LASTING_FAULTS.items():
        if any(word in text for word in (f"CUDA_ERROR_{fault.driver}", f"cudaError{fault.runtime}", fault.sentence)):
            return code
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    asked: list[BaseException | None] = [error]
    while asked:
        each = asked.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            asked += [each.__context__, each.__cause__]
