"""How long an MTP assistant takes for one draft of each of some requests, on one rank.

    weights   W / (bandwidth x weight_read), W without the table where a head with centroids scores a part of it
    head      3 requests C h e / (bandwidth x elementwise), the C tokens that such a head scores: gathered, then read
    cache     requests x (n_g g L + n_s s min(L, window)) / (bandwidth x cache_read)
    launches  (kernels + GRAPH_KERNELS) x draft_launch_seconds

n layers of a kind, each of which reads all of the target's last cache of its kind: g and s bytes a token.
"""

from __future__ import annotations

from modelserve.hardware import Accelerator
from modelserve.model.architecture import LayerKind
from modelserve.model.assistant import AssistantArchitecture
from modelserve.planning.speed.engine_rates import engine_rates
from modelserve.sizing.pages import CacheGeometry
from modelserve.sizing.weights.assistant import assistant_weight_bytes, kernels_per_draft
from modelserve.sizing.weights.text import element_bytes

GRAPH_KERNELS = 5  # as long as the start of a graph behind another takes, and the copy of what it drafted


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

    def seconds(self, requests: float, *, context: float) -> float:
        """Of one draft of each of `requests` requests at a mean length of `context` tokens."""
        rates = self._rates
        cached = requests * (self._global * context + self._sliding * min(context, self._window))
        kernels = kernels_per_draft(self._assistant, rows=max(1, round(requests))) + GRAPH_KERNELS
        read = self._weights / rates.weight_read + cached / rates.cache_read
        read += requests * self._scored / rates.elementwise
        return read / self._bandwidth + kernels * rates.draft_launch_seconds
