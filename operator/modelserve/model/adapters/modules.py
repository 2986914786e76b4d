"""The modules of a model that LoRA adapts: their sizes, and which matrices of the engine they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.quantization.linears import layer_modules
from modelserve.model.weight_format import TextLinear

# By linear layer and the number of matrices that it stacks: one module of tools that fuse them.
_FUSED = {(TextLinear.QKV, 3): "self_attn.qkv_proj", (TextLinear.GATE_UP, 2): "mlp.gate_up_proj"}


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer of a checkpoint, [outputs, inputs]: the matrices `parts` of those stacked in `linear` of `layer`.
    `experts`: so many of them, one behind the other."""

    linear: TextLinear
    layer: int | None
    inputs: int
    parts: tuple[tuple[int, int], ...]  # (which one, its outputs)
    expert: int | None = None
    experts: int = 0

    @property
    def outputs(self) -> int:
        return sum(size for _, size in self.parts)


def adapted_modules(architecture: ModelArchitecture) -> dict[str, Module]:
    """By name relative to the text model, as checkpoints and tools that fuse q, k and v or gate and up have it."""
    modules = {}
    for layer in range(architecture.num_hidden_layers):
        for name, module in _of_layer(architecture, layer):
            modules[f"layers.{layer}.{name}"] = module
    if architecture.hidden_size_per_layer_input:
        outputs = architecture.num_hidden_layers * architecture.hidden_size_per_layer_input
        modules["per_layer_model_projection"] = Module(
            TextLinear.MODEL_PROJECTION, None, architecture.hidden_size, ((0, outputs),)
        )
    return modules


def stacked_experts(architecture: ModelArchitecture, layer: int) -> dict[str, Module]:
    """The two parameters of all experts of a layer, as one tensor each, by their names below `experts`."""
    return {
        name: Module(linear, layer, inputs, tuple(enumerate(outputs)), experts=architecture.num_experts)
        for name, linear in (("gate_up_proj", TextLinear.EXPERT_GATE_UP), ("down_proj", TextLinear.EXPERT_DOWN))
        for inputs, outputs in [_sizes(architecture, layer, linear)]
    }


def without_effect(architecture: ModelArchitecture) -> frozenset[str]:
    """Modules that first published checkpoints have and no model reads: of layers that read another's cache."""
    return frozenset(
        f"layers.{layer}.self_attn.{name}_proj"
        for layer in range(architecture.first_shared_layer, architecture.num_hidden_layers)
        for name in "kv"
    )


def _of_layer(architecture: ModelArchitecture, layer: int) -> Iterator[tuple[str, Module]]:
    for linear, names in layer_modules(architecture, layer):
        inputs, outputs = _sizes(architecture, layer, linear)
        parts = tuple(enumerate(outputs))
        for number, name in enumerate(names):
            expert, part = divmod(number, len(parts))
            of = expert if linear in (TextLinear.EXPERT_GATE_UP, TextLinear.EXPERT_DOWN) else None
            yield name, Module(linear, layer, inputs, (parts[part],), expert=of)
        if (fused := _FUSED.get((linear, len(parts)))) is not None:
            yield fused, Module(linear, layer, inputs, parts)


def _sizes(architecture: ModelArchitecture, layer: int, linear: TextLinear) -> tuple[int, tuple[int, ...]]:
    """Inputs, and outputs of each matrix that is stacked."""
    hidden, head = architecture.hidden_size, architecture.layer_head_dim(layer)
    queries, keys = architecture.num_attention_heads * head, architecture.layer_kv_heads(layer) * head
    read = 0 if not architecture.owns_cache(layer) else 1 if architecture.k_from_v(layer) else 2
    width, inner = architecture.layer_intermediate_size(layer), architecture.moe_intermediate_size
    per_layer = architecture.hidden_size_per_layer_input
    return {
        TextLinear.QKV: (hidden, (queries, *[keys] * read)),
        TextLinear.OUTPUT: (queries, (hidden,)),
        TextLinear.GATE_UP: (hidden, (width, width)),
        TextLinear.DOWN: (width, (hidden,)),
        TextLinear.EXPERT_GATE_UP: (hidden, (inner, inner)),
        TextLinear.EXPERT_DOWN: (inner, (hidden,)),
        TextLinear.LAYER_INPUT_GATE: (hidden, (per_layer,)),
        TextLinear.LAYER_PROJECTION: (per_layer, (hidden,)),
    }[linear]
