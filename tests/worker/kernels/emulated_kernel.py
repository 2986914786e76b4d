"""CUDA kernels on the CPU: their source, built by a C++ compiler, over `emulated_sm90.h` in place of PTX."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

from modelserve_worker.kernels.cuda_kernel import FOLDER, CudaSource


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _whole(file: Path) -> str:
    """A source with what it includes, but for PTX, in whose place the emulation is."""
    if file.name in ("sm90.cuh", "barriers_sm90.cuh", "slice_products_sm90.cuh"):
        return '#include "emulated_sm90.h"\n'
    text = file.read_text().replace("#pragma once", "")
    return re.sub(r'^#include "(.+)"$', lambda name: _whole(file.with_name(name[1])), text, flags=re.MULTILINE)


def built(source: CudaSource, entry: str, folder: Path) -> ctypes.CDLL:
    """A library of the kernel and of `entry`, C++ that launches it."""
    text = _whole(FOLDER / source.file)
    declared = "extern __shared__ __align__(1024) unsigned char memory[];"
    assert declared in text
    written, library = folder / "kernel.cpp", folder / f"{'-'.join((source.entry, *source.defines))}.so"
    written.write_text(text.replace(declared, "unsigned char* memory = shared_memory();") + entry)
    defines = [f"-D{define}" for define in (*source.defines, f"SHARED_BYTES={source.shared_bytes}")]
    named = [compiler() or "c++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{Path(__file__).parent}"]
    subprocess.run([*named, *defines, str(written), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
