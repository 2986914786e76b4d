"""Which tensor of an assistant's checkpoint fills which parameter; names as in `gemma4_checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator

from modelserve_worker.models.gemma4_assistant import Gemma4Assistant
from modelserve_worker.models.gemma4_checkpoint import HEAD, layer_sources, sharded, shared_names
from modelserve_worker.models.weight_source import WeightSource, whole_tensor

ORDERING = "masked_embedding.token_ordering"


def assistant_sources(assistant: Gemma4Assistant) -> Iterator[WeightSource]:
    """Every tensor that a checkpoint must hold, with this rank's share of it."""
    yield from sharded("embed_tokens.weight", assistant.head.weight, assistant.head.shard, dim=0)
    for layer in assistant.decoder_layers():
        yield from layer_sources(f"layers.{layer.layer}.", layer)
    yield from whole_tensor("norm.weight", assistant.norm.weight)
    yield from whole_tensor("pre_projection.weight", assistant.pre_projection)
    yield from whole_tensor("post_projection.weight", assistant.post_projection)
    if (centroids := assistant.centroids) is not None:
        yield from whole_tensor("masked_embedding.centroids.weight", centroids.weight)
        yield from whole_tensor(ORDERING, centroids.ordering, dtypes=("I64", "I32"))


def unused_assistant_names(assistant: Gemma4Assistant) -> frozenset[str]:
    """Tensors that an assistant's files may carry and nobody reads: keys and values of its layers, the tied head."""
    return shared_names(assistant.architecture) | {HEAD}
