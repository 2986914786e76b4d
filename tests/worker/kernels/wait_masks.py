"""Whether a compiled Hopper kernel frees shared memory while reads of it are on their way: its machine code says so.

    python tests/worker/kernels/wait_masks.py CUBIN...

An arrival at a barrier (SYNCS.ARRIVE ... A1T0) lets the copy engine write where warps have read, and to the assembler
it needs nothing that a read brings. A read (LDS, LDSM) names one of six scoreboards in its control bits, and an
instruction whose wait mask has that scoreboard issues when the read is back. So a read is pending at an arrival where
some way through the code has no such instruction between the two. Bits 105 to 121 of an instruction, from the lowest:
stall 4, yield 1, write scoreboard 3 (7: none), read scoreboard 3, wait mask 6 (read from Hopper's machine code; a test
compiles a kernel that is wrong, which is found only where they are there).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);\s*/\* 0x[0-9a-f]{16} \*/")
_UPPER = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"(\.L_x_\d+):")
_READ = re.compile(r"\bLDSM?\b")
_IN_ORDER = re.compile(r"\b(LDSM?|SHFL)\b")  # what comes back in the order in which it was issued
_ENDS = re.compile(r"\b(EXIT|RET|BRX|JMX)\b")
_BRANCH = re.compile(r"\b(BRA|BSSY|BREAK)\b.*`\((\.L_x_\d+)\)")
_SCOREBOARDS = 6


@dataclass
class Instruction:
    address: str
    text: str
    writes: int  # the scoreboard that its result clears
    waits: int
    following: tuple[int, ...] = ()  # indices of what may come next


def instructions(cubin: bytes | Path, folder: Path) -> list[Instruction]:
    """Of a cubin with one kernel."""
    if isinstance(cubin, bytes):
        path = folder / "kernel.cubin"
        path.write_bytes(cubin)
        cubin = path
    lines = _disassembled(cubin).splitlines()
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif (one := _INSTRUCTION.match(line)) and (upper := _UPPER.match(after)):
            control = int(upper[1], 16) >> 41
            found.append(Instruction(one[1], one[2].strip(), control >> 5 & 7, control >> 11 & 0x3F))
    for index, one in enumerate(found):
        one.following = tuple(each for each in _following(one, index, labels) if each < len(found))
    return found


def _disassembled(cubin: Path) -> str:
    import triton.backends.nvidia

    disassembler = Path(triton.backends.nvidia.__path__[0]) / "bin" / "nvdisasm"
    return subprocess.run([disassembler, "-c", "-hex", cubin], capture_output=True, text=True, check=True).stdout


def _following(one: Instruction, index: int, labels: dict[str, int]) -> Iterator[int]:
    predicated = one.text.startswith("@")
    branch = _BRANCH.search(one.text)
    if branch and branch[1] == "BRA":
        yield labels[branch[2]]
        # A uniform or divergent predicate may stand among the operands, too.
        if predicated or re.search(r"BRA\S*\s+!?U?P", one.text):
            yield index + 1
    elif not _ENDS.search(one.text) or predicated:
        yield index + 1


def pending_at_arrivals(code: list[Instruction]) -> list[str]:
    """For each arrival with reads pending: where it stands, and one of them by its scoreboard."""
    # Before each instruction: of every scoreboard the reads that may be on their way, as indices, and last those that
    # have none: they are there when what comes back next is.
    nothing: tuple[frozenset[int], ...] = (frozenset(),) * (_SCOREBOARDS + 1)
    before = {0: nothing}
    todo = [0]
    while todo:
        index = todo.pop()
        one = code[index]
        state = list(_waited(before[index], one))
        if _IN_ORDER.search(one.text) and not one.text.startswith("@!PT"):
            behind = state[_SCOREBOARDS] | ({index} if _READ.search(one.text) else set())
            state[_SCOREBOARDS] = frozenset()
            state[min(one.writes, _SCOREBOARDS)] |= behind
        for following in one.following:
            known = before.get(following)
            joined = tuple(map(frozenset.union, known or nothing, state))
            if joined != known:
                before[following] = joined
                todo.append(following)
    said = []
    for index, one in enumerate(code):
        if is_arrival(one) and index in before:
            reads = sorted(frozenset().union(*_waited(before[index], one)))
            if reads:
                shown = code[reads[-1]]
                said.append(f"{one.address} {one.text}: {len(reads)} reads, {shown.address} {shown.text}")
    return said


def _waited(pending: tuple[frozenset[int], ...], one: Instruction) -> tuple[frozenset[int], ...]:
    return tuple(frozenset() if one.waits >> board & 1 else reads for board, reads in enumerate(pending))


def is_arrival(one: Instruction) -> bool:
    """Of a warp; a copy's, which expects bytes, has none of the mark."""
    return "SYNCS.ARRIVE" in one.text and "A1T0" in one.text


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for line in pending_at_arrivals(instructions(Path(name), Path(name).parent)):
            print(Path(name).name, line)
