"""Which tensors of a checkpoint make rows of images and of sounds, and whether they are held as this release reads
them: in floats, however the text is stored."""

from __future__ import annotations

from collections.abc import Iterable

from modelserve.model.checkpoint_files import TensorEntry

IMAGE_PREFIXES = ("model.vision_embedder.", "model.vision_tower.", "model.embed_vision.")
AUDIO_PREFIXES = ("model.audio_tower.", "model.embed_audio.")
MEDIA_DTYPES = ("BF16", "F16", "F32")
_QUANTISED = (".qweight", ".qzeros", ".scales", ".g_idx")


def is_quantised(tensor: TensorEntry) -> bool:
    """Whether it is a part of a quantised matrix, by its name or its dtype."""
    return ".weight_" in tensor.name or tensor.name.endswith(_QUANTISED) or tensor.dtype not in MEDIA_DTYPES


def holds(tensors: Iterable[TensorEntry], prefixes: tuple[str, ...]) -> bool:
    """Whether there are tensors of these names, and none of them is quantised."""
    held = [tensor for tensor in tensors if tensor.name.startswith(prefixes)]
    return bool(held) and not any(map(is_quantised, held))
