"""Which checkpoint tensor fills which part of which parameter, and what a checkpoint may hold besides.

Names are relative to the text model: `layers.0.self_attn.q_proj.weight`, without `model.language_model.` or `model.`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from modelserve_worker.layers.attention import Attention
from modelserve_worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from modelserve_worker.layers.parallel import Shard
from modelserve_worker.models.gemma4 import DecoderLayer, Gemma4ForCausalLM

TEXT_PREFIXES = ("model.language_model.", "model.")
TOWER_PREFIXES = (
    "model.vision_tower.",
    "model.embed_vision.",
    "model.vision_embedder.",
    "model.audio_tower.",
    "model.embed_audio.",
)
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Region:
    """`length` indices of dimension `dim`: from `source` in the checkpoint tensor to `target` in the parameter."""

    dim: int
    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One checkpoint tensor of `shape`, and the regions of it that this rank copies into `parameter`."""

    name: str
    shape: tuple[int, ...]
    parameter: Tensor
    regions: tuple[Region, ...]


def text_name(name: str) -> str | None:
    """Name relative to the text model; None for a tensor of an image or audio tower, which is not served."""
    if name.startswith(TOWER_PREFIXES):
        return None
    for prefix in TEXT_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def unused_names(model: Gemma4ForCausalLM) -> frozenset[str]:
    """Tensors that some checkpoints carry and no variant reads.

    The first published E2B and E4B files hold k_proj, v_proj and k_norm of KV-shared layers, re-saved ones do not; a
    tied model may repeat its embedding as the output head.
    """
    architecture = model.architecture
    names = {
        f"layers.{layer}.self_attn.{name}.weight"
        for layer in range(architecture.first_shared_layer, architecture.num_hidden_layers)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    return frozenset(names | ({HEAD} if model.output_head is None else set()))


def weight_sources(model: Gemma4ForCausalLM) -> Iterator[WeightSource]:
    """Every tensor that a checkpoint must hold for this model, with this rank's share of it."""
    yield from _sharded("embed_tokens.weight", model.embedding.weight, model.embedding.shard, dim=0)
    if (ple := model.per_layer_embedding) is not None:
        yield from _sharded("embed_tokens_per_layer.weight", ple.table.weight, ple.table.shard, dim=0)
        yield from _whole("per_layer_model_projection.weight", ple.projection.weight)
        yield from _whole("per_layer_projection_norm.weight", ple.norm.weight)
    for layer in model.decoder_layers():
        yield from _layer(f"layers.{layer.layer}.", layer)
    yield from _whole("norm.weight", model.norm.weight)
    if model.output_head is not None:
        yield from _sharded(HEAD, model.output_head.weight, model.output_head.shard, dim=0)


def _layer(prefix: str, layer: DecoderLayer) -> Iterator[WeightSource]:
    yield from _attention(prefix + "self_attn.", layer.attention)
    yield from _fused([prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"], layer.mlp.gate_up)
    yield from _row_parallel(prefix + "mlp.down_proj.weight", layer.mlp.down)
    whole = {
        "input_layernorm.weight": layer.input_norm.weight,
        "post_attention_layernorm.weight": layer.post_attention_norm.weight,
        "pre_feedforward_layernorm.weight": layer.pre_feedforward_norm.weight,
        "post_feedforward_layernorm.weight": layer.post_feedforward_norm.weight,
        "layer_scalar": layer.scalar,
    }
    if (ple := layer.per_layer_input) is not None:
        whole["per_layer_input_gate.weight"] = ple.gate.weight
        whole["per_layer_projection.weight"] = ple.projection.weight
        whole["post_per_layer_input_norm.weight"] = ple.norm.weight
    if (moe := layer.moe) is not None:
        whole["router.proj.weight"] = moe.router.weight
        whole["router.scale"] = moe.router.scale
        whole["router.per_expert_scale"] = moe.router.per_expert_scale
        whole["pre_feedforward_layernorm_2.weight"] = moe.pre_norm.weight
        whole["post_feedforward_layernorm_1.weight"] = moe.dense_post_norm.weight
        whole["post_feedforward_layernorm_2.weight"] = moe.post_norm.weight
        shard = moe.experts.shard
        experts, _, hidden = moe.experts.gate_up.shape
        yield WeightSource(
            prefix + "experts.gate_up_proj",
            (experts, 2 * shard.total, hidden),
            moe.experts.gate_up,
            (Region(1, shard.start, 0, shard.size), Region(1, shard.total + shard.start, shard.size, shard.size)),
        )
        yield from _sharded(prefix + "experts.down_proj", moe.experts.down, shard, dim=2)
    for name, parameter in whole.items():
        yield from _whole(prefix + name, parameter)


def _attention(prefix: str, attention: Attention) -> Iterator[WeightSource]:
    names = ("q_proj", "k_proj", "v_proj")[: len(attention.qkv.shards)]
    yield from _fused([f"{prefix}{name}.weight" for name in names], attention.qkv)
    yield from _row_parallel(prefix + "o_proj.weight", attention.o)
    yield from _whole(prefix + "q_norm.weight", attention.q_norm.weight)
    if attention.k_norm is not None:
        yield from _whole(prefix + "k_norm.weight", attention.k_norm.weight)


def _whole(name: str, parameter: Tensor) -> Iterator[WeightSource]:
    size = parameter.shape[0]
    yield WeightSource(name, tuple(parameter.shape), parameter, (Region(0, 0, 0, size),))


def _sharded(name: str, parameter: Tensor, shard: Shard, *, dim: int) -> Iterator[WeightSource]:
    shape = list(parameter.shape)
    shape[dim] = shard.total
    yield WeightSource(name, tuple(shape), parameter, (Region(dim, shard.start, 0, shard.size),))


def _row_parallel(name: str, linear: RowParallelLinear) -> Iterator[WeightSource]:
    yield from _sharded(name, linear.weight, linear.shard, dim=1)


def _fused(names: Sequence[str], linear: ColumnParallelLinear) -> Iterator[WeightSource]:
    target = 0
    for name, shard in zip(names, linear.shards, strict=True):
        shape = (shard.total, linear.weight.shape[1])
        yield WeightSource(name, shape, linear.weight, (Region(0, shard.start, target, shard.size),))
        target += shard.size
