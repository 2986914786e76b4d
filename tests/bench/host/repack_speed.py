"""Times how words and blocks of other tools' checkpoints become ours, on one core of the CPU.

    python tests/bench repack_speed [--megabytes 64] [--formats awq gptq Q4_0 ...]

Makes random bytes of a matrix with 5,376 inputs, repacks them --repeats times as the loader does, and prints for each
format the bytes of the file per second of one core (the best repeat), beside a plain copy of the same bytes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from modelserve.model.weight_format import Layout
from modelserve_worker.layers.stored.int4_layouts import words_by_rows
from modelserve_worker.models.weight_source import INT8_BLOCKS
from modelserve_worker.weights.gguf_blocks import BLOCKS_BY_NAME, PACKED, BlockTargets

INPUTS = 5_376
NAMES = ("copy", "gptq", "awq", *INT8_BLOCKS)
PIECE = 1 << 23  # bytes that the loader reads at a time, about


def job(name: str, size: int) -> tuple[Callable[[], object], int]:
    """What repacks about `size` bytes of a format, and how many they are."""
    if name in ("gptq", "awq", "copy"):
        outputs = size * 2 // INPUTS // 8 * 8
        shape = (INPUTS, outputs // 8) if name == "awq" else (INPUTS // 8, outputs)
        words = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).to(torch.int32)
        made = torch.empty_like(words)
        if name == "copy":
            return lambda: made.copy_(words), words.nbytes
        layout = Layout.AWQ if name == "awq" else Layout.GPTQ
        return lambda: words_by_rows(words, layout), words.nbytes
    kind = BLOCKS_BY_NAME[name]
    row = INPUTS // kind.elements * kind.bytes
    rows = size // row
    raw = torch.randint(0, 256, (rows, row), dtype=torch.uint8)
    raw.view(rows, -1, kind.bytes)[..., 1::2] &= 0x3B  # as float16 no scale is infinite
    packed = kind.name == "Q4_0"
    elements = torch.empty(rows, INPUTS // PACKED if packed else INPUTS, dtype=torch.int32 if packed else torch.int8)
    scales = torch.empty(rows, INPUTS // 32, dtype=torch.float16)
    piece = max(1, PIECE // row)

    def store() -> None:
        for first in range(0, rows, piece):
            part = slice(first, first + piece)
            BlockTargets(kind, elements[part], scales[part]).store(raw[part])

    return store, raw.nbytes


def speed(work: Callable[[], object], size: int, repeats: int) -> float:
    """GB/s of a core, the best of the repeats."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return size / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--formats", nargs="+", default=NAMES, choices=NAMES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.formats:
        print(f"{name:6} {speed(*job(name, options.megabytes << 20), options.repeats):.2f} GB/s a core", flush=True)


if __name__ == "__main__":
    main()
