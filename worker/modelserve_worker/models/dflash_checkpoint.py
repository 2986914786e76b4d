"""Which tensor of a DFlash drafter's checkpoint fills which parameter; names without a `model.` that some have."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from modelserve_worker.models.dflash import DFlash
from modelserve_worker.models.dflash_layer import DFlashLayer
from modelserve_worker.models.gemma4_checkpoint import (
    HEAD,
    fused,
    replicated,
    row_parallel,
    sharded,
)
from modelserve_worker.models.weight_source import WeightSource, whole_tensor

EMBEDDING, TOKEN_MAP = "embed_tokens.weight", "d2t"
_OF_TRAINING = {"t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq"}


def dflash_sources(drafter: DFlash) -> Iterator[WeightSource]:
    """Every tensor that a checkpoint must hold, with this rank's share of it."""
    architecture, layers = drafter.architecture, drafter.drafting_layers()
    yield from replicated("fc", drafter.fc)
    yield from whole_tensor("hidden_norm.weight", drafter.hidden_norm.weight)
    projections = ("k_proj", "v_proj")[: architecture.values_per_row]
    names = ([f"layers.{each.layer}.self_attn.{name}" for name in projections] for each in layers)
    yield from fused(list(chain.from_iterable(names)), drafter.keys_values)
    for layer in layers:
        yield from _layer(f"layers.{layer.layer}.", layer)
    yield from whole_tensor("norm.weight", drafter.norm.weight)
    if (embedding := drafter.embedding) is not None:
        yield from sharded(EMBEDDING, embedding.weight, embedding.shard, dim=0)
    if (head := drafter.head).own is not None:
        yield from sharded(HEAD, head.own.weight, head.own.shard, dim=0)
    if head.tokens is not None:
        yield from whole_tensor(TOKEN_MAP, head.tokens, dtypes=("I64", "I32"))
    if (markov := drafter.markov) is not None:
        yield from whole_tensor("markov_head.markov_w1.weight", markov.before)
        yield from sharded("markov_head.markov_w2.weight", markov.added.weight, markov.added.shard, dim=0)
    if (confidence := drafter.confidence) is not None:
        yield from whole_tensor("confidence_head.proj.weight", confidence.weight)
        yield from whole_tensor("confidence_head.proj.bias", confidence.bias)
    if (selector := drafter.selector) is not None:
        yield from whole_tensor("candidate_selector.predecessor_codebook", selector.before)
        yield from whole_tensor("candidate_selector.successor_codebook", selector.candidates)
        yield from whole_tensor("candidate_selector.hidden_projection.weight", selector.projection)


def unused_dflash_names(drafter: DFlash) -> frozenset[str]:
    """Tensors that a drafter's files may carry and nobody reads: what training needs, and copies of the target's."""
    names = set(_OF_TRAINING)
    if drafter.embedding is None:
        names.add(EMBEDDING)
    if drafter.head.own is None:
        names.add(HEAD)
    if drafter.head.tokens is None:
        names.add(TOKEN_MAP)
    return frozenset(names)


def _layer(prefix: str, layer: DFlashLayer) -> Iterator[WeightSource]:
    yield from fused([prefix + "self_attn.q_proj"], layer.q)
    yield from row_parallel(prefix + "self_attn.o_proj", layer.o)
    yield from fused([prefix + "mlp.gate_proj", prefix + "mlp.up_proj"], layer.mlp.gate_up)
    yield from row_parallel(prefix + "mlp.down_proj", layer.mlp.down)
    gemma = layer.scalar is not None
    unsplit = {
        "self_attn.q_norm.weight": layer.q_norm.weight,
        "self_attn.k_norm.weight": layer.k_norm.weight,
        "input_layernorm.weight": layer.input_norm.weight,
        f"{'pre_feedforward' if gemma else 'post_attention'}_layernorm.weight": layer.feedforward_norm.weight,
    }
    if layer.after_attention is not None and layer.after_feedforward is not None and layer.scalar is not None:
        unsplit["post_attention_layernorm.weight"] = layer.after_attention.weight
        unsplit["post_feedforward_layernorm.weight"] = layer.after_feedforward.weight
        unsplit["layer_scalar"] = layer.scalar
    for name, parameter in unsplit.items():
        yield from whole_tensor(prefix + name, parameter)
    for name, convolution in (("attention_conv", layer.attention_conv), ("mlp_conv", layer.mlp_conv)):
        if convolution is not None:
            yield from whole_tensor(f"{prefix}{name}.base_kernel", convolution.base)
            yield from replicated(f"{prefix}{name}.kernel_projection", convolution.projection)
