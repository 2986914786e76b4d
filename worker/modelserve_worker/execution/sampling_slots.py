"""Sampling parameters by slot: sent to the device when a request is given its slot, gathered there by every step.

The host keeps a copy to choose code paths by, so that no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve.sizing.activation import TOP_K_CAPACITY
from modelserve_worker.batch import AdmittedRequest
from modelserve_worker.kernels.sampling import MIN_TEMPERATURE, DrawParameters
from modelserve_worker.request import SamplingParams

_WORD = 1 << 64
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_BANNED = 8  # tokens per slot that the kernels can ban; a longer list takes the exact path
_WORDS_PER_SLOT = 2 + 1 + 1 + len(_FLOATS) + _BANNED  # of 32 bits: seed, top_k, min_tokens, the floats, banned tokens

Slots = NDArray[np.int32]


class SlotColumns:
    """One buffer of 32-bit words with a column of `slots` values per parameter, on the host or on a device.

    seeds int64; top_k (0 where it keeps the whole vocabulary), min_tokens (0 where it bans nothing) and banned
    [slots, 8] (-1: no token) int32; the others float32.
    """

    def __init__(self, words: Tensor, slots: int) -> None:
        self.words = words
        self.seeds = words[: 2 * slots].view(torch.int64)
        self.top_k = words[2 * slots : 3 * slots]
        self.min_tokens = words[3 * slots : 4 * slots]
        (
            self.temperature,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        ) = words[4 * slots : (4 + len(_FLOATS)) * slots].view(torch.float32).view(len(_FLOATS), slots)
        self.banned = words[(4 + len(_FLOATS)) * slots :].view(slots, _BANNED)


class SamplingSlots:
    """Parameters of every slot. Integers outside the vocabulary among biased and stop ids can never be sampled and are
    left out."""

    def __init__(
        self, *, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        padded = -(-max_num_seqs // 4) * 4  # aligned to 16 bytes whatever the batch, for one version of the kernels
        self._host = SlotColumns(torch.zeros(_WORDS_PER_SLOT * padded, dtype=torch.int32), padded)
        self.device = SlotColumns(self._host.words.to(device), padded)
        self.penalised = np.zeros(max_num_seqs, dtype=np.bool_)  # logits depend on the tokens the slot has seen
        self.random = np.zeros(max_num_seqs, dtype=np.bool_)
        self.truncated = np.zeros(max_num_seqs, dtype=np.bool_)  # by top-k or top-p
        self.min_p = np.zeros(max_num_seqs, dtype=np.bool_)
        self.logprobs = np.full(max_num_seqs, -1, dtype=np.int32)  # alternatives to report; -1: nothing at all
        columns = ("seeds", "top_k", "min_tokens", "banned", *_FLOATS)
        self._columns: dict[str, NDArray[Any]] = {name: getattr(self._host, name).numpy() for name in columns}
        self.min_tokens = self._columns["min_tokens"]
        self.bias: dict[int, tuple[Tensor, Tensor]] = {}  # slot -> different tokens int64 [M], values float32 [M]
        self.banned: dict[int, Tensor] = {}  # slot -> tokens int64 [M] that min_tokens forbids
        self._exact = np.zeros(max_num_seqs, dtype=np.bool_)
        self._exact_bans = np.zeros(max_num_seqs, dtype=np.bool_)  # more banned tokens than the kernels take

    def admit(self, admitted: Sequence[AdmittedRequest]) -> None:
        """Take the parameters of these requests into their slots, on the host and, on the stream, on the device."""
        for request in admitted:
            self._take(request.slot, request.sampling)
        self.device.words.copy_(self._pinned(self._host.words), non_blocking=True)

    def exact_rows(self, slots: Slots, output_counts: Slots) -> NDArray[np.bool_]:
        """Of the rows with these slots and tokens sampled so far: those whose filters the kernels do not have."""
        banning = self._exact_bans[slots] & (output_counts < self.min_tokens[slots])
        return np.asarray(self._exact[slots] | banning)

    def draw_parameters(self, slots: Tensor, positions: Tensor) -> DrawParameters:
        """Rows of the device's columns; slots and positions are integers [N]."""
        columns = self.device
        return DrawParameters(
            columns.seeds[slots],
            positions.long(),
            columns.temperature[slots],
            columns.top_k[slots],
            columns.top_p[slots],
            columns.min_p[slots],
        )

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        """A small array on the device, sent without waiting."""
        return self._pinned(torch.from_numpy(values)).to(self._device, non_blocking=True)

    def _take(self, slot: int, sampling: SamplingParams) -> None:
        columns = self._columns
        top_k = sampling.top_k if sampling.top_k < self._vocab_size else 0
        columns["seeds"][slot] = _signed(sampling.seed)
        columns["top_k"][slot] = top_k
        for name in _FLOATS:
            columns[name][slot] = getattr(sampling, name)
        self.random[slot] = sampling.temperature >= MIN_TEMPERATURE
        self.truncated[slot] = top_k > 0 or sampling.top_p < 1
        self.min_p[slot] = sampling.min_p > 0
        self.penalised[slot] = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )
        self.logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self._take_lists(slot, sampling)
        unsorted = top_k > TOP_K_CAPACITY or (top_k == 0 and (sampling.top_p < 1 or sampling.min_p > 0))
        self._exact[slot] = self.penalised[slot] or slot in self.bias or (self.random[slot] and unsorted)

    def _take_lists(self, slot: int, sampling: SamplingParams) -> None:
        self.bias.pop(slot, None)
        self.banned.pop(slot, None)
        bias: dict[int, float] = {}
        for token, value in sampling.logit_bias:
            if 0 <= token < self._vocab_size:
                bias[token] = bias.get(token, 0.0) + value
        if bias:
            self.bias[slot] = (
                self.upload(np.fromiter(bias.keys(), np.int64, len(bias))),
                self.upload(np.fromiter(bias.values(), np.float32, len(bias))),
            )
        stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids))
        banned = [token for token in dict.fromkeys(stops) if 0 <= token < self._vocab_size]
        self.min_tokens[slot] = sampling.min_tokens if banned else 0
        if sampling.min_tokens == 0 or not banned:
            return
        self.banned[slot] = self.upload(np.array(banned, dtype=np.int64))
        self._exact_bans[slot] = len(banned) > _BANNED
        self._columns["banned"][slot] = (banned + [-1] * _BANNED)[:_BANNED]

    def _pinned(self, values: Tensor) -> Tensor:
        """A copy that the device may read while the host goes on; the allocator keeps it until the copy is done."""
        return values.pin_memory() if self._device.type == "cuda" else values


def _signed(seed: int) -> int:
    """The seed modulo 2^64 as a signed word."""
    word = seed % _WORD
    return word - _WORD if word >= _WORD // 2 else word
