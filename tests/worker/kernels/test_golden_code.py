"""Machine code that is committed: what moves a row, what does not, and what is said of rows that moved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import golden_code
import pytest
from golden_code import Golden, Row
from machine_code import code_hash

from modelserve_worker.kernels import cuda_kernel
from modelserve_worker.kernels.cuda_kernel import CudaSource

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
ROW = Row("sm_90", "kernel(1*bf16; SIZE=64; 4 warps, 3 stages)", 40, 0, 1024, "0123456789abcdef")
OTHER = replace(ROW, name="other(; SIZE=64; 4 warps, 3 stages)", code="fedcba9876543210")
GOLDEN = Golden(("triton 3.6.0", "ptxas 12.8.93"), (ROW, OTHER))
SOURCE = """
__device__ const float factors[2] = {FACTOR, 3.0f};
extern "C" __global__ void __launch_bounds__(THREADS) NAME(float* out, int row) {
  __shared__ float shared[64];
  shared[threadIdx.x % 64] = factors[row % 2];
  __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + 1) % 64];
}
"""


def test_names_comments_lines_and_folders_are_no_machine_code_and_constants_are(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "renamed_kernels.py", tmp_path / "elsewhere.py")
    codes: dict[str, set[str]] = {}
    for file in (FOLDER / "renamed_kernels.py", tmp_path / "elsewhere.py"):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "operator"), str(ROOT / "worker"), str(file.parent)))
        command = [sys.executable, str(FOLDER / "compile_kernels.py"), "--file", str(file), "--capability", "89"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        read = golden_code.read(done.stdout.splitlines())
        assert len(read.compilers) == 4
        for row in read.rows:
            codes.setdefault(row.name.partition("(")[0], set()).add(row.code)
    assert codes["scaled"] == codes["a_longer_name_in_other_lines"]
    assert len(codes["scaled"]) == len(codes["scaled_by_three"]) == 1
    assert codes["scaled"] != codes["scaled_by_three"]


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
def test_code_in_cuda_is_known_by_what_it_does(
    changed: dict[str, str], same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_kernel, "FOLDER", tmp_path)

    def code(
        *, file: str = "kernel.cu", entry: str = "kernel", text: str = SOURCE, factor: str = "2.0f", threads: int = 256
    ) -> str:
        (tmp_path / file).write_text(text)
        defines = (f"NAME={entry}", f"FACTOR={factor}", f"THREADS={threads}")
        return code_hash(cuda_kernel.compiled(CudaSource(file, entry, "sm_90a", defines))[0])

    assert code() == code()
    assert (code(**changed) == code()) is same


def test_what_is_written_is_read_back() -> None:
    assert golden_code.read(GOLDEN.text().splitlines()) == Golden(GOLDEN.compilers, tuple(sorted(GOLDEN.rows)))
    assert golden_code.moved(GOLDEN, GOLDEN) == []


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
