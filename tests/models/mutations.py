"""Faults of the kind that a change to cache, kernels or decoding could bring, put into the engine from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from modelserve.model.architecture import LayerKind
from modelserve_worker.attention import paged_attention
from modelserve_worker.attention.page_groups import SegmentGroup
from modelserve_worker.attention.paged_attention import PagedAttention
from modelserve_worker.kernels.attention.block_attention import SoftmaxAccumulator
from modelserve_worker.kernels.attention.row_codec import v_only_columns
from modelserve_worker.layers import attention as attention_layer
from modelserve_worker.layers.rotary import rotate
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.runner import model_runner
from modelserve_worker.runner.model_runner import GPUModelRunner


@contextmanager
def window_off_by(model: Gemma4ForCausalLM, *, tokens: int) -> Iterator[None]:
    """Scheduler, page tables and masks take the window to be `tokens` longer than it is."""
    right = model.architecture
    model.architecture = right.model_copy(update={"sliding_window": right.sliding_window + tokens})
    try:
        yield
    finally:
        model.architecture = right


@contextmanager
def adjacent_rotary_pairs(model: Gemma4ForCausalLM) -> Iterator[None]:
    """Global layers turn pairs (i, i + P) of the first 2 P dimensions, not (i, i + D / 2); P pairs turn at all."""
    architecture = model.architecture
    pairs, width = architecture.global_rotary_pairs, architecture.global_head_dim
    assert architecture.head_dim != width, "the layer kinds are told apart by their head dim"
    stored = v_only_columns(width, pairs=pairs, device=model.norm.weight.device)

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.shape[-1] != width:
            return rotate(x, cos, sin)
        first, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        return torch.cat((rotate(first, cos[:, :pairs], sin[:, :pairs]), rest), dim=-1)

    def derived(_: GPUModelRunner, layer: int, values: Tensor, positions: Tensor) -> Tensor:
        """Keys of rows of V alone: the rotation is of columns in their natural order, not in that of the rows."""
        scaled = (values.float() * model.stored_k_norm_weight(layer))[..., stored.argsort()]
        cos, sin = model.rope.cos_sin(LayerKind.GLOBAL, positions)
        by_position = turned(scaled.flatten(0, 1).transpose(0, 1), cos, sin)  # [K, B * heads, D]
        return by_position.transpose(0, 1).reshape(values.shape)[..., stored].to(values.dtype)

    with (
        mock.patch.object(attention_layer, "rotate", turned),
        mock.patch.object(GPUModelRunner, "_derive_keys", derived),
    ):
        yield


@contextmanager
def oldest_page_dropped(_: Gemma4ForCausalLM) -> Iterator[None]:
    """A sliding page is gone as soon as its first row leaves the window; its other rows are not read any more."""
    with mock.patch.object(model_runner, "PagedAttention", _WithoutOldestPage):
        yield


class _WithoutOldestPage(PagedAttention):
    def _sliding_group(
        self, layer: int, producer: int, group: SegmentGroup, q: Tensor, own_keys: Tensor, own_values: Tensor
    ) -> Tensor:
        page = self._cache.geometry.sliding_page.page_tokens
        assert self._window > page, f"a window of {self._window} rows would lose the query's own row with its page"
        oldest = group.positions - self._window + 1
        lost = torch.where(oldest > 0, -oldest % page, 0)  # [B, n] rows up to the next page
        taken = 0

        def accumulator(queries: Tensor, *, kv_heads: int) -> SoftmaxAccumulator:
            """The group's queries come in blocks of rows, in their order."""
            nonlocal taken
            rows = queries.shape[1]
            mine = lost[:, taken : taken + rows, None]
            taken += rows
            return _Trimmed(queries, kv_heads=kv_heads, lost=mine)

        with mock.patch.object(paged_attention, "SoftmaxAccumulator", accumulator):
            attended = super()._sliding_group(layer, producer, group, q, own_keys, own_values)
        assert taken == lost.shape[1], "some query was not attended once"
        return attended


class _Trimmed(SoftmaxAccumulator):
    """Takes the first `lost` [B, Tq, 1] readable keys of each query out of the mask; keys come at once and in order."""

    def __init__(self, queries: Tensor, *, kv_heads: int, lost: Tensor) -> None:
        super().__init__(queries, kv_heads=kv_heads)
        self._lost = lost

    def add(self, keys: Tensor, values: Tensor, mask: Tensor) -> None:
        super().add(keys, values, mask & (mask.cumsum(-1) > self._lost))


@contextmanager
def derived_keys_without_k_norm(model: Gemma4ForCausalLM) -> Iterator[None]:
    """K of global layers is made of V without the weight of its norm."""
    right = model.k_norm_weight
    with mock.patch.object(model, "k_norm_weight", lambda layer: torch.ones_like(right(layer))):
        yield


@dataclass(frozen=True)
class Mutation:
    """`maskable`: global layers may make up for it, so that answers stay right while the distribution shifts."""

    name: str
    applied: Callable[[Gemma4ForCausalLM], AbstractContextManager[None]]
    maskable: bool
    needs_k_eq_v: bool = False


MUTATIONS = (
    Mutation("window one row shorter", partial(window_off_by, tokens=-1), maskable=True),
    Mutation("window one row longer", partial(window_off_by, tokens=1), maskable=True),
    Mutation("RoPE pairs (i, i + 64) on global layers", adjacent_rotary_pairs, maskable=False),
    Mutation("oldest sliding page dropped early", oldest_page_dropped, maskable=True),
    Mutation("global K from V without k_norm", derived_keys_without_k_norm, maskable=False, needs_k_eq_v=True),
)
