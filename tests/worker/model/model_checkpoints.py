"""Small Gemma 4 checkpoints with every tensor random, and the reference's logits for them.

`make_checkpoint` writes what transformers' own `save_pretrained` writes. transformers initialises norm weights, layer
scalars and expert scales to one, which would hide a dropped multiplication: here all of them are random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelserve.inspection import read_architecture, read_weight_format
from modelserve.model.audio import AudioArchitecture
from modelserve.model.images import ImageArchitecture
from modelserve_worker.kernels.operations import PLAIN, Operations
from modelserve_worker.layers.parallel import TensorParallel
from modelserve_worker.layers.placement import Placement
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM as Gemma4
from modelserve_worker.weights.loader import load_model

WINDOW = 9
IMAGE_TOKEN = 250  # of the small unified checkpoint
S, F = "sliding_attention", "full_attention"

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        S: {"rope_type": "default", "rope_theta": 10_000.0},
        F: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    },
}

VARIANTS: dict[str, dict[str, Any]] = {
    "E2B": {
        "layer_types": [S, S, F, S, F, S, S, F],
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
    },
    "E4B": {
        "layer_types": [S, S, F, S, S, F, S, F],
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
    },
    "12B": {
        "layer_types": [S, S, F, S, S, F],
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "26B-A4B": {
        "layer_types": [S, S, F, S, F],
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    },
    "31B": {
        "layer_types": [S, S, F, S, S, F],
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
    },
}


def make_checkpoint(
    variant: str, directory: Path, *, seed: int, dtype: torch.dtype = torch.float32, **changes: int
) -> dict[str, Any]:
    """Write config.json and model.safetensors of a small `variant` (a key of VARIANTS), with `changes` to its config;
    return the config as a dict."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig  # seconds, which ranks that only load need not wait

    config = Gemma4TextConfig(
        **COMMON | VARIANTS[variant] | {"num_hidden_layers": len(VARIANTS[variant]["layer_types"])} | changes
    )
    model = Gemma4ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            tensor.copy_(_random(name, tensor, generator))
    model.to(dtype).save_pretrained(directory)
    return config.to_dict()


def make_unified(directory: Path, *, seed: int, image_token: int = IMAGE_TOKEN, **changes: int) -> dict[str, Any]:
    """The same of a 12B that sees, in float32 as transformers saves it: text with `changes`, and what embeds patches of
    48 x 48 pixels."""
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    layers = len(VARIANTS["12B"]["layer_types"])
    text = COMMON | VARIANTS["12B"] | {"num_hidden_layers": layers, "use_bidirectional_attention": "vision"}
    text.pop("hidden_size_per_layer_input")
    text |= changes
    vision = {"mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 1120}
    config = Gemma4UnifiedConfig(
        text_config=text, vision_config=vision, audio_config={"audio_embed_dim": 16}, image_token_id=image_token,
        video_token_id=image_token + 3, audio_token_id=image_token + 4,
    )  # fmt: skip
    model = Gemma4UnifiedForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            tensor.copy_(_random(name, tensor, generator))
    model.save_pretrained(directory)
    return config.to_dict()


TOWERS: dict[str, dict[str, Any]] = {
    "clipped": {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
                "intermediate_size": 48, "use_clipped_linears": True},
    "standardised": {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24,
                     "intermediate_size": 80, "standardize": True},
}  # fmt: skip


CONFORMER: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "subsampling_conv_channels": [128, 4],
    "conv_kernel_size": 5, "output_proj_dims": 24, "use_clipped_linears": True,
}  # fmt: skip


def make_towered(
    variant: str, directory: Path, *, seed: int, image_token: int = IMAGE_TOKEN, hears: bool = False, **changes: Any
) -> dict[str, Any]:
    """The same of a model that sees by a tower: clipped beside per-layer embeddings, as small models' are, else
    standardised; with `hears` a conformer, too; the text with `changes`."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    small = bool(VARIANTS[variant].get("hidden_size_per_layer_input"))
    text = COMMON | VARIANTS[variant] | {"num_hidden_layers": len(VARIANTS[variant]["layer_types"])}
    text |= {"use_bidirectional_attention": None if small else "vision", "pad_token_id": 0} | changes
    vision = TOWERS["clipped" if small else "standardised"]
    config = Gemma4Config(
        text_config=text, vision_config=vision | {"num_hidden_layers": 2, "position_embedding_size": 512},
        audio_config=CONFORMER if hears else None,
        image_token_id=image_token, video_token_id=image_token + 3, audio_token_id=image_token + 4,
    )  # fmt: skip
    model = Gemma4ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            tensor.copy_(_random(name, tensor, generator))
    model.save_pretrained(directory)
    return config.to_dict()


_SMALLER = ("down_proj", "ffw_layer_2", "linear_end")  # behind a gate or a SiLU numbers are smaller


def _bound(name: str, noise: Tensor) -> Tensor:
    """Of a linear's inputs or outputs: a tenth of the numbers or so are beyond; behind a gated MLP they are smaller."""
    size = (1.3 + 0.3 * noise).abs() * (0.2 if name.split(".")[-2] in _SMALLER else 1)
    return -size if name.endswith("_min") else size


def _random(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Attention scores of variance 1 (q_norm * k_norm ~ 1 / sqrt(d)), matrices of unit gain, the rest 1 +- 0.2."""
    noise = torch.randn(tensor.shape, generator=generator)
    if not tensor.dim():
        return _bound(name, noise)
    if tensor.dim() > 1:
        return noise * tensor.shape[-1] ** -0.5
    scale = tensor.shape[0] ** -0.25 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
    return (1.0 + 0.2 * noise) * scale


def rewrite(directory: Path, *, rename: dict[str, str] | None = None, add: dict[str, Tensor] | None = None) -> None:
    """Change the single file of a checkpoint: replace name prefixes (old -> new), then add tensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for old, new in (rename or {}).items():
        tensors = {name.replace(old, new, 1) if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(tensors | (add or {}), path, metadata={"format": "pt"})


def reference_logits(directory: Path, token_ids: list[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """float32 [len(token_ids), vocab]: transformers' logits of every position, in one pass without a cache."""
    from transformers import Gemma4ForCausalLM

    model = Gemma4ForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits
    return logits[0].float()


def random_tokens(count: int, *, seed: int, vocab_size: int = 256) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (count,), generator=generator).tolist()


def load_checkpoint(
    directory: Path,
    *,
    parallel: TensorParallel | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    operations: Operations = PLAIN,
    images: ImageArchitecture | None = None,
    audio: AudioArchitecture | None = None,
) -> Gemma4:
    """The product's model with the weights of `directory`, on the CPU where no device is named."""
    placement = Placement(
        device or torch.device("cpu"), dtype, parallel or TensorParallel(), read_weight_format(directory), operations
    )
    return load_model(read_architecture(directory), directory, placement, images=images, audio=audio)
