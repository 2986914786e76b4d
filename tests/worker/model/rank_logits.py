"""The same work on every rank of a tensor-parallel model; ranks are processes of this machine, joined by gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from dense_attention import dense_logits, last_logits
from model_checkpoints import load_checkpoint
from torch import Tensor

from modelserve_worker.kernels.elementwise.elementwise import PlainElementwise
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.ranks.process_group import join_tensor_parallel

Case = tuple[Path, list[int]]
Work = Callable[[TensorParallel], list[Tensor]]


def on_every_rank(work: Work, *, size: int, scratch: Path, timeout_s: float = 240.0) -> list[list[Tensor]]:
    """What `work` (picklable) returned on each rank: [rank][item]."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, size, work, scratch)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout_s)
        process.kill()  # of no effect on a process that ended
        process.join()
    assert [process.exitcode for process in ranks] == [0] * size
    return [torch.load(scratch / f"rank{rank}.pt") for rank in range(size)]


def tensor_parallel_logits(cases: list[Case], *, size: int, scratch: Path) -> list[list[Tensor]]:
    """Logits of every case (checkpoint directory, token ids), as each rank computed them: [rank][case]."""
    return on_every_rank(partial(_dense, cases), size=size, scratch=scratch)


def _dense(cases: list[Case], parallel: TensorParallel) -> list[Tensor]:
    models = {directory: load_checkpoint(directory, parallel=parallel) for directory in dict(cases)}
    return [dense_logits(models[directory], ids) for directory, ids in cases]


def logits_of_kept_rows(cases: list[Case], *, size: int, scratch: Path) -> list[list[Tensor]]:
    """The same where sums go by rows, through a plain reference of `PeerRows`."""
    return on_every_rank(partial(_by_rows, cases), size=size, scratch=scratch)


def last_logits_of_kept_rows(cases: list[Case], *, size: int, scratch: Path) -> list[list[Tensor]]:
    """The same of each case's last row alone."""
    return on_every_rank(partial(_last_by_rows, cases), size=size, scratch=scratch)


class PlainPeerRows:
    """`PeerRows` in plain PyTorch: each rank norms its rows alone, and others' rows of the residual are NaN."""

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel

    def takes(self, delta: Tensor) -> bool:
        return True

    def residual_norm(
        self, residual: Tensor, delta: Tensor, delta_weight: Tensor, *, scalar: Tensor | None, next_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rank, share = self._parallel.rank, -(-len(delta) // self._parallel.size)
        mine = slice(rank * share, (rank + 1) * share)
        total = self._parallel.all_reduce(delta)
        kept, normed = torch.full_like(residual, torch.nan), torch.zeros_like(residual)
        kept[mine], normed[mine] = PlainElementwise().residual_norm(
            residual[mine], total[mine], delta_weight, scalar=scalar, next_weight=next_weight, eps=eps
        )
        return kept, self._parallel.all_reduce(normed)


def _by_rows(cases: list[Case], parallel: TensorParallel) -> list[Tensor]:
    return _dense(cases, replace(parallel, peer_rows=PlainPeerRows(parallel)))


def _last_by_rows(cases: list[Case], parallel: TensorParallel) -> list[Tensor]:
    kept = replace(parallel, peer_rows=PlainPeerRows(parallel))
    return [last_logits(load_checkpoint(directory, parallel=kept), ids) for directory, ids in cases]


def _rank(rank: int, size: int, work: Work, scratch: Path) -> None:
    parallel = join_tensor_parallel(
        rank=rank, size=size, init_method=f"file://{scratch}/rendezvous", device=torch.device("cpu"), timeout_s=120.0
    )
    torch.save(work(parallel), scratch / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
