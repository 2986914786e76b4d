"""On one Hopper GPU: what a step takes with each way to choose cuBLASLt's tile for its products of many rows.

    PYTHONPATH=operator:worker:tests/gpu:tests/models python tests/gpu/step_products.py --variant 31B
        [--mixed 1024] [--least-rows 4096] [--context 2048] [--prefills 3] [--rounds 3]

One process, random weights, captured steps of each way beside one another, timed in turns: prompts of 8,192 tokens
alone, then beside 31 decodes in steps of --mixed rows. Ways: PyTorch's own, the choice of `kernels/many_rows.py`, its
first offer, and each known tile where it is offered. A loop over one product says something else: its clock is its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import torch
from engine_on_gpu import Bench
from random_checkpoint import read_config

from modelserve.engine_args import EngineArgs
from modelserve_worker.execution.ranks import launch
from modelserve_worker.kernels import many_rows
from modelserve_worker.kernels.cublaslt import Offer
from modelserve_worker.kernels.many_rows import RATES, ManyRows, chosen

PROMPT, DECODES = 8192, 31
Choice = Callable[[Sequence[Offer]], Offer | None]


def tile(number: int) -> Choice:
    return lambda offers: chosen([offer for offer in offers if offer.tile == number])


def first(offers: Sequence[Offer]) -> Offer | None:
    return next((offer for offer in offers if offer.splits <= 1), None)


WAYS: dict[str, Choice | None] = {
    "PyTorch": None, "chosen": chosen, "first": first, **{str(number): tile(number) for number in RATES},
}  # fmt: skip


class Door(ManyRows):
    """A door with a choice of its own, which its plans keep."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(torch.device("cuda"))
        self._choice = choice

    def multiply(self, *tensors: torch.Tensor) -> bool:
        with mock.patch.object(many_rows, "chosen", self._choice):
            return super().multiply(*tensors)


class Ways:
    """A replica with the captured steps of every way."""

    def __init__(self, options: argparse.Namespace) -> None:
        doors = {name: None if choice is None else Door(choice) for name, choice in WAYS.items()}
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(read_config(options.variant, None)))
            args = EngineArgs(
                model=directory, load_format="dummy", device="cuda", max_model_len=2 * PROMPT,
                max_num_batched_tokens=PROMPT, max_num_mixed_tokens=options.mixed, gpu_memory_utilization=0.8,
            )  # fmt: skip
            replica = launch(args)
        self.runner, self.bench, self.doors, self.graphs = replica.runner, Bench(replica, args), doors, {}
        for name, door in doors.items():
            many_rows.many_rows_door = lambda _, door=door: door
            self.runner.capture_graphs()
            self.graphs[name] = self.runner._graphs

    def use(self, name: str) -> None:
        self.runner._graphs = self.graphs[name]
        many_rows.many_rows_door = lambda _: self.doors[name]

    def compare(self, title: str, prompts: int, rounds: int) -> None:
        found: dict[str, list[float]] = {name: [] for name in self.graphs}
        for _ in range(rounds):
            for name, times in found.items():
                self.use(name)
                times.append(self.milliseconds(prompts))
        base = statistics.median(found["PyTorch"])
        for name, times in found.items():
            middle = statistics.median(times)
            print(f"{title}, {name:8} {middle:9.2f} ms, {min(times):.2f} to {max(times):.2f}, {base / middle:.4f}")

    def milliseconds(self, prompts: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(prompts):
            self.bench.first_tokens([self.bench.request(PROMPT, 1)])
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--mixed", type=int, default=1024)
    parser.add_argument("--least-rows", type=int, default=many_rows.LEAST_ROWS)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prefills", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    many_rows.LEAST_ROWS = options.least_rows
    ways = Ways(options)
    ways.milliseconds(2)
    ways.compare(f"{options.variant}, {PROMPT} tokens alone", options.prefills, options.rounds)
    ways.bench.first_tokens([ways.bench.request(options.context, PROMPT) for _ in range(DECODES)])
    ways.compare(f"{options.variant}, {PROMPT} tokens beside {DECODES} decodes", options.prefills, options.rounds)


if __name__ == "__main__":
    main()
