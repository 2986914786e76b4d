"""The modules of a model that LoRA adapts: their sizes, and which matrices of the engine they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.weight_format import TextLinear


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
    hidden, width, experts = architecture.hidden_size, architecture.moe_intermediate_size, architecture.num_experts
    gate_up = Module(TextLinear.EXPERT_GATE_UP, layer, hidden, ((0, width), (1, width)), experts=experts)
    down = Module(TextLinear.EXPERT_DOWN, layer, width, ((0, hidden),), experts=experts)
    return {"gate_up_proj": gate_up, "down_proj": down}


def without_effect(architecture: ModelArchitecture) -> frozenset[str]:
    """Modules that first published checkpoints have and no model reads: of layers that read another's cache."""
    return frozenset(
        f"layers.{layer}.self_attn.{name}_proj"
        for layer in range(architecture.first_shared_layer, architecture.num_hidden_layers)
        for name in "kv"
    )


def _of_layer(architecture: ModelArchitecture, layer: int) -> Iterator[tuple[str, Module]]:
    hidden, head = architecture.hidden_size, architecture.layer_head_dim(layer)
    queries, keys = architecture.num_attention_heads * head, architecture.layer_kv_heads(layer) * head
    sizes = [("q", queries)]
    if architecture.owns_cache(layer):
        sizes += [("k", keys)] if architecture.k_from_v(layer) else [("k", keys), ("v", keys)]
    yield from _fused(TextLinear.QKV, layer, hidden, "self_attn", sizes, "qkv_proj" if len(sizes) == 3 else None)
    yield "self_attn.o_proj", Module(TextLinear.OUTPUT, layer, queries, ((0, hidden),))
    width = architecture.layer_intermediate_size(layer)
    yield from _fused(TextLinear.GATE_UP, layer, hidden, "mlp", [("gate", width), ("up", width)], "gate_up_proj")
    yield "mlp.down_proj", Module(TextLinear.DOWN, layer, width, ((0, hidden),))
    for expert in range(architecture.num_experts):
        inner = architecture.moe_intermediate_size
        for part, name in enumerate(("gate", "up")):
            module = Module(TextLinear.EXPERT_GATE_UP, layer, hidden, ((part, inner),), expert=expert)
            yield f"experts.{expert}.{name}_proj", module
        yield f"experts.{expert}.down_proj", Module(TextLinear.EXPERT_DOWN, layer, inner, ((0, hidden),), expert=expert)
    if per_layer := architecture.hidden_size_per_layer_input:
        yield "per_layer_input_gate", Module(TextLinear.LAYER_INPUT_GATE, layer, hidden, ((0, per_layer),))
        yield "per_layer_projection", Module(TextLinear.LAYER_PROJECTION, layer, per_layer, ((0, hidden),))


def _fused(
    linear: TextLinear, layer: int, inputs: int, parent: str, sizes: list[tuple[str, int]], fused: str | None
) -> Iterator[tuple[str, Module]]:
    """Each by itself, and all of them under one name where tools fuse them."""
    parts = tuple((part, size) for part, (_, size) in enumerate(sizes))
    for (name, _), part in zip(sizes, parts, strict=True):
        yield f"{parent}.{name}_proj", Module(linear, layer, inputs, (part,))
    if fused is not None:
        yield f"{parent}.{fused}", Module(linear, layer, inputs, parts)
