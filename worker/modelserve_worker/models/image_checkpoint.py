"""Which checkpoint tensors fill what makes rows of images. Every rank reads them whole, in floats: where the text is
quantised, they are not."""

from __future__ import annotations

from collections.abc import Iterator

from modelserve_worker.models.image_embedder import ImageEmbedder
from modelserve_worker.models.image_tower import ImageTower, TowerLayer
from modelserve_worker.models.tower_linear import linear_sources
from modelserve_worker.models.weight_source import WeightSource, whole_tensor

_TOWER = "model.vision_tower."
_PROJECTION = "model.embed_vision.embedding_projection.weight"


def image_sources(embedder: ImageTower | ImageEmbedder) -> Iterator[WeightSource]:
    yield from _tower(embedder) if isinstance(embedder, ImageTower) else _embedder(embedder)
    yield from whole_tensor(_PROJECTION, embedder.projection)


def _embedder(embedder: ImageEmbedder) -> Iterator[WeightSource]:
    norms = {"patch_ln1": embedder.patch_norm, "patch_ln2": embedder.embedded_norm, "pos_norm": embedder.placed_norm}
    tensors = {
        **{f"{name}.{part}": getattr(norm, part) for name, norm in norms.items() for part in ("weight", "bias")},
        "patch_dense.weight": embedder.patch_weight,
        "patch_dense.bias": embedder.patch_bias,
        "pos_embedding": embedder.positions,
    }
    for name, parameter in tensors.items():
        yield from whole_tensor(f"model.vision_embedder.{name}", parameter)


def _tower(tower: ImageTower) -> Iterator[WeightSource]:
    yield from whole_tensor(f"{_TOWER}patch_embedder.input_proj.weight", tower.patch_weight)
    yield from whole_tensor(f"{_TOWER}patch_embedder.position_embedding_table", tower.positions)
    for number, layer in enumerate(tower.layers):
        assert isinstance(layer, TowerLayer)
        yield from _layer(f"{_TOWER}encoder.layers.{number}.", layer)
    if tower.bias is not None and tower.scale is not None:
        yield from whole_tensor(f"{_TOWER}std_bias", tower.bias)
        yield from whole_tensor(f"{_TOWER}std_scale", tower.scale)


def _layer(prefix: str, layer: TowerLayer) -> Iterator[WeightSource]:
    yield from linear_sources([f"{prefix}self_attn.{name}_proj" for name in "qkv"], layer.qkv)
    yield from linear_sources([f"{prefix}self_attn.o_proj"], layer.o)
    yield from linear_sources([f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"], layer.gate_up)
    yield from linear_sources([f"{prefix}mlp.down_proj"], layer.down)
    for number, name in enumerate("qk"):
        yield from whole_tensor(f"{prefix}self_attn.{name}_norm.weight", layer.qk_norm[number])
    norms = {
        "input_layernorm": layer.input_norm,
        "post_attention_layernorm": layer.attended_norm,
        "pre_feedforward_layernorm": layer.mlp_norm,
        "post_feedforward_layernorm": layer.added_norm,
    }
    for name, weight in norms.items():
        yield from whole_tensor(f"{prefix}{name}.weight", weight)
