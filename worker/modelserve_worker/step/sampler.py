"""Logits to tokens on the device.

Order, as OpenAI-compatible servers have it: log probabilities are of the raw logits; then the token mask of a
constrained row; logit_bias, min_tokens (EOS and stop ids masked), repetition, presence and frequency penalties;
temperature; min-p; top-k; top-p; one draw. With temperature 0 (any below 1e-5) the token is the argmax after the
penalties. Every filter keeps the most likely token; equals are cut by token id, the lowest stays.

Two paths, chosen for each row by its own parameters alone, so that no other row can change its token. Rows that are
greedy, unfiltered, or filtered by a top-k of at most TOP_K_CAPACITY (with top-p and min-p) are sampled by candidates:
each rank selects from its share of the logits, ranks gather what they selected, and all draw the same. Of every other
row, and of each whose log probabilities are reported, ranks gather the logits, some rows at a time. Biases, bans and
penalties are applied where logits are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve_worker.batch import AdmittedRequest
from modelserve_worker.kernels.sampling.sampling import (
    IN_PROMPT,
    Adjustments,
    PlainSampling,
    SampledRows,
    SamplingBackend,
)
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.step.sampling_slots import SamplingSlots, Slots
from modelserve_worker.step.staging import upload
from modelserve_worker.step.token_masks import TokenMasks


@dataclass(frozen=True)
class SampledLogprobs:
    """Of the raw logits: the drawn token's log probability and rank [S], and the n likeliest tokens [S, n].

    Rows that asked for nothing hold zeros; n is the most that any row asked for.
    """

    chosen: Tensor  # float32
    rank: Tensor  # int64, 1 = the likeliest
    top_tokens: Tensor  # int64
    top_logprobs: Tensor  # float32
    wanted: NDArray[np.int32]  # on the host, [S]: alternatives that the row asked for; -1: it asked for nothing


@dataclass(frozen=True)
class SamplerOutput:
    tokens: Tensor  # int64 [S]; NOT_A_NUMBER where the logits held a NaN
    logprobs: SampledLogprobs | None


def draw_candidates(
    backend: SamplingBackend, parallel: TensorParallel, logits: Tensor, rows: SampledRows, *, first_token: int
) -> Tensor:
    """Tokens int64 [S], the same on every rank, of this rank's share of the raw logits [S, vocab / size]."""
    candidates = backend.select(logits, rows, first_token=first_token)
    if parallel.size > 1:
        gathered = parallel.all_gather(backend.merge(candidates, rows))
        candidates = gathered.view(len(logits), parallel.size, rows.width)
    return backend.draw(candidates, rows)


class Sampler:
    """Draws tokens; keeps the parameters of every slot and which tokens its request has seen (int32 [slots, vocab])."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        softcap: float | None,
        parallel: TensorParallel,
        device: torch.device,
        backend: SamplingBackend | None = None,
    ) -> None:
        """`backend` left out: plain PyTorch's."""
        self._parallel = parallel
        self._first_token = parallel.shard(vocab_size, what="vocab_size").start
        self._softcap = softcap
        self._slots = SamplingSlots(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device)
        seen = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)
        self._adjustments = Adjustments(seen, self._slots.lists)
        self._right = torch.ones(max_num_seqs, dtype=torch.bool, device=device)  # the drafts so far, of a step
        self._backend = backend or PlainSampling()

    @property
    def _seen(self) -> Tensor:
        return self._adjustments.seen

    def reset(self) -> None:
        """Forget what every slot has seen."""
        self._seen.zero_()

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """Requests take their slots: parameters go to the device, what they have seen is counted afresh.

        Ordered on the current stream, which is not waited for: steps launched before still see the old parameters.
        """
        if not admitted:
            return
        self._slots.admit(admitted)
        for request in admitted:
            if self._slots.penalised[request.slot]:
                self._rebuild(request)

    def sample(
        self,
        logits: Tensor,
        *,
        slots: Tensor,
        positions: Tensor,
        output_counts: Tensor,
        host_slots: Slots,
        masks: TokenMasks | None = None,
        offsets: Slots | None = None,
        proposed: Tensor | None = None,
    ) -> SamplerOutput:
        """Raw logits [S, vocab / size] of the head, before the softcap, left unchanged -> one token per row.

        slots, positions (of the sampled token) and output_counts (tokens that the row's request has sampled before):
        int32 [S] on the device; host_slots: the same on the host. Tokens are counted in the slots that have penalties.
        Where rows of one request follow each other, `offsets` on the host [S] numbers them
        and `proposed` int32 [S] is the draft that the next one was fed with, -1 behind the last: a token is drawn of
        each as if the drafts before were right, and counted where they were. Waits for nothing. With several ranks all
        of them come here, with the same of everything but logits, and meet in the collectives that the rows' paths call
        for.
        """
        paths = self._slots.paths(host_slots)
        rows = SampledRows(
            slots=slots,
            positions=positions,
            output_counts=output_counts,
            columns=self._slots.device,
            width=paths.width,
            softcap=self._softcap,
            mask_rows=None if masks is None else masks.rows,
            masks=None if masks is None else masks.words,
            adjustments=self._adjustments if paths.adjusted else None,
        )
        tokens = self._draw(logits, rows, paths.filtered)
        if paths.penalised.any():
            behind = np.zeros(len(host_slots), dtype=np.int32) if offsets is None else offsets
            for offset in range(1 + int(behind[paths.penalised].max())):
                which = np.flatnonzero(paths.penalised & (behind == offset)).astype(np.int64)
                some = upload(which, logits.device)
                if offset > 0:  # what these rows have seen is known only now
                    again = self._draw(logits[some], rows.some(some), paths.filtered[which])
                    tokens.index_copy_(0, some, again)
                self._count_drawn(
                    tokens[some], slots[some], None if proposed is None else proposed[some], behind_drafts=offset > 0
                )
        return SamplerOutput(tokens, self._logprobs(logits, tokens, paths.reported))

    def _draw(self, logits: Tensor, rows: SampledRows, filtered: NDArray[np.bool_]) -> Tensor:
        """One token int64 [N] of each row of [N, vocab / size]; `filtered`: those that few candidates do not decide."""
        backend, parallel = self._backend, self._parallel
        if filtered.all():
            tokens = torch.empty(len(filtered), dtype=torch.int64, device=logits.device)
        else:
            tokens = draw_candidates(backend, parallel, logits, rows, first_token=self._first_token)
        for some in self._passes(filtered):
            whole, places = self._whole(logits, some)
            drawn = backend.draw_filtered(whole, rows.some(some), places)
            tokens.index_copy_(0, some, drawn)
        return tokens

    def _passes(self, which: NDArray[np.bool_]) -> Iterator[Tensor]:
        """The rows that are True, as many at a time as the backend takes, as indices int64 on the device."""
        if which.any():
            rows, most = upload(np.flatnonzero(which).astype(np.int64), self._seen.device), self._backend.rows_at_once
            yield from (rows[first : first + most] for first in range(0, len(rows), most))

    def _whole(self, logits: Tensor, some: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the whole vocabulary, and where in them some rows stand."""
        if self._parallel.size == 1:
            return logits, some
        return self._parallel.all_gather(logits[some]), torch.arange(len(some), device=some.device)

    def _count_drawn(self, tokens: Tensor, slots: Tensor, proposed: Tensor | None, *, behind_drafts: bool) -> None:
        """Of rows with penalties, no two of a slot: the drafts before them were right, or they were drawn in vain."""
        sound = tokens >= 0
        right = self._right[slots] if behind_drafts else torch.ones_like(sound)
        self._count(slots.long() * self._seen.shape[1] + tokens.clamp(min=0), (right & sound).int())
        if proposed is not None:
            self._right[slots] = right & (tokens == proposed)

    def _rebuild(self, request: AdmittedRequest) -> None:
        row = self._seen[request.slot].zero_()
        output = self._tokens(request.output_token_ids) + request.slot * self._seen.shape[1]
        self._count(output, torch.ones_like(output, dtype=torch.int32))
        prompt = self._tokens(request.prompt_token_ids)
        row[prompt] = row[prompt] | IN_PROMPT

    def _count(self, places: Tensor, ones: Tensor) -> None:
        """Add int32 ones at places of the flattened counts; integers, so the order of equal places does not matter."""
        self._seen.view(-1).index_add_(0, places, ones)

    def _tokens(self, ids: Sequence[int]) -> Tensor:
        return upload(np.array(ids, dtype=np.int64), self._seen.device)

    def _logprobs(self, logits: Tensor, tokens: Tensor, wanted: NDArray[np.int32]) -> SampledLogprobs | None:
        most = int(wanted.max(initial=-1))
        if most < 0:
            return None
        rows, device = len(wanted), logits.device
        reported = SampledLogprobs(
            chosen=torch.zeros(rows, device=device),
            rank=torch.zeros(rows, dtype=torch.int64, device=device),
            top_tokens=torch.zeros(rows, most, dtype=torch.int64, device=device),
            top_logprobs=torch.zeros(rows, most, device=device),
            wanted=wanted,
        )
        for some in self._passes(wanted >= 0):
            whole, places = self._whole(logits, some)
            found = self._backend.logprobs(whole, tokens[some], places, most=most, softcap=self._softcap)
            reported.chosen.index_copy_(0, some, found.chosen)
            reported.rank.index_copy_(0, some, found.rank)
            reported.top_tokens.index_copy_(0, some, found.top_tokens)
            reported.top_logprobs.index_copy_(0, some, found.top_logprobs)
        return reported
