"""The static workspace of one rank: what a step of T tokens needs beside weights and pages, phase by phase.

Follows the worker's own tensors (`layers`, `execution.paged_attention`, `execution.sampler`), in bytes. T tokens of a
step, S sequences, H hidden size, e bytes of an element, V vocabulary, P per-layer width of all layers together.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from modelserve.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.pages import GLOBAL_PAGE_TOKENS
from modelserve.sizing.weights import element_bytes

MIB = 1 << 20
KEYS_PER_PASS = 16_384  # keys of global layers that are read (and, for v_only, expanded) at a time in prefill
SCORES_PER_PASS = 1 << 25  # attention scores of one matrix product
ROWS_PER_SORT = 32  # rows of logits that are sorted at a time
FLOAT32 = 4
CUBLAS_WORKSPACE_BYTES = 64 * MIB  # cuBLAS and cuBLASLt, 32 MiB each on Hopper, taken from PyTorch's allocator

PHASES = ("embedding", "attention", "mlp", "sampling")


def activation_bytes(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Bytes that the allocator holds at the peak of a step: what lives throughout, and the largest phase."""
    always, phases = activation_terms(
        architecture,
        tensor_parallel_size=tensor_parallel_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    return sum(always.values()) + sum(phases[name] for name in largest_phase(phases))


def largest_phase(phases: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the phases that set the peak: `embedding`, `sampling`, or `attention` and `mlp` together.

    Only one phase lives at a time. But attention and MLP alternate layer by layer in blocks of different sizes, and
    PyTorch's caching allocator keeps the blocks of both: what one has cut up does not serve the other.
    """
    groups = (("attention", "mlp"), ("embedding",), ("sampling",))
    return max(groups, key=lambda names: sum(phases[name] for name in names))


@lru_cache(maxsize=256)  # a plan asks for each size many times
def activation_terms(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, max_num_batched_tokens: int, max_num_seqs: int
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """(terms that live throughout a step, terms of its phases), in bytes of one rank.

    The residual stream and the normed input of the current sub-layer live throughout.
    """
    tokens, e = max_num_batched_tokens, element_bytes(architecture)
    per_layer_columns = architecture.num_hidden_layers * architecture.hidden_size_per_layer_input
    rope_columns = architecture.head_dim + architecture.global_head_dim  # cos and sin of half a head, both kinds
    pages = -(-architecture.max_position_embeddings // GLOBAL_PAGE_TOKENS)
    always = {
        "residual": tokens * architecture.hidden_size * 2 * e,
        "per_layer_inputs": tokens * per_layer_columns * e,
        "rope": tokens * rope_columns * e,
        "penalties": max_num_seqs * architecture.vocab_size * 4,  # int32 counts
        "block_tables": max_num_seqs * pages * 8,  # int64 page numbers
        "cublas": CUBLAS_WORKSPACE_BYTES,
    }
    phases = {
        # The projection as its norm sees it: two float32 copies; the other two e are its input and the counted result.
        "embedding": tokens * per_layer_columns * 2 * FLOAT32,
        "attention": max(
            _attention_bytes(architecture, kind, tokens=tokens, tensor_parallel_size=tensor_parallel_size)
            for kind in LayerKind
        ),
        "mlp": _mlp_bytes(architecture, tokens=tokens, tensor_parallel_size=tensor_parallel_size),
        "sampling": _sampling_bytes(architecture, sequences=max_num_seqs),
    }
    return MappingProxyType(always), MappingProxyType(phases)


def _attention_bytes(
    architecture: ModelArchitecture, kind: LayerKind, *, tokens: int, tensor_parallel_size: int
) -> int:
    """Projections and their rotated copies, then the larger of normalising the queries and attending.

    Attending holds the output, the packed queries and float32 numerators; beside them one pass of keys and values,
    first while keys are expanded from values (four float32 temporaries), then with the scores and their copy in the
    compute type.
    """
    e = element_bytes(architecture)
    width = architecture.global_head_dim if kind is LayerKind.GLOBAL else architecture.head_dim
    heads = architecture.num_attention_heads // tensor_parallel_size
    kv_heads = architecture.kv_heads_per_rank(kind, tensor_parallel_size)
    query, fresh = tokens * heads * width, tokens * kv_heads * width
    projections = 2 * e * (query + 2 * fresh)
    normalising = query * 2 * FLOAT32
    longest = architecture.max_position_embeddings
    if kind is LayerKind.GLOBAL:
        keys = min(KEYS_PER_PASS, longest)
        expanding = keys * kv_heads * width * (4 * FLOAT32 + e) if architecture.attention_k_eq_v else 0
        scores = min(SCORES_PER_PASS, tokens * heads * keys)
    else:
        keys, expanding = min(architecture.sliding_window + tokens, longest), 0
        scores = min(SCORES_PER_PASS, tokens * heads * keys)
    reading = keys * kv_heads * width * (2 * e + FLOAT32)  # one float32 copy of either while it is decoded
    attending = query * (2 * e + FLOAT32) + max(expanding, reading + scores * (FLOAT32 + e))
    return projections + max(normalising, attending)


def _mlp_bytes(architecture: ModelArchitecture, *, tokens: int, tensor_parallel_size: int) -> int:
    """Gate and up, the activated gate, their product. Experts hold the same per (token, expert) and sum in float32."""
    e, hidden = element_bytes(architecture), architecture.hidden_size
    widest = max(architecture.layer_intermediate_size(layer) for layer in range(architecture.num_hidden_layers))
    dense = tokens * (widest // tensor_parallel_size) * 4 * e
    routed = tokens * architecture.top_k_experts
    width = architecture.moe_intermediate_size // tensor_parallel_size
    experts = routed * (width * 4 * e + hidden * (2 * e + 2 * FLOAT32))
    return max(dense, experts)


def _sampling_bytes(architecture: ModelArchitecture, *, sequences: int) -> int:
    """Logits in e and float32, five float32 temporaries of penalties, then a sort of ROWS_PER_SORT rows at a time.

    A sorted row holds values, 8-byte indices, running sums, a mask, and as much again of the sort's own.
    """
    e, vocabulary = element_bytes(architecture), architecture.vocab_size
    return sequences * vocabulary * (2 * e + 6 * FLOAT32) + min(sequences, ROWS_PER_SORT) * vocabulary * 48
