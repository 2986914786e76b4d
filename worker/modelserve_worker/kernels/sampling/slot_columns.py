"""Sampling parameters by slot, as kernels read them: columns of one buffer, so that one copy brings them all, and lists
of tokens that some slots have beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WORDS_PER_SLOT = 2 + 1 + 1 + 1 + len(FLOATS)  # of 32 bits: seed, top_k, min_tokens, listed, the floats
LISTED = 2048  # tokens that a slot can have listed: a power of two above 1,024 biased and 256 that end, as the API has


@dataclass(frozen=True)
class DrawParameters:
    """What the draw of each row depends on. Integers are int64 [N], the others float32 [N]."""

    seeds: Tensor
    positions: Tensor  # of the sampled token: the key of its random numbers
    temperature: Tensor
    top_k: Tensor  # 0 is off
    top_p: Tensor
    min_p: Tensor


class SlotColumns:
    """One buffer of 32-bit words with a column of `slots` values per parameter, on the host or on a device.

    seeds int64; top_k (0 where it keeps the whole vocabulary), min_tokens and listed (tokens in the slot's list) int32;
    the others float32.
    """

    def __init__(self, words: Tensor, slots: int) -> None:
        self.words = words
        self.seeds = words[: 2 * slots].view(torch.int64)
        self.top_k = words[2 * slots : 3 * slots]
        self.min_tokens = words[3 * slots : 4 * slots]
        self.listed = words[4 * slots : 5 * slots]
        (
            self.temperature,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        ) = words[5 * slots :].view(torch.float32).view(len(FLOATS), slots)

    def draw_parameters(self, slots: Tensor, positions: Tensor) -> DrawParameters:
        """Those of some rows; slots and positions are integers [N]."""
        return DrawParameters(
            self.seeds[slots],
            positions.long(),
            self.temperature[slots],
            self.top_k[slots].long(),
            self.top_p[slots],
            self.min_p[slots],
        )


@dataclass(frozen=True)
class SlotLists:
    """By slot the tokens whose logits change, in ascending order, as many as `listed` of its columns says.

    tokens int32 [slots, LISTED]; biases float32 [slots, LISTED]: what is added, or -inf, which forbids the token as
    long as the row has sampled fewer than `min_tokens`. Of two entries of a token the one that forbids is the last.
    """

    tokens: Tensor
    biases: Tensor
