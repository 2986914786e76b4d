"""CUDA C++ kernels of this package: compiled by NVRTC, which PyTorch's wheels bring, and launched by the driver.

A machine that serves has no nvcc. What NVRTC makes of a source is looked for and kept where `kernel_cache` says, under
a name that covers the source, the options, the target and NVRTC's version, with a digest at its end.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
from cuda.bindings import driver, nvrtc

from modelserve_worker.device_faults import device_lost
from modelserve_worker.kernels.compiling.cache_folder import shipped_folder
from modelserve_worker.kernels.compiling.compute_stream import check_compute_stream
from modelserve_worker.kernels.compiling.kept_files import sealed, tell, trusted_bytes, unsealed, write_whole
from modelserve_worker.kernels.compiling.kernel_cache import CheckedCache, awaited
from modelserve_worker.kernels.compiling.launching import noting

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent.parent  # of this package: sources lie beside what launches them
_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)
_BUILDS = {"watch": "WATCH=1", "chaos": "CHAOS=1"}  # as barriers_sm90.cuh has them


@cache
def build_defines() -> tuple[str, ...]:
    """What MODELSERVE_CUDA_BUILD adds to every compilation: "watch", "chaos" or "watch,chaos". Raises ValueError."""
    asked = [name for name in os.environ.get("MODELSERVE_CUDA_BUILD", "").split(",") if name]
    if unknown := sorted(set(asked) - set(_BUILDS)):
        raise ValueError(f"MODELSERVE_CUDA_BUILD names {unknown}; known: {sorted(_BUILDS)}, separated by commas")
    return tuple(_BUILDS[name] for name in asked)


def source_file(name: str) -> Path:
    """The file of that name, in whichever folder of kernels it lies. Raises FileNotFoundError."""
    return _files(FOLDER).get(name) or FOLDER / name


@cache
def _files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.rglob("*.cu*")}


@dataclass(frozen=True)
class CudaSource:
    """One kernel `entry` of a file of this package, for one target such as "sm_90a".

    `shared_bytes`: of dynamic shared memory that a thread block has. Where a source lays it out it asserts this figure,
    which it gets as SHARED_BYTES.
    """

    file: str
    entry: str
    target: str
    defines: tuple[str, ...] = ()  # NAME=VALUE
    shared_bytes: int = 0

    @property
    def options(self) -> tuple[str, ...]:
        defines = (*self.defines, f"SHARED_BYTES={self.shared_bytes}", *build_defines())
        return f"--gpu-architecture={self.target}", "--std=c++17", *(f"-D{define}" for define in defines)

    def texts(self) -> dict[str, bytes]:
        """The file and, after it, all files of this package that it includes, by their names."""
        found: dict[str, bytes] = {}
        asked = [self.file]
        while asked:
            name = asked.pop()
            if name not in found:
                found[name] = source_file(name).read_bytes()
                asked += [each.decode() for each in _INCLUDE.findall(found[name])]
        return found


def compiled(source: CudaSource) -> tuple[bytes, str]:
    """The cubin of a source, and what ptxas says of its registers. Raises RuntimeError with NVRTC's log."""
    texts = source.texts()
    text, *included = texts.values()
    names = [name.encode() for name in list(texts)[1:]]
    program = checked(nvrtc.nvrtcCreateProgram(text, source.file.encode(), len(names), included, names))
    options = [option.encode() for option in (*source.options, "--ptxas-options=-v")]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    report = _written(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"{source.file} does not compile for {source.target}: {status.name}\n{report}")
    cubin = _written(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    checked(nvrtc.nvrtcDestroyProgram(program))
    return cubin, report


def kept(source: CudaSource) -> bytes:
    """The cubin of a source from the kernel cache, or compiled and put there."""
    file = _name(source)
    return awaited(lambda: _in_cache(file)) or _made(source, file)


def _name(source: CudaSource) -> str:
    major, minor = checked(nvrtc.nvrtcVersion())
    parts = *source.texts().values(), repr(source.options).encode(), f"{major}.{minor}".encode(), b"sealed"
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return f"{Path(source.file).stem}-{digest}.cubin"


def _made(source: CudaSource, file: str) -> bytes:
    cubin, _ = compiled(source)
    try:
        write_whole(Path(triton.knobs.cache.dir, file), sealed(cubin))
        CheckedCache.used.add(file)
    except OSError as error:
        logger.warning("the compiled %s is not kept, and the next start compiles it again: %s", source.file, error)
    return cubin


def _in_cache(file: str) -> bytes:
    """What the cache has under this name; empty where it has nothing that is sound."""
    return next(_copies(file), b"")


def _copies(file: str) -> Iterator[bytes]:
    """What the folders of the cache have under this name, and is what was written there."""
    for folder, shipped in ((shipped_folder(), True), (Path(triton.knobs.cache.dir), False)):
        path = folder / file
        content = trusted_bytes(path, shipped=shipped)
        if content is None:
            continue
        if (cubin := unsealed(content)) is not None:
            CheckedCache.used.add(file)
            yield cubin
        else:
            tell(f"{path} is damaged, and is compiled anew")


@cache
def _loaded(source: CudaSource, device: int) -> Any:  # noqa: ARG001 - one per device
    """The kernel, loaded for the current device, with its dynamic shared memory allowed to a block. A cubin of the
    cache that the driver refuses is compiled anew."""
    file = _name(source)
    awaited(lambda: _in_cache(file))
    for cubin in _copies(file):
        try:
            return _load(source, cubin)
        except RuntimeError as error:
            if device_lost(error) is not None or "OUT_OF_MEMORY" in str(error):
                raise
            tell(f"{file} is compiled anew: the driver refuses what the kernel cache has ({error})")
    return _load(source, _made(source, file))


def _load(source: CudaSource, cubin: bytes) -> Any:
    module = checked(driver.cuModuleLoadData(cubin))
    function = checked(driver.cuModuleGetFunction(module, source.entry.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, limit, source.shared_bytes))
    return function


def launch(
    source: CudaSource,
    *,
    grid: tuple[int, int],
    threads: int,
    arguments: Sequence[tuple[Any, Any]],
    resident: int = 0,
    dependent: bool = True,
) -> None:
    """Launch on the current stream, which is the compute stream; a graph captures it like any other kernel.

    `arguments`: values with their ctypes types, tensor maps with None. `resident`: blocks go on until the work is done,
    and no more are launched than this for each multiprocessor. `dependent`, from capability 9.0 on: the kernel may
    start before the one ahead has ended, and waits for it itself (as `dependent_launch` says).
    """
    if (note := noting()) is not None:
        note(source)
        return
    device = torch.cuda.current_device()
    if resident:
        grid = min(grid[0], resident * torch.cuda.get_device_properties(device).multi_processor_count), grid[1]
    function = _loaded(source, device)
    values, types = zip(*arguments, strict=True)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = source.shared_bytes
    stream = torch.cuda.current_stream().cuda_stream
    check_compute_stream(stream)
    config.hStream = stream
    config.attrs = [_dependent_launch()] if dependent else []
    config.numAttrs = len(config.attrs)
    checked(driver.cuLaunchKernelEx(config, function, (values, types), 0))


@cache
def _dependent_launch() -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def pointer(tensor: torch.Tensor | None) -> tuple[int, Any]:
    """A kernel's pointer argument; None is null."""
    return 0 if tensor is None else tensor.data_ptr(), ctypes.c_void_p


def tensor_map(
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzled: bool = True,
    promoted: bool = True,
) -> Any:
    """A view of bfloat16 elements that the copy engine reads boxes of, in rows of at most 128 bytes.

    `sizes` in elements, innermost first; `strides` in bytes of all dimensions but the innermost. `swizzled`: rows of
    128 bytes lie swizzled by 128. `promoted`: each 128 bytes bring the other half of their 256 into the L2 cache, which
    is as well where several blocks read them and takes 7 % of memory's speed where all is read once.
    """
    if noting() is not None:
        return None
    return _encoded(address, sizes, strides, box, swizzled, promoted)


@lru_cache(maxsize=8192)
def _encoded(
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool,
    promoted: bool,
) -> Any:
    swizzles = driver.CUtensorMapSwizzle
    swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
    element, interleave = driver.CUtensorMapDataType, driver.CUtensorMapInterleave
    promotions = driver.CUtensorMapL2promotion
    whole, part = promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B, promotions.CU_TENSOR_MAP_L2_PROMOTION_NONE
    return checked(
        driver.cuTensorMapEncodeTiled(
            element.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, len(sizes), address, _wide(sizes), _wide(strides), _narrow(box),
            _narrow((1,) * len(sizes)), interleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            whole if promoted else part,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip


def _wide(values: Sequence[int]) -> list[Any]:
    return [driver.cuuint64_t(value) for value in values]


def _narrow(values: Sequence[int]) -> list[Any]:
    return [driver.cuuint32_t(value) for value in values]


def _written(size_of: Callable[..., Any], write: Callable[..., Any], program: Any) -> bytes:
    """What NVRTC writes into a buffer of the size it names."""
    size = checked(size_of(program))
    buffer = bytes(size + 1)  # an object of its own: Python shares those of one byte
    checked(write(program, buffer))
    return buffer[:size]


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver or of NVRTC returned beside its status; raises RuntimeError where that is a failure."""
    status, *values = answer
    if status.value:
        raise RuntimeError(f"CUDA: {status.name} ({status.value})")
    return values[0] if len(values) == 1 else tuple(values)
