"""Logits to tokens on the device.

Order, as OpenAI-compatible servers have it: log probabilities are of the raw logits; then the token mask of a
constrained row; logit_bias, min_tokens (EOS and stop ids masked), repetition, presence and frequency penalties;
temperature; min-p; top-k; top-p; one draw. With temperature 0 (any below 1e-5) the token is the argmax after the
penalties. Every filter keeps the most likely token; equals are cut by token id, the lowest stays.

Two paths, chosen for each row by its own parameters alone, so that no other row can change its token. Rows that are
greedy, unfiltered, or filtered by a top-k of at most TOP_K_CAPACITY (with top-p and min-p) are sampled by candidates:
each rank selects from its share of the logits, ranks gather what they selected, and all draw the same. Of every other
row, and of each whose log probabilities are reported, ranks gather the logits, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.sizing.activation import ROWS_PER_SORT
from modelserve_worker.batch import NOT_A_NUMBER, AdmittedRequest
from modelserve_worker.kernels.sampling.sampling import (
    CandidateRows,
    PlainSampling,
    SamplingBackend,
    allowed_tokens,
    draw_tokens,
    likeliest,
    softcapped,
)
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.step.sampling_slots import SamplingSlots, Slots
from modelserve_worker.step.staging import upload
from modelserve_worker.step.token_masks import TokenMasks

_IN_PROMPT = 1 << 30  # bit of a penalty count that says: the token is in the prompt


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
    backend: SamplingBackend, parallel: TensorParallel, logits: Tensor, rows: CandidateRows, *, first_token: int
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
        self._seen = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)
        self._right = torch.ones(max_num_seqs, dtype=torch.bool, device=device)  # the drafts so far, of a step
        self._backend = backend or PlainSampling()

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
        if paths.width:
            candidates = CandidateRows(
                slots=slots,
                positions=positions,
                output_counts=output_counts,
                columns=self._slots.device,
                width=paths.width,
                softcap=self._softcap,
                mask_rows=None if masks is None else masks.rows,
                masks=None if masks is None else masks.words,
            )
            tokens = draw_candidates(self._backend, self._parallel, logits, candidates, first_token=self._first_token)
        else:
            tokens = torch.empty(len(host_slots), dtype=torch.int64, device=logits.device)
        for offset in range(1 if offsets is None else 1 + int(offsets.max(initial=0))):
            exact = paths.exact if offsets is None else paths.exact & (offsets == offset)
            for rows, on_device in self._passes(exact):
                drawn = self._draw_exactly(
                    self._parallel.all_gather(logits[on_device]),
                    slots=slots[on_device],
                    positions=positions[on_device],
                    output_counts=output_counts[on_device],
                    host_slots=host_slots[rows],
                    masks=masks,
                    rows=rows,
                    behind_drafts=offset > 0,
                    proposed=None if proposed is None else proposed[on_device],
                )
                tokens.index_copy_(0, on_device, drawn)
        return SamplerOutput(tokens, self._logprobs(logits, tokens, paths.reported))

    def _passes(self, which: NDArray[np.bool_]) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """The rows that are True, ROWS_PER_SORT at a time, as indices on the host and on the device."""
        if not which.any():
            return
        rows = np.flatnonzero(which).astype(np.int64)
        on_device = upload(rows, self._seen.device)
        for first in range(0, len(rows), ROWS_PER_SORT):
            end = first + ROWS_PER_SORT
            yield rows[first:end], on_device[first:end]

    def _draw_exactly(
        self,
        logits: Tensor,
        *,
        slots: Tensor,
        positions: Tensor,
        output_counts: Tensor,
        host_slots: Slots,
        masks: TokenMasks | None,
        rows: NDArray[np.int64],
        behind_drafts: bool,
        proposed: Tensor | None,
    ) -> Tensor:
        """The draw of some of the step's rows, those with these numbers, from all their logits [N, vocab]."""
        parameters = self._slots
        values = softcapped(logits, self._softcap)
        broken = values.isnan().any(dim=-1)
        if masks is not None:
            self._mask(values, masks, rows)
        for row, slot in enumerate(host_slots.tolist()):
            if slot in parameters.bias:
                biased, bias = parameters.bias[slot]
                values[row].index_add_(0, biased, bias)  # no token comes twice, so no order of addition either
            if slot in parameters.banned:  # the device knows which drafts before this row were accepted
                ban = torch.where(output_counts[row] < int(parameters.min_tokens[slot]), -torch.inf, 0.0)
                values[row].index_add_(0, parameters.banned[slot], ban.expand(len(parameters.banned[slot])))
        penalised = bool(parameters.penalised[host_slots].any())
        if penalised:
            self._penalise(values, slots)
        random = parameters.random[host_slots]
        tokens = draw_tokens(
            values,
            parameters.device.draw_parameters(slots, positions),
            random=bool(random.any()),
            min_p=bool((random & parameters.min_p[host_slots]).any()),
            truncated=bool((random & parameters.truncated[host_slots]).any()),
        )
        if penalised:  # a slot without penalties may be counted too: it starts afresh when it is given away
            right = self._right[slots] if behind_drafts else torch.ones_like(broken)
            self._count(slots.long() * self._seen.shape[1] + tokens, right.int())
            if proposed is not None:
                self._right[slots] = right & (tokens == proposed)
        return tokens.masked_fill_(broken, NOT_A_NUMBER)

    def _mask(self, values: Tensor, masks: TokenMasks, rows: NDArray[np.int64]) -> None:
        constrained = np.flatnonzero(masks.host_rows[rows] >= 0)
        if not len(constrained):
            return
        here = upload(constrained, values.device)
        words = masks.words[upload(masks.host_rows[rows][constrained].astype(np.int64), values.device)]
        allowed = allowed_tokens(words, torch.arange(values.shape[1], device=values.device))
        values.index_copy_(0, here, values[here].masked_fill_(~allowed, -torch.inf))

    def _penalise(self, values: Tensor, slots: Tensor) -> None:
        columns, seen = self._slots.device, self._seen[slots]
        factor = torch.where(seen > 0, columns.repetition_penalty[slots][:, None], 1.0)
        values.copy_(torch.where(values > 0, values / factor, values * factor))
        counts = (seen & (_IN_PROMPT - 1)).float()
        values -= columns.frequency_penalty[slots][:, None] * counts
        values -= columns.presence_penalty[slots][:, None] * (counts > 0)

    def _rebuild(self, request: AdmittedRequest) -> None:
        row = self._seen[request.slot].zero_()
        output = self._tokens(request.output_token_ids) + request.slot * self._seen.shape[1]
        self._count(output, torch.ones_like(output, dtype=torch.int32))
        prompt = self._tokens(request.prompt_token_ids)
        row[prompt] = row[prompt] | _IN_PROMPT

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
        for _, some in self._passes(wanted >= 0):
            logprobs = softcapped(self._parallel.all_gather(logits[some]), self._softcap).log_softmax(dim=-1)
            chosen = logprobs.gather(1, tokens[some].clamp_(min=0)[:, None])
            reported.chosen.index_copy_(0, some, chosen[:, 0])
            reported.rank.index_copy_(0, some, (logprobs > chosen).sum(dim=-1) + 1)
            values, likely = likeliest(logprobs, most)
            reported.top_tokens.index_copy_(0, some, likely)
            reported.top_logprobs.index_copy_(0, some, values)
        return reported
