"""Binds every tensor of an adapter to a matrix of its model, or refuses the adapter and lists each one that does not.

Nothing is left out in silence: an adapter half of which is dropped answers like its base, and nobody is told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.adapters.config import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MAX_RANK,
    PICKLED_FILE,
    PICKLED_NOT_READ,
    AdapterConfig,
)
from modelserve.model.adapters.modules import Module, adapted_modules, stacked_experts, without_effect
from modelserve.model.adapters.names import ROOT, WRAPPED, FactorName, factor_name
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.checkpoint_files import TensorEntry, read_header, read_json_object

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_EXPERTS = re.compile(r"layers\.(\d+)\.experts(?:\.base_layer)*")
_INDEX = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Factors:
    """A [rank, inputs] and B [outputs, rank] of one module; its term is scale * B A x.

    Of stacked experts A is [experts * rank, inputs], an expert's rows together, and B [outputs, rank * experts], an
    expert's columns `experts` apart (PEFT's ParamWrapper). `turned`: earlier versions of PEFT took the parameter's
    last size for the outputs: A is [experts * rank, outputs] and B [inputs, rank * experts], and the term is
    scale * A^T B^T x.
    """

    name: str  # of the module, relative to the text model
    module: Module
    rank: int
    scale: float
    a: TensorEntry
    b: TensorEntry
    turned: bool = False


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    """All factors of an adapter, each bound, in the order of the file's names."""

    factors: tuple[Factors, ...]
    without_effect: tuple[Factors, ...]  # of modules that the model has and never reads: their B must be zero
    base_model: str | None

    @property
    def rank(self) -> int:
        """The largest of any module."""
        return max(each.rank for each in self.factors)

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for each in self.factors for tensor in (each.a, each.b))


def read_adapter(directory: Path, architecture: ModelArchitecture) -> BoundAdapter:
    """Bind the adapter in a directory from its two files' headers. Raises InvalidInput for broken files, and
    UnsupportedModel for what does not bind or is no plain LoRA."""
    if not (file := directory / ADAPTER_FILE).is_file():
        pickled = (directory / PICKLED_FILE).exists()
        told = f"{PICKLED_NOT_READ}; save it as safetensors" if pickled else "give an adapter"
        raise InvalidInput(f"adapter: {directory} holds no {ADAPTER_FILE}: {told}")
    config = AdapterConfig.from_document(read_json_object(directory / ADAPTER_CONFIG_FILE))
    return bind(architecture, config, read_header(file))


def bind(architecture: ModelArchitecture, config: AdapterConfig, tensors: Sequence[TensorEntry]) -> BoundAdapter:
    """Raises UnsupportedModel, with every name that does not bind and why, unless all tensors do."""
    problems: list[tuple[str, str]] = []
    pairs: dict[str, dict[str, TensorEntry]] = {}
    names: dict[str, FactorName] = {}
    for tensor in tensors:
        try:
            found = factor_name(tensor.name)
        except UnsupportedModel as error:
            problems.append((tensor.name, str(error)))
            continue
        if found.factor in pairs.setdefault(found.module, {}):
            problems.append((tensor.name, "the module has this factor twice"))
            continue
        pairs[found.module][found.factor], names[found.module] = tensor, found
    modules, unread = adapted_modules(architecture), without_effect(architecture)
    bound: list[Factors] = []
    idle: list[Factors] = []
    taken: dict[tuple[object, ...], str] = {}
    for name, pair in pairs.items():
        try:
            factors = _bind(name, names[name], pair, modules, unread, architecture, config)
            if name in unread:
                idle.append(factors)
                continue
            for part, _ in factors.module.parts:
                _claim(taken, factors, part)
            bound.append(factors)
        except UnsupportedModel as error:
            problems.extend((tensor.name, str(error)) for tensor in pair.values())
    if problems:
        raise UnsupportedModel(_refusal(problems, len(tensors)))
    if not bound:
        raise UnsupportedModel("adapter: it has no tensor that the model reads: it would change nothing")
    return BoundAdapter(tuple(bound), tuple(idle), config.base_model_name_or_path)


def _bind(
    name: str,
    names: FactorName,
    pair: Mapping[str, TensorEntry],
    modules: Mapping[str, Module],
    unread: frozenset[str],
    architecture: ModelArchitecture,
    config: AdapterConfig,
) -> Factors:
    if len(pair) < 2:
        raise UnsupportedModel(f"lora_{'B' if 'A' in pair else 'A'} of its module is missing")
    a, b = pair["A"], pair["B"]
    for tensor in (a, b):
        if (element := ELEMENT_BYTES.get(tensor.dtype)) is None:
            raise UnsupportedModel(f"its dtype is {tensor.dtype}; {', '.join(ELEMENT_BYTES)} are read")
        if len(tensor.shape) != 2 or math.prod(tensor.shape) * element != tensor.end - tensor.start:
            raise UnsupportedModel(f"its shape {list(tensor.shape)} is no matrix of {tensor.end - tensor.start} bytes")
    if (experts := _EXPERTS.fullmatch(name)) is not None and architecture.num_experts:
        return _bind_stacked(names, a, b, stacked_experts(architecture, int(experts[1])), config)
    rank = config.rank(names.whole)
    if name in unread:  # keys and values of a layer that reads another's
        layer = int(name.split(".")[1])
        like = modules[f"layers.{architecture.producer(layer)}.self_attn.k_proj"]
        return Factors(name, like, rank, config.scale(names.whole), a, b)
    if (module := modules.get(name)) is None:
        raise UnsupportedModel(_unknown(name, architecture))
    if (a.shape, b.shape) != ((rank, module.inputs), (module.outputs, rank)) or not 1 <= rank <= MAX_RANK:
        raise UnsupportedModel(
            f"lora_A is {list(a.shape)} and lora_B {list(b.shape)}; of rank {rank}, which {ADAPTER_CONFIG_FILE} gives "
            f"it, they are {[rank, module.inputs]} and {[module.outputs, rank]} in this model"
        )
    return Factors(name, module, rank, config.scale(names.whole), a, b)


def _bind_stacked(
    names: FactorName, a: TensorEntry, b: TensorEntry, parameters: Mapping[str, Module], config: AdapterConfig
) -> Factors:
    """Which of both parameters it is, and which way round, by shapes: the names tell nothing of it."""
    found = []
    module_name = names.whole.replace(WRAPPED, "")
    for parameter, module in parameters.items():
        whole = f"{module_name}.{parameter}"
        rank = config.rank(whole)
        rows = module.experts * rank
        for turned in (False, True):
            ends = (module.outputs, module.inputs) if turned else (module.inputs, module.outputs)
            if (a.shape, b.shape) == ((rows, ends[0]), (ends[1], rows)):
                name = f"{names.module.replace(WRAPPED, '')}.{parameter}"
                found.append(Factors(name, module, rank, config.scale(whole), a, b, turned))
    if len(found) != 1:
        expected = ", ".join(
            f"{[each.experts * config.rank(f'{module_name}.{name}'), each.inputs]} and "
            f"{[each.outputs, each.experts * config.rank(f'{module_name}.{name}')]} for {name}"
            for name, each in parameters.items()
        )
        told = "fit several of the experts' parameters" if found else "fit none of the experts' parameters"
        raise UnsupportedModel(f"lora_A {list(a.shape)} and lora_B {list(b.shape)} {told}: {expected}")
    return found[0]


def _claim(taken: dict[tuple[object, ...], str], factors: Factors, part: int) -> None:
    """A matrix may be adapted once: by its own name, or by that of a fused one. All experts, or one by one."""
    module = factors.module
    for expert in range(module.experts) if module.experts else (module.expert,):
        key = module.linear, module.layer, part, expert
        if (other := taken.setdefault(key, factors.name)) != factors.name:
            raise UnsupportedModel(f"{other} adapts the same matrix")


def _unknown(name: str, architecture: ModelArchitecture) -> str:
    """Why the model has no such module to adapt."""
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer is not None and int(layer[1]) >= architecture.num_hidden_layers:
        return f"the model has {architecture.num_hidden_layers} layers: the adapter is of another model"
    if layer is not None and name.endswith("self_attn.v_proj") and architecture.k_from_v(int(layer[1])):
        return "the layer has no v_proj: its values are its keys' projection; the adapter is of another model"
    if name.endswith("router.proj"):
        return "adapted routers are not served: a rounded logit picks other experts; train without it"
    if name.startswith(("lm_head", "embed_tokens")):
        return "adapted embeddings and output heads are not served; train without them"
    return "the model has no such module"


def _refusal(problems: list[tuple[str, str]], count: int) -> str:
    """All names by reason; those that differ in numbers alone are one, with the numbers."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, reason in problems:
        short = name.removeprefix(ROOT)
        grouped.setdefault((reason, _INDEX.sub(".*", short)), []).append(".".join(_INDEX.findall(short)))
    said: dict[str, list[str]] = {}
    for (reason, pattern), numbers in grouped.items():
        of = [each for each in numbers if each]
        said.setdefault(reason, []).append(f"{pattern} ({', '.join(of)})" if of else pattern)
    told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in said.items())
    if len(problems) == count:
        return f"adapter: none of its {count} tensors binds to the model; name the model that it was trained on: {told}"
    return f"adapter: {len(problems)} of its {count} tensors do not bind, so none is used: {told}"
