"""Sampling parameters by slot: sent to the device when a request is given its slot, gathered there by every step.

The host keeps a copy to choose code paths by, so that no step waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modelserve.sizing.activation import TOP_K_CAPACITY
from modelserve_worker.batch import AdmittedRequest
from modelserve_worker.kernels.sampling.sampling import MIN_TEMPERATURE
from modelserve_worker.kernels.sampling.slot_columns import FLOATS, LISTED, WORDS_PER_SLOT, SlotColumns, SlotLists
from modelserve_worker.request import SamplingParams
from modelserve_worker.step.staging import pinned, upload

_WORD = 1 << 64

Slots = NDArray[np.int32]


@dataclass(frozen=True)
class RowPaths:
    """How the S rows of a step are sampled: which by candidates, and which from all their logits.

    Ranks that share the vocabulary gather candidates, and all logits of the other rows. So all of them must come to the
    same paths without asking each other: paths follow from the requests that were admitted and from a step's slots,
    which every rank reads from the same batches, and from nothing that a rank computes.
    """

    filtered: NDArray[np.bool_]  # [S]: filters that are no matter of a few candidates
    penalised: NDArray[np.bool_]  # [S]: logits depend on the tokens that the slot has seen
    reported: NDArray[np.int32]  # [S]: alternatives whose log probabilities are reported; -1: nothing at all
    width: int  # candidates that the row with most of them needs, 1 to TOP_K_CAPACITY; 0: every row is filtered
    adjusted: bool  # a row has penalties, or a list of tokens whose logits change


class SamplingSlots:
    """Parameters of every slot. Integers outside the vocabulary among biased and stop ids can never be sampled and are
    left out."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        padded = -(-max_num_seqs // 4) * 4  # aligned to 16 bytes whatever the batch, for one version of the kernels
        self._host = SlotColumns(torch.zeros(WORDS_PER_SLOT * padded, dtype=torch.int32), padded)
        self.device = SlotColumns(self._host.words.to(device), padded)
        self.lists = SlotLists(
            torch.zeros(max_num_seqs, LISTED, dtype=torch.int32, device=device),
            torch.zeros(max_num_seqs, LISTED, dtype=torch.float32, device=device),
        )
        self.penalised = np.zeros(max_num_seqs, dtype=np.bool_)
        self._reported = np.full(max_num_seqs, -1, dtype=np.int32)
        columns = ("seeds", "top_k", "min_tokens", "listed", *FLOATS)
        self._columns: dict[str, NDArray[Any]] = {name: getattr(self._host, name).numpy() for name in columns}
        self._filtered = np.zeros(max_num_seqs, dtype=np.bool_)
        self._candidates = np.ones(max_num_seqs, dtype=np.int32)  # that a row which is not filtered needs

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """Take the parameters of these requests into their slots, on the host and, on the stream, on the device."""
        for request in admitted:
            self._take(request.slot, request.sampling, request.banned_token_ids)
        self.device.words.copy_(pinned(self._host.words, self._device), non_blocking=True)

    def paths(self, slots: Slots) -> RowPaths:
        """Those of the rows with these slots."""
        filtered, penalised = np.asarray(self._filtered[slots]), np.asarray(self.penalised[slots])
        return RowPaths(
            filtered, penalised, self._reported[slots], int(self._candidates[slots][~filtered].max(initial=0)),
            adjusted=bool(penalised.any() or self._columns["listed"][slots].any()),
        )  # fmt: skip

    def _take(self, slot: int, sampling: SamplingParams, banned: tuple[int, ...]) -> None:
        columns = self._columns
        top_k = sampling.top_k if sampling.top_k < self._vocab_size else 0
        columns["seeds"][slot] = _signed(sampling.seed)
        columns["top_k"][slot] = top_k
        for name in FLOATS:
            columns[name][slot] = getattr(sampling, name)
        self.penalised[slot] = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )
        self._reported[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self._take_list(slot, sampling, banned)
        random = sampling.temperature >= MIN_TEMPERATURE
        many = top_k > TOP_K_CAPACITY or (top_k == 0 and (sampling.top_p < 1 or sampling.min_p > 0))
        self._filtered[slot] = random and many
        self._candidates[slot] = max(1, top_k) if random else 1

    def _take_list(self, slot: int, sampling: SamplingParams, banned_token_ids: tuple[int, ...]) -> None:
        bias: dict[int, float] = {}
        for token, value in sampling.logit_bias:
            bias[token] = bias.get(token, 0.0) + value
        banned = dict.fromkeys(banned_token_ids if sampling.min_tokens else (), -math.inf)
        found = sorted([*bias.items(), *banned.items()], key=lambda entry: entry[0])  # of a token, the ban is last
        listed = [(token, value) for token, value in found if 0 <= token < self._vocab_size]
        assert len(listed) <= LISTED, f"{len(listed)} tokens are biased or forbidden, and a slot has room for {LISTED}"
        self._columns["min_tokens"][slot] = sampling.min_tokens
        self._columns["listed"][slot] = len(listed)
        if listed:
            tokens, values = zip(*listed, strict=True)
            self.lists.tokens[slot, : len(listed)] = upload(np.array(tokens, dtype=np.int32), self._device)
            self.lists.biases[slot, : len(listed)] = upload(np.array(values, dtype=np.float32), self._device)


def _signed(seed: int) -> int:
    """The seed modulo 2^64 as a signed word."""
    word = seed % _WORD
    return word - _WORD if word >= _WORD // 2 else word
