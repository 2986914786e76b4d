"""Bytes of the text weights on one rank, tensor by tensor, as the worker shards them.

A linear layer of N outputs and K inputs takes, by format:
    bfloat16, float32   N K e
    int4_g32            N K / 2 + N K / 32 x 2      packed int4, one bfloat16 scale per 32 inputs
    fp8_channel         N K + 2 N                   e4m3, one bfloat16 scale per output
Embeddings, per-layer-embedding tensors, norms, scalars and the router stay in bfloat16 in the quantised formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from modelserve.architecture import ModelArchitecture
from modelserve.errors import InvalidInput
from modelserve.weight_format import INT4_GROUP, WeightFormat

EXPERT_WIDTH_MULTIPLE = 8  # grouped matrix products need rows of a multiple of 16 bytes: 8 bfloat16 elements
SEGMENT_BYTES = 2 << 20  # device memory is taken in whole segments of this size by tensors of LARGE_TENSOR_BYTES on
LARGE_TENSOR_BYTES = 10 << 20


@dataclass(frozen=True)
class WeightTensor:
    """`count` tensors [rows, columns] of one rank, as the worker holds them (q, k and v fused; gate and up fused)."""

    term: str  # "embedding", "per_layer_embedding", "linear", "experts" or "other"
    rows: int
    columns: int
    count: int = 1  # experts: one tensor holds all, [count, rows, columns]

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.count

    def bytes_in(self, weight_format: WeightFormat) -> int:
        """Bytes with the scales; only linear layers and experts are quantised."""
        if weight_format is WeightFormat.FLOAT32:
            return self.parameters * 4
        if self.term in ("linear", "experts"):
            if weight_format is WeightFormat.INT4_G32:
                return self.parameters // 2 + self.parameters // INT4_GROUP * 2
            if weight_format is WeightFormat.FP8_CHANNEL:
                return self.parameters + self.rows * self.count * 2
        return self.parameters * 2


def element_bytes(architecture: ModelArchitecture) -> int:
    """Bytes of one activation element, and of one unquantised weight."""
    return 4 if architecture.dtype == "float32" else 2


def weight_bytes(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, weight_format: WeightFormat | None = None
) -> int:
    """Bytes of one rank's weights; at size 1 exactly the checkpoint's text tensors, the tied embedding once.

    Split over the ranks: the embedding and the per-layer-embedding table by vocabulary, query and output projections
    by heads, the MLP and every expert by intermediate width, KV projections by KV heads, which replicate past their
    number.
    Whole on every rank: norms, layer scalars, router, and the projections of per-layer embeddings (tens of MB).
    `weight_format` left out is the architecture's dtype. Raises InvalidInput when the size does not divide the model.
    """
    terms = weight_terms(architecture, tensor_parallel_size=tensor_parallel_size, weight_format=weight_format)
    return sum(terms.values())


@lru_cache(maxsize=256)  # a plan asks for each size many times
def _terms(architecture: ModelArchitecture, tensor_parallel_size: int, weight_format: WeightFormat) -> dict[str, int]:
    problem = tensor_parallel_problem(architecture, tensor_parallel_size, weight_format=weight_format)
    if problem:
        raise InvalidInput(problem, field="tensorParallelSize")
    terms: dict[str, int] = {}
    for tensor in weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size):
        terms[tensor.term] = terms.get(tensor.term, 0) + tensor.bytes_in(weight_format)
    return terms


def weight_terms(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, weight_format: WeightFormat | None = None
) -> dict[str, int]:
    """Bytes of one rank by term: embedding, per_layer_embedding, linear, experts, other. Raises as `weight_bytes`."""
    return dict(_terms(architecture, tensor_parallel_size, weight_format or WeightFormat(architecture.dtype)))


@lru_cache(maxsize=256)
def segment_rounding_bytes(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, weight_format: WeightFormat | None = None
) -> int:
    """Device memory that the weights take beyond their bytes.

    PyTorch's caching allocator asks the device for whole segments of 2 MiB for every tensor of 10 MiB and more; the
    smaller ones share segments, one partly filled of each pool (2 MiB and 20 MiB).
    """
    stored = weight_format or WeightFormat(architecture.dtype)
    sizes = [
        tensor.bytes_in(stored) for tensor in weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size)
    ]
    return sum(-size % SEGMENT_BYTES for size in sizes if size >= LARGE_TENSOR_BYTES) + 11 * SEGMENT_BYTES


@lru_cache(maxsize=64)
def parameters_per_rank(architecture: ModelArchitecture, *, tensor_parallel_size: int) -> int:
    """Elements of one rank's weights. Raises InvalidInput when the size does not divide the model."""
    problem = tensor_parallel_problem(architecture, tensor_parallel_size)
    if problem:
        raise InvalidInput(problem, field="tensorParallelSize")
    return sum(t.parameters for t in weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size))


def tensor_parallel_problem(
    architecture: ModelArchitecture, tensor_parallel_size: int, *, weight_format: WeightFormat | None = None
) -> str | None:
    """Why the model cannot be split over this many ranks, or None when it can.

    int4_g32: every rank's share of the inputs of the output, down and expert projections must be whole groups of 32,
    since a group has one scale. 26B-A4B: 704 / 4 = 176 is 5.5 groups, so its INT4 experts split over 2 ranks at most.
    """
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
    expert_width = architecture.moe_intermediate_size
    limits = [("moe_intermediate_size", expert_width, expert_width // tp, EXPERT_WIDTH_MULTIPLE, "")]
    if weight_format is WeightFormat.INT4_G32:
        hidden, heads = architecture.hidden_size, architecture.num_attention_heads
        inner, columns = architecture.intermediate_size, heads * architecture.head_dim
        limits += [
            (name, value, share, INT4_GROUP, ", the INT4 group")
            for name, value, share in (
                ("hidden_size", hidden, hidden),  # not split
                ("moe_intermediate_size", expert_width, expert_width // tp),
                ("intermediate_size", inner, inner // tp),
                ("num_attention_heads x head_dim", columns, columns // tp),
            )
        ]
    for name, value, share, multiple, why in limits:
        if share % multiple:
            return (
                f"tensor parallel size {tp} leaves {share} of {name} {value} per rank, which is not a multiple of "
                f"{multiple}{why}"
            )
    for name, heads in (
        ("num_key_value_heads", architecture.num_key_value_heads),
        ("num_global_key_value_heads", architecture.num_global_key_value_heads),
    ):
        if heads % tp and tp % heads:
            return f"tensor parallel size {tp} neither divides nor is a multiple of {name} {heads}"
    return None


def weight_tensors(architecture: ModelArchitecture, *, tensor_parallel_size: int) -> Iterator[WeightTensor]:
    """Every tensor of one rank; small ones of a layer are counted together."""
    tp, hidden = tensor_parallel_size, architecture.hidden_size
    for _ in range(1 if architecture.tie_word_embeddings else 2):
        yield WeightTensor("embedding", architecture.vocab_size // tp, hidden)
    yield WeightTensor("other", hidden, 1)
    width = architecture.hidden_size_per_layer_input
    if width:
        columns = architecture.num_hidden_layers * width
        yield WeightTensor("per_layer_embedding", architecture.vocab_size_per_layer_input // tp, columns)
        yield WeightTensor("other", columns, hidden)
        yield WeightTensor("other", width, 1)
    for layer in range(architecture.num_hidden_layers):
        yield from _layer_tensors(architecture, layer, tp)


def _layer_tensors(architecture: ModelArchitecture, layer: int, tp: int) -> Iterator[WeightTensor]:
    hidden, width = architecture.hidden_size, architecture.layer_head_dim(layer)
    query = architecture.num_attention_heads // tp * width
    key_rows, norms = 0, 4 * hidden + 1 + width  # norms around attention and MLP; layer_scalar; q_norm
    if architecture.owns_cache(layer):
        key = architecture.kv_heads_per_rank(architecture.kind(layer), tp) * width
        key_rows = key * (1 if architecture.k_from_v(layer) else 2)
        norms += width  # k_norm
    yield WeightTensor("linear", query + key_rows, hidden)
    yield WeightTensor("linear", hidden, query)
    inner = architecture.layer_intermediate_size(layer) // tp
    yield WeightTensor("linear", 2 * inner, hidden)
    yield WeightTensor("linear", hidden, inner)
    if architecture.num_experts:
        inner, experts = architecture.moe_intermediate_size // tp, architecture.num_experts
        yield WeightTensor("experts", 2 * inner, hidden, experts)
        yield WeightTensor("experts", hidden, inner, experts)
        norms += experts * (hidden + 1) + hidden + 3 * hidden  # router: proj, per_expert_scale, scale; three norms
    if architecture.hidden_size_per_layer_input:
        yield WeightTensor("other", 2 * hidden, architecture.hidden_size_per_layer_input)  # gate, projection
        norms += hidden
    yield WeightTensor("other", norms, 1)
