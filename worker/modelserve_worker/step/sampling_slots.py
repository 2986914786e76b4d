"""Sampling parameters by slot: sent to the device when a request is given its slot, gathered there by every step.

The host keeps a copy to choose code paths by, so that no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.sizing.activation import TOP_K_CAPACITY
from modelserve_worker.batch import AdmittedRequest
from modelserve_worker.kernels.sampling.sampling import MIN_TEMPERATURE
from modelserve_worker.kernels.sampling.slot_columns import BANNED, FLOATS, WORDS_PER_SLOT, SlotColumns
from modelserve_worker.request import SamplingParams
from modelserve_worker.step.staging import pinned, upload

_WORD = 1 << 64

Slots = NDArray[np.int32]


@dataclass(frozen=True)
class RowPaths:
    """How the S rows of a step are sampled: which by candidates, which from all their logits.

    Ranks that share the vocabulary gather candidates, and all logits of the other rows. So all of them must come to the
    same paths without asking each other: paths follow from the requests that were admitted and from a step's slots,
    which every rank reads from the same batches, and from nothing that a rank computes.
    """

    exact: NDArray[np.bool_]  # [S]: filters that are no matter of a few candidates
    reported: NDArray[np.int32]  # [S]: alternatives whose log probabilities are reported; -1: nothing at all
    width: int  # candidates that the row with most of them needs, 1 to TOP_K_CAPACITY; 0: every row is exact


class SamplingSlots:
    """Parameters of every slot. Integers outside the vocabulary among biased and stop ids can never be sampled and are
    left out."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        padded = -(-max_num_seqs // 4) * 4  # aligned to 16 bytes whatever the batch, for one version of the kernels
        self._host = SlotColumns(torch.zeros(WORDS_PER_SLOT * padded, dtype=torch.int32), padded)
        self.device = SlotColumns(self._host.words.to(device), padded)
        self.penalised = np.zeros(max_num_seqs, dtype=np.bool_)  # logits depend on the tokens the slot has seen
        self.random = np.zeros(max_num_seqs, dtype=np.bool_)
        self.truncated = np.zeros(max_num_seqs, dtype=np.bool_)  # by top-k or top-p
        self.min_p = np.zeros(max_num_seqs, dtype=np.bool_)
        self._reported = np.full(max_num_seqs, -1, dtype=np.int32)
        columns = ("seeds", "top_k", "min_tokens", "banned", *FLOATS)
        self._columns: dict[str, NDArray[Any]] = {name: getattr(self._host, name).numpy() for name in columns}
        self.min_tokens = self._columns["min_tokens"]
        self.bias: dict[int, tuple[Tensor, Tensor]] = {}  # slot -> different tokens int64 [M], values float32 [M]
        self.banned: dict[int, Tensor] = {}  # slot -> tokens int64 [M] that min_tokens forbids
        self._exact = np.zeros(max_num_seqs, dtype=np.bool_)
        self._candidates = np.ones(max_num_seqs, dtype=np.int32)  # that a row which is not exact needs

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """Take the parameters of these requests into their slots, on the host and, on the stream, on the device."""
        for request in admitted:
            self._take(request.slot, request.sampling, request.banned_token_ids)
        self.device.words.copy_(pinned(self._host.words, self._device), non_blocking=True)

    def paths(self, slots: Slots) -> RowPaths:
        """Those of the rows with these slots."""
        exact = np.asarray(self._exact[slots])
        return RowPaths(exact, self._reported[slots], int(self._candidates[slots][~exact].max(initial=0)))

    def _take(self, slot: int, sampling: SamplingParams, banned: tuple[int, ...]) -> None:
        columns = self._columns
        top_k = sampling.top_k if sampling.top_k < self._vocab_size else 0
        columns["seeds"][slot] = _signed(sampling.seed)
        columns["top_k"][slot] = top_k
        for name in FLOATS:
            columns[name][slot] = getattr(sampling, name)
        self.random[slot] = sampling.temperature >= MIN_TEMPERATURE
        self.truncated[slot] = top_k > 0 or sampling.top_p < 1
        self.min_p[slot] = sampling.min_p > 0
        self.penalised[slot] = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )
        self._reported[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self._take_lists(slot, sampling, banned)
        unsorted = top_k > TOP_K_CAPACITY or (top_k == 0 and (sampling.top_p < 1 or sampling.min_p > 0))
        by_hand = slot in self.bias or len(self.banned.get(slot, ())) > BANNED  # lists that the kernels do not take
        self._exact[slot] = self.penalised[slot] or by_hand or (self.random[slot] and unsorted)
        self._candidates[slot] = max(1, top_k) if self.random[slot] else 1

    def _take_lists(self, slot: int, sampling: SamplingParams, banned_token_ids: tuple[int, ...]) -> None:
        self.bias.pop(slot, None)
        self.banned.pop(slot, None)
        bias: dict[int, float] = {}
        for token, value in sampling.logit_bias:
            if 0 <= token < self._vocab_size:
                bias[token] = bias.get(token, 0.0) + value
        if bias:
            self.bias[slot] = (
                upload(np.fromiter(bias.keys(), np.int64, len(bias)), self._device),
                upload(np.fromiter(bias.values(), np.float32, len(bias)), self._device),
            )
        banned = [token for token in dict.fromkeys(banned_token_ids) if 0 <= token < self._vocab_size]
        self.min_tokens[slot] = sampling.min_tokens if banned else 0
        if sampling.min_tokens == 0 or not banned:
            return
        self.banned[slot] = upload(np.array(banned, dtype=np.int64), self._device)
        self._columns["banned"][slot] = (banned + [-1] * BANNED)[:BANNED]


def _signed(seed: int) -> int:
    """The seed modulo 2^64 as a signed word."""
    word = seed % _WORD
    return word - _WORD if word >= _WORD // 2 else word
