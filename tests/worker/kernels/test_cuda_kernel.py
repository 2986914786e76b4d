"""CUDA C++ kernels without a GPU: they compile within the registers of their threads, once, and say why when not.

What they compile to frees no shared memory that is being read (`wait_masks`)."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import wait_masks
from architecture_of import architecture_of

from modelserve.sizing.backends.attention import (
    decode_stream_bytes,
    global_chunk_bytes,
    global_decode_bytes,
    sliding_chunk_bytes,
    sliding_decode_bytes,
)
from modelserve.sizing.backends.products import GROUPED_STAGES
from modelserve.sizing.backends.table import Backend, Operation
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.kernels.attention.bound_kernels import AttentionKernels
from modelserve_worker.kernels.attention.hopper import (
    decode_stream_sm90,
    global_chunk_sm90,
    sliding_chunk_sm90,
    sliding_decode_sm90,
    v_only_decode_sm90,
)
from modelserve_worker.kernels.attention.paged_layout import layer_rows
from modelserve_worker.kernels.compiling import cuda_kernel
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource
from modelserve_worker.kernels.experts import chosen_rows_sm90, grouped_rows_sm90
from modelserve_worker.kernels.products.hopper import cluster_rows_sm90, linear_int4_sm90, linear_rows_sm90
from modelserve_worker.kernels.products.hopper.integer_rows_sm90 import IntegerKernel

STREAM, STREAM_GLOBAL = (decode_stream_sm90.StreamKernel(*each) for each in ((256, 1024, 4, 5), (512, 0, 2, 5)))
SHARED_BYTES = 227 * 1024  # of one block on capability 9.0
SMALL = 'extern "C" __global__ void small(int* out) { *out = VALUE; }'


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("source", "threads", "releases"),
    [
        *(
            (variant.source, global_chunk_sm90.THREADS, True)
            for variant in (global_chunk_sm90.V_ONLY, global_chunk_sm90.WITH_KEYS)
        ),
        (sliding_chunk_sm90.SOURCE, sliding_chunk_sm90.THREADS, True),
        (v_only_decode_sm90.SOURCE, 2 * v_only_decode_sm90.THREADS, True),  # two blocks
        *(
            (kernel.source, sliding_decode_sm90.THREADS, False)  # all that it reads is loaded once
            for kernel in map(sliding_decode_sm90.DecodeKernel, (1024, 512))
        ),
        *((kernel.source, kernel.threads, True) for kernel in (STREAM, STREAM_GLOBAL)),
        *(
            (kernel.source, kernel.threads, True)
            for kernel in (
                cluster_rows_sm90.ClusterKernel(64, 2, 128, gated=False),
                cluster_rows_sm90.ClusterKernel(160, 1, 128, gated=True),
                cluster_rows_sm90.ClusterKernel(192, 8, 64, gated=False),
            )
        ),
        *(
            (grouped_rows_sm90.source(gated=gated, together=together), grouped_rows_sm90.THREADS, True)
            for gated in (False, True)
            for together in GROUPED_STAGES
        ),
        *(
            (kernel.source, linear_int4_sm90.THREADS, True)
            for kernel in (
                linear_int4_sm90.Int4Kernel(64, 8, gated=False, split=True),
                linear_int4_sm90.Int4Kernel(128, 1, gated=False, split=False),
                linear_int4_sm90.Int4Kernel(192, 8, gated=False, split=False),
                linear_int4_sm90.Int4Kernel(256, 8, gated=True, split=False),
                linear_int4_sm90.Int4Kernel(256, 8, gated=True, split=False, half_scales=True, zeros=True),
            )
        ),
    ],
)
def test_hopper_kernels_fit_their_registers_and_shared_memory_and_overlap_their_products(
    source: CudaSource, threads: int, releases: bool, tmp_path: Path
) -> None:
    cubin, report = cuda_kernel.compiled(source)
    used = re.search(r"Used (\d+) registers", report)
    assert used is not None, report
    # What a launch of this many threads may have; the warpgroups then share them out among themselves.
    assert int(used[1]) <= 65536 // threads // 8 * 8
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert "warning" not in report, report
    assert "serialized" not in report, "ptxas waits after every matrix product"
    assert source.shared_bytes <= SHARED_BYTES
    check_releases(cubin, tmp_path, any_release=releases)


def check_releases(cubin: bytes, folder: Path, *, any_release: bool) -> None:
    code = wait_masks.instructions(cubin, folder)
    assert any(map(wait_masks.is_arrival, code)) == any_release
    assert wait_masks.pending_at_arrivals(code) == []


@pytest.mark.drawn
@pytest.mark.parametrize(("rows", "matrix_rows", "settings", "spilled"), [
    (1, 43008, {"gated": True}, 0), (32, 5376, {}, 0), (8, 256, {}, 0), (9, 16384, {"fp8": True, "rounds": True}, 0),
    (16, 5376, {}, 0), (32, 43008, {"gated": True, "fp8": True}, 0),
    (1, 5376, {"int4_scales": 8}, 0), (32, 43008, {"gated": True, "int4_scales": 8}, 0),
    (16, 16384, {"int4_scales": 1}, 0), (32, 43008, {"gated": True, "int4_scales": 8, "zeros": True}, 0),
    (32, 5376, {"split": True}, 0), (1, 5376, {"int4_scales": 8, "split": True}, 0),
    (8, 2560, {"fp8": True, "split": True}, 0),
])  # fmt: skip
def test_the_hopper_kernel_of_few_rows_fits_its_registers_and_shared_memory(
    rows, matrix_rows, settings, spilled, tmp_path
) -> None:
    kernel = linear_rows_sm90.kernel_for(rows, matrix_rows, **{"gated": False, **settings})
    cubin, report = cuda_kernel.compiled(kernel.source)
    stores = re.search(r"(\d+) bytes spill stores", report)
    assert stores is not None, report
    assert int(stores[1]) <= spilled
    assert "warning" not in report, report
    assert kernel.stages >= 2, "nothing is under way while a stage is multiplied"
    assert kernel.shared_bytes <= SHARED_BYTES
    check_releases(cubin, tmp_path, any_release=True)


@pytest.mark.drawn
@pytest.mark.parametrize("kernel", [
    IntegerKernel(352, 1, 1, 8, 21, gated=True), IntegerKernel(128, 2, 2, 8, 22, gated=False),
    IntegerKernel(128, 2, 2, 1, 84, gated=False), IntegerKernel(64, 4, 2, 8, 40, gated=True),
    IntegerKernel(352, 1, 2, 8, 21, gated=True, zeros=True),
], ids=str)  # fmt: skip
def test_the_hopper_kernel_of_integers_fits_its_registers_and_shared_memory(
    kernel: IntegerKernel, tmp_path: Path
) -> None:
    cubin, report = cuda_kernel.compiled(kernel.source)
    assert "0 bytes spill stores" in report
    assert "warning" not in report, report
    assert kernel.stages >= 2, "nothing is under way while a stage is multiplied"
    assert kernel.shared_bytes <= SHARED_BYTES
    check_releases(cubin, tmp_path, any_release=True)


@pytest.mark.drawn
@pytest.mark.parametrize("kernel", [
    chosen_rows_sm90.kernel_for(1408, 8, gated=True), chosen_rows_sm90.kernel_for(2816, 8, gated=False),
    linear_rows_sm90.kernel_for(1, 2816, settles=True), linear_rows_sm90.kernel_for(1, 2816),
], ids=str)  # fmt: skip
def test_a_product_that_settles_lets_others_start_behind_its_wait(
    kernel: linear_rows_sm90.RowsKernel, tmp_path: Path
) -> None:
    """Experts' matrices are read before the kernel ahead has ended, so what chose them must have; the others start what
    follows first of all."""
    cubin, report = cuda_kernel.compiled(kernel.source)
    assert "0 bytes spill stores" in report
    assert "warning" not in report, report
    assert kernel.stages >= 2
    assert kernel.shared_bytes <= SHARED_BYTES
    check_releases(cubin, tmp_path, any_release=True)
    order = [
        word
        for each in wait_masks.instructions(cubin, tmp_path)
        for word in ("ACQBULK", "PREEXIT")
        if word in each.text
    ]
    assert order.count("PREEXIT") == 1
    at = order.index("PREEXIT")
    assert (at > 0 and order[at - 1] == "ACQBULK") if kernel.settles else at == 0


def test_a_stage_that_is_freed_right_behind_its_reads_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernel with each stage freed when its products have been issued, as the source has it."""
    kernel = linear_rows_sm90.kernel_for(8, 5376)
    for name, text in kernel.source.texts().items():
        (tmp_path / name).write_bytes(text)
    source = tmp_path / kernel.source.file
    late = "      held.exchange(barriers.empty(ring.place));\n", "lane);\n      ring.advance();\n"
    assert all(source.read_text().count(line) == 1 for line in late)
    early = source.read_text().replace(late[0], "      __syncwarp();\n")
    early = early.replace(late[1], "lane);\n      release(barriers.empty(ring.place));\n      ring.advance();\n")
    source.write_text(early)
    monkeypatch.setattr(cuda_kernel, "FOLDER", tmp_path)
    found = wait_masks.pending_at_arrivals(wait_masks.instructions(cuda_kernel.compiled(kernel.source)[0], tmp_path))
    assert len(found) == 1
    assert "LDSM" in found[0]


def test_a_layout_that_the_launch_does_not_know_is_not_compiled() -> None:
    source = replace(v_only_decode_sm90.SOURCE, shared_bytes=v_only_decode_sm90.SOURCE.shared_bytes + 8)
    with pytest.raises(RuntimeError, match="SHARED_BYTES"):
        cuda_kernel.compiled(source)


def test_watched_and_disturbed_builds_are_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits ask for the time and fail by name; waits, arrivals and copies sleep. An unknown build is refused."""
    source = sliding_decode_sm90.DecodeKernel(512).source
    try:
        for build, marks in (("", ()), ("watch", (b"this wait ends",)), ("chaos", ())):
            monkeypatch.setenv("MODELSERVE_CUDA_BUILD", build)
            cuda_kernel.build_defines.cache_clear()
            cubin, _ = cuda_kernel.compiled(source)
            assert (b"this wait ends" in cubin) == bool(marks)
            assert ("CHAOS=1" in repr(source.options)) == (build == "chaos")
        monkeypatch.setenv("MODELSERVE_CUDA_BUILD", "watch,quiet")
        cuda_kernel.build_defines.cache_clear()
        with pytest.raises(ValueError, match="quiet"):
            cuda_kernel.compiled(source)
    finally:
        cuda_kernel.build_defines.cache_clear()


@pytest.mark.parametrize("name", ["31B", "26B-A4B", "12B", "E4B", "E2B"])
def test_hopper_alone_takes_the_kernels_and_their_rows_are_whole_tokens(name: str) -> None:
    architecture = architecture_of(name, form="")
    layout = KVCacheLayout.least(architecture)
    for dtype in (KVCacheDtype.BFLOAT16, KVCacheDtype.INT8):
        geometry = cache_geometry(architecture, dtype=dtype, layout=layout, tensor_parallel_size=1)
        of_global, of_sliding = (
            layer_rows(geometry, page.layers[0], pool_bytes=1 << 30)
            for page in (geometry.global_page, geometry.sliding_page)
        )
        for rows, block in (
            (of_global, 64 * global_chunk_sm90.CLUSTER),
            (of_sliding, sliding_chunk_sm90.ROWS),
        ):
            heads = architecture.num_attention_heads
            kernels = AttentionKernels.over(rows, capability=90, query_heads=heads)
            firsts = {each.operation: each.backend for each in reversed(kernels.choices)}
            assert firsts[Operation.CHUNK_ATTENTION] is Backend.HOPPER
            assert kernels.chunk_rows == block
            assert block // 2 % (architecture.num_attention_heads // rows.heads) == 0
            others = [AttentionKernels.over(rows, capability=at, query_heads=heads) for at in (80, 89, 100, 120)]
            assert {choice.backend for other in others for choice in other.choices} == {Backend.TRITON}
            few = architecture.num_attention_heads // rows.heads <= 8
            taken = rows is of_sliding or few
            on_hopper = taken and dtype is KVCacheDtype.BFLOAT16
            assert firsts[Operation.DECODE_ATTENTION] is (Backend.HOPPER if on_hopper else Backend.TRITON)
            assert firsts[Operation.VERIFY_ATTENTION] is Backend.TRITON


def test_shared_memory_of_the_table_is_that_of_the_launches() -> None:
    assert sliding_decode_sm90.DecodeKernel(1024).source.shared_bytes == sliding_decode_bytes(1024)
    for source, sized in (
        (global_chunk_sm90.V_ONLY.source, global_chunk_bytes(key_plane=False)),
        (global_chunk_sm90.WITH_KEYS.source, global_chunk_bytes(key_plane=True)),
        (sliding_chunk_sm90.SOURCE, sliding_chunk_bytes()),
        (v_only_decode_sm90.SOURCE, global_decode_bytes()),
        (STREAM.source, decode_stream_bytes(256, 4)),
        (STREAM_GLOBAL.source, decode_stream_bytes(512, 2)),
    ):
        assert source.shared_bytes == sized <= SHARED_BYTES


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaSource:
    (tmp_path / "small.cu").write_text(SMALL)
    monkeypatch.setattr(cuda_kernel, "FOLDER", tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return CudaSource("small.cu", "small", "sm_90a", ("VALUE=1",))


def test_a_kernel_is_compiled_once_per_source_and_options(
    small: CudaSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cuda_kernel.kept(small)
    assert first.startswith(b"\x7fELF")
    assert cuda_kernel.kept(CudaSource("small.cu", "small", "sm_90a", ("VALUE=2",))) != first
    (tmp_path / "small.cu").write_text(SMALL + "  ")
    cuda_kernel.kept(small)
    kept = list((tmp_path / "cache").iterdir())
    assert len(kept) == 3
    assert all(path.suffix == ".cubin" for path in kept), "no half-written file stays"
    (tmp_path / "small.cu").write_text(SMALL)
    monkeypatch.setattr(cuda_kernel, "compiled", lambda source: pytest.fail("compiled again"))
    assert cuda_kernel.kept(small) == first


def test_a_folder_that_takes_no_file_costs_a_compilation_and_no_start(
    small: CudaSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert cuda_kernel.kept(small).startswith(b"\x7fELF")
    assert "small.cu is not kept" in caplog.text


def test_a_source_that_does_not_compile_says_where(small: CudaSource, tmp_path: Path) -> None:
    (tmp_path / "small.cu").write_text("int broken(")
    with pytest.raises(RuntimeError, match=r"(?s)small\.cu does not compile for sm_90a.*small\.cu\(1\): error"):
        cuda_kernel.kept(small)
    assert not (tmp_path / "cache").exists()
