"""What the machine code of a compiled kernel is, whatever the kernel, its module and its file are called.

`code_hash` covers what a GPU runs and what its launch needs of the compiler: instructions, constants, initialised and
shared memory, where addresses are filled in, and bounds of a launch. Names, lines of the source, debug sections and the
order of sections are left out, and so is how parameters are described: where code reads them is in its instructions.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_NO_BITS = 8  # a section's type: memory that the file has no bytes of
_CODE = re.compile(r"\.text\b|\.nv\.constant[1-9]|\.nv\.global\b|\.nv\.shared\b")
_FILLED_IN = re.compile(r"\.(rela?)(\.text|\.nv\.constant)")
_RESOURCES = ".nv.info."
# Entries of a kernel's resources that name symbols by number, describe parameters, or say which toolkit wrote them.
_PARAM_CBANK, _EXTERNS, _PARAMETER, _PARAMETER_BYTES, _TOOLKIT = 0x0A, 0x0F, 0x17, 0x19, 0x37
_LEFT_OUT = (_PARAM_CBANK, _EXTERNS, _PARAMETER, _PARAMETER_BYTES, _TOOLKIT)


@dataclass(frozen=True)
class _Section:
    name: str
    size: int
    content: bytes


def code_hash(cubin: bytes) -> str:
    """16 hexadecimal digits. `cubin`: an ELF file of 64 bits with one kernel."""
    parts = sorted(part for section in _sections(cubin) for part in _parts(section))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _sections(elf: bytes) -> Iterator[_Section]:
    (headers,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    known = [struct.unpack_from("<IIQQQQ", elf, headers + number * size) for number in range(count)]
    names_at = known[of_names][4]
    for name_at, kind, _, _, offset, length in known:
        name = elf[names_at + name_at : elf.index(b"\0", names_at + name_at)].decode()
        yield _Section(name, length, b"" if kind == _NO_BITS else elf[offset : offset + length])


def _parts(section: _Section) -> Iterator[tuple[str, int, bytes]]:
    """What of a section is machine code, under a name that no kernel's name is in."""
    if section.name.startswith(_RESOURCES):
        yield from (("resource", kind, value) for kind, value in _resources(section.content) if kind not in _LEFT_OUT)
    elif filled := _FILLED_IN.match(section.name):
        step, form = (24, "<QIIq") if filled[1] == "rela" else (16, "<QII")
        for at in range(0, section.size, step):
            place, kind, _symbol, *added = struct.unpack_from(form, section.content, at)
            yield filled[0], place, repr((kind, added)).encode()
    elif code := _CODE.match(section.name):
        yield code[0], section.size, section.content


def _resources(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(content):
        form, kind, value = struct.unpack_from("<BBH", content, at)
        size = value if form == 4 else 0  # else the value itself is all
        yield kind, content[at + 4 : at + 4 + size] or str(value).encode()
        at += 4 + size


def source_hash(launch: HasSources) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(repr(launch.sources()).encode()).hexdigest()[:16]


class HasSources(Protocol):
    def sources(self) -> tuple[str, ...]: ...


def compilers() -> tuple[str, ...]:
    """Name and version of all that machine code comes from."""
    import triton

    folder = Path(triton.backends.__path__[0]) / "nvidia" / "bin"
    assemblers = (f"{name} {_version(folder / name)}" for name in ("ptxas", "ptxas-blackwell"))
    return f"triton {triton.__version__}", *assemblers, f"nvrtc {importlib.metadata.version('nvidia-cuda-nvrtc')}"


@functools.cache
def _version(assembler: Path) -> str:
    said = subprocess.run([assembler, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release [\d.]+, V([\d.]+)", said)
    assert found is not None, said
    return found[1]
