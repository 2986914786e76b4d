"""Bytes of the text weights on one rank, tensor by tensor, as the worker shards them.

A linear layer of N outputs and K inputs takes, by format:
    bfloat16, float32    N K e
    int4, groups of g    N K / 2 + s N K / g              packed int4, one scale of s bytes (2 or 4) per group
                         + N K / 2 g                      packed zero points, where groups are asymmetric
                         + 4 K                            the order of its inputs, with an activation order
    int8, groups of g    N K + s N K / g                  one scale of s bytes per group
    int8                 N K + 4 N                        float32 scales: one per output row
    nvfp4                N K / 2 + N K / 16 + 4 N         e2m1, e4m3 scales, and the float32 scale of its matrix by row
    fp8                  N K + 4 N                        e4m3, float32 scales: one per output row
    fp8 in blocks        N K + 4 ceil(N / 128) ceil(K / 128)   of each checkpoint matrix that is fused into it
Embeddings, norms, scalars and the router stay in bfloat16 in the quantised formats, and so do linear layers that the
checkpoint does not quantise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from modelserve.errors import InvalidInput
from modelserve.model.architecture import EXPERT_WIDTH_MULTIPLE, LayerKind, ModelArchitecture
from modelserve.model.weight_format import FP8_BLOCK, Layout, StoredType, TextLinear, WeightFormat, dense_format

PACKED = 8  # int4 elements of an int32
SEGMENT_BYTES = 2 << 20  # device memory is taken in whole segments of this size by tensors of LARGE_TENSOR_BYTES on
LARGE_TENSOR_BYTES = 10 << 20


@dataclass(frozen=True)
class WeightTensor:
    """`count` tensors [rows, columns] of one rank, as the worker holds them (q, k and v fused; gate and up fused)."""

    term: str  # "embedding", "per_layer_embedding", "linear", "experts" or "other"
    rows: int
    columns: int
    count: int = 1  # experts: one tensor holds all, [count, rows, columns]
    linear: TextLinear | None = None  # what a quantised format may store otherwise
    parts: tuple[int, ...] = ()  # rows of the checkpoint matrices that are fused; empty for one

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.count

    def allocations(self, weight_format: WeightFormat, *, dense_element: int) -> tuple[int, ...]:
        """Bytes of the tensors that hold it: elements, scales, and what else its format has.

        `dense_element`: bytes of an element of what is not quantised.
        """
        stored = weight_format.matrix(self.linear)
        groups = self.parameters // (stored.group_size or 1)
        if stored.stored is StoredType.INT4:
            zero_points = () if stored.symmetric else (groups // PACKED * 4,)
            order = (self.columns * 4,) if stored.activation_order else ()
            return self.parameters // 2, groups * stored.scale_type.bytes, *zero_points, *order
        if stored.stored is StoredType.NVFP4:
            return self.parameters // 2, groups, self.rows * self.count * 4
        if stored.stored is StoredType.INT8 and stored.scales == "group":
            return self.parameters, groups * stored.scale_type.bytes
        if stored.scales == "block":
            block_rows = sum(-(-part // FP8_BLOCK) for part in self.parts or (self.rows,))
            return self.parameters, self.count * block_rows * -(-self.columns // FP8_BLOCK) * 4
        if stored.quantised:
            return self.parameters, self.rows * self.count * 4
        return (self.parameters * dense_element,)


def element_bytes(architecture: ModelArchitecture) -> int:
    """Bytes of one activation element, and of one unquantised weight."""
    return 4 if architecture.dtype == "float32" else 2


def _dense_element(architecture: ModelArchitecture, weight_format: WeightFormat) -> int:
    """Bytes of an unquantised element: beside quantised matrices in the type that is computed in."""
    return element_bytes(architecture) if weight_format.quantised else weight_format.element_bytes


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
    element = _dense_element(architecture, weight_format)
    for tensor in weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size):
        size = sum(tensor.allocations(weight_format, dense_element=element))
        terms[tensor.term] = terms.get(tensor.term, 0) + size
    return terms


def weight_terms(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, weight_format: WeightFormat | None = None
) -> dict[str, int]:
    """Bytes of one rank by term: embedding, per_layer_embedding, linear, experts, other. Raises as `weight_bytes`."""
    return dict(_terms(architecture, tensor_parallel_size, weight_format or dense_format(architecture.dtype)))


@lru_cache(maxsize=256)
def segment_rounding_bytes(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, weight_format: WeightFormat | None = None
) -> int:
    """Device memory that the weights take beyond their bytes.

    PyTorch's caching allocator asks the device for whole segments of 2 MiB for every tensor of 10 MiB and more; the
    smaller ones share segments, one partly filled of each pool (2 MiB and 20 MiB).
    """
    stored = weight_format or dense_format(architecture.dtype)
    tensors = weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size)
    element = _dense_element(architecture, stored)
    sizes = [size for tensor in tensors for size in tensor.allocations(stored, dense_element=element)]
    return sum(-size % SEGMENT_BYTES for size in sizes if size >= LARGE_TENSOR_BYTES) + 11 * SEGMENT_BYTES


@lru_cache(maxsize=64)
def parameters_per_rank(architecture: ModelArchitecture, *, tensor_parallel_size: int) -> int:
    """Elements of one rank's weights. Raises InvalidInput when the size does not divide the model."""
    problem = tensor_parallel_problem(architecture, tensor_parallel_size)
    if problem:
        raise InvalidInput(problem, field="tensorParallelSize")
    return sum(t.parameters for t in weight_tensors(architecture, tensor_parallel_size=tensor_parallel_size))


@lru_cache(maxsize=256)
def tensor_parallel_problem(
    architecture: ModelArchitecture, tensor_parallel_size: int, *, weight_format: WeightFormat | None = None
) -> str | None:
    """Why the model cannot be split over this many ranks, or None when it can.

    A rank's share of a quantised matrix is cut where its scales are: `_cut_limits`.
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
    if weight_format is not None and weight_format.quantised:
        if tp > 1 and any(each.activation_order for each in weight_format.formats()):
            return (
                f"tensor parallel size {tp} does not split weights with an activation order (weight_g_idx): the inputs "
                "of a group lie on all ranks; use 1, or a checkpoint without one (actorder weight or null)"
            )
        limits += _cut_limits(architecture, tp, weight_format)
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


def _cut_limits(
    architecture: ModelArchitecture, tp: int, weight_format: WeightFormat
) -> Iterator[tuple[str, int, int, int, str]]:
    """(dimension, its size, a rank's share, what the share must be a multiple of, why) of a quantised format.

    Inputs come in whole groups, since a group has one scale: 26B-A4B's 704 / 4 = 176 is 5.5 groups of 32, so its
    experts split over 2 ranks at most in INT4. Outputs that are packed together, or whose zero points are, come in
    eights. Where FP8 has blocks, a dimension is cut between them; one that is not cut may end in part of a block.
    """
    for linear, is_input, name, value, share in _dimensions(architecture, tp):
        stored = weight_format.matrix(linear)
        if stored.group_size is not None and is_input:
            yield name, value, share, stored.group_size, f", the {stored.stored.upper()} group"
        elif stored.stored is StoredType.INT4 and stored.layout is Layout.AWQ:
            yield name, value, share, PACKED, ", the outputs that are packed together"
        elif stored.stored is StoredType.INT4 and not stored.symmetric:
            yield name, value, share, PACKED, ", the outputs whose zero points are packed together"
        elif stored.scales == "block" and share != value:
            yield name, value, share, FP8_BLOCK, ", the FP8 block"


def _dimensions(architecture: ModelArchitecture, tp: int) -> Iterator[tuple[TextLinear, bool, str, int, int]]:
    """(linear layer, whether this is its input side, dimension, its size, a rank's share of it)."""
    hidden, inner, expert = architecture.hidden_size, architecture.intermediate_size, architecture.moe_intermediate_size
    width = architecture.hidden_size_per_layer_input
    if architecture.num_experts:
        yield TextLinear.EXPERT_GATE_UP, True, "hidden_size", hidden, hidden
        yield TextLinear.EXPERT_GATE_UP, False, "moe_intermediate_size", expert, expert // tp
        yield TextLinear.EXPERT_DOWN, True, "moe_intermediate_size", expert, expert // tp
        yield TextLinear.EXPERT_DOWN, False, "hidden_size", hidden, hidden
    for kind, head in ((LayerKind.SLIDING, "head_dim"), (LayerKind.GLOBAL, "global_head_dim")):
        size = getattr(architecture, head)
        heads, kv_heads = architecture.num_attention_heads, architecture.kv_heads(kind)
        yield TextLinear.OUTPUT, True, f"num_attention_heads x {head}", heads * size, heads // tp * size
        yield TextLinear.QKV, False, f"num_attention_heads x {head}", heads * size, heads // tp * size
        share = architecture.kv_heads_per_rank(kind, tp) * size
        yield TextLinear.QKV, False, f"KV heads x {head}", kv_heads * size, share
    yield TextLinear.QKV, True, "hidden_size", hidden, hidden
    yield TextLinear.OUTPUT, False, "hidden_size", hidden, hidden
    yield TextLinear.GATE_UP, True, "hidden_size", hidden, hidden
    yield TextLinear.GATE_UP, False, "intermediate_size", inner, inner // tp
    yield TextLinear.DOWN, True, "intermediate_size", inner, inner // tp
    yield TextLinear.DOWN, False, "hidden_size", hidden, hidden
    if width:
        yield TextLinear.LAYER_INPUT_GATE, True, "hidden_size", hidden, hidden
        yield TextLinear.LAYER_INPUT_GATE, False, "hidden_size_per_layer_input", width, width
        yield TextLinear.LAYER_PROJECTION, True, "hidden_size_per_layer_input", width, width
        yield TextLinear.LAYER_PROJECTION, False, "hidden_size", hidden, hidden
        yield TextLinear.MODEL_PROJECTION, True, "hidden_size", hidden, hidden
        columns = architecture.num_hidden_layers * width
        yield TextLinear.MODEL_PROJECTION, False, "layers x hidden_size_per_layer_input", columns, columns


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
        yield WeightTensor("other", columns, hidden, linear=TextLinear.MODEL_PROJECTION)
        yield WeightTensor("other", width, 1)
    for layer in range(architecture.num_hidden_layers):
        yield from layer_tensors(architecture, layer, tp)


def layer_tensors(architecture: ModelArchitecture, layer: int, tp: int) -> Iterator[WeightTensor]:
    """Those of one layer, on one of `tp` ranks."""
    hidden, head = architecture.hidden_size, architecture.layer_head_dim(layer)
    query = architecture.num_attention_heads // tp * head
    projections, norms = [query], 4 * hidden + 1 + head  # norms around attention and MLP; layer_scalar; q_norm
    if architecture.owns_cache(layer):
        key = architecture.kv_heads_per_rank(architecture.kind(layer), tp) * head
        projections += [key] * (1 if architecture.k_from_v(layer) else 2)
        norms += head  # k_norm
    yield WeightTensor("linear", sum(projections), hidden, linear=TextLinear.QKV, parts=tuple(projections))
    yield WeightTensor("linear", hidden, query, linear=TextLinear.OUTPUT)
    inner = architecture.layer_intermediate_size(layer) // tp
    yield WeightTensor("linear", 2 * inner, hidden, linear=TextLinear.GATE_UP, parts=(inner, inner))
    yield WeightTensor("linear", hidden, inner, linear=TextLinear.DOWN)
    if architecture.num_experts:
        inner, experts = architecture.moe_intermediate_size // tp, architecture.num_experts
        gate_up = TextLinear.EXPERT_GATE_UP
        yield WeightTensor("experts", 2 * inner, hidden, experts, linear=gate_up, parts=(inner, inner))
        yield WeightTensor("experts", hidden, inner, experts, linear=TextLinear.EXPERT_DOWN)
        norms += experts * (hidden + 1) + hidden + 3 * hidden  # router: proj, per_expert_scale, scale; three norms
    if width := architecture.hidden_size_per_layer_input:
        yield WeightTensor("other", width, hidden, linear=TextLinear.LAYER_INPUT_GATE)
        yield WeightTensor("other", hidden, width, linear=TextLinear.LAYER_PROJECTION)
        norms += hidden
    yield WeightTensor("other", norms, 1)
