"""What a step launches, counted from the table: kernels by name, those of libraries as one name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import TextLinear
from modelserve.sizing.backends.table import Choice, KernelTable, Operation, Subject
from modelserve.sizing.weights.text import layer_tensors

_OF_LAYER_INPUTS = (TextLinear.LAYER_INPUT_GATE, TextLinear.LAYER_PROJECTION)
Call = tuple[Operation, Subject, tuple[int, int]]


def layer_calls(architecture: ModelArchitecture, layer: int, *, ranks: int) -> Iterator[Call]:
    """The operations of one layer of a step of decodes, in order. Sums over ranks stand before the norms behind them,
    as where no kernel does both."""
    kind, nothing = architecture.kind(layer), (0, 0)
    shapes = {each.linear: (each.rows, each.columns) for each in layer_tensors(architecture, layer, ranks)}

    def product(linear: TextLinear) -> Call:
        return Operation.LINEAR, linear, shapes[linear]

    def summed() -> Iterator[Call]:
        if ranks > 1:
            yield Operation.RANK_SUM, "", nothing

    yield product(TextLinear.QKV)
    yield Operation.PREPARE, kind, nothing
    yield Operation.DECODE_ATTENTION, kind, nothing
    yield product(TextLinear.OUTPUT)
    yield from summed()
    yield Operation.RESIDUAL_NORM, "", nothing
    if architecture.num_experts:
        yield Operation.ROUTE, "", nothing
    yield product(TextLinear.GATE_UP)
    yield Operation.GATED_GELU, "", nothing
    yield product(TextLinear.DOWN)
    yield from summed()
    if architecture.num_experts:
        yield Operation.EXPERTS, "", nothing
        yield Operation.GROUPED, TextLinear.EXPERT_GATE_UP, shapes[TextLinear.EXPERT_GATE_UP]
        yield Operation.GATED_GELU, "", nothing
        yield Operation.GROUPED, TextLinear.EXPERT_DOWN, shapes[TextLinear.EXPERT_DOWN]
        if ranks > 1:
            yield Operation.WEIGHTED_SUM, "", nothing
        yield from summed()
        yield Operation.ADD_BRANCHES, "", nothing
    else:
        yield Operation.RESIDUAL_NORM, "", nothing
    if architecture.hidden_size_per_layer_input:
        gate, projection = (product(linear) for linear in _OF_LAYER_INPUTS)
        yield from (gate, (Operation.PER_LAYER_GATE, "", nothing), projection, (Operation.RESIDUAL_NORM, "", nothing))


def _layer_choices(
    table: KernelTable, architecture: ModelArchitecture, layer: int, *, rows: int, ranks: int
) -> Iterator[Choice]:
    """What one layer of a step of `rows` decodes launches, without what other kernels do besides. Raises KeyError for a
    table of another model."""
    experts = table.choose(Operation.EXPERTS, rows=rows) if architecture.num_experts else None
    fused, dealt = False, experts is not None and experts.most_rows is None
    beside = (TextLinear.GATE_UP, TextLinear.DOWN) if experts is not None and experts.takes_dense else ()
    for operation, subject, shape in layer_calls(architecture, layer, ranks=ranks):
        choice = table.choose(operation, subject, shape, rows=rows)
        if subject in beside or (operation is Operation.GROUPED and not dealt):
            fused = True  # experts' kernels have both products and the gate already
        elif not (operation is Operation.GATED_GELU and fused):
            fused = choice.ends.gated
            yield choice


def layer_launches(
    table: KernelTable, architecture: ModelArchitecture, layer: int, *, rows: int, ranks: int, summed: bool = True
) -> Counter[str]:
    """Kernels of one layer of a step of `rows` decodes; those of sums over ranks only if `summed`. Raises KeyError for
    a table of another model."""
    found: Counter[str] = Counter()
    for choice in _layer_choices(table, architecture, layer, rows=rows, ranks=ranks):
        if summed or choice.operation is not Operation.RANK_SUM:
            found.update(choice.kernels)
            found[Operation.RESIDUAL_NORM] -= choice.fuses_norm
    return +found


def dense_products(
    table: KernelTable, architecture: ModelArchitecture, *, rows: int, ranks: int
) -> Iterator[tuple[Choice, int]]:
    """Choices of the dense products of a step of `rows` decodes, each with how many layers multiply so; without those
    that an operation beside them does. Raises KeyError for a table of another model."""
    for layer, layers in _alike(architecture, ranks):
        for choice in _layer_choices(table, architecture, layer, rows=rows, ranks=ranks):
            if choice.operation is Operation.LINEAR:
                yield choice, layers


def decode_launches(
    table: KernelTable, architecture: ModelArchitecture, *, rows: int, ranks: int, summed: bool = True
) -> Counter[str]:
    """Kernels of all layers of a step of `rows` decodes; those of sums over ranks only if `summed`."""
    found: Counter[str] = Counter()
    for layer, layers in _alike(architecture, ranks):
        one = layer_launches(table, architecture, layer, rows=rows, ranks=ranks, summed=summed)
        found.update({name: count * layers for name, count in one.items()})
    return found


@lru_cache(maxsize=256)  # a plan asks for each number of rows of each candidate, and there are few models
def _alike(architecture: ModelArchitecture, ranks: int) -> tuple[tuple[int, int], ...]:
    """One of the layers that have the same calls, and how many they are."""
    firsts: dict[tuple[Call, ...], int] = {}
    layers = range(architecture.num_hidden_layers)
    found = (firsts.setdefault(tuple(layer_calls(architecture, layer, ranks=ranks)), layer) for layer in layers)
    return tuple(Counter(found).items())
