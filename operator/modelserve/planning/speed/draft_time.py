"""How long drafters take for drafts of each of some requests, on one rank. An MTP assistant, for one of each:

    weights   W / (bandwidth x weight_read), W without the table where a head with centroids scores a part of it
    head      3 requests C h e / (bandwidth x elementwise), the C tokens that such a head scores: gathered, then read
    cache     requests x (n_g g L + n_s s min(L, window)) / (bandwidth x cache_read)
    launches  (kernels + GRAPH_KERNELS) x draft_launch_seconds

n layers of a kind, each of which reads all of the target's last cache of its kind: g and s bytes a token.
"""

from __future__ import annotations

from typing import Protocol

from modelserve.hardware import Accelerator
from modelserve.model.architecture import LayerKind
from modelserve.model.assistant import AssistantArchitecture
from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve.planning.speed.engine_rates import engine_rates
from modelserve.sizing.pages import CacheGeometry
from modelserve.sizing.speculation import STEP_DRAFTS, Speculation
from modelserve.sizing.weights.assistant import assistant_weight_bytes, kernels_per_draft
from modelserve.sizing.weights.dflash import dflash_element_bytes, dflash_weight_bytes, kernels_per_block
from modelserve.sizing.weights.text import element_bytes

GRAPH_KERNELS = 5  # as long as the start of a graph behind another takes, and the copy of what it drafted


class Proposing(Protocol):
    """How long drafts take, of one drafter."""

    def __hash__(self) -> int: ...

    def seconds(self, requests: float, most: int, *, context: float) -> tuple[float, ...]:
        """Of 0 to `most` drafts of each of `requests` requests at a mean length of `context` tokens: [most + 1], in s;
        none take none."""
        ...


class DraftSpeed:
    """Of one assistant on one rank of one accelerator, over the caches of its target, as planned."""

    def __init__(
        self, assistant: AssistantArchitecture, device: Accelerator, geometry: CacheGeometry, *, tensor_parallel: int
    ) -> None:
        self._assistant, self._rates = assistant, engine_rates(device.compute_capability)
        self._bandwidth = device.bandwidth
        self._window = assistant.sliding_window
        row = assistant.hidden_size * element_bytes(assistant)
        self._weights = assistant_weight_bytes(assistant, tensor_parallel_size=tensor_parallel)
        self._scored = 0
        if assistant.num_centroids:
            self._weights -= assistant.vocab_size * row
            self._scored = 3 * assistant.centroid_tokens * row
        full = len(assistant.full_attention_layers)
        readers = {LayerKind.GLOBAL: full, LayerKind.SLIDING: assistant.num_hidden_layers - full}
        self._global, self._sliding = (
            readers[kind] * geometry.page(kind).layer_bytes / geometry.page(kind).page_tokens
            for kind in (LayerKind.GLOBAL, LayerKind.SLIDING)
        )

    def seconds(self, requests: float, most: int, *, context: float) -> tuple[float, ...]:
        """Of `Proposing`: one draft after the other."""
        rates = self._rates
        cached = requests * (self._global * context + self._sliding * min(context, self._window))
        kernels = kernels_per_draft(self._assistant, rows=max(1, round(requests))) + GRAPH_KERNELS
        read = self._weights / rates.weight_read + cached / rates.cache_read
        read += requests * self._scored / rates.elementwise
        each = read / self._bandwidth + kernels * rates.draft_launch_seconds
        return tuple(drafts * each for drafts in range(most + 1))


class BlockSpeed:
    """Of a drafter of the DFlash family, which makes all drafts of a request in one pass.

    layers    W / (bandwidth x weight_read), or 2 W / e rows / (flops x linear) where that is longer; of its rows
              `block_rows` a request
    head      the tokens that are scored, of the drafts that are asked for, likewise
    cache     of each request all rows of its layers before the block, of window layers the window
    launches  kernels x draft_launch_seconds
    """

    def __init__(
        self, drafter: DFlashArchitecture, device: Accelerator, geometry: CacheGeometry, *, tensor_parallel: int
    ) -> None:
        self._drafter, self._rates, self._draft = drafter, engine_rates(device.compute_capability), geometry.draft
        self._bandwidth, self._flops = device.bandwidth, device.flops
        size, ranks = dflash_element_bytes(drafter), tensor_parallel
        aside = len(drafter.taps) * drafter.hidden_size**2 * size  # what projects the taps, which steps do
        self._head = (drafter.draft_vocab_size or drafter.vocab_size) // ranks * drafter.hidden_size * size
        own = self._head if drafter.draft_vocab_size is not None else 0
        self._layers = max(0, dflash_weight_bytes(drafter, tensor_parallel_size=ranks) - aside - own)
        self._element_bytes = size

    def seconds(self, requests: float, most: int, *, context: float) -> tuple[float, ...]:
        """Of `Proposing`: a block of each, of which more or fewer rows are scored."""
        scored = min(self._drafter.num_drafts, max(1, STEP_DRAFTS // max(1, round(requests))))
        block = self._multiplied(self._layers, requests * self._drafter.block_rows)
        if (kept := self._draft) is not None:
            rows = kept.full_layers * context + kept.window_layers * min(context, kept.window)
            block += requests * rows * kept.row_bytes / (self._rates.cache_read * self._bandwidth)
        block += (kernels_per_block(self._drafter) + GRAPH_KERNELS) * self._rates.draft_launch_seconds
        heads = (self._multiplied(self._head, requests * min(drafts, scored)) for drafts in range(1, most + 1))
        return 0.0, *(block + head for head in heads)

    def _multiplied(self, weights: float, rows: float) -> float:
        """Reading matrices of so many bytes, or multiplying rows by them."""
        flops = 2 * weights / self._element_bytes * rows
        return max(weights / (self._rates.weight_read * self._bandwidth), flops / (self._flops * self._rates.linear))


def draft_speeds(
    speculation: Speculation, device: Accelerator, geometry: CacheGeometry, *, tensor_parallel: int
) -> tuple[Proposing, ...]:
    """Of each drafter that proposes when it is asked to, in the worker's order."""
    found: list[Proposing] = []
    if speculation.assistant is not None:
        found.append(DraftSpeed(speculation.assistant, device, geometry, tensor_parallel=tensor_parallel))
    if speculation.block is not None:
        found.append(BlockSpeed(speculation.block, device, geometry, tensor_parallel=tensor_parallel))
    return tuple(found)
