"""Sums over the GPUs of a tensor-parallel group: the same bits on all ranks and as the references, then their time.

    python tests/bench rank_sums [--ranks 2] [--width 5376] [--rows 1,8,64,512,8192] [--check-only]

One process a GPU, joined by NCCL. Microseconds of one sum inside a captured graph of 40, mean of 5 replays, the slowest
rank's: NCCL alone, NCCL with the norm behind it, small sums through peer memory alone and with the norm, sums by rows.
Exit status 1 when a bit differed between ranks or from the sum in rank order, or more than 2 of 1,000 normed elements
were rounded otherwise than the reference's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modelserve.sizing.rank_sums import PeerRowsLayout
from modelserve_worker.kernels.elementwise.elementwise import PlainElementwise
from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise
from modelserve_worker.layers.parallel import TensorParallel, sum_in_rank_order
from modelserve_worker.ranks.process_group import join_tensor_parallel

EPS = 1e-6
PER_GRAPH, REPLAYS = 40, 5
MOST_ROWS = 8192


class Rank:
    """What one rank checks and times."""

    def __init__(self, parallel: TensorParallel, device: torch.device, width: int) -> None:
        self.parallel, self.device, self.width = parallel, device, width
        self.generator = torch.Generator(device=device).manual_seed(100 + parallel.rank)
        self.same = torch.Generator(device=device).manual_seed(7)  # of what all ranks hold alike
        self.faults: list[str] = []

    def partial(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).bfloat16()

    def shared(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.same, device=self.device).bfloat16()

    def gathered(self, x: Tensor) -> Tensor:
        return torch.stack(self.parallel.all_gather(x[None]).chunk(self.parallel.size, dim=-1)).squeeze(1)

    def expect(self, what: str, right: bool) -> None:
        if not right:
            self.faults.append(f"rank {self.parallel.rank}: {what}")

    def check_sums(self) -> None:
        peers = self.parallel.peers
        assert peers is not None
        for shape in ((1, 8), (3, 1000), (1, self.width), (17, self.width), (96, self.width)):
            x = self.partial(*shape)
            if not peers.takes(x):
                continue
            total = peers.all_reduce(x)
            self.expect(f"sum {shape}: not in rank order", torch.equal(total, sum_in_rank_order(self.gathered(x))))

    def check_norms(self, rows: int, *, scalar: bool) -> None:
        """Residuals begin alike on all ranks; two calls, since the second reads what the first left of the residual."""
        by_rows = not self.fits(rows)
        sums = self.parallel.peer_rows if by_rows else self.parallel.peers
        assert sums is not None
        residual, weight, next_weight = self.shared(rows, self.width), self.shared(self.width), self.shared(self.width)
        factor = self.shared(1) if scalar else None
        expected = residual.clone()
        for call in range(2):
            partial = self.partial(rows, self.width)
            residual, normed = sums.residual_norm(
                residual, partial, weight, scalar=factor, next_weight=next_weight, eps=EPS
            )
            normed = normed.clone()
            what = f"norms of {rows} rows, call {call}"
            total = sum_in_rank_order(self.gathered(partial))
            expected, expected_norm = PlainElementwise().residual_norm(
                expected, total, weight, scalar=factor, next_weight=next_weight, eps=EPS
            )
            everyones = self.gathered(normed)
            self.expect(f"{what}: ranks differ", all(torch.equal(everyones[0], other) for other in everyones[1:]))
            mine = slice(0, rows)
            if by_rows:
                share = -(-rows // self.parallel.size)
                mine = slice(self.parallel.rank * share, min(rows, (self.parallel.rank + 1) * share))
            for name, found, wanted in (
                ("residual", residual[mine], expected[mine]),
                ("normed", normed, expected_norm),
            ):
                # A delta that is rounded otherwise moves a sum by the delta's last bit, however small the sum is.
                most = (found.float() - wanted.float()).abs().max().item()
                self.expect(f"{what}: {name} is {most:.3f} away from the reference", most < 0.5)
                other = (found != wanted).float().mean().item()
                self.expect(f"{what}: {100 * other:.3f} % of {name} rounded otherwise", other < 0.002)
            # From here on both go on with the same numbers.
            expected[mine] = residual[mine]

    def fits(self, rows: int) -> bool:
        assert self.parallel.peers is not None
        return self.parallel.peers.takes_rows(torch.empty(rows, self.width, dtype=torch.bfloat16, device=self.device))

    def check_replays(self) -> None:
        """Small sums of changing size captured among sums by rows, replayed: every result right, every time."""
        peers, by_rows = self.parallel.peers, self.parallel.peer_rows
        assert peers is not None
        sizes = [8 * self.width, 256, 33 * self.width, self.width]
        inputs = [self.partial(size) for size in sizes]
        weight, residual = self.shared(self.width), self.shared(300, self.width)
        rows = self.partial(300, self.width)
        graph, totals = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(25):
                totals += [(x, peers.all_reduce(x)) for x in inputs]
                if by_rows is not None:
                    by_rows.residual_norm(residual, rows, weight, scalar=None, next_weight=weight, eps=EPS)
        for replay in range(20):
            for x in inputs:
                x.copy_(self.partial(*x.shape))
            graph.replay()
            wanted = {id(x): sum_in_rank_order(self.gathered(x)) for x in inputs}
            right = all(torch.equal(total, wanted[id(x)]) for x, total in totals)
            self.expect(f"replay {replay} of captured sums is wrong", right)

    def microseconds(self, run: Callable[[], Any]) -> float:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(PER_GRAPH):
                run()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(1e3 * begin.elapsed_time(end) / PER_GRAPH / REPLAYS, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest.item())

    def times(self, rows: int) -> dict[str, float]:
        parallel, width = self.parallel, self.width
        delta, residual, weight = self.partial(rows, width), self.shared(rows, width), self.shared(width)
        scalar = self.shared(1)
        options = {"scalar": scalar, "next_weight": weight, "eps": EPS}

        def nccl() -> None:
            dist.all_reduce(delta)

        def nccl_norm() -> None:
            nccl()
            TritonElementwise().residual_norm(residual, delta, weight, **options)

        found = {
            "norm": self.microseconds(lambda: TritonElementwise().residual_norm(residual, delta, weight, **options)),
            "nccl": self.microseconds(nccl),
            "nccl+norm": self.microseconds(nccl_norm),
        }
        peers, by_rows = parallel.peers, parallel.peer_rows
        if peers is not None and peers.takes(delta):
            found["peers"] = self.microseconds(lambda: peers.all_reduce(delta))
        if peers is not None and peers.takes_rows(delta):
            found["peers+norm"] = self.microseconds(lambda: peers.residual_norm(residual, delta, weight, **options))
        if by_rows is not None and by_rows.takes(delta):
            found["rows+norm"] = self.microseconds(lambda: by_rows.residual_norm(residual, delta, weight, **options))
        return found


COLUMNS = ("norm", "nccl", "nccl+norm", "peers", "peers+norm", "rows+norm")


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    layout = PeerRowsLayout(MOST_ROWS, options.width, options.ranks)
    major, minor = torch.cuda.get_device_capability(device)
    parallel = join_tensor_parallel(
        rank=rank, size=options.ranks, init_method=f"file://{folder}/rendezvous", device=device, timeout_s=60.0,
        capability=10 * major + minor, peer_layout=layout,
    )  # fmt: skip
    say = print if rank == 0 else lambda *_, **__: None
    say(f"{options.ranks} x {torch.cuda.get_device_name()}: peer memory {parallel.peers is not None}, "
        f"by rows {parallel.peer_rows is not None}", flush=True)  # fmt: skip
    here = Rank(parallel, device, options.width)
    with torch.inference_mode():
        if parallel.peers is not None:
            here.check_sums()
            say("sums checked", flush=True)
            for rows in (1, 2, 13, 64, 96):
                if here.fits(rows):
                    here.check_norms(rows, scalar=rows % 2 == 0)
            say("small norms checked", flush=True)
            if parallel.peer_rows is not None:
                for rows in (128, 301, 1024, 8191, 8192):
                    here.check_norms(rows, scalar=rows % 2 == 0)
                say("norms by rows checked", flush=True)
            here.check_replays()
        faults: list[list[str]] = [[] for _ in range(options.ranks)]
        dist.all_gather_object(faults, here.faults)
        say("\n".join(fault for each in faults for fault in each) or "every check passed", flush=True)
        if not options.check_only:
            say(f"{'rows':>6} {'KiB':>8} " + " ".join(f"{name:>10}" for name in COLUMNS))
            for rows in options.rows:
                found = here.times(rows)
                times = (f"{found[name]:10.1f}" if name in found else f"{'-':>10}" for name in COLUMNS)
                say(f"{rows:6} {rows * options.width / 512:8.0f} " + " ".join(times), flush=True)
    dist.barrier()
    sys.stdout.flush()
    sys.exit(int(any(faults)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=5376)
    parser.add_argument(
        "--rows", type=lambda text: [int(each) for each in text.split(",")],
        default=[1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192],
    )  # fmt: skip
    parser.add_argument("--check-only", action="store_true")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(rank, options, folder)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
            process.kill()
            process.join()
    codes = [process.exitcode for process in ranks]
    if any(codes):
        print(f"ranks ended with {codes}")
    return int(any(codes))
