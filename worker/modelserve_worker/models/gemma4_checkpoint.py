"""Which checkpoint tensor fills which part of which parameter, and what a checkpoint may hold besides.

Names are relative to the text model: `layers.0.self_attn.q_proj.weight`, without `model.language_model.` or `model.`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from modelserve.model.architecture import ModelArchitecture
from modelserve.model.media_files import AUDIO_PREFIXES, IMAGE_PREFIXES
from modelserve_worker.layers.attention import Attention
from modelserve_worker.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from modelserve_worker.layers.moe import Experts
from modelserve_worker.layers.parallel import Shard
from modelserve_worker.models.audio_checkpoint import audio_sources
from modelserve_worker.models.gemma4 import DecoderLayer, Gemma4ForCausalLM
from modelserve_worker.models.image_checkpoint import image_sources
from modelserve_worker.models.weight_source import (
    TABLES,
    MatrixNames,
    MatrixShare,
    Region,
    WeightSource,
    is_fused,
    matrix_sources,
    whole,
    whole_tensor,
)

TEXT_PREFIXES = ("model.language_model.", "model.")
TOWER_PREFIXES = (
    "model.vision_tower.",
    "model.embed_vision.",
    "model.vision_embedder.",
    "model.audio_tower.",
    "model.embed_audio.",
)
HEAD = "lm_head.weight"
# Scales of inputs and of the cache, whatever layer has them: both are made from what is there.
UNUSED_ENDINGS = (
    ".input_scale", ".input_global_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale", ".prob_scale",
)  # fmt: skip


_ENDINGS = (
    *(f".weight{ending}" for ending in ("", "_packed", "_scale", "_scale_2", "_scale_inv", "_global_scale")),
    *(f".weight{ending}" for ending in ("_zero_point", "_g_idx", "_shape")),
    *(f".{name}" for name in ("qweight", "qzeros", "scales", "g_idx")),
)  # fmt: skip


def text_name(name: str) -> str | None:
    """Name relative to the text model; None for a tensor of an image or audio tower, which is not served."""
    if name.startswith(TOWER_PREFIXES):
        return None
    for prefix in TEXT_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def media_name(name: str, *, images: bool, audio: bool) -> str | None:
    """`text_name`, and the whole name of a tensor of what embeds images or sounds, as far as the model takes them."""
    taken = (IMAGE_PREFIXES if images else ()) + (AUDIO_PREFIXES if audio else ())
    return name if name.startswith(taken) else text_name(name)


def unused_names(model: Gemma4ForCausalLM) -> frozenset[str]:
    """Tensors that some checkpoints carry and no variant reads.

    The first published E2B and E4B files hold k_proj, v_proj and k_norm of KV-shared layers, re-saved ones do not; a
    tied model may repeat its embedding as the output head.
    """
    names = shared_names(model.architecture)
    names |= {f"layers.{i}.experts.{name}_proj_shape" for i in range(len(model.layers)) for name in ("gate_up", "down")}
    return names | ({HEAD} if model.output_head is None else set())


def shared_names(architecture: ModelArchitecture) -> frozenset[str]:
    """Tensors of keys and values that a checkpoint may hold for layers that read another's cache."""
    return frozenset(
        f"layers.{layer}.self_attn.{name}{ending}"
        for layer in range(architecture.first_shared_layer, architecture.num_hidden_layers)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        for ending in _ENDINGS
    )


def names_experts_apart(names: Iterable[str]) -> bool:
    """Whether a checkpoint has tensors of each expert, as tools write that quantise modules of class Linear."""
    return any(".experts.0.gate_proj." in name for name in names)


def weight_sources(model: Gemma4ForCausalLM, *, experts_apart: bool = False) -> Iterator[WeightSource]:
    """Every tensor that a checkpoint must hold for this model, with this rank's share of it."""
    yield from sharded("embed_tokens.weight", model.embedding.weight, model.embedding.shard, dim=0)
    if (ple := model.per_layer_embedding) is not None:
        yield from sharded("embed_tokens_per_layer.weight", ple.table.weight, ple.table.shard, dim=0)
        yield from replicated("per_layer_model_projection", ple.projection)
        yield from whole_tensor("per_layer_projection_norm.weight", ple.norm.weight)
    for layer in model.decoder_layers():
        yield from layer_sources(f"layers.{layer.layer}.", layer)
        if layer.moe is not None:
            yield from _experts(f"layers.{layer.layer}.experts.", layer.moe.experts, apart=experts_apart)
    yield from whole_tensor("norm.weight", model.norm.weight)
    if model.image_embedder is not None:
        yield from image_sources(model.image_embedder)
    if model.audio_embedder is not None:
        yield from audio_sources(model.audio_embedder)
    if model.output_head is not None:
        yield from sharded(HEAD, model.output_head.weight, model.output_head.shard, dim=0)


def layer_sources(prefix: str, layer: DecoderLayer) -> Iterator[WeightSource]:
    """Those of one decoder layer, but for its experts."""
    yield from _attention(prefix + "self_attn.", layer.attention)
    yield from fused([prefix + "mlp.gate_proj", prefix + "mlp.up_proj"], layer.mlp.gate_up)
    yield from row_parallel(prefix + "mlp.down_proj", layer.mlp.down)
    unsplit = {
        "input_layernorm.weight": layer.input_norm.weight,
        "post_attention_layernorm.weight": layer.post_attention_norm.weight,
        "pre_feedforward_layernorm.weight": layer.pre_feedforward_norm.weight,
        "post_feedforward_layernorm.weight": layer.post_feedforward_norm.weight,
        "layer_scalar": layer.scalar,
    }
    if (ple := layer.per_layer_input) is not None:
        yield from replicated(prefix + "per_layer_input_gate", ple.gate)
        yield from replicated(prefix + "per_layer_projection", ple.projection)
        unsplit["post_per_layer_input_norm.weight"] = ple.norm.weight
    if (moe := layer.moe) is not None:
        unsplit["router.proj.weight"] = moe.router.weight
        unsplit["router.scale"] = moe.router.scale
        unsplit["router.per_expert_scale"] = moe.router.per_expert_scale
        unsplit["pre_feedforward_layernorm_2.weight"] = moe.pre_norm.weight
        unsplit["post_feedforward_layernorm_1.weight"] = moe.dense_post_norm.weight
        unsplit["post_feedforward_layernorm_2.weight"] = moe.post_norm.weight
    for name, parameter in unsplit.items():
        yield from whole_tensor(prefix + name, parameter)


def _attention(prefix: str, attention: Attention) -> Iterator[WeightSource]:
    names = ("q_proj", "k_proj", "v_proj")[: len(attention.qkv.shards)]
    yield from fused([prefix + name for name in names], attention.qkv)
    yield from row_parallel(prefix + "o_proj", attention.o)
    yield from whole_tensor(prefix + "q_norm.weight", attention.q_norm.weight)
    if attention.k_norm is not None:
        yield from whole_tensor(prefix + "k_norm.weight", attention.k_norm.weight)


def sharded(name: str, parameter: Tensor, shard: Shard, *, dim: int) -> Iterator[WeightSource]:
    """A table that ranks hold a share of."""
    shape = list(parameter.shape)
    shape[dim] = shard.total
    yield WeightSource(name, tuple(shape), parameter, (Region(dim, shard.start, 0, shard.size),), TABLES)


def replicated(name: str, linear: ReplicatedLinear) -> Iterator[WeightSource]:
    matrix = linear.matrix
    share = MatrixShare((whole(matrix.rows),), whole(matrix.columns))
    yield from matrix_sources(matrix, MatrixNames.of_module(name), share)


def row_parallel(name: str, linear: RowParallelLinear) -> Iterator[WeightSource]:
    share = MatrixShare((whole(linear.matrix.rows),), linear.shard)
    yield from matrix_sources(linear.matrix, MatrixNames.of_module(name), share)


def fused(names: Sequence[str], linear: ColumnParallelLinear) -> Iterator[WeightSource]:
    for part, (name, shard) in enumerate(zip(names, linear.shards, strict=True)):
        share = MatrixShare((shard,), whole(linear.matrix.columns), part)
        yield from matrix_sources(linear.matrix, MatrixNames.of_module(name), share)


def _experts(prefix: str, experts: Experts, *, apart: bool) -> Iterator[WeightSource]:
    """Both matrices of all experts: one tensor for all, where the format has such, or tensors of each expert."""
    shard = experts.shard
    for matrix, names in ((experts.gate_up, ("gate_proj", "up_proj")), (experts.down, ("down_proj",))):
        split_rows = matrix is experts.gate_up
        rows, columns = (shard, whole(matrix.columns)) if split_rows else (whole(matrix.rows), shard)
        if apart or not is_fused(matrix):
            for expert in range(matrix.experts):
                for part, name in enumerate(names):
                    share = MatrixShare((rows,), columns, part, expert)
                    yield from matrix_sources(matrix, MatrixNames.of_module(f"{prefix}{expert}.{name}"), share)
            continue
        total = len(names) * rows.total
        runs = tuple(Shard(first + rows.start, first + rows.stop, total) for first in range(0, total, rows.total))
        name = "gate_up_proj" if split_rows else "down_proj"
        yield from matrix_sources(matrix, MatrixNames.of_parameter(prefix + name), MatrixShare(runs, columns))
