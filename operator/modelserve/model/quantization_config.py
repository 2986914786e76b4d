"""`quantization_config` of a config.json: which weight format it states, and which linear layers have it.

compressed-tensors names modules by exact name, by "re:" and a regular expression that matches from the start, or by the
class "Linear", in `targets` of each group and in `ignore`. Modules of image and audio towers are never looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from pydantic import ValidationError

from modelserve.errors import UnsupportedModel
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import FP8_BLOCK, StoredType, TextLinear, WeightFormat

PREFIXES = ("model.language_model.", "model.")  # of text modules: in the multimodal wrapper, and in a bare text model
PACKED_FORMATS = ("pack-quantized",)
FLOAT_FORMATS = ("float-quantized", "naive-quantized")
REMEDY = (
    "use a bfloat16 checkpoint, or one in compressed-tensors INT4 (pack-quantized) or FP8 (float-quantized) with "
    "bfloat16 embeddings, head and router"
)
_INSTEAD = {  # what to use in place of a method of quantisation that is not read
    "awq": "the compressed-tensors INT4 form of the model",
    "auto-round": "a checkpoint that AutoRound exported as compressed-tensors (llm_compressor) INT4",
    "bitsandbytes": "the compressed-tensors INT4 form; bitsandbytes has none that is split over GPUs",
    "fp8": "a compressed-tensors FP8 checkpoint (FP8-dynamic or FP8-block)",
    "gemma": "the -it-qat-w4a16-ct form",
    "gguf": "the -it-qat-w4a16-ct form, which has the same quantisation-aware training",
    "gptq": "a compressed-tensors W4A16 checkpoint made with GPTQ",
    "modelopt": "a compressed-tensors INT4 or FP8 checkpoint",
}

Matches = Callable[[str], bool]


def stated_format(config: Mapping[str, Any], architecture: ModelArchitecture) -> WeightFormat | None:
    """The format that `quantization_config` states for this model's text; None where there is none.

    Raises UnsupportedModel, naming what was found and what to use, for every other scheme, for a quantised output head
    or router, and for linear layers of one kind of which only some are quantised.
    """
    stated = config.get("quantization_config")
    if not stated:
        return None
    if not isinstance(stated, Mapping) or stated.get("quant_method") != "compressed-tensors":
        method = str(stated.get("quant_method") if isinstance(stated, Mapping) else type(stated).__name__)[:64]
        raise _unknown(f"quant_method {method}", _INSTEAD.get(method.lower().replace("_", "-")))
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if stated.get(name):
            raise _unknown(f"{name} {str(stated[name])[:64]}")
    if stated.get("quantization_status", "compressed") != "compressed":
        raise _unknown(f"quantization_status {str(stated['quantization_status'])[:64]}")
    groups = stated.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    if not schemes:
        raise _unknown("no config_groups")
    ignored = _matcher(stated.get("ignore") or [])
    targets: dict[WeightFormat, list[Matches]] = {}
    for scheme in schemes:
        found = _scheme_format(scheme, layout=stated.get("format"))
        targets.setdefault(found, []).append(_matcher(scheme.get("targets") or []))

    def quantised(name: str, of: Iterable[Matches]) -> bool:
        return any(matches(name) for matches in of) and not ignored(name)

    held = {found: _held(architecture, partial(quantised, of=of)) for found, of in targets.items()}
    used = [found for found, linears in held.items() if linears]
    if len(used) != 1:
        named = " and ".join(str(found) for found in used) or "no weight scheme"
        raise _unknown(f"{named} for the text's linear layers")
    _check_unquantised(architecture, partial(quantised, of=list(chain(*targets.values()))))
    if used[0].activation_order and TextLinear.EXPERT_GATE_UP in held[used[0]]:
        raise _unknown("experts with an activation order (actorder)")
    dense = tuple(linear for linear in modules(architecture) if linear not in held[used[0]])
    return used[0].model_copy(update={"dense": dense})


def modules(architecture: ModelArchitecture) -> dict[TextLinear, list[str]]:
    """Names of the checkpoint's modules, without prefix, that each kind of linear layer of this model is made of."""
    named: dict[TextLinear, list[str]] = {}
    for layer in range(architecture.num_hidden_layers):
        for linear, names in _layer_modules(architecture, layer):
            named.setdefault(linear, []).extend(f"layers.{layer}.{name}" for name in names)
    if architecture.hidden_size_per_layer_input:
        named[TextLinear.MODEL_PROJECTION] = ["per_layer_model_projection"]
    return named


def _layer_modules(architecture: ModelArchitecture, layer: int) -> Iterator[tuple[TextLinear, Sequence[str]]]:
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


def _held(architecture: ModelArchitecture, quantised: Matches) -> set[TextLinear]:
    """Kinds of linear layers all of whose modules are quantised. Raises UnsupportedModel where only some are."""
    held = set()
    for linear, names in modules(architecture).items():
        missing = [name for name in names if not quantised(name)]
        if not missing:
            held.add(linear)
        elif len(missing) < len(names):
            there = next(name for name in names if quantised(name))
            raise _unknown(f"{there} quantised and {missing[0]} not (one format must hold for {linear} of all layers)")
    return held


def _check_unquantised(architecture: ModelArchitecture, quantised: Matches) -> None:
    """The router, and an output head of its own, are held in bfloat16."""
    head = [] if architecture.tie_word_embeddings else ["lm_head"]
    routers = [f"layers.{layer}.router.proj" for layer in range(architecture.num_hidden_layers)]
    for name in (*head, *(routers if architecture.num_experts else ())):
        if quantised(name):
            raise _unknown(f"{name} is quantised (it is not in `ignore`)")


def _matcher(patterns: object) -> Matches:
    """Whether a module, named without its prefix, is one of those that `targets` or `ignore` name."""
    if not isinstance(patterns, Sequence) or isinstance(patterns, str):
        raise _unknown(f"a list of modules that is {type(patterns).__name__}")
    texts = [str(pattern) for pattern in patterns]
    exact = {text for text in texts if not text.startswith("re:")}
    if "Linear" in exact:
        return lambda _: True
    try:
        expressions = [re.compile(text.removeprefix("re:")) for text in texts if text.startswith("re:")]
    except re.error as error:
        raise _unknown(f"a pattern that is no regular expression ({error})") from error

    def matches(name: str) -> bool:
        spelled = ("lm_head",) if name == "lm_head" else tuple(prefix + name for prefix in PREFIXES)
        return any(each in exact or any(pattern.match(each) for pattern in expressions) for each in spelled)

    return matches


def _scheme_format(scheme: object, *, layout: object) -> WeightFormat:
    """The format that one group states for what it targets; `layout` is the whole config's, if the group has none."""
    weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
    if not isinstance(scheme, Mapping) or not isinstance(weights, Mapping):
        raise _unknown("a config group without weights")
    layout, block = scheme.get("format") or layout, weights.get("block_structure")
    kind, bits, span, size = (weights.get(name) for name in ("type", "num_bits", "strategy", "group_size"))
    symmetric = weights.get("symmetric", True) is True
    fp8_activations = _fp8_activations(scheme)
    fields: dict[str, Any] | None = None
    if (kind, bits, span) == ("int", 4, "group") and layout in (None, *PACKED_FORMATS) and not fp8_activations:
        ordered = weights.get("actorder") in ("group", "dynamic", True)  # others are undone before weights are stored
        fields = {"scales": span, "group_size": size, "symmetric": symmetric, "activation_order": ordered}
        fields["stored"] = StoredType.INT4
    spans = ("channel", "tensor", "block") if block == [FP8_BLOCK, FP8_BLOCK] else ("channel", "tensor")
    if (kind, bits, symmetric) == ("float", 8, True) and layout in (None, *FLOAT_FORMATS) and span in spans:
        fields = {"stored": StoredType.FP8, "scales": span, "fp8_activations": fp8_activations}
    shown = {"type": kind, "num_bits": bits, "strategy": span, "group_size": size, "block_structure": block}
    text = ", ".join(f"{name} {str(value)[:32]}" for name, value in shown.items() if value is not None)
    problem = _unknown(f"weights of {text}{'' if symmetric else ', asymmetric'}, format {str(layout)[:32]}")
    if fields is None:
        raise problem
    try:
        return WeightFormat(**fields)
    except ValidationError as error:
        raise problem from error


def _fp8_activations(scheme: Mapping[str, Any]) -> bool:
    """Whether inputs are to be rounded to float of 8 bits as they come; raises UnsupportedModel for other roundings."""
    stated = scheme.get("input_activations")
    if scheme.get("output_activations"):
        raise _unknown("output_activations")
    if not stated:
        return False
    wanted = {"type": "float", "num_bits": 8, "dynamic": True}
    if not isinstance(stated, Mapping) or any(stated.get(name) != value for name, value in wanted.items()):
        raise _unknown(f"input_activations {str(stated)[:96]} (known are none, and dynamic ones in float of 8 bits)")
    return True


def _unknown(found: str, instead: str | None = None) -> UnsupportedModel:
    return UnsupportedModel(
        f"quantization_config: {found} is not served; use {instead or REMEDY.removeprefix('use ')}",
        field="quantization_config",
    )
