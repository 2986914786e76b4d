"""Bytes of an MTP assistant on one rank, tensor by tensor, as the worker holds them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from modelserve.model.assistant import AssistantArchitecture
from modelserve.sizing.weights.text import WeightTensor, element_bytes, layer_tensors

ORDERING_BYTES = 4  # of a token's place among the centroids
LAYERS_NODES = 11  # kernels of a layer: four products, prepare, decode attention in two, two norms, GeGLU, split sums
DRAFT_NODES = 9  # of a draft: embedding, concatenation, projections, first norm, head, the largest, and their casts
CENTROID_NODES = 8  # of ROWS_PER_SELECTION rows: nearest centroids, their tokens and these tokens' scores
ROWS_PER_SELECTION = 8  # whose tokens of the nearest centroids are gathered at a time: 2 MiB each as published
FIRST_DRAFT_NODES = 8  # of the first draft of a proposal: places, rotations


def assistant_tensors(assistant: AssistantArchitecture, *, tensor_parallel_size: int) -> Iterator[WeightTensor]:
    """Every tensor of one rank but the order of tokens. Heads, MLPs and a dense head are split over ranks; projections
    to and from the target, and a head with centroids, are whole on each."""
    hidden, backbone = assistant.hidden_size, assistant.backbone_hidden_size
    shares = 1 if assistant.num_centroids else tensor_parallel_size
    yield WeightTensor("embedding", assistant.vocab_size // shares, hidden)
    yield WeightTensor("linear", hidden, 2 * backbone)
    yield WeightTensor("linear", backbone, hidden)
    if assistant.num_centroids:
        yield WeightTensor("other", assistant.num_centroids, hidden)
    for layer in range(assistant.num_hidden_layers):
        yield from layer_tensors(assistant, layer, tensor_parallel_size)
    yield WeightTensor("other", hidden, 1)


@lru_cache(maxsize=64)
def assistant_weight_bytes(assistant: AssistantArchitecture, *, tensor_parallel_size: int) -> int:
    """Bytes of one rank's weights."""
    tensors = assistant_tensors(assistant, tensor_parallel_size=tensor_parallel_size)
    ordering = assistant.vocab_size * ORDERING_BYTES if assistant.num_centroids else 0
    return sum(tensor.parameters for tensor in tensors) * element_bytes(assistant) + ordering


def ranks_problem(assistant: AssistantArchitecture, tensor_parallel_size: int) -> str | None:
    """What keeps an assistant from so many ranks, or None: they share its query heads."""
    if assistant.num_attention_heads % tensor_parallel_size:
        return f"its {assistant.num_attention_heads} query heads are not shared evenly by {tensor_parallel_size} GPUs"
    return None


def drafter_buffer_bytes(assistant: AssistantArchitecture, *, num_tokens: int, max_num_seqs: int) -> int:
    """What a drafter holds at fixed addresses: of each sequence the target's hidden state that it drafts from, and its
    own; its slot, token and position, its drafts, and how many these are by what is asked for."""
    states = (assistant.backbone_hidden_size + assistant.hidden_size) * element_bytes(assistant)
    return max_num_seqs * (states + (4 + 2 * num_tokens) * 4)


def kernels_per_draft(assistant: AssistantArchitecture, *, rows: int) -> int:
    """Kernels of a captured launch that drafts a token for each of so many requests."""
    selections = -(-rows // ROWS_PER_SELECTION) if assistant.num_centroids else 0
    return LAYERS_NODES * assistant.num_hidden_layers + DRAFT_NODES + CENTROID_NODES * selections
