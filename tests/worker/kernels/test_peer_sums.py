"""Sums over ranks through peer memory, without GPUs: the kernels compile, buffers hold what they are given, and the
layers take each sum to where it fits. What the kernels compute is compared on GPUs by `tests/bench rank_sums`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from architecture_of import architecture_of
from torch import Tensor

from modelserve.sizing.rank_sums import (
    FLAG_BYTES,
    PEER_BUFFER_BYTES,
    PeerRowsLayout,
    peer_bytes,
    peer_message_bytes,
    peer_rows_layout,
)
from modelserve_worker.kernels.compiling import cuda_kernel
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource
from modelserve_worker.kernels.elementwise.elementwise import PlainElementwise
from modelserve_worker.kernels.peers.peer_rows import PeerRows
from modelserve_worker.kernels.peers.peer_sums import PeerBuffers, PeerSums
from modelserve_worker.layers.parallel import TensorParallel, sum_in_rank_order
from modelserve_worker.layers.partial_sums import PartialSums
from modelserve_worker.ranks import process_group

EPS = 1e-6
REGISTERS = 65_536  # of a multiprocessor
MOST_SPILLED = 200  # bytes; eight ranks' rows are in flight at a time


def buffers(ranks: int, rank: int = 0) -> PeerBuffers:
    addresses = tuple(range(0x1000, 0x1000 * (ranks + 1), 0x1000))
    state, ended = (torch.zeros(size, dtype=torch.int32) for size in (4, 1))
    return PeerBuffers(addresses, rank, state, ended)


class Launched(list[dict]):
    """Arguments of every launch, of which there is none."""

    def __call__(self, source: CudaSource, **options: Any) -> None:
        self.append({"source": source, **options})


def small_sums(launched: Launched, ranks: int = 2, capability: int = 80) -> PeerSums:
    return PeerSums(buffers(ranks), capability=capability, launch=launched)


def rows_sums(layout: PeerRowsLayout, launched: Launched | None = None, capability: int = 90) -> PeerRows:
    normed, launch = torch.zeros(layout.rows, layout.width, dtype=torch.bfloat16), launched
    if launch is None:
        launch = Launched()
    sizes = {"capability": capability, "multiprocessors": 132}
    return PeerRows(buffers(layout.ranks), layout, normed, **sizes, launch=launch)


@pytest.mark.parametrize("capability", [80, 86, 89, 90])
@pytest.mark.parametrize(("width", "ranks"), [(5376, 2), (1536, 8)])
def test_kernels_compile_within_the_registers_of_their_blocks(capability: int, width: int, ranks: int) -> None:
    launched = Launched()
    x, weight = torch.zeros(8, width, dtype=torch.bfloat16), torch.zeros(width, dtype=torch.bfloat16)
    small = small_sums(launched, ranks, capability)
    small.all_reduce(x)
    for sums in (small, rows_sums(PeerRowsLayout(8192, width, ranks), launched, capability)):
        sums.residual_norm(x.clone(), x, weight, scalar=None, next_weight=weight, eps=EPS)
    assert [each["source"].file for each in launched] == ["peer_sums.cu", "peer_sums.cu", "peer_rows.cu"]
    for each in launched:
        _, report = cuda_kernel.compiled(each["source"])
        registers, spilled = re.search(r"Used (\d+) registers", report), re.search(r"(\d+) bytes spill stores", report)
        assert registers is not None, report
        assert spilled is not None, report
        at_a_time = 1 if each["source"].file == "peer_sums.cu" else each["grid"][0] // 132
        warps = REGISTERS // 4 // (int(registers[1]) * 32) * 4  # that four parts of a multiprocessor have registers for
        assert each["threads"] // 32 * at_a_time <= warps
        assert each["threads"] * at_a_time <= 1536, "all blocks of sums by rows must run at once, on every GPU"
        assert int(spilled[1]) <= MOST_SPILLED, report
        assert "warning" not in report, report


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_small_sums_fit_their_buffer_in_both_parities(ranks: int) -> None:
    launched = Launched()
    sums, width = small_sums(launched, ranks), 5376
    most = peer_message_bytes(ranks) // (2 * width)
    fits = torch.zeros(most, width, dtype=torch.bfloat16)
    assert sums.takes_rows(fits)
    assert not sums.takes_rows(torch.zeros(most + 1, width, dtype=torch.bfloat16))
    sums.residual_norm(fits, fits, fits[0], scalar=None, next_weight=None, eps=EPS)
    (only,) = launched
    region = only["arguments"][9][0]
    lines = only["grid"][0] * only["threads"] * 2 * 16  # two lines of 16 bytes for the 8 elements of a thread
    assert lines <= region
    assert 2 * ranks * region <= PEER_BUFFER_BYTES


def test_only_whole_words_of_bfloat16_go_through_peer_memory() -> None:
    sums = PeerSums(buffers(2), capability=80)
    x = torch.zeros(4, 512, dtype=torch.bfloat16)
    assert sums.takes(x)
    assert sums.takes_rows(x)
    assert not sums.takes(x.float())
    assert not sums.takes(x[:, :511].contiguous()[:1])
    assert not sums.takes(x[:0])
    assert not sums.takes_rows(torch.zeros(4, 384, dtype=torch.bfloat16)), "a warp has 256 elements"
    by_rows = rows_sums(PeerRowsLayout(16, 512, 2))
    assert by_rows.takes(x)
    assert not by_rows.takes(torch.zeros(17, 512, dtype=torch.bfloat16))
    assert not by_rows.takes(torch.zeros(4, 256, dtype=torch.bfloat16))


def test_a_delta_that_lies_apart_takes_the_same_kernel_and_is_put_together() -> None:
    """Kernels of one step must not change from layer to layer: sums by rows leave no whole residual behind."""
    launched = Launched()
    small, by_rows = small_sums(launched, capability=90), rows_sums(PeerRowsLayout(16, 512, 2), launched)
    residual, weight = torch.zeros(4, 512, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.bfloat16)
    apart = torch.zeros(4, 640, dtype=torch.bfloat16)[:, :512]
    assert small.takes_rows(apart)
    assert by_rows.takes(apart)
    for sums in (small, by_rows):
        sums.residual_norm(residual, apart, weight, scalar=None, next_weight=weight, eps=EPS)
    assert len(launched) == 2
    for each in launched:
        assert each["arguments"][0][0] != apart.data_ptr()
        assert each["arguments"][1][0] == residual.data_ptr()


@pytest.mark.parametrize(("rows", "ranks"), [(8192, 2), (8191, 2), (10, 8), (1, 4)])
def test_parts_of_a_buffer_of_rows_do_not_overlap(rows: int, ranks: int) -> None:
    layout = PeerRowsLayout(rows, 5376, ranks)
    row = 2 * 5376
    assert layout.inbox == rows * row
    assert layout.normed_flags - layout.inbox == ranks * layout.share * row
    assert layout.share * ranks >= rows
    assert layout.inbox_flags - layout.normed_flags == rows * FLAG_BYTES
    assert layout.total_bytes - layout.inbox_flags == ranks * layout.share * FLAG_BYTES


def test_models_whose_residual_others_read_have_no_sums_by_rows() -> None:
    for variant, expected in (("31B", True), ("12B", True), ("26B-A4B", False), ("E4B", False), ("E2B", False)):
        layout = peer_rows_layout(architecture_of(variant, form=""), tensor_parallel_size=2, rows=2048)
        assert (layout is not None) == expected, variant
        taken = peer_bytes(architecture_of(variant, form=""), tensor_parallel_size=2, rows=2048)
        assert taken == PEER_BUFFER_BYTES + (layout.total_bytes if layout else 0)
    assert peer_bytes(architecture_of("31B", form=""), tensor_parallel_size=1, rows=2048) == 0


def test_the_sum_in_rank_order_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(3)
    shares = torch.randn(4, 50, 64, generator=generator).bfloat16()
    total = sum_in_rank_order(shares)
    exact = shares.double().sum(0)
    assert total.dtype == torch.bfloat16
    assert ((total.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()
    # In bfloat16 256 + 1 is 256: ones would be lost one after the other.
    assert sum_in_rank_order(torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()).item() == 258
    # And the order counts: float32 loses what comes while a large number is there.
    assert sum_in_rank_order(torch.tensor([[2.0**30], [1.0], [-(2.0**30)]]).bfloat16()).item() == 0


class Recorded:
    """A kernel of sums that notes who calls it."""

    def __init__(self, calls: list[str], name: str, most_rows: int) -> None:
        self.calls, self.name, self.most_rows = calls, name, most_rows

    def takes_rows(self, x: Tensor) -> bool:
        return x.shape[0] <= self.most_rows

    takes = takes_rows

    def residual_norm(self, residual: Tensor, delta: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.calls.append(f"{self.name} {delta.shape[0]}")
        return residual, delta


def test_each_sum_goes_where_it_fits() -> None:
    calls: list[str] = []
    parallel = TensorParallel(peers=Recorded(calls, "small", 2), peer_rows=Recorded(calls, "rows", 5))  # type: ignore[arg-type]
    sums, weight = PartialSums(parallel, PlainElementwise()), torch.ones(8)
    for rows in (1, 2, 3, 5):
        x = torch.ones(rows, 8)
        sums.residual_norm(x, x, weight, scalar=None, next_weight=weight, eps=EPS)
    assert calls == ["small 1", "small 2", "rows 3", "rows 5"]
    calls.clear()
    for rows, following in ((6, weight), (3, None)):
        x = torch.full((rows, 8), 2.0)
        summed, normed = sums.residual_norm(x, x, weight, scalar=None, next_weight=following, eps=EPS)
        assert not calls
        torch.testing.assert_close(summed, torch.full((rows, 8), 3.0))
        assert (normed is None) == (following is None)


def test_the_end_of_the_group_is_told_to_all_its_buffers() -> None:
    """And to those of this group alone: another process's, or another group's, are no business of it."""
    small, rows = PeerSums(buffers(2), capability=80), rows_sums(PeerRowsLayout(16, 512, 2))
    bystander = PeerSums(buffers(2), capability=80)
    process_group.abort_collectives([TensorParallel(peers=small, peer_rows=rows)])
    assert [sums._buffers.ended.item() for sums in (small, rows, bystander)] == [1, 1, 0]
