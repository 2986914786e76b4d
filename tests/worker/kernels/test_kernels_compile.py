"""Every kernel compiles for every GPU generation that is served, within what one block may take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import golden_code
import pytest
from traced_launches import Traced, once_each

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


@pytest.mark.slow("what hundreds of launches are is found for a GPU generation, and one in 24 is compiled")
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_within_its_limits_to_the_code_that_is_committed(pytestconfig: pytest.Config) -> None:
    every_one = pytestconfig.getoption("--hypothesis-profile") == "long"
    status, lines = compile_kernels(*(() if every_one else ("--trust",)))
    assert status == 0, "\n".join(lines)
    assert lines[-1].endswith("0 problems")
    compiled = golden_code.read(lines)
    assert len({row.launch for row in compiled.rows}) == len(compiled.rows), "a row of the file is one launch"
    looked_at = {row.target for row in compiled.rows}
    assert len(looked_at) == (5 if every_one else 1)
    before = golden_code.committed()
    moved = golden_code.moved(replace(before, rows=tuple(r for r in before.rows if r.target in looked_at)), compiled)
    assert moved == [], "\n".join(moved)


def test_faults_are_found_and_a_sound_kernel_beside_them_is_not_blamed() -> None:
    status, lines = compile_kernels("--file", str(FOLDER / "faulty_kernels.py"), "--capability", "86")
    assert status == 1
    problems = lines[lines.index("10 compiled, 5 problems") + 1 :]
    for name, problem in (
        ("does_not_compile(x:*fp32; SIZE=128)", "does not compile: CompilationError"),
        ("too_much_shared_memory(x:*bf16; SIZE=128)", "131072 bytes of shared memory, of 101376"),
        ("spills(x:*fp32; SIZE=16384)", "bytes of spill stores, of 0 accepted"),
    ):
        assert any(line.startswith(f"sm_86 {name}: ") and problem in line for line in problems), (name, problems)
    assert not any(line.startswith("sm_86 sound(x:*fp32; SIZE=128)") for line in problems)
    assert "faulty_kernels.forgotten is launched by nobody" in problems
    assert not any("faulty_kernels.doubled" in line for line in problems), "what a kernel calls is none itself"


def test_what_a_kernel_does_before_it_waits_for_the_one_before_is_looked_at() -> None:
    arguments = ("--file", str(FOLDER / "faulty_kernels.py"), "--capability", "90", "--match")
    status, lines = compile_kernels(*arguments, "SIZE=64")
    assert status == 1
    problems = lines[lines.index("5 compiled, 7 problems") + 1 :]  # two of the branch, and the forgotten one
    for name, problem in (
        ("sound", "does not wait for the kernel before it"),
        ("returns_early", "has bra before it waits"),
        ("reads_early", "reads ['x'] before it waits"),
        ("waits_first", "lets the next kernel start after it waits"),
        ("writes_early", "has st.global before it waits"),
    ):
        assert any(line.startswith(f"sm_90 {name}(") and problem in line for line in problems), (name, problems)
    status, lines = compile_kernels(*arguments, "waits(")
    assert lines[-2:] == ["1 compiled, 1 problems", "faulty_kernels.forgotten is launched by nobody"]


def test_of_launches_that_differ_in_integers_the_one_is_compiled_of_which_least_is_known() -> None:
    def launch(*, count: int | None, block: int, divides: bool) -> Traced:
        """`count` None: it is passed; a number: it was 1, or another that the compiler knows."""
        signature = {"x": "*bf16", "count": "i32" if count is None else "constexpr", "BLOCK": "constexpr"}
        constants = {(2,): block} if count is None else {(1,): count, (2,): block}
        said = {
            "signature": signature, "constant_keys": [*constants], "constant_vals": [*constants.values()],
            "attrs_keys": [[0], [1]], "attrs_vals": [[["tt.divisibility", 16]], [["tt.divisibility", 16]] * divides],
            "options": {"num_warps": 4, "num_stages": 3},
        }  # fmt: skip
        return Traced("module", "kernel", json.dumps(said))

    one, divided = launch(count=1, block=64, divides=False), launch(count=None, block=64, divides=True)
    unknown, wider = launch(count=None, block=64, divides=False), launch(count=1, block=128, divides=False)
    assert once_each([one, divided, unknown, wider]) == [unknown, wider]
    assert (unknown.types, unknown.constants) == ({"x": "*bf16", "count": "i32"}, {"BLOCK": 64})
    assert one.name == "kernel(x:*bf16; count=1,BLOCK=64)"
