"""Brings masks of the tokens that a step's constrained rows may sample from the host to the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelserve_worker.batch import Int32Array
from modelserve_worker.step.staging import StagingBuffer

_UNCONSTRAINED = -1


@dataclass(frozen=True)
class TokenMasks:
    """Masks of a step that samples S rows, C of them constrained."""

    rows: Tensor  # int32 [S]: the row's mask; -1: it may sample any token
    words: Tensor  # int32 [C, ceil(vocab / 32)], bit i of word w: token 32 w + i
    host_rows: NDArray[np.int32]  # `rows` on the host


class TokenMaskBuffer:
    """Masks of every row at a fixed address. A step sends those it has, behind a step's metadata and not with it: they
    are known only when the step before has answered."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._words = -(-vocab_size // 32)
        self._staging = StagingBuffer({"rows": max_num_seqs, "words": max_num_seqs * self._words}, device)

    def send(self, constrained: Int32Array, masks: Int32Array, *, rows: int) -> TokenMasks:
        """`masks` [C, words] are those of rows `constrained` [C] of `rows` that are sampled. Waits for nothing."""
        staging, count = self._staging, len(constrained)
        staging.begin()
        by_row = np.full(rows, _UNCONSTRAINED, dtype=np.int32)
        by_row[constrained] = np.arange(count, dtype=np.int32)
        staging.host("rows")[:rows] = by_row
        staging.host("words")[: masks.size] = masks.reshape(-1)
        staging.send(last="words", words=masks.size)
        words = staging.device("words")[: masks.size].view(count, self._words)
        return TokenMasks(staging.device("rows")[:rows], words, by_row)
