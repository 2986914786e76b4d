"""Programmatic dependent launch: from compute capability 9.0 on, a kernel starts while the one before it ends.

A kernel that `launch` launches may start as soon as every program of the kernel before it on the stream has
allowed that (`griddepcontrol.launch_dependents`) or has ended. `griddepcontrol.wait` then holds it until the kernel
before is complete and its writes are visible. Each Triton kernel here begins with `launch_dependents` and
`wait_for_prerequisites`, and reads between them at most what no kernel writes that it could meet:

- weights, which nobody writes while steps run;
- the arrays of a step (positions, slots), block tables, cos and sin. They are written before the embedding, whose
  kernel alone waits first and only then lets others start: so whatever starts after it finds them complete;
- rows of a cache that earlier steps stored, for the same reason, where this step stores none but those that are read
  again (`sliding_decode_sm90`), or only read (`decode_stream_sm90`, `v_only_decode_sm90`), after the wait;
- what a kernel ahead of one that *settles* wrote. Such a kernel lets others start only after its own wait, so whatever
  starts behind it, at once or later, finds all complete that came before it. It is read past the first cache. A dense
  product that settles stands between a router and the experts that it chose, whose matrices so stream while that
  product ends (`chosen_rows_sm90`), and the first product of experts settles for the sum of both branches. Of rows
  that are dealt out the first product settles, too, and the second reads early where experts' rows end
  (`grouped_rows_sm90`).

A x of adapters' terms (`row_terms_triton`) does all its work before it waits, behind a product that settles: it reads
what was complete before that, and writes memory that was allocated before it was launched, so that nobody has it.

So the setup of a launch and the latency of those reads pass while the kernel before still computes.

Decodes' attention may run beside all of the chunks' attention of its layer (`beside`): neither reads what the other
writes. Such a kernel of chunks lets the next one start only after its own wait, so what starts then finds all complete
that came before the chunks, and the last program of the decodes' kernel alone waits.

Why results are those of kernels that run one after the other:

- A program of every kernel waits, before any return: each, or the last one of a kernel beside another. So a kernel is
  complete only after the one before it is, and by induction one that has waited comes after all work that was launched
  before it on its stream: what it reads is
  written, and what it overwrites (memory that the allocator gives to several tensors of one captured step in turn,
  the residual, partial sums of a split product) has been read. A step uses one stream (`compute_stream`).
- That holds whatever is launched between, since the attribute binds a kernel to the work before it alone. A kernel
  launched without it (PyTorch's, cuBLAS's, NCCL's), a copy or another graph starts after all before it is complete,
  and what follows one that does not allow an earlier start comes when it has ended. Such a kernel is correct, and a
  gap on either side.
- Nobody can starve: a kernel is resident whole before the next one may take a place.

Captured, the order becomes programmatic edges of the graph. Below 9.0 and in the interpreter nothing is emitted, and no
launch has the attribute. It is a compile option of Triton, so part of a kernel's name in every cache: `kernel_trace`
finds it beside the others, and what was built ahead is what is launched.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq, current_target

from modelserve.sizing.backends.generations import DEPENDENT_LAUNCH
from modelserve_worker.kernels.compiling.compute_stream import check_compute_stream
from modelserve_worker.kernels.compiling.launching import noting

LEAST_CAPABILITY = tl.constexpr(DEPENDENT_LAUNCH)
_PREFETCH = tl.constexpr("""{
.reg .pred wanted;
setp.ne.b32 wanted, $2, 0;
@wanted prefetch.global.L2 [$1];
mov.b32 $0, 0;
}""")
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter knows no assembly


@triton.jit
def launch_dependents() -> None:
    """Let the next kernel start: the first thing that a kernel does, but for the embedding's."""
    if not _INTERPRETED and cuda_capability_geq(LEAST_CAPABILITY // 10):
        gdc_launch_dependents()


@triton.jit
def wait_for_prerequisites() -> None:
    """Wait for the kernel before. Earlier a kernel writes nothing, and reads what the module says at most."""
    if not _INTERPRETED and cuda_capability_geq(LEAST_CAPABILITY // 10):
        gdc_wait()


@triton.jit
def wait_for_what_is_read(beside: tl.constexpr) -> None:
    """Wait for the kernel before or, `beside` it, only in the last program: nothing of it is read."""
    if beside:
        last = tl.program_id(0) == tl.num_programs(0) - 1
        last &= (tl.program_id(1) == tl.num_programs(1) - 1) & (tl.program_id(2) == tl.num_programs(2) - 1)
        if last:
            wait_for_prerequisites()
    else:
        wait_for_prerequisites()


@triton.jit
def prefetch(lines: tl.tensor, wanted: tl.tensor) -> None:
    """Bring the memory at pointers `lines`, 128 bytes each, into the L2 cache where `wanted`.

    Nothing is read, so it may come before the wait, of memory that is being written, too.
    """
    if not _INTERPRETED and cuda_capability_geq(LEAST_CAPABILITY // 10):  # below, the loads themselves come as soon
        addresses = lines.to(tl.int64, bitcast=True)
        tl.inline_asm_elementwise(
            _PREFETCH, "=r,l,r", [addresses, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


class Pointer:
    """A tensor as a launch specialises it: its dtype, and its offset in an allocation that is aligned."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._offset = tensor.storage_offset() * tensor.itemsize

    def data_ptr(self) -> int:
        return int(self._offset)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel that waits, as all here do, with constants and options by name, and what belongs together
    as `bundles` says; where launches are noted (`launching`) it is specialised and no more. Raises ComputeStreamError.
    """
    options |= dependent_launch()
    if noting() is None:
        kernel[grid](*arguments, **options)
    else:
        kernel.run(*map(_described, arguments), grid=grid, warmup=True, **options)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Pointer(value)
    return type(value)(*map(_described, value)) if isinstance(value, tuple) else value


def dependent_launch() -> dict[str, bool]:
    """Options of a launch of a kernel that waits; one that does not wait must never have them.

    Raises ComputeStreamError.
    """
    target = current_target()
    if target is None or target.backend != "cuda" or target.arch < LEAST_CAPABILITY.value:
        return {}
    driver = triton.runtime.driver.active
    check_compute_stream(driver.get_current_stream(driver.get_current_device()))
    return {"launch_pdl": True}
