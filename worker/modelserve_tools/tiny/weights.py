"""Random weights that keep a network of this structure alive: unit-scale activations, unsaturated attention scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from modelserve.model.architecture import LayerKind, ModelArchitecture

PREFIX = "model.language_model."


def tensor_shapes(architecture: ModelArchitecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name without prefix, shape) of every text tensor, in file order; KV-shared layers carry no k, v or k_norm."""
    a, hidden = architecture, architecture.hidden_size
    yield "embed_tokens.weight", (a.vocab_size, hidden)
    yield "norm.weight", (hidden,)
    per_layer = a.hidden_size_per_layer_input
    if per_layer:
        width = a.num_hidden_layers * per_layer
        yield "embed_tokens_per_layer.weight", (a.vocab_size_per_layer_input, width)
        yield "per_layer_model_projection.weight", (width, hidden)
        yield "per_layer_projection_norm.weight", (per_layer,)
    for layer in range(a.num_hidden_layers):
        for name, shape in _layer_shapes(a, layer):
            yield f"layers.{layer}.{name}", shape


def _layer_shapes(a: ModelArchitecture, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head_dim = a.hidden_size, a.layer_head_dim(layer)
    kv_width = a.layer_kv_heads(layer) * head_dim
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield f"{norm}_layernorm.weight", (hidden,)
    yield "layer_scalar", (1,)
    yield "self_attn.q_proj.weight", (a.num_attention_heads * head_dim, hidden)
    yield "self_attn.o_proj.weight", (hidden, a.num_attention_heads * head_dim)
    yield "self_attn.q_norm.weight", (head_dim,)
    if a.owns_cache(layer):
        yield "self_attn.k_proj.weight", (kv_width, hidden)
        yield "self_attn.k_norm.weight", (head_dim,)
        if not (a.attention_k_eq_v and a.kind(layer) is LayerKind.GLOBAL):
            yield "self_attn.v_proj.weight", (kv_width, hidden)
    width = a.layer_intermediate_size(layer)
    yield "mlp.gate_proj.weight", (width, hidden)
    yield "mlp.up_proj.weight", (width, hidden)
    yield "mlp.down_proj.weight", (hidden, width)
    if per_layer := a.hidden_size_per_layer_input:
        yield "per_layer_input_gate.weight", (per_layer, hidden)
        yield "per_layer_projection.weight", (hidden, per_layer)
        yield "post_per_layer_input_norm.weight", (hidden,)
    if a.num_experts:
        yield "router.proj.weight", (a.num_experts, hidden)
        yield "router.scale", (hidden,)
        yield "router.per_expert_scale", (a.num_experts,)
        yield "experts.gate_up_proj", (a.num_experts, 2 * a.moe_intermediate_size, hidden)
        yield "experts.down_proj", (a.num_experts, hidden, a.moe_intermediate_size)
        for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
            yield f"{norm}.weight", (hidden,)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """float32 values by role. Norms and scales lie in [0.5, 1.5]; matrices have variance 1 / fan-in."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        # Scores are q.k without 1/sqrt(d), and q and k have unit rows: their weights' product must be near 1/sqrt(d).
        return torch.rand(shape, generator=generator).add(0.5).mul(shape[0] ** -0.25)
    if "norm" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        return torch.rand(shape, generator=generator) + 0.5
    return torch.randn(shape, generator=generator).mul(shape[-1] ** -0.5)


def write_weights(architecture: ModelArchitecture, directory: Path, *, seed: int) -> int:
    """Write model.safetensors (bfloat16) and return its tensor bytes. The same seed writes the same values."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        PREFIX + name: _random(name, shape, generator).to(torch.bfloat16) for name, shape in tensor_shapes(architecture)
    }
    return save_weights(tensors, directory)


def save_weights(tensors: dict[str, torch.Tensor], directory: Path) -> int:
    """Write model.safetensors, readable by all, and return its tensor bytes."""
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library writes 0600, which a pod with another user could not read
    return sum(tensor.nbytes for tensor in tensors.values())
