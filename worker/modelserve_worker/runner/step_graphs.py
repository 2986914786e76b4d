"""Captured steps, one per size bucket: a launch of hundreds of kernels becomes one replay.

Steps of decodes alone are captured up to their raw logits, by batch size; steps with chunks up to the hidden states of
last rows, by rows and last rows, because few of them sample. All graphs share one memory pool, in which a step's
temporaries lie, also those of a step that no graph takes (`memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from modelserve.sizing.cuda_graphs import decode_graph_rows, mixed_graph_sizes
from modelserve.sizing.speculation import Speculation
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.kernels.compiling.compute_stream import check_compute_stream, in_turn
from modelserve_worker.kernels.step import Step
from modelserve_worker.step.input_batch import StepPacker
from modelserve_worker.step.step_size import StepSize

WARM_ROWS = 512  # where sums over ranks, and launches of small and large steps, change from one kernel to another


class StepGraphs:
    """Graphs over the fixed metadata buffers of `packer`."""

    def __init__(
        self,
        packer: StepPacker,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        last_rows: Sequence[int],
        logits: Callable[[Step], Tensor],
        hidden: Callable[[Step], Tensor],
        warm_rows: int = 0,
    ) -> None:
        """`logits` and `hidden` run the model over a step: raw logits of every row, and hidden states of its last rows.

        Steps with chunks are captured for each number of `last_rows`, the largest of which is all that requests may
        have. The largest step is captured first: the others fit in its memory. Results are copied into one buffer for
        all graphs of a kind, so that no graph keeps its own. Where `warm_rows` is not 0, steps of at most so many rows
        run once before they are captured, and each number of last rows does in one, since a capture neither compiles
        nor loads a kernel: what several ranks launch depends on a step's size.
        """
        self._packer = packer
        self._warm_rows = warm_rows
        self._memory = torch.cuda.MemPool()
        self._outputs: dict[Callable[[Step], Tensor], Tensor] = {}
        speculation = Speculation(packer.most_rows - 1)
        sizes = mixed_graph_sizes(max(max_num_batched_tokens, speculation.step_rows(max_num_seqs)))
        for last in last_rows[:-1] if warm_rows else ():  # in a small step: large ones find no memory beside graphs
            hidden(packer.mixed_views(sizes[0], last, adapted=packer.adapted is not None))
        most = packer.most_rows
        mixed = sorted(
            {StepSize(rows, packer.last_rows(rows, last), most) for rows in sizes for last in last_rows}, reverse=True
        )
        kinds = (False,) if packer.adapted is None else (True, False)  # the larger ones first
        self._mixed = {
            replace(size, adapted=adapted): self._capture(
                packer.mixed_views(size.rows, size.last, adapted=adapted), hidden
            )
            for size in mixed for adapted in kinds
        }  # fmt: skip
        self._decode = {
            StepSize(rows, rows, few, adapted): self._capture(packer.decode_views(rows, few, adapted=adapted), logits)
            for rows, few in sorted(decode_graph_rows(max_num_seqs, speculation), reverse=True)
            for adapted in kinds
        }

    @property
    def pool(self) -> Any:  # torch names no type for it
        """Whose memory captured steps take."""
        return self._memory.id

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Where the tensors of what is not captured take theirs from: between two replays the graphs' memory is
        nobody's. They hold until the next replay."""
        stream = torch.cuda.graph.default_capture_stream  # which all graphs are captured on, and whose memory is free
        assert stream is not None
        with in_turn(stream), torch.cuda.use_mem_pool(self._memory):
            yield

    @property
    def mixed_rows(self) -> tuple[int, ...]:
        """Sizes of the captured steps with chunks, rising."""
        return tuple(sorted({size.rows for size in self._mixed}))

    def size_for(self, batch: ScheduledBatch) -> StepSize | None:
        """The smallest captured step that takes a batch; None where there is none, or rows begin from embeddings."""
        if len(batch.spans.segments):
            return None
        adapted = len(batch.adapters) > 0
        if batch.decodes(self._packer.most_rows) == batch.num_requests:
            few = 1 if batch.lengths.max() == 1 else self._packer.most_rows  # without drafts as without a drafter
            taking = (
                size for size in self._decode
                if size.few == few and size.adapted == adapted and size.rows >= batch.num_tokens
                and self._packer.segments_of(size.rows, few) >= batch.num_requests
            )  # fmt: skip
            return min(taking, default=None)
        narrows = self._packer.narrows(batch)
        if not (narrows or self._packer.exact) or not self._packer.fits_one_expansion(batch):
            return None
        kept = int(batch.kept.sum()) if narrows else batch.num_tokens
        enough = (
            size for size in self._mixed
            if size.adapted == adapted and size.rows >= batch.num_tokens and size.last >= kept
        )  # fmt: skip
        return min(enough, default=None)

    def replay(self, packed: Step, size: StepSize) -> Tensor:
        """Run the step that was packed last, to `size`: raw logits [size.rows, vocab] of decodes alone, else hidden
        states [size.last, H].

        Valid until the next replay. Raises ComputeStreamError.
        """
        check_compute_stream(torch.cuda.current_stream().cuda_stream)
        graph, output = (self._decode if packed.chunks is None else self._mixed)[size]
        graph.replay()
        return output

    def _capture(self, step: Step, run: Callable[[Step], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if run not in self._outputs:  # the largest step of its kind
            self._outputs[run] = torch.empty_like(run(step))
        elif len(step.positions) <= self._warm_rows:
            run(step)
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask the device meanwhile, as NCCL's watchdog does.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            result = run(step)
            output = self._outputs[run][: result.shape[0]]
            output.copy_(result)
        return graph, output
