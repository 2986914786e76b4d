"""What a step may hold: on a GPU an index outside an array ends the process, a check of the batch ends one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelserve.errors import InvalidInput
from modelserve_worker.batch import ScheduledBatch
from modelserve_worker.step.segment_columns import Ints, of_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingLimits:
    """Of one runner: requests and tokens of a step, rows of its segments that are no chunks and of one of them."""

    max_num_seqs: int
    max_tokens: int
    few_rows: int
    most_rows: int
    vocab_size: int
    max_model_len: int

    def check(self, batch: ScheduledBatch) -> None:
        """Raises InvalidInput for a batch that breaks the contract of `modelserve_worker.batch`."""
        name = f"step {batch.step}"
        if not batch.num_tokens or (batch.lengths < 1).any() or batch.lengths.sum() != batch.num_tokens:
            raise InvalidInput(f"{name} has no tokens, or not as many as its requests' lengths add up to")
        if batch.num_requests > self.max_num_seqs or batch.num_tokens > self.max_tokens:
            raise InvalidInput(
                f"{name} has {batch.num_requests} requests and {batch.num_tokens} tokens; the runner was made for "
                f"{self.max_num_seqs} and {self.max_tokens}"
            )
        drawn = batch.drawn
        if drawn.min() < 0 or drawn.max() > self.most_rows or (batch.sampled > batch.lengths).any():
            raise InvalidInput(f"{name} draws tokens of rows that it does not have, or of more than {self.most_rows}")
        decodes = batch.decodes(self.most_rows)
        if (rows := int(batch.lengths[:decodes].sum())) > self.few_rows:
            raise InvalidInput(
                f"{name} has {rows} rows in segments that are no chunks; there is room for {self.few_rows}"
            )
        few = np.arange(batch.num_requests) < decodes
        if few.any() and batch.lengths[few].max() > self.most_rows:
            raise InvalidInput(f"{name} has a decode of more than {self.most_rows} rows")
        lowest: Ints | int = 0
        if few.all():
            lowest = -self.most_rows
        elif few.any():
            lowest = np.where(of_rows(batch, few), np.int32(-self.most_rows), np.int32(0))
        if (batch.token_ids < lowest).any() or batch.token_ids.max() >= self.vocab_size:
            raise InvalidInput(f"{name}: a token id outside 0..{self.vocab_size - 1}")
        if batch.slots.min() < 0 or batch.slots.max() >= self.max_num_seqs or batch.starts.min() < 0:
            raise InvalidInput(f"{name}: a slot outside 0..{self.max_num_seqs - 1} or a position below 0")
        if (last := int((batch.starts + batch.lengths).max())) > self.max_model_len:
            raise InvalidInput(f"{name} computes {last} positions; block tables are for {self.max_model_len}")
