"""Which tensors of a checkpoint make rows of images, and whether they are held as this release reads them: in floats,
however the text is stored."""

from __future__ import annotations

from collections.abc import Iterable

from modelserve.model.checkpoint_files import TensorEntry

IMAGE_PREFIXES = ("model.vision_embedder.", "model.vision_tower.", "model.embed_vision.")
IMAGE_DTYPES = ("BF16", "F16", "F32")
_QUANTISED = (".qweight", ".qzeros", ".scales", ".g_idx")


def is_quantised(tensor: TensorEntry) -> bool:
    """Whether it is a part of a quantised matrix, by its name or its dtype."""
    return ".weight_" in tensor.name or tensor.name.endswith(_QUANTISED) or tensor.dtype not in IMAGE_DTYPES


def holds_images(tensors: Iterable[TensorEntry]) -> bool:
    """Whether there are such tensors, and none of them is quantised."""
    held = [tensor for tensor in tensors if tensor.name.startswith(IMAGE_PREFIXES)]
    return bool(held) and not any(map(is_quantised, held))
