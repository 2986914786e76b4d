"""Which modules each linear layer of the engine is made of, and a checkpoint's format from those of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pydantic import ValidationError

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.quantization.patterns import HEAD
from modelserve.model.quantization.refusal import unknown
from modelserve.model.weight_format import MatrixFormat, MixedLinears, TextLinear, WeightFormat

FormatOf = Callable[[str], MatrixFormat | None]
"""The stated format of a module, named without prefix; None of one that is not quantised."""

# Whose format is that of most bytes, the first of them that is quantised.
_LARGEST_FIRST = (
    TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN, TextLinear.GATE_UP, TextLinear.DOWN, *TextLinear,
)  # fmt: skip


def modules(architecture: ModelArchitecture) -> dict[TextLinear, list[str]]:
    """Names of the checkpoint's modules, without prefix, that each kind of linear layer of this model is made of."""
    named: dict[TextLinear, list[str]] = {}
    for layer in range(architecture.num_hidden_layers):
        for linear, names in layer_modules(architecture, layer):
            named.setdefault(linear, []).extend(f"layers.{layer}.{name}" for name in names)
    if architecture.hidden_size_per_layer_input:
        named[TextLinear.MODEL_PROJECTION] = ["per_layer_model_projection"]
    return named


def layer_modules(architecture: ModelArchitecture, layer: int) -> Iterator[tuple[TextLinear, Sequence[str]]]:
    """Of one layer, named below it: those that a linear layer stacks, in their order; of experts all of one behind the
    other."""
    projections = ["q", "k", "v"] if architecture.owns_cache(layer) else ["q"]
    if architecture.k_from_v(layer):
        projections.remove("v")
    yield TextLinear.QKV, [f"self_attn.{each}_proj" for each in projections]
    yield TextLinear.OUTPUT, ["self_attn.o_proj"]
    yield TextLinear.GATE_UP, ["mlp.gate_proj", "mlp.up_proj"]
    yield TextLinear.DOWN, ["mlp.down_proj"]
    experts = range(architecture.num_experts)
    if experts:
        yield TextLinear.EXPERT_GATE_UP, [f"experts.{e}.{part}_proj" for e in experts for part in ("gate", "up")]
        yield TextLinear.EXPERT_DOWN, [f"experts.{e}.down_proj" for e in experts]
    if architecture.hidden_size_per_layer_input:
        yield TextLinear.LAYER_INPUT_GATE, ["per_layer_input_gate"]
        yield TextLinear.LAYER_PROJECTION, ["per_layer_projection"]


def of_modules(architecture: ModelArchitecture, format_of: FormatOf) -> WeightFormat:
    """The format of a checkpoint whose modules are stated to have these.

    Raises UnsupportedModel for a quantised output head or router, for linear layers of one kind that differ, and where
    nothing is quantised.
    """
    found: dict[TextLinear, MatrixFormat | None] = {}
    for linear, names in modules(architecture).items():
        found[linear] = format_of(names[0])
        for name in names[1:]:
            if (other := format_of(name)) != found[linear]:
                raise _differing(linear, (names[0], found[linear]), (name, other))
    stated = of_linears(found)
    _check_unquantised(architecture, format_of)
    return stated


def of_linears(found: Mapping[TextLinear, MatrixFormat | None]) -> WeightFormat:
    """The format of a checkpoint whose kinds of linear layers have these; None: not quantised.

    Raises UnsupportedModel where none is, and for experts with an activation order.
    """
    most = next((stored for linear in _LARGEST_FIRST if (stored := found.get(linear)) is not None), None)
    if most is None:
        raise unknown("no weight scheme for the text's linear layers")
    for linear in (TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN):
        if (stored := found.get(linear)) is not None and stored.activation_order:
            raise unknown("experts with an activation order (actorder)")
    others: dict[MatrixFormat, list[TextLinear]] = {}
    for linear, stored in found.items():
        if stored is not None and stored != most:
            others.setdefault(stored, []).append(linear)
    return WeightFormat(
        **{name: getattr(most, name) for name in MatrixFormat.model_fields},
        dense=tuple(linear for linear, stored in found.items() if stored is None),
        mixed=tuple(MixedLinears(linears=tuple(linears), format=stored) for stored, linears in others.items()),
    )


def checked(fields: Mapping[str, object], text: str) -> MatrixFormat:
    """The format of these fields; raises UnsupportedModel for `text`, which stated them, where there is no such."""
    try:
        return MatrixFormat.model_validate(fields)
    except ValidationError as error:
        raise unknown(text) from error


def _differing(linear: TextLinear, *cases: tuple[str, MatrixFormat | None]) -> Exception:
    """Of one kind of linear layers, two modules that do not have the same."""
    (first, stored), (second, other) = sorted(cases, key=lambda case: case[1] is None)
    said = ("quantised", "not") if other is None else (f"in {stored}", f"in {other}")
    return unknown(f"{first} {said[0]} and {second} {said[1]} (one format must hold for {linear} of all layers)")


def _check_unquantised(architecture: ModelArchitecture, format_of: FormatOf) -> None:
    """The router, and an output head of its own, are held in bfloat16."""
    head = [] if architecture.tie_word_embeddings else [HEAD]
    routers = [f"layers.{layer}.router.proj" for layer in range(architecture.num_hidden_layers)]
    for name in (*head, *(routers if architecture.num_experts else ())):
        if format_of(name) is not None:
            raise unknown(f"{name} is quantised (it is not in `ignore`)")
