"""The kernels of a model's layers by a table of kernels, each with its bytes and operations: what `kernel_speed`
times.

Attention at a context, products and experts by rows, and what stands between them, at the model's shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.kernels.attention_work import COMPUTE, DEVICE, SEQUENCES, Layer, chunk_call, decode_calls, ints
from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.model.weight_format import TextLinear, WeightFormat
from modelserve.sizing.backends.resolve import Formats, resolve
from modelserve.sizing.backends.table import LIBRARY, KernelTable, Operation
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve.sizing.weights.text import layer_tensors
from modelserve_worker.batch import AdmittedRequest
from modelserve_worker.kernels.attention import triton_launches as launches
from modelserve_worker.kernels.attention.arguments import HeadNorms, LayerPages, Rotary, StepRows
from modelserve_worker.kernels.attention.bound_kernels import AttentionKernels
from modelserve_worker.kernels.experts.experts import Choice
from modelserve_worker.kernels.operations import Operations
from modelserve_worker.kernels.sampling.sampling import Adjustments, SampledRows
from modelserve_worker.kernels.step import Step
from modelserve_worker.layers.moe import MixtureOfExperts
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.layers.stored.matrix import StoredMatrix
from modelserve_worker.layers.stored.stored_matrix import stored_matrix
from modelserve_worker.request import SamplingParams
from modelserve_worker.step.sampler import draw_candidates
from modelserve_worker.step.sampling_slots import SamplingSlots

ROUND_BYTES = 200_000_000  # that calls go round: several times the L2 cache of any GPU


class Model(NamedTuple):
    architecture: ModelArchitecture
    weights: WeightFormat | None = None


@dataclass(frozen=True)
class Sizes:
    context: int = 8192
    segments: tuple[int, ...] = (1, 8, 32)
    chunk: int = 2048  # rows, the last of the context
    few: tuple[int, ...] = (1, 8, 32)
    many: tuple[int, ...] = (512, 2048)
    sampled: tuple[int, ...] = (1, 32, 128)
    arena: int = 2 << 30  # 32 contexts
    round: int = ROUND_BYTES


class Work(NamedTuple):
    """Calls over memory of their own, and of one of them the bytes that must be moved and the operations."""

    calls: Sequence[Callable[[], Any]]
    bytes: float
    operations: float = 0.0


class Cell(NamedTuple):
    name: str
    make: Callable[[], Work]
    library: bool = False  # no kernel of ours


Line = tuple[str, list[Cell]]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(COMPUTE)


def attention(model: Model, table: KernelTable, dtype: KVCacheDtype, sizes: Sizes) -> Iterator[Line]:
    for kind in LayerKind:
        layer = cache(partial(Layer, model.architecture, kind, dtype, sizes.arena))

        def decode(count: int, layer: Callable[[], Layer] = layer) -> Work:
            contexts = [sizes.context + (i if layer().rows.entries else 0) for i in range(count)]
            return Work(*decode_calls(layer(), contexts, AttentionKernels.of(table, layer().rows.kind)))

        def chunk(layer: Callable[[], Layer] = layer) -> Work:
            start, kernels = sizes.context - sizes.chunk, AttentionKernels.of(table, layer().rows.kind)
            call, operations = chunk_call(layer(), start, sizes.chunk, kernels)
            return Work([call] * 2, sizes.context * layer().row_bytes, operations)

        def store(rows: int, kernels: str, layer: Callable[[], Layer] = layer) -> Work:
            return stored_rows(layer(), rows, kernels)

        yield f"decode {kind.name.lower()} {dtype}", [Cell(f"{n}x", partial(decode, n)) for n in sizes.segments]
        yield f"chunk {kind.name.lower()} {dtype}", [Cell(f"{sizes.chunk}", chunk)]
        if dtype is KVCacheDtype.BFLOAT16:
            yield (
                f"prepare {kind.name.lower()}",
                [Cell(f"{n}", partial(store, n, "prepare")) for n in (*sizes.few, *sizes.many[-1:])],
            )
            if kind is LayerKind.SLIDING:
                yield "commit", [Cell(f"{n}", partial(store, n, "commit")) for n in (*sizes.few[-1:], *sizes.many[:1])]


def stored_rows(layer: Layer, rows: int, kernels: str) -> Work:
    """New rows into pages: of a request each, or more than there are slots of one, where they wait if they slide."""
    held, width, apart = layer.rows, layer.rows.width, rows <= SEQUENCES
    slots, at = ints(range(rows) if apart else [0] * rows), ints([0] * rows if apart else range(rows))
    (table,) = layer.tables([1] * rows if apart else [rows], 1)
    pages = LayerPages(held, table, layer.arena)
    fresh = StepRows(
        *(random(rows, held.heads, width) for _ in "kv"),
        *(torch.rand(rows, held.heads, device=DEVICE).half(),) * 2,
    )
    waiting = ints([-1] * rows) if held.entries and not apart else slots
    step = Step(at, ints([rows]), slots, waiting, slots, None, None)
    if kernels == "commit":
        store = partial(launches.commit, fresh, step, pages=pages)
        return Work([store] * 8, 2 * rows * layer.row_bytes)
    projected = random(rows, (layer.heads + held.heads * (1 if held.v_only else 2)) * width)
    angles, weight, q = torch.rand(2, rows, width // 2, device=DEVICE), random(width), layer.queries(rows)
    store = partial(
        launches.prepare, projected, q, step, pages=pages, norms=HeadNorms(weight, weight, 1e-6),
        rotary=Rotary(*angles), fresh=fresh if held.entries else None, pairs=layer.pairs,
    )  # fmt: skip
    return Work([store] * 8, 2 * projected.nbytes + angles.nbytes)


def matrix(model: Model, table: KernelTable, linear: TextLinear, shape: tuple[int, int]) -> StoredMatrix:
    placement = Placement(DEVICE, COMPUTE, weight_format=model.weights, operations=Operations(table, DEVICE))
    return filled(stored_matrix(linear, [shape[0]], shape[1], placement))


def filled(made: Any) -> Any:
    """Random parameters of a layer, in the order of its kernels."""
    for parameter in made.parameters():
        if parameter.dtype == torch.int32:
            parameter.random_(-(2**31), 2**31 - 1)
        elif parameter.dtype == torch.int8:
            parameter.random_(-128, 128)
        elif parameter.dtype == torch.float8_e4m3fn:
            parameter.copy_(torch.randn(parameter.shape, device=parameter.device).to(parameter.dtype))
        else:
            parameter.normal_(std=0.02)
    for part in made.modules():
        if isinstance(part, StoredMatrix):
            part.loaded()
    return made


def held_bytes(made: Any) -> int:
    return sum(parameter.nbytes for parameter in made.parameters())


def products(model: Model, table: KernelTable, sizes: Sizes) -> Iterator[Line]:
    for tensor in layer_tensors(model.architecture, 0, 1):
        if tensor.linear is None or tensor.count > 1 or tensor.term == "other":
            continue
        shape = tensor.rows, tensor.columns
        first = cache(partial(matrix, model, table, tensor.linear, shape))

        @cache
        def copies(first: Callable[[], StoredMatrix] = first, more: Any = first.__wrapped__) -> list[StoredMatrix]:
            return [first(), *(more() for _ in range(max(1, sizes.round // held_bytes(first()))))]

        def multiply(rows: int, copies: Callable[[], list[StoredMatrix]] = copies) -> Work:
            x, made = random(rows, copies()[0].columns), copies()
            moved = held_bytes(made[0]) + x.nbytes + 2 * rows * made[0].rows
            return Work([partial(each.linear, x) for each in made], moved, 2 * rows * made[0].rows * made[0].columns)

        def of_library(rows: int, of: tuple[TextLinear, tuple[int, int]] = (tensor.linear, shape)) -> bool:
            return table.choose(Operation.LINEAR, *of, rows=rows).kernels[-1] == LIBRARY

        rows = (*sizes.few, *((128,) if model.weights else ()), *sizes.many)
        yield f"product {tensor.linear}", [Cell(f"{n}", partial(multiply, n), of_library(n)) for n in rows]


def experts(model: Model, table: KernelTable, sizes: Sizes) -> Iterator[Line]:
    a = model.architecture
    placement = Placement(DEVICE, COMPUTE, weight_format=model.weights, operations=Operations(table, DEVICE))
    layer = cache(lambda: filled(MixtureOfExperts(a, placement)))

    def multiply(rows: int) -> Work:
        chosen = [
            torch.rand(rows, a.num_experts, device=DEVICE).argsort(1)[:, : a.top_k_experts].int() for _ in range(8)
        ]
        given = [Choice(torch.rand(rows, a.top_k_experts, device=DEVICE), each.contiguous()) for each in chosen]
        x, made = random(rows, a.hidden_size), layer().experts
        read = sum(len(each.unique()) for each in chosen) / len(chosen) / a.num_experts * held_bytes(made)
        operations = 6 * rows * a.top_k_experts * a.hidden_size * a.moe_intermediate_size
        return Work([partial(made, x, each) for each in given], read, operations)

    def route(rows: int) -> Work:
        x, made = random(rows, a.hidden_size), layer()
        return Work([partial(made.router, x, made.pre_norm)] * 8, held_bytes(made.router) + 2 * x.nbytes)

    grouped = next(each for each in table.choices if each.operation is Operation.GROUPED).kernels[-1] == LIBRARY
    few = max((each.most_rows or 0 for each in table.of(Operation.EXPERTS)), default=0)
    rows = (*sizes.few, *sizes.many)
    yield "experts", [Cell(f"{n}", partial(multiply, n), grouped and n > few) for n in rows]
    yield "router", [Cell(f"{n}", partial(route, n)) for n in rows]


def elementwise(model: Model, table: KernelTable, sizes: Sizes) -> Iterator[Line]:
    a, made = model.architecture, Operations(table, DEVICE).elementwise

    def norm(rows: int) -> Work:
        added, x, weight = random(rows, a.hidden_size), random(rows, a.hidden_size), random(a.hidden_size)
        scalar = torch.full((1,), 0.5, device=DEVICE, dtype=COMPUTE)
        call = partial(made.residual_norm, x, added, weight, scalar=scalar, next_weight=weight, eps=1e-6)
        return Work([call] * 8, 4 * x.nbytes)

    def gelu(rows: int) -> Work:
        gates = [random(rows, 2 * a.intermediate_size) for _ in range(8)]
        return Work([partial(made.gated_gelu, each) for each in gates], 1.5 * gates[0].nbytes)

    for name, make, rows in (("norms", norm, sizes.many), ("gelu", gelu, sizes.many)):
        yield name, [Cell(f"{n}", partial(make, n)) for n in (*sizes.few, *rows)]
    for kind, changes in SAMPLED.items():
        yield f"sampler {kind}", [Cell(f"{n}", partial(sampler, model, table, n, changes)) for n in sizes.sampled]


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "penalties": {"frequency_penalty": 0.1, "presence_penalty": 0.1},
    "biases": {"logit_bias": tuple((8 * token, -1.0) for token in range(300))},
    "all": {
        "top_p": 0.9, "min_p": 0.05, "frequency_penalty": 0.1, "presence_penalty": 0.1,
        "logit_bias": tuple((8 * token, -1.0) for token in range(300)),
    },
    "logprobs": {"logprobs": 20},
}  # fmt: skip


def sampler(model: Model, table: KernelTable, rows: int, changes: dict[str, Any]) -> Work:
    """Rows of one kind, of random logits as flat as a filter never sees them: its longest work."""
    a, backend = model.architecture, Operations(table, DEVICE).sampling
    slots, at = SamplingSlots(max_num_seqs=rows, vocab_size=a.vocab_size, device=DEVICE), ints(range(rows))
    params = [SamplingParams(seed=row, max_tokens=9, **changes) for row in range(rows)]
    slots.admit([AdmittedRequest(row, "", each, (), ()) for row, each in enumerate(params)])
    paths, places = slots.paths(np.arange(rows, dtype=np.int32)), torch.arange(rows, device=DEVICE)
    seen = torch.zeros(rows, a.vocab_size, dtype=torch.int32, device=DEVICE)
    given = SampledRows(
        slots=at, positions=at, output_counts=at, columns=slots.device, width=1, softcap=30.0,
        adjustments=Adjustments(seen, slots.lists) if paths.adjusted else None,
    )  # fmt: skip
    logits = [random(rows, a.vocab_size) for _ in range(2)]

    def draw(of: Tensor) -> Tensor:
        if not paths.filtered.any():
            return draw_candidates(backend, TensorParallel(), of, given, first_token=0)
        blocks = places.split(backend.rows_at_once)
        return torch.cat([backend.draw_filtered(of, given.some(each), each) for each in blocks])

    def report(of: Tensor) -> None:
        for each in places.split(backend.rows_at_once):
            backend.logprobs(of, each, each, most=20, softcap=30.0)

    call = report if "logprobs" in changes else draw
    return Work([partial(call, each) for each in logits], logits[0].nbytes + seen.nbytes * bool(paths.penalised.any()))


def lines(model: Model, capability: int, sizes: Sizes) -> Iterator[Line]:
    """All kernels of a model, most of its time first."""
    layout = KVCacheLayout.V_ONLY if model.architecture.attention_k_eq_v else KVCacheLayout.KV
    formats = [Formats(model.weights, dtype, layout) for dtype in (KVCacheDtype.BFLOAT16, KVCacheDtype.INT8)]
    tables = [resolve(capability, model.architecture, each) for each in formats]
    if model.weights is None:  # with weights in INT4 it is the same
        yield from attention(model, tables[0], formats[0].kv_dtype, sizes)
    if model.architecture.num_experts:
        yield from experts(model, tables[0], sizes)
    yield from products(model, tables[0], sizes)
    if model.weights is None:
        yield from attention(model, tables[1], formats[1].kv_dtype, sizes)
        yield from elementwise(model, tables[0], sizes)
