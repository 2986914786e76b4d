"""A GPU that is not there: tensors in the CPU's memory that say they are on `cuda:0`, and what a GPU would refuse.

Triton's kernels run in its interpreter, PyTorch's operations on the CPU, at once and in order. Graphs are recorded
while they are captured, which computes once, where a GPU's capture does not, and played again with the values that they
then find in memory: what the host knew at the capture stays as it was.

Refused, as on a GPU:

- operations over tensors of both devices, and reading a device's tensor from the host without a copy;
- in a capture, whatever waits for the device, and copies from and to the host;
- with `torch.cuda.set_sync_debug_mode("error")`, whatever waits for the device.

Memory that a capture used and nobody holds any more is full of ones in all bits (NaN) once another graph has been
played that was captured after it was given back, as graphs of one pool share it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime import interpreter

from modelserve_worker.kernels.compiling import cuda_kernel
from modelserve_worker.startup.kernel_trace import TargetDriver
from modelserve_worker.weights import reading as weights_reading

DEVICE = torch.device("cuda", 0)
_WAIT = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero", "item")
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_ENDS = {
    "step_tokens", "accept_tokens", "settle_positions", "_select_chunks", "_merge_parts", "_draw_rows",
    "_scale_chunks", "_weigh_chunks", "_draw_filtered_rows", "_report_chunks", "_report_rows",
    "remember_tokens", "longest_match", "following_tokens",
}  # fmt: skip
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")  # which take indices of the CPU


class PretendedError(RuntimeError):
    """What a GPU would refuse."""


class OnDevice(torch.Tensor):
    """`inner` is where its elements really are."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        assert _pretended, "the GPU is gone"
        return _pretended[-1].run(func, args, kwargs or {})


@dataclass
class Graph:
    """What `torch.cuda.CUDAGraph` is here."""

    began: int = 0  # captures before it
    ended: bool = False
    played: list[Callable[[], None]] = field(default_factory=list)
    memory: dict[int, Any] = field(default_factory=dict)  # storages of results, by address

    def pool(self) -> int:
        return 1

    def replay(self) -> None:
        gpu = _pretended[-1]
        if not self.ended:
            raise PretendedError("a graph is played that was never captured")
        if gpu.capturing is not None:
            raise PretendedError("a graph is played while another is captured")
        gpu.replayed(self)
        for each in self.played:
            each()


class PretendedGPU(TorchDispatchMode):
    def __init__(self, capability: int, *, blind: bool) -> None:
        super().__init__()
        self.capability = divmod(capability, 10)
        self.capturing: Graph | None = None
        self.strict, self.blind = False, blind
        self.captures = 0
        self.graphs: list[weakref.ref[Graph]] = []
        self.held: dict[int, list[int]] = {}  # by address: tensors over it, and captures when the last was given back
        self.pinned: set[int] = set()
        self.stream = Stream()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        named = next((each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.device)), None)
        pinning = bool(kwargs.pop("pin_memory", False)) or name in ("pin_memory", "_pin_memory")
        if name == "is_pinned":
            return args[0].untyped_storage().data_ptr() in self.pinned
        if pinning and name in ("pin_memory", "_pin_memory"):
            result = args[0].clone()
            self.pinned.add(result.untyped_storage().data_ptr())
            return result
        here = [each for each in tensors if isinstance(each, OnDevice)]
        wanted = bool(here) if named is None else named.type == "cuda"
        if name in ("device", "prim::device"):
            return func(*args, **kwargs)
        self._refuse(name, args, kwargs, tensors, here, to_device=wanted)
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
        if name in ("_to_copy", "to") and isinstance(args[0], OnDevice) is not wanted:
            inner_args = (inner_args[0].clone(), *inner_args[1:])  # another memory
        inner_kwargs.pop("non_blocking", None)
        result = func(*inner_args, **inner_kwargs)
        if self.blind and wanted and name in _UNWRITTEN:
            result.zero_()
        if pinning:
            self.pinned.add(result.untyped_storage().data_ptr())
        if not wanted:
            return result
        return self._results(func, args, kwargs, inner_args, inner_kwargs, result)

    def _results(self, func, args, kwargs, inner_args, inner_kwargs, result) -> Any:
        """The operation's results as the device's tensors, of which those that are written in place stay the same."""
        known = {id(each.inner): each for each in tree_flatten((args, kwargs))[0] if isinstance(each, OnDevice)}
        flat = [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]
        given = [each for each in tree_flatten((inner_args, inner_kwargs))[0] if isinstance(each, Tensor)]
        sources = {each.untyped_storage().data_ptr() for each in given}
        if self.capturing is not None:
            fresh = [each for each in flat if each.untyped_storage().data_ptr() not in sources]
            written = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
            if (fresh or written) and func._schema.name.removeprefix("aten::") not in _UNWRITTEN:
                self.capturing.played.append(lambda: _again(func, inner_args, inner_kwargs, flat, fresh))
            for each in fresh:
                self.capturing.memory[each.untyped_storage().data_ptr()] = each.untyped_storage()

        def on_device(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            return known[id(each)] if id(each) in known else self._wrapped(each)

        return tree_map(on_device, result)

    def _wrapped(self, inner: Tensor) -> OnDevice:
        made = OnDevice(inner)
        held = self.held.setdefault(inner.untyped_storage().data_ptr(), [0, 0])
        held[0] += 1
        weakref.finalize(made, self._given_back, held)
        return made

    def _given_back(self, held: list[int]) -> None:
        held[0] -= 1
        held[1] = self.captures

    def _refuse(self, name, args, kwargs, tensors, here, *, to_device: bool) -> None:
        there = [each for each in tensors if not isinstance(each, OnDevice)]
        copies = name in ("copy_", "_to_copy", "to")
        if here and not copies and any(each.dim() for each in there) and name not in _INDEXED:
            raise PretendedError(f"{name}: tensors of cpu and cuda:0 together")
        if here and not copies and there and any(each.dim() == 0 and each.requires_grad for each in there):
            raise PretendedError(f"{name}: tensors of cpu and cuda:0 together")
        waits = bool(here) and (name in _WAIT or (name in _INDEXED and _by_mask(args)))
        crosses = copies and bool(here or to_device) and bool(there or (here and not to_device))
        if copies and name == "copy_":
            crosses = bool(here and there)
        if crosses:
            host = next((each for each in there), None)
            non_blocking = bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            pinned = host is None or host.untyped_storage().data_ptr() in self.pinned
            waits = not (non_blocking and pinned)
            if name == "_to_copy" and to_device and non_blocking and not pinned:
                waits = True
        if name in _INDEXED and here and any(each.dim() for each in there):
            waits = True
        if self.capturing is not None and (waits or crosses):
            raise PretendedError(f"{name} in a capture: it waits for the device, or reads or writes the host's memory")
        if self.strict and waits:
            raise PretendedError(f"{name}: it waits for the device")

    def launched(self, execute: Callable[[], None]) -> None:
        if self.capturing is not None:
            self.capturing.played.append(execute)
        execute()

    def replayed(self, graph: Graph) -> None:
        """What graphs captured before it had given back by then is overwritten."""
        for reference in self.graphs:
            other = reference()
            if other is None or other is graph or self.blind:  # where kernels do not write it again
                continue
            for address, storage in other.memory.items():
                count, since = self.held.get(address, (1, 0))
                if count == 0 and since < graph.began:
                    storage.fill_(0xFF)

    @contextmanager
    def capture(self, graph: Graph, **_: Any) -> Iterator[None]:
        if self.capturing is not None:
            raise PretendedError("a capture in a capture")
        self.captures += 1
        graph.began, self.capturing = self.captures, graph
        self.graphs.append(weakref.ref(graph))
        try:
            yield
        finally:
            self.capturing = None
        graph.ended = True


def _again(func: Any, args: Any, kwargs: Any, flat: list[Tensor], fresh: list[Tensor]) -> None:
    result = [each for each in tree_flatten(func(*args, **kwargs))[0] if isinstance(each, Tensor)]
    for old, new in zip(flat, result, strict=True):
        if any(old is each for each in fresh):
            old.copy_(new)


def _inner(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.inner if isinstance(value, OnDevice) else value


def _by_mask(args: tuple) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)


class Stream:
    """The only one: all is done in order."""

    cuda_stream = 0

    def __init__(self, *_: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...


class Event:
    def __init__(self, **_: Any) -> None:
        """Whatever stands before it has passed."""

    def record(self, _stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, _stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 1.0


class _Numbered(TorchFunctionMode):
    """Gives the device its number, which PyTorch would ask the driver for, and sends what `torch.tensor` makes."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch.tensor and (device := kwargs.pop("device", None)) is not None:
            return func(*args, **kwargs).to(_numbered(device))
        return func(*(_numbered(each) for each in args), **{name: _numbered(each) for name, each in kwargs.items()})


def _numbered(value: Any) -> Any:
    named = isinstance(value, str | torch.device) and str(value) == "cuda"
    return DEVICE if named else value


class Generator(torch.Generator):
    """Of the device's random numbers."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        made.of = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE if self.of.type == "cuda" else self.of


class _AtOnce(Executor):
    """In the thread that asks: another one would see the machine as it is."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


_pretended: list[PretendedGPU] = []


@contextmanager
def pretended_gpu(capability: int = 80, *, blind: bool = False) -> Iterator[PretendedGPU]:
    """Until the end, in this thread, there is one of compute capability `capability`. `blind`: kernels but those that
    begin and end a step are launched and do nothing, CUDA C++ ones among them, and new memory holds zeros."""
    gpu = PretendedGPU(capability, blind=blind)
    executor = interpreter.GridExecutor.__call__
    graph_class = type(
        "graph", (), {"default_capture_stream": gpu.stream, "__new__": lambda _, *a, **k: gpu.capture(a[0])}
    )

    def called(self: Any, *args: Any, **kwargs: Any) -> None:
        for each in (*args, *kwargs.values()):
            if isinstance(each, Tensor) and not isinstance(each, OnDevice):
                raise PretendedError("a kernel got a tensor of the CPU")
        if grid := (self.grid if isinstance(self.grid, tuple) else None):
            assert all(each > 0 for each in grid), f"a launch of {grid} programs"
        inner = tuple(_inner(each) for each in args), {name: _inner(each) for name, each in kwargs.items()}

        if blind and self.fn.__name__ not in _ENDS:
            return

        def execute() -> None:
            with torch._C._DisableTorchDispatch():
                executor(self, *inner[0], **inner[1])

        gpu.launched(execute)

    def debug_mode(mode: Any) -> None:
        gpu.strict = mode == "error"

    properties = SimpleNamespace(
        name="Pretended", total_memory=8 << 30, major=gpu.capability[0], minor=gpu.capability[1], uuid="0",
        multi_processor_count=4,
    )  # fmt: skip
    replaced: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "set_device": lambda _: None, "get_device_name": lambda *_: "Pretended",
        "get_device_capability": lambda *_: gpu.capability, "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (6 << 30, 8 << 30), "memory_reserved": lambda *_: 1 << 28,
        "max_memory_reserved": lambda *_: 1 << 28, "reset_peak_memory_stats": lambda *_: None,
        "synchronize": lambda *_: None, "empty_cache": lambda: None, "_lazy_init": lambda: None,
        "current_stream": lambda *_: gpu.stream, "default_stream": lambda *_: gpu.stream,
        "Stream": Stream, "Event": Event, "stream": lambda _: nullcontext(),
        "CUDAGraph": Graph, "graph": graph_class, "MemPool": lambda: SimpleNamespace(id=(0, 1)),
        "use_mem_pool": lambda _: nullcontext(), "is_current_stream_capturing": lambda: gpu.capturing is not None,
        "set_sync_debug_mode": debug_mode,
    }  # fmt: skip
    driver = mock.patch.object(triton.runtime.driver, "_active", TargetDriver(capability))
    with (
        mock.patch.multiple(torch.cuda, **replaced),
        driver,
        mock.patch.object(interpreter.GridExecutor, "__call__", called),
        mock.patch.object(torch, "Generator", Generator),
        mock.patch.object(cuda_kernel, "_loaded", return_value=None),
        mock.patch.object(cuda_kernel, "_encoded", return_value=None),
        mock.patch.object(cuda_kernel.driver, "cuLaunchKernelEx", return_value=(SimpleNamespace(value=0),)),
        mock.patch.object(torch._C, "_host_emptyCache", return_value=None),
        mock.patch.object(weights_reading, "ThreadPoolExecutor", _AtOnce),
    ):
        torch._C._ensureCUDADeviceGuardSet()  # to one that does nothing, as for fake tensors: there is no driver
        _pretended.append(gpu)
        try:
            with torch.inference_mode(), _Numbered(), gpu:  # a view of a tensor of another mode would not be one
                yield gpu
        finally:
            _pretended.pop()
            gc.collect()
