"""Attention by the definition, over one whole sequence at once: no pages, no cache, nothing shared with the product's."""

from __future__ import annotations

import torch
from torch import Tensor

from modelserve.architecture import LayerKind, ModelArchitecture


class DenseAttention:
    """An AttentionBackend for one sequence from position 0. `window` may differ from the model's, for mutations."""

    def __init__(self, architecture: ModelArchitecture, *, window: int | None = None) -> None:
        self.architecture = architecture
        self.window = architecture.sliding_window if window is None else window
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}

    def producer(self, layer: int) -> int:
        return self.architecture.producer(layer)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is not None and v is not None:
            self.rows[layer] = (k, v)
        k, v = self.rows[self.producer(layer)]
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        query, key = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])[None, :]
        allowed = key <= query
        if self.architecture.kind(layer) is LayerKind.SLIDING:
            allowed &= key > query - self.window
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()).masked_fill(~allowed, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v.float()).to(q.dtype)
