"""Names of an adapter's tensors: which factor of which module each is, or why it is none."""

from __future__ import annotations

import re
from typing import NamedTuple

from modelserve.errors import UnsupportedModel

ROOT = "base_model.model."  # before the name that a module has in its model
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
TOWERS = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|vision_embedder|embed_vision|audio_tower|embed_audio|multi_modal_\w+)\."
)
WRAPPED = ".base_layer"  # experts whose two parameters are adapted: PEFT wraps the wrapper of the first one
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.[A-Za-z0-9_-]+)?\.weight")

STRIP_TOWERS = (
    "strip them: python -c 'from safetensors.torch import load_file as l, save_file as s; "
    'n = "adapter_model.safetensors"; t = l(n); '
    's({k: v for k, v in t.items() if "language_model" in k}, n)\''
)


class FactorName(NamedTuple):
    """Of one tensor: the module by its whole name in the model, and relative to the text model."""

    whole: str
    module: str
    factor: str  # A or B


def factor_name(name: str) -> FactorName:
    """Raises UnsupportedModel, which says why, for a tensor that is no factor of a module of the text model."""
    whole = name.removeprefix(ROOT)
    if TOWERS.match(whole):
        raise UnsupportedModel(f"it is of an image or audio tower, which is not served; {STRIP_TOWERS}")
    if "lora_magnitude_vector" in name:
        raise UnsupportedModel("it is DoRA's, which is not served")
    if "lora_embedding_" in name:
        raise UnsupportedModel("adapted embeddings are not served")
    if name.endswith(".bias"):
        raise UnsupportedModel("biases are not served")
    if (found := _FACTOR.fullmatch(whole)) is None:
        raise UnsupportedModel("it is no factor of LoRA: whole modules (modules_to_save) are not served")
    module = found["module"]
    prefix = next(prefix for prefix in TEXT_PREFIXES if module.startswith(prefix))
    return FactorName(module, module.removeprefix(prefix), found["factor"])
