"""Memory predicted and measured: E4B and 31B, cache bfloat16 and int8, one and two GPUs, chunks of 2,048 and 8,192.

    python tests/bench pool_matrix [--ranks 1 2]

Each row is one fresh process with an empty calibration; those of two ranks want two GPUs visible.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess

from bench.entries import command

VARIANTS, FORMATS, CHUNKS = ("E4B", "31B"), ("bfloat16", "int8"), (2048, 8192)
TOLD = ("memory", "Error", "error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    for ranks, variant, dtype, chunk in itertools.product(options.ranks, VARIANTS, FORMATS, CHUNKS):
        flags = f"--variant {variant} --tensor-parallel-size {ranks} --kv-cache-dtype {dtype} --max-model-len 16384"
        row = command("engine_on_gpu", *flags.split(), "--max-num-batched-tokens", str(chunk), "--memory-only")
        done = subprocess.run(
            ["timeout", "90", *row], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        for line in done.stdout.splitlines():
            if any(word in line for word in TOLD):
                print(f"chunk {chunk} {line}", flush=True)
