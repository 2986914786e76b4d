"""Where the memory of one GPU (or of a CPU worker's container) goes: weights, workspace, overhead, and the KV pool.

Every term is named and stated as a formula, so that a plan can be read and a measurement compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

from modelserve.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.pages import LAYER_ALIGNMENT_BYTES
from modelserve.sizing.weights import element_bytes, weight_bytes

__all__ = [
    "MemoryPlan",
    "activation_bytes",
    "activation_terms",
    "memory_plan",
    "overhead_bytes",
    "overhead_terms",
    "weight_bytes",
]

MIB = 1 << 20
KEYS_PER_PASS = 16_384  # keys of global layers that are read (and, for v_only, expanded) at a time in prefill
SCORES_PER_PASS = 1 << 25  # attention scores of one matrix product
ROWS_PER_SORT = 32  # rows of logits that are sorted at a time
FLOAT32 = 4

CUDA_CONTEXT_BYTES = 512 * MIB  # context, kernels and libraries of one process; measured on H100 and H200
CUBLAS_WORKSPACE_BYTES = 64 * MIB  # two handles of 32 MiB, the library's default on Hopper
CUDA_GRAPHS_BYTES = 300 * MIB  # 0.24 to 0.29 GiB measured for the decode graphs of 31B
NCCL_BYTES = 1638 * MIB  # beside the context, 2.1 GiB outside of torch at two or more ranks, measured on H100
CPU_PROCESS_BYTES = 614 * MIB  # resident set of the interpreter with torch and the HTTP stack: 0.6 GiB
CPU_HEADROOM = Decimal("0.05")  # of the container's limit: heap growth, and page cache while weights load


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank. `kv_pool_bytes` is what is left of the budget: never negative, a multiple of 128."""

    total_bytes: int
    budget_bytes: int
    weights_bytes: int
    activation_bytes: int
    overhead_bytes: int

    @property
    def available_bytes(self) -> int:
        """Budget less all fixed terms; negative when they alone do not fit."""
        return self.budget_bytes - self.weights_bytes - self.activation_bytes - self.overhead_bytes

    @property
    def kv_pool_bytes(self) -> int:
        return max(0, self.available_bytes) // LAYER_ALIGNMENT_BYTES * LAYER_ALIGNMENT_BYTES


def memory_plan(
    architecture: ModelArchitecture,
    *,
    total_bytes: int,
    utilization: Decimal,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    on_cpu: bool,
) -> MemoryPlan:
    """Divide the memory of one rank.

    `total_bytes` is device memory as a process sees it, or the container's memory limit. On a GPU the budget is
    `utilization` of it; on the CPU it is all of it, since the headroom is a term of its own there.
    Raises InvalidInput when the tensor-parallel size does not divide the model.
    """
    return MemoryPlan(
        total_bytes=total_bytes,
        budget_bytes=total_bytes if on_cpu else int(total_bytes * utilization),
        weights_bytes=weight_bytes(architecture, tensor_parallel_size=tensor_parallel_size),
        activation_bytes=activation_bytes(
            architecture,
            tensor_parallel_size=tensor_parallel_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        ),
        overhead_bytes=overhead_bytes(
            tensor_parallel_size=tensor_parallel_size, total_bytes=total_bytes, on_cpu=on_cpu
        ),
    )


def overhead_bytes(*, tensor_parallel_size: int, total_bytes: int, on_cpu: bool) -> int:
    """Sum of `overhead_terms`."""
    return sum(
        overhead_terms(tensor_parallel_size=tensor_parallel_size, total_bytes=total_bytes, on_cpu=on_cpu).values()
    )


def overhead_terms(*, tensor_parallel_size: int, total_bytes: int, on_cpu: bool) -> dict[str, int]:
    """Bytes of one process that no tensor of the engine accounts for, by name."""
    if on_cpu:
        return {"process": CPU_PROCESS_BYTES, "headroom": int(total_bytes * CPU_HEADROOM)}
    terms = {"context": CUDA_CONTEXT_BYTES, "cublas": CUBLAS_WORKSPACE_BYTES, "graphs": CUDA_GRAPHS_BYTES}
    if tensor_parallel_size > 1:
        terms["nccl"] = NCCL_BYTES
    return terms


@lru_cache(maxsize=256)  # a plan asks for each size many times
def activation_bytes(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, max_num_batched_tokens: int, max_num_seqs: int
) -> int:
    """Static workspace of one rank: what lives all the time, plus the largest phase of a step."""
    always, phases = activation_terms(
        architecture,
        tensor_parallel_size=tensor_parallel_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    return sum(always.values()) + max(phases.values())


def activation_terms(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, max_num_batched_tokens: int, max_num_seqs: int
) -> tuple[dict[str, int], dict[str, int]]:
    """(terms that live throughout a step, terms of which only one lives at a time), in bytes of one rank.

    T tokens of a step, S sequences, H hidden size, e bytes of an element, V vocabulary. Norms hold three float32
    temporaries of their input. The residual stream, the current sub-layer's input and its output live throughout.
    """
    tokens, e = max_num_batched_tokens, element_bytes(architecture)
    hidden, per_layer = architecture.hidden_size, architecture.hidden_size_per_layer_input
    per_layer_columns = architecture.num_hidden_layers * per_layer
    rope_columns = architecture.head_dim + architecture.global_head_dim  # cos and sin of half a head, both kinds
    pages = -(-architecture.max_position_embeddings // 64)
    always = {
        "residual": tokens * hidden * (3 * e + 3 * FLOAT32),
        "per_layer_inputs": tokens * per_layer_columns * e,
        "rope": tokens * rope_columns * (e + FLOAT32),
        "penalties": max_num_seqs * architecture.vocab_size * 4,  # int32 counts
        "block_tables": max_num_seqs * pages * 8,  # int64 page numbers
    }
    phases = {
        "embedding": tokens * per_layer_columns * (2 * e + 3 * FLOAT32),
        "attention": max(
            _attention_bytes(architecture, kind, tokens=tokens, tensor_parallel_size=tensor_parallel_size)
            for kind in LayerKind
        ),
        "mlp": _mlp_bytes(architecture, tokens=tokens, tensor_parallel_size=tensor_parallel_size),
        "sampling": _sampling_bytes(architecture, sequences=max_num_seqs),
    }
    return always, phases


def _attention_bytes(
    architecture: ModelArchitecture, kind: LayerKind, *, tokens: int, tensor_parallel_size: int
) -> int:
    """Projections, then the larger of normalising the queries and attending.

    Attending holds float32 numerators and their decayed product beside the packed queries, one pass of keys and values
    (expanded keys take four float32 temporaries), and the scores with their copy in the compute type.
    """
    e = element_bytes(architecture)
    width = architecture.global_head_dim if kind is LayerKind.GLOBAL else architecture.head_dim
    heads = architecture.num_attention_heads // tensor_parallel_size
    kv_heads = architecture.kv_heads_per_rank(kind, tensor_parallel_size)
    query = tokens * heads * width
    projections = query * e + 2 * tokens * kv_heads * width * e
    normalising = query * (3 * FLOAT32 + 2 * e)
    longest = architecture.max_position_embeddings
    keys = (
        min(KEYS_PER_PASS, longest) if kind is LayerKind.GLOBAL else min(architecture.sliding_window + tokens, longest)
    )
    scores = min(SCORES_PER_PASS, tokens * heads * keys)
    attending = query * (2 * FLOAT32 + 3 * e) + keys * kv_heads * width * (4 * FLOAT32 + 2 * e) + scores * (FLOAT32 + e)
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
