"""CUDA kernels on the CPU: their source, built by a C++ compiler, over `emulated_sm90.h` in place of PTX."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
from paged_case import PagedCase
from torch import Tensor

from modelserve_worker.kernels.compiling.cuda_kernel import CudaSource, source_file
from modelserve_worker.kernels.step import Segments


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _whole(file: Path) -> str:
    """A source with what it includes, but for PTX, in whose place the emulation is."""
    if file.name in ("sm90.cuh", "barriers_sm90.cuh", "slice_products_sm90.cuh"):
        return '#include "emulated_sm90.h"\n'
    if file.name in ("integer_mma_sm90.cuh", "group_scales_sm90.cuh"):
        return '#include "emulated_integers.h"\n'
    text = file.read_text().replace("#pragma once", "")
    return re.sub(r'^#include "(.+)"$', lambda name: _whole(source_file(name[1])), text, flags=re.MULTILINE)


def built(source: CudaSource, entry: str, folder: Path) -> ctypes.CDLL:
    """A library of the kernel and of `entry`, C++ that launches it."""
    text = _whole(source_file(source.file))
    declared = "extern __shared__ __align__(1024) unsigned char memory[];"
    assert declared in text
    written, library = folder / "kernel.cpp", folder / f"{'-'.join((source.entry, *source.defines))}.so"
    written.write_text(text.replace(declared, "unsigned char* memory = shared_memory();") + entry)
    defines = [f"-D{define}" for define in (*source.defines, f"SHARED_BYTES={source.shared_bytes}")]
    named = [compiler() or "c++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{Path(__file__).parent}"]
    subprocess.run([*named, *defines, str(written), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def around_the_kernel_ahead(case: PagedCase, q: Tensor, decode: Segments) -> tuple[Tensor, Tensor]:
    """uint8 [pages and queries] before and after the kernel ahead stores queries and keys, which are NaN before.

    Of a settled step these are the rows' own keys and values, else all that their last pages hold.
    """
    then = torch.cat((case.arena, q.view(torch.uint8).flatten()))
    for slot, position in zip(decode.slots.tolist(), decode.positions.tolist(), strict=True):
        for plane in ("k", "v") if position >= 0 else ():
            own = case.page(slot, position // case.page_tokens, plane)[0]
            own[:, position % case.page_tokens if decode.settled else slice(None)] = torch.nan
    now = torch.cat((case.arena, torch.full_like(q, torch.nan).view(torch.uint8).flatten()))
    case.arena.copy_(then[: case.arena.numel()])
    return now, then


def merged_splits(partial: Tensor, maxima: Tensor, totals: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each row that has splits, and its outputs, float32 [heads, width].

    partial [rows, splits, kv_heads, group, width], maxima and totals [rows, splits, kv_heads, group]: float32, and NaN
    where a row has no such split.
    """
    for row in range(len(maxima)):
        made = ~maxima[row, :, 0, 0].isnan()
        if made.any():
            weights = (maxima[row, made] - maxima[row, made].amax(0)).exp2()
            merged = (partial[row, made] * weights[..., None]).sum(0) / (totals[row, made] * weights).sum(0)[..., None]
            yield row, merged.flatten(0, 1)
