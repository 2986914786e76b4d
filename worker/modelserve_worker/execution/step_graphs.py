"""Captured steps, one per size bucket: a launch of hundreds of kernels becomes one replay.

Steps of decodes alone are captured up to their raw logits, by batch size; steps with chunks up to the hidden states, by
rows, because few of their rows sample. All graphs share one memory pool, in which a step's temporaries lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelserve.sizing.cuda_graphs import decode_graph_sizes, mixed_graph_sizes
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.execution.input_batch import PackedStep, StepPacker

WARM_ROWS = 512  # where sums over ranks, and launches of small and large steps, change from one kernel to another


class StepGraphs:
    """Graphs over the fixed metadata buffers of `packer`."""

    def __init__(
        self,
        packer: StepPacker,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        logits: Callable[[PackedStep], Tensor],
        hidden: Callable[[PackedStep], Tensor],
        warm_rows: int = 0,
    ) -> None:
        """`logits` and `hidden` run the model over a step: raw logits of every row, and hidden states of every row.

        The largest step is captured first: the others fit in its memory. Results are copied into one buffer for all
        graphs of a kind, so that no graph keeps its own. Steps of at most `warm_rows` rows run once before they are
        captured, which neither compiles nor loads a kernel: what several ranks launch depends on a step's size.
        """
        self._packer = packer
        self._warm_rows = warm_rows
        self._pool: Any = None  # torch names no type for it
        self._outputs: dict[Callable[[PackedStep], Tensor], Tensor] = {}
        self._mixed = {
            rows: self._capture(packer.mixed_views(rows), hidden)
            for rows in reversed(mixed_graph_sizes(max(max_num_batched_tokens, max_num_seqs)))
        }
        self._decode = {
            rows: self._capture(packer.decode_views(rows), logits)
            for rows in reversed(decode_graph_sizes(max_num_seqs))
        }

    @property
    def mixed_rows(self) -> tuple[int, ...]:
        """Sizes of the captured steps with chunks, rising."""
        return tuple(sorted(self._mixed))

    def rows_for(self, batch: ScheduledBatch) -> int | None:
        """The bucket of a batch; None where no captured step takes it."""
        if int(batch.lengths.max(initial=0)) <= 1:
            return min((size for size in self._decode if size >= batch.num_requests), default=None)
        if not self._packer.fits_one_expansion(batch):
            return None
        return min((size for size in self._mixed if size >= batch.num_tokens), default=None)

    def replay(self, packed: PackedStep, rows: int) -> Tensor:
        """Run the step that was packed last: raw logits [rows, vocab] of decodes alone, else hidden states [rows, H],
        of a model that narrows its steps [max_num_seqs, H].

        Valid until the next replay.
        """
        graph, output = (self._decode if packed.inputs.chunks is None else self._mixed)[rows]
        graph.replay()
        return output

    def _capture(self, step: PackedStep, run: Callable[[PackedStep], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if run not in self._outputs:  # the largest step of its kind
            self._outputs[run] = torch.empty_like(run(step))
        elif len(step.token_ids) <= self._warm_rows:
            run(step)
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask the device meanwhile, as NCCL's watchdog does.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run(step)
            output = self._outputs[run][: result.shape[0]]
            output.copy_(result)
        if self._pool is None:
            self._pool = graph.pool()
        return graph, output
