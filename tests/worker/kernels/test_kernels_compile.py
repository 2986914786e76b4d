"""Every kernel compiles for every GPU generation that is served, within what one block may take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]


def compile_kernels(*arguments: str) -> tuple[int, list[str]]:
    """Exit status and lines; in a process of its own, since this one interprets its kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "operator"), str(ROOT / "worker")))
    done = subprocess.run(
        [sys.executable, str(FOLDER / "compile_kernels.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_every_kernel_compiles_within_its_limits() -> None:
    status, lines = compile_kernels()
    assert status == 0, "\n".join(lines)
    assert lines[-1].endswith("0 problems")


def test_faults_are_found_and_a_sound_kernel_beside_them_is_not_blamed() -> None:
    status, lines = compile_kernels("--file", str(FOLDER / "faulty_kernels.py"), "--capability", "86")
    assert status == 1
    problems = lines[lines.index("5 compiled, 4 problems") + 1 :]
    for name, problem in (
        ("does_not_compile(x:*fp32; SIZE=128)", "does not compile: CompilationError"),
        ("too_much_shared_memory(x:*bf16; SIZE=128)", "131072 bytes of shared memory, of 101376"),
        ("spills(x:*fp32; SIZE=16384)", "bytes of spill stores, of 0 accepted"),
        ("sound(x:*fp32; LENGTH=128)", "do not agree on the parameters ['LENGTH', 'SIZE']"),
    ):
        assert any(line.startswith(f"sm_86 {name}: ") and problem in line for line in problems), (name, problems)
    assert not any(line.startswith("sm_86 sound(x:*fp32; SIZE=128)") for line in problems)
    assert "SIZE=256" not in "\n".join(lines), "a kernel for a later generation was compiled for an earlier one"


def test_what_a_kernel_does_before_it_waits_for_the_one_before_is_looked_at() -> None:
    arguments = ("--file", str(FOLDER / "faulty_kernels.py"), "--capability", "90", "--match")
    status, lines = compile_kernels(*arguments, "SIZE=64")
    assert status == 1
    problems = lines[lines.index("5 compiled, 6 problems") + 1 :]  # two of the branch
    for name, problem in (
        ("sound", "does not wait for the kernel before it"),
        ("returns_early", "has bra before it waits"),
        ("reads_early", "reads ['x'] before it waits"),
        ("waits_first", "lets the next kernel start after it waits"),
        ("writes_early", "has st.global before it waits"),
    ):
        assert any(line.startswith(f"sm_90 {name}(") and problem in line for line in problems), (name, problems)
    status, lines = compile_kernels(*arguments, "waits(")
    assert (status, lines[-1]) == (0, "1 compiled, 0 problems")


def test_a_module_that_declares_none_of_its_kernels_is_a_problem(tmp_path: Path) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("import triton\n\n@triton.jit\ndef kernel(x):\n    pass\n")
    status, lines = compile_kernels("--file", str(silent))
    assert status == 1
    assert f"{silent} has kernels and declares no SPECIMENS" in lines
