"""Which checkpoint tensors fill what makes rows of sounds. Every rank reads them whole, in floats: where the text is
quantised, they are not."""

from __future__ import annotations

from collections.abc import Iterator

from modelserve_worker.models.audio_tower import AudioEmbedder, AudioFeedForward, AudioLayer, AudioTower
from modelserve_worker.models.tower_linear import linear_sources
from modelserve_worker.models.weight_source import WeightSource, whole_tensor

_TOWER = "model.audio_tower."
_PROJECTION = "model.embed_audio.embedding_projection.weight"


def audio_sources(embedder: AudioTower | AudioEmbedder) -> Iterator[WeightSource]:
    if isinstance(embedder, AudioTower):
        yield from _tower(embedder)
    yield from whole_tensor(_PROJECTION, embedder.projection)


def _tower(tower: AudioTower) -> Iterator[WeightSource]:
    tensors = {
        "subsample_conv_projection.layer0.conv.weight": tower.first,
        "subsample_conv_projection.layer0.norm.weight": tower.first_norm,
        "subsample_conv_projection.layer1.conv.weight": tower.second,
        "subsample_conv_projection.layer1.norm.weight": tower.second_norm,
        "subsample_conv_projection.input_proj_linear.weight": tower.entry,
        "output_proj.weight": tower.out,
        "output_proj.bias": tower.bias,
    }
    for name, parameter in tensors.items():
        yield from whole_tensor(f"{_TOWER}{name}", parameter)
    for number, layer in enumerate(tower.layers):
        assert isinstance(layer, AudioLayer)
        yield from _layer(f"{_TOWER}layers.{number}.", layer)


def _layer(prefix: str, layer: AudioLayer) -> Iterator[WeightSource]:
    yield from _feed_forward(f"{prefix}feed_forward1.", layer.first)
    yield from _feed_forward(f"{prefix}feed_forward2.", layer.second)
    attention, convolution = layer.attention, layer.convolution
    yield from linear_sources([f"{prefix}self_attn.{name}_proj" for name in "qkv"], attention.qkv)
    yield from linear_sources([f"{prefix}self_attn.post"], attention.out)
    yield from linear_sources([f"{prefix}lconv1d.linear_start"], convolution.gated)
    yield from linear_sources([f"{prefix}lconv1d.linear_end"], convolution.out)
    tensors = {
        "self_attn.relative_k_proj.weight": attention.distances,
        "self_attn.per_dim_scale": attention.scale,
        "norm_pre_attn.weight": attention.norm_before,
        "norm_post_attn.weight": attention.norm_behind,
        "lconv1d.depthwise_conv1d.weight": convolution.weight,
        "lconv1d.pre_layer_norm.weight": convolution.norm_before,
        "lconv1d.conv_norm.weight": convolution.norm_within,
        "norm_out.weight": layer.norm,
    }
    for name, parameter in tensors.items():
        yield from whole_tensor(f"{prefix}{name}", parameter)


def _feed_forward(prefix: str, part: AudioFeedForward) -> Iterator[WeightSource]:
    yield from linear_sources([f"{prefix}ffw_layer_1"], part.up)
    yield from linear_sources([f"{prefix}ffw_layer_2"], part.down)
    yield from whole_tensor(f"{prefix}pre_layer_norm.weight", part.norm_before)
    yield from whole_tensor(f"{prefix}post_layer_norm.weight", part.norm_behind)
