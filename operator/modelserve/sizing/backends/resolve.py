"""The one place that decides what runs where: from GPU, model and formats to a frozen table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.model.drafters.dflash import DFlashArchitecture
from modelserve.model.drafters.reading import DrafterArchitecture
from modelserve.model.weight_format import StoredType, TextLinear, WeightFormat
from modelserve.sizing.backends.attention import AttentionShape
from modelserve.sizing.backends.attention_kernels import Attended, attention_choices
from modelserve.sizing.backends.generations import HOPPER, LEAST_CAPABILITY, generation_of
from modelserve.sizing.backends.products import (
    BOX_INPUTS,
    CHOSEN_ROWS,
    CHOSEN_SLOTS,
    GROUPED_DENSE_ROWS,
    GROUPED_DENSE_TILES,
    GROUPED_EXPERTS,
    GROUPED_TILE,
    MOST_GROUPED_BYTES,
    PRODUCTS,
    SCALE_ROWS,
)
from modelserve.sizing.backends.registry import Matrix, choices_of
from modelserve.sizing.backends.table import HEAD, LIBRARY, Backend, Choice, KernelTable, Operation, Subject
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve.sizing.rank_settings import Profile
from modelserve.sizing.rank_sums import peer_message_bytes, sums_by_rows
from modelserve.sizing.weights.assistant import assistant_tensors
from modelserve.sizing.weights.dequantisation import kernels as dequantising_kernels
from modelserve.sizing.weights.dflash import dflash_products
from modelserve.sizing.weights.text import WeightTensor, layer_tensors, weight_tensors

EXPERT_FEW_ROWS = 64  # rows up to which kernels find the experts of a row by themselves
ROUTED_ROWS = 16  # rows up to which routing is one kernel, whose programs share a row's experts
ATTENTION_OPERATIONS = (
    Operation.DECODE_ATTENTION,
    Operation.VERIFY_ATTENTION,
    Operation.CHUNK_ATTENTION,
    Operation.SPAN_ATTENTION,
)
_EXPERT_LINEARS = (TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN)


@dataclass(frozen=True, slots=True)
class Formats:
    """How a rank holds what it reads: weights (None: unquantised, in the dtype of the model) and rows of the cache."""

    weights: WeightFormat | None = None
    kv_dtype: KVCacheDtype = KVCacheDtype.BFLOAT16
    kv_layout: KVCacheLayout = KVCacheLayout.KV


def takes_model(architecture: ModelArchitecture) -> bool:
    """Whether kernels compute this model, on GPUs that have any: it is in bfloat16 (products of float32 would be
    rounded to tf32), and its heads and rotated pairs fill matrix tiles."""
    pairs, widths = architecture.global_rotary_pairs, (architecture.head_dim, architecture.global_head_dim)
    tiled = all(width >= 64 and width & (width - 1) == 0 for width in widths)
    return architecture.dtype == "bfloat16" and tiled and pairs >= 32 and architecture.global_head_dim == 8 * pairs


@lru_cache(maxsize=256)
def resolve(
    gpu: int | None, model: ModelArchitecture, formats: Formats, profile: Profile = "fast", *, ranks: int = 1
) -> KernelTable:
    """What one of `ranks` ranks launches on a GPU of compute capability `gpu` (10 * major + minor), or None: the CPU.

    In profile exact (decision 0030) an operation that adds is one kernel for any number of rows, so that a row has the
    same bits whatever rows lie beside it. A model that kernels do not take, or a GPU that has none, runs on plain
    PyTorch in all operations. Raises InvalidInput for a profile that this release does not have, UnknownGenerationError
    for a GPU whose tiles are not known.
    """
    if profile not in get_args(Profile):
        raise InvalidInput(f"profile {profile}: this release has {' and '.join(get_args(Profile))}", field="profile")
    capability = gpu if gpu is not None and gpu >= LEAST_CAPABILITY and takes_model(model) else None
    if capability is not None:
        generation_of(capability)
    choices = (
        *_elementwise(model, Backend.PLAIN if capability is None else Backend.TRITON),
        *_products(model, formats.weights, capability, profile, ranks),
        *(_plain_attention(formats) if capability is None else _attention(model, formats, capability, profile, ranks)),
        *(_experts(model, formats.weights, capability, profile, ranks) if model.num_experts else ()),
        *_sums(model, capability, profile, ranks),
    )
    return KernelTable(gpu, profile, capability is not None, choices)


@lru_cache(maxsize=64)
def with_drafter(table: KernelTable, drafter: DrafterArchitecture, *, ranks: int = 1) -> KernelTable:
    """The table of a target with the products of its drafter, all dense. What is no linear layer of a decoder is found
    as the head's, by its shape."""
    known: set[tuple[Operation, Subject, tuple[int, int]]]
    known = {(choice.operation, choice.subject, choice.shape) for choice in table.choices}
    added: list[Choice] = []
    for linear, outputs, inputs in _drafter_products(drafter, ranks):
        subject: Subject = HEAD if linear is None else linear
        if (key := (Operation.LINEAR, subject, (outputs, inputs))) not in known:
            known.add(key)
            matrix = Matrix(linear, outputs, inputs, None, table.capability, table.profile)
            added += choices_of(matrix, PRODUCTS)
    return replace(table, choices=(*table.choices, *added)) if table.on_kernels else table


def _drafter_products(drafter: DrafterArchitecture, ranks: int) -> Iterator[tuple[TextLinear | None, int, int]]:
    if isinstance(drafter, DFlashArchitecture):
        yield from dflash_products(drafter, tensor_parallel_size=ranks)
        return
    for tensor in assistant_tensors(drafter, tensor_parallel_size=ranks):
        if tensor.columns > 1:
            yield tensor.linear, tensor.rows, tensor.columns


def _elementwise(model: ModelArchitecture, backend: Backend) -> Iterator[Choice]:
    """What is between the products, and where a step begins and ends."""
    kernels = {
        Operation.TOKENS: ("step_tokens",),
        Operation.ROTATIONS: ("rotations",),
        Operation.EMBED: ("embed",),
        Operation.NORM: ("rms_norm",),
        Operation.RESIDUAL_NORM: ("residual_norm",),
        Operation.GATED_GELU: ("gated_gelu",),
        Operation.SAMPLE: (
            "_select_chunks",
            "_draw_rows",
            "accept_tokens",
            "_scale_chunks",
            "_weigh_chunks",
            "_draw_filtered_rows",
            "_report_chunks",
            "_report_rows",
        ),
    }
    if model.hidden_size_per_layer_input:
        kernels |= {Operation.PER_LAYER_INPUTS: ("per_layer_inputs",), Operation.PER_LAYER_GATE: ("gated_gelu",)}
    for operation, names in kernels.items():
        yield Choice(operation, backend, names if backend is Backend.TRITON else (LIBRARY,), format=model.dtype)


def _products(
    model: ModelArchitecture, weight_format: WeightFormat | None, capability: int | None, profile: Profile, ranks: int
) -> Iterator[Choice]:
    seen: set[tuple[TextLinear | None, int, int]] = set()
    for tensor in weight_tensors(model, tensor_parallel_size=ranks):
        head = tensor.term == "embedding"  # whose other end multiplies, or an output head of the same shape
        key = tensor.linear, tensor.rows, tensor.columns
        if key in seen or not (head or tensor.linear) or tensor.count > 1:
            continue
        seen.add(key)
        matrix = Matrix(
            *key, weight_format, capability, profile,
            plain_kernels=_plain_kernels(tensor, weight_format), settles=_settles(model, tensor.linear),
        )  # fmt: skip
        yield from choices_of(matrix, PRODUCTS)


def _settles(model: ModelArchitecture, linear: TextLinear | None) -> bool:
    """Whether a product stands between a router and the experts that it chooses, who read that before they wait."""
    return bool(model.num_experts) and linear is TextLinear.DOWN


def _plain_kernels(tensor: WeightTensor, weight_format: WeightFormat | None) -> int:
    return 0 if weight_format is None else dequantising_kernels(tensor, weight_format)


def _attention(
    model: ModelArchitecture, formats: Formats, capability: int, profile: Profile, ranks: int
) -> Iterator[Choice]:
    for kind in LayerKind:
        shape = AttentionShape.of(
            model, kind, dtype=formats.kv_dtype, v_only=formats.kv_layout is KVCacheLayout.V_ONLY, ranks=ranks
        )
        yield Choice(Operation.PREPARE, Backend.TRITON, ("prepare",), kind, format=shape.format)
        for operation in ATTENTION_OPERATIONS:
            yield from attention_choices(operation, Attended(shape, capability, profile))
        if shape.window:
            yield Choice(Operation.COMMIT, Backend.TRITON, ("commit",), kind, format=shape.format)


def _plain_attention(formats: Formats) -> Iterator[Choice]:
    """PyTorch's, whose launches nobody counts: nothing is captured there."""
    operations = Operation.PREPARE, *ATTENTION_OPERATIONS[:-1], Operation.COMMIT
    for kind in LayerKind:
        for operation in operations:
            yield Choice(operation, Backend.PLAIN, (LIBRARY,), kind, format=str(formats.kv_dtype))


def _experts(
    model: ModelArchitecture, weight_format: WeightFormat | None, capability: int | None, profile: Profile, ranks: int
) -> Iterator[Choice]:
    """Router, products and what adds both branches. Rows of a step are dealt to experts, whose products then are
    grouped ones; few rows in bfloat16 find their experts themselves, in profile fast."""
    backend = Backend.PLAIN if capability is None else Backend.TRITON
    stored = {StoredType.BFLOAT16 if weight_format is None else weight_format.of(each) for each in _EXPERT_LINEARS}
    quantised = weight_format is not None and any(weight_format.matrix(each).quantised for each in _EXPERT_LINEARS)

    def choice(operation: Operation, *kernels: str, most_rows: int | None = None) -> Choice:
        return Choice(operation, backend, kernels if capability else (LIBRARY,), most_rows=most_rows)

    few = capability is not None and profile == "fast"
    streamed = capability == HOPPER and (weight_format is None or not weight_format.quantised)
    if few:
        yield replace(choice(Operation.ROUTE, "route_few", most_rows=ROUTED_ROWS), fuses_norm=ranks == 1)
    # On one rank the kernel ahead of it stores the norm that experts take, too.
    yield choice(Operation.ROUTE, "route_many", *(("rms_norm",) if ranks > 1 else ()))
    packed = capability == HOPPER and stored == {StoredType.NVFP4} and _whole_scales(model, ranks)
    if few and (streamed or packed) and _streams(model, ranks):
        yield Choice(
            Operation.EXPERTS, Backend.HOPPER, ("chosen_rows", "chosen_rows"),
            most_rows=min(CHOSEN_ROWS, CHOSEN_SLOTS // model.top_k_experts),
            shared_bytes=generation_of(HOPPER).shared_bytes,
        )  # fmt: skip
    if few and not quantised:
        yield choice(Operation.EXPERTS, "chosen_products", "chosen_products", most_rows=EXPERT_FEW_ROWS)
        if streamed and _takes_dense(model, ranks):
            yield Choice(
                Operation.EXPERTS, Backend.HOPPER, ("deal_rows", "grouped_rows", "grouped_rows"),
                most_rows=GROUPED_DENSE_ROWS, shared_bytes=MOST_GROUPED_BYTES, takes_dense=True,
            )  # fmt: skip
    yield choice(Operation.EXPERTS, "deal_slots", "copy_rows")
    for tensor in layer_tensors(model, 0, ranks):
        if tensor.linear in _EXPERT_LINEARS:
            matrix = Matrix(
                tensor.linear, tensor.rows, tensor.columns, weight_format, capability, profile,
                experts=model.num_experts, plain_kernels=_plain_kernels(tensor, weight_format),
            )  # fmt: skip
            yield from choices_of(matrix, PRODUCTS)
    if ranks > 1:
        yield choice(Operation.WEIGHTED_SUM, "weighted_sum")
    yield choice(Operation.ADD_BRANCHES, "add_branches")


def _streams(model: ModelArchitecture, ranks: int) -> bool:
    """Whether inputs of experts' matrices are whole blocks, of which copies are."""
    inputs = model.hidden_size, model.moe_intermediate_size // ranks
    return all(each % BOX_INPUTS == 0 for each in inputs) and model.top_k_experts <= CHOSEN_SLOTS


def _whole_scales(model: ModelArchitecture, ranks: int) -> bool:
    """Whether outputs of experts' matrices are as many as their scales of NVFP4 are copied for."""
    return model.hidden_size % SCALE_ROWS == 0 and 2 * (model.moe_intermediate_size // ranks) % SCALE_ROWS == 0


def _takes_dense(model: ModelArchitecture, ranks: int) -> bool:
    """Whether the dense MLP is multiplied beside experts: both by Hopper's kernel of grouped products, on one rank."""
    inputs = model.hidden_size, model.moe_intermediate_size, model.intermediate_size
    tiles = max(-(-model.hidden_size // GROUPED_TILE), -(-2 * model.intermediate_size // GROUPED_TILE))
    whole = all(each % BOX_INPUTS == 0 and each >= 8 * BOX_INPUTS for each in inputs)
    return ranks == 1 and whole and tiles <= GROUPED_DENSE_TILES and model.num_experts <= GROUPED_EXPERTS


def _sums(model: ModelArchitecture, capability: int | None, profile: Profile, ranks: int) -> Iterator[Choice]:
    """Over ranks: through each other's memory where GPUs reach it, which the worker asks as it starts; in profile exact
    of gathered parts, in the order of ranks."""
    if ranks == 1:
        return
    if capability is not None and profile == "fast":
        row = 2 * model.hidden_size
        most = peer_message_bytes(ranks) // row
        yield Choice(Operation.RANK_SUM, Backend.CUDA, ("rank_sum",), most_rows=most, shared_bytes=0)
        if sums_by_rows(model):
            yield Choice(Operation.RANK_SUM, Backend.CUDA, ("rank_rows",), shared_bytes=0)
            return
    yield Choice(Operation.RANK_SUM, Backend.PLAIN, (LIBRARY,), format=model.dtype)
