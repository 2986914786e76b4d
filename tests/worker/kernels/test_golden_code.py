"""Machine code that is committed: what moves a row, what does not, and what is said of rows that moved."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import compile_kernels
import golden_code
import pytest
from compile_kernels import Outcome, compile_one
from golden_code import Golden, Row
from machine_code import code_hash, source_hash
from traced_launches import Source

from modelserve_worker.kernels.compiling import cuda_kernel
from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
ROW = Row("sm_90", "kernel(1*bf16; SIZE=64; 4 warps, 3 stages)", 40, 0, 1024, "0123456789abcdef", "aaaa")
OTHER = replace(ROW, name="other(; SIZE=64; 4 warps, 3 stages)", code="fedcba9876543210", source="bbbb")
GOLDEN = Golden(("triton 3.6.0", "ptxas 12.8.93"), (ROW, OTHER), "cccc")
SOURCE = """
__device__ const float factors[2] = {FACTOR, 3.0f};
extern "C" __global__ void __launch_bounds__(THREADS) NAME(float* out, int row) {
  __shared__ float shared[64];
  shared[threadIdx.x % 64] = factors[row % 2];
  __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + 1) % 64];
}
"""


def test_names_comments_and_lines_are_no_machine_code_and_constants_are() -> None:
    """Nor are folders: the rows that are committed are those of any clone."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "operator"), str(ROOT / "worker")))
    file = str(FOLDER / "renamed_kernels.py")
    command = [sys.executable, str(FOLDER / "compile_kernels.py"), "--file", file, "--capability", "89"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    read = golden_code.read(done.stdout.splitlines())
    assert len(read.compilers) == 4
    codes = {row.name.partition("(")[0]: row.code for row in read.rows}
    assert codes["scaled"] == codes["a_longer_name_in_other_lines"] != codes["scaled_by_three"]


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"file": "moved.cu", "entry": "a_longer_name"}, True),
        ({"text": "// Explained.\n\n" + SOURCE}, True),
        ({"factor": "5.0f"}, False),  # of memory that is initialised: no instruction knows it
        ({"text": SOURCE.replace("+ 1)", "+ 2)")}, False),
        ({"threads": 128}, False),
        ({"text": SOURCE.replace("% 64]", "% 64 + 64]").replace("shared[64]", "shared[128]")}, False),
    ],
)
def test_code_in_cuda_is_known_by_what_it_does(changed: dict[str, str], same: bool, tmp_path: Path) -> None:
    def code(
        *, file: str = "kernel.cu", entry: str = "kernel", text: str = SOURCE, factor: str = "2.0f", threads: int = 256
    ) -> str:
        (tmp_path / file).write_text(text)
        defines = (f"NAME={entry}", f"FACTOR={factor}", f"THREADS={threads}")
        return code_hash(cuda_kernel.compiled(CudaSource(str(tmp_path / file), entry, "sm_90a", defines))[0])

    assert code() == code()
    assert (code(**changed) == code()) is same


def test_what_is_written_is_read_back() -> None:
    assert golden_code.read(GOLDEN.text().splitlines()) == replace(GOLDEN, rows=tuple(sorted(GOLDEN.rows)))
    assert golden_code.moved(GOLDEN, GOLDEN) == []
    assert golden_code.moved(GOLDEN, replace(GOLDEN, rows=(replace(ROW, source="dddd"), OTHER))) == []


def test_a_row_is_believed_of_the_sources_that_it_names_and_held_to_the_limits(
    tmp_path: Path,
) -> None:
    file = tmp_path / "kernel.cu"
    file.write_text(SOURCE)
    launch, other = (
        Source(CudaSource(str(file), "kernel", "sm_90a", ("NAME=kernel", f"FACTOR={factor}", "THREADS=256")))
        for factor in ("2.0f", "5.0f")
    )
    row = compile_one(launch, 90).row
    assert row is not None
    never_compiled = replace(row, code="0" * 16)
    assert compile_one(launch, 90, never_compiled) == Outcome(launch, (), never_compiled)
    with_other_source = compile_one(other, 90, never_compiled).row
    assert with_other_source is not None
    assert with_other_source.code not in {row.code, never_compiled.code}
    (tmp_path / "kernel.cu").write_text(SOURCE + "// a comment")
    assert compile_one(launch, 90, never_compiled).row == replace(row, source=source_hash(launch))
    (tmp_path / "kernel.cu").write_text(SOURCE)
    assert compile_one(launch, 90, replace(row, registers=256)).problems == ("256 registers, of 255",)


def test_rows_that_moved_are_named_with_what_they_were() -> None:
    slower = replace(ROW, registers=64, spilled_bytes=8)
    new = replace(ROW, name="new(; 1 warps, 1 stages)", code="0" * 16)
    said = golden_code.moved(GOLDEN, replace(GOLDEN, rows=(slower, new)))
    assert said[0].startswith(f"sm_90 {ROW.name}: code {ROW.code}, 64 registers, 8 B spilled")
    assert "was code 0123456789abcdef, 40 registers, 0 B spilled" in said[0]
    assert said[1:3] == [f"sm_90 {new.name}: is new", f"sm_90 {OTHER.name}: is compiled no more"]
    assert said[3].startswith("3 rows moved")
    assert golden_code.RECORD in said[3]


def test_a_launch_with_another_name_is_told_from_one_with_other_code() -> None:
    renamed = replace(OTHER, name="better(; SIZE=64; 4 warps, 3 stages)")
    now = replace(GOLDEN, rows=(ROW, renamed))
    assert golden_code.moved(GOLDEN, now)[0] == f"sm_90 {renamed.name}: is the code that was {OTHER.name}"
    assert list(golden_code.other_code(GOLDEN, now)) == []
    twice = replace(GOLDEN, rows=(ROW, replace(ROW, name="again()"), OTHER))
    assert len(list(golden_code.other_code(GOLDEN, twice))) == 1, "how often code is compiled counts"
    changed = replace(GOLDEN, rows=(ROW, replace(OTHER, code="")))
    assert [line[0] for line in golden_code.other_code(GOLDEN, changed)] == ["-", "+"]


def test_other_compilers_are_named_and_no_row_is_compared() -> None:
    newer = Golden(("triton 3.7.0", "ptxas 12.8.93"), (replace(ROW, code=""), replace(OTHER, code="")))
    (said,) = golden_code.moved(GOLDEN, newer)
    assert "triton 3.6.0" in said
    assert "triton 3.7.0" in said
    assert golden_code.RECORD in said


def test_code_that_differs_by_what_a_process_compiled_before_is_compiled_by_a_process_of_its_own() -> None:
    """A row of a launch that is compiled once more as it was; the one that never is stays as it has come."""
    launch = Source(CudaSource("peer_sums.cu", "rank_sum", "sm_90", ("WIDTH=2048", "RANKS=2", "NORMS=0")))
    row = compile_one(launch, 90).row
    assert row is not None
    by_chance = Outcome(launch, (), replace(row, code="0" * 16))
    assert compile_kernels.as_before([by_chance], {row.launch: row}, 90) == [Outcome(launch, (), row)]
    changed = {row.launch: replace(row, code="1" * 16)}
    assert compile_kernels.as_before([by_chance], changed, 90) == [by_chance]
    many = [
        replace(by_chance, launch=replace(launch, source=replace(launch.source, shared_bytes=n))) for n in range(17)
    ]
    assert compile_kernels.as_before(many, {row.launch: row}, 90) == many


def test_a_kernel_of_which_one_of_two_codes_is_made_has_both_in_its_row() -> None:
    first, second = replace(ROW, code="1" * 16), replace(ROW, code="2" * 16)
    both = first.or_else(second)
    assert both == second.or_else(first).or_else(both) == golden_code.read([str(both)]).rows[0]
    assert first.is_of(both)
    assert second.is_of(both)
    assert not replace(ROW, code="3" * 16).is_of(both)
    assert not replace(first, registers=1).is_of(both)
    assert replace(first, source="other").or_else(second).code == first.code, "of other sources: the old code is gone"
    assert golden_code.moved(replace(GOLDEN, rows=(both,)), replace(GOLDEN, rows=(second,))) == []
