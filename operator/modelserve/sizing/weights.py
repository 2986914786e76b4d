"""Bytes of the text weights on one rank, tensor by tensor, as the worker shards them."""

from __future__ import annotations

from functools import lru_cache

from modelserve.architecture import ModelArchitecture
from modelserve.errors import InvalidInput

EXPERT_WIDTH_MULTIPLE = 8  # grouped matrix products need rows of a multiple of 16 bytes: 8 bfloat16 elements


def element_bytes(architecture: ModelArchitecture) -> int:
    """Bytes of one weight or activation element."""
    return 4 if architecture.dtype == "float32" else 2


def weight_bytes(architecture: ModelArchitecture, *, tensor_parallel_size: int) -> int:
    """Bytes of one rank's weights; at size 1 exactly the checkpoint's text tensors, the tied embedding once.

    Split over the ranks: the embedding and the per-layer-embedding table by vocabulary, query and output projections
    by heads, the MLP and every expert by intermediate width, KV projections by KV heads, which replicate past their
    number.
    Whole on every rank: norms, layer scalars, router, and the projections of per-layer embeddings (tens of MB).
    """
    return parameters_per_rank(architecture, tensor_parallel_size=tensor_parallel_size) * element_bytes(architecture)


@lru_cache(maxsize=64)  # a plan asks for each size many times
def parameters_per_rank(architecture: ModelArchitecture, *, tensor_parallel_size: int) -> int:
    """Elements of one rank's weights. Raises InvalidInput when the size does not divide the model."""
    problem = tensor_parallel_problem(architecture, tensor_parallel_size)
    if problem:
        raise InvalidInput(problem, field="tensorParallelSize")
    tp, hidden = tensor_parallel_size, architecture.hidden_size
    embedding = architecture.vocab_size // tp * hidden * (1 if architecture.tie_word_embeddings else 2)
    layers = sum(_layer_parameters(architecture, layer, tp) for layer in range(architecture.num_hidden_layers))
    return embedding + hidden + _per_layer_embedding_parameters(architecture, tp) + layers


def tensor_parallel_problem(architecture: ModelArchitecture, tensor_parallel_size: int) -> str | None:
    """Why the model cannot be split over this many ranks, or None when it can."""
    tp = tensor_parallel_size
    divided = {
        "num_attention_heads": architecture.num_attention_heads,
        "vocab_size": architecture.vocab_size,
        "intermediate_size": architecture.intermediate_size,
        "moe_intermediate_size": architecture.moe_intermediate_size,
        "vocab_size_per_layer_input": architecture.vocab_size_per_layer_input,
    }
    for name, value in divided.items():
        if value % tp:
            return f"tensor parallel size {tp} does not divide {name} {value}"
    if architecture.moe_intermediate_size // tp % EXPERT_WIDTH_MULTIPLE:
        return (
            f"tensor parallel size {tp} leaves {architecture.moe_intermediate_size // tp} of moe_intermediate_size "
            f"{architecture.moe_intermediate_size} per rank, which is not a multiple of {EXPERT_WIDTH_MULTIPLE}"
        )
    for name, heads in (
        ("num_key_value_heads", architecture.num_key_value_heads),
        ("num_global_key_value_heads", architecture.num_global_key_value_heads),
    ):
        if heads % tp and tp % heads:
            return f"tensor parallel size {tp} neither divides nor is a multiple of {name} {heads}"
    return None


def _layer_parameters(architecture: ModelArchitecture, layer: int, tp: int) -> int:
    hidden, width = architecture.hidden_size, architecture.layer_head_dim(layer)
    query = architecture.num_attention_heads // tp * width
    total = 2 * query * hidden + width  # q_proj, o_proj, q_norm
    if architecture.owns_cache(layer):
        key = architecture.kv_heads_per_rank(architecture.kind(layer), tp) * width
        total += key * hidden * (1 if architecture.k_from_v(layer) else 2) + width  # k_proj, v_proj, k_norm
    total += 3 * hidden * architecture.layer_intermediate_size(layer) // tp  # gate, up, down
    total += 4 * hidden + 1  # norms around attention and MLP; layer_scalar
    if architecture.num_experts:
        expert = 3 * hidden * architecture.moe_intermediate_size // tp
        router = architecture.num_experts * (hidden + 1) + hidden  # proj, per_expert_scale, scale
        total += architecture.num_experts * expert + router + 3 * hidden  # and three norms of the expert branch
    if architecture.hidden_size_per_layer_input:
        total += 2 * hidden * architecture.hidden_size_per_layer_input + hidden  # gate, projection, norm
    return total


def _per_layer_embedding_parameters(architecture: ModelArchitecture, tp: int) -> int:
    width = architecture.hidden_size_per_layer_input
    if not width:
        return 0
    columns = architecture.num_hidden_layers * width
    table = architecture.vocab_size_per_layer_input // tp * columns
    return table + columns * architecture.hidden_size + width  # the table; model projection and its norm
