"""Transformers' logits of prompts with images for a checkpoint that sees, and such prompts of random patches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_checkpoints import IMAGE_TOKEN, random_tokens
from torch import Tensor

from modelserve_worker.embedded_spans import EmbeddedSpan, ImagePatches

BEGIN, END = 248, 249  # of an image


def random_image(rows: int, columns: int, *, seed: int) -> ImagePatches:
    """Patches of 48 x 48, no two alike in brightness, contrast or colour."""
    generator = np.random.default_rng(seed)
    count = rows * columns
    middle, width = generator.integers(20, 236, (count, 1, 3)), generator.integers(1, 90, (count, 1, 1))
    values = middle + width * generator.standard_normal((count, 48 * 48, 3))
    return ImagePatches(np.clip(values, 0, 255).astype(np.uint8).reshape(count, -1), columns)


def image_span(start: int, patches: ImagePatches, *, seed: int, mutual: bool = True) -> EmbeddedSpan:
    return EmbeddedSpan(start, patches, seed.to_bytes(16, "little"), mutual)


def seen_prompt(length: int, spans: Sequence[EmbeddedSpan], *, seed: int) -> tuple[int, ...]:
    """Random tokens, and images between their marks."""
    tokens = random_tokens(length, seed=seed, vocab_size=240)
    for span in spans:
        tokens[span.start - 1 : span.end + 1] = [BEGIN, *[IMAGE_TOKEN] * len(span), END]
    return tuple(tokens)


def reference_model(directory: Path) -> Any:
    from transformers import Gemma4ForConditionalGeneration, Gemma4UnifiedForConditionalGeneration

    kinds = {"gemma4": Gemma4ForConditionalGeneration, "gemma4_unified": Gemma4UnifiedForConditionalGeneration}
    kind = kinds[json.loads((directory / "config.json").read_text())["model_type"]]
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def _inputs(patches: Sequence[ImagePatches], *, side: int) -> dict[str, Tensor]:
    """As the processor hands images over, in squares of `side` pixels: padded to the longest, padding at (-1, -1)."""
    most = max(map(len, patches)) * (48 // side) ** 2
    values, places = torch.zeros(len(patches), most, 3 * side**2), torch.full((len(patches), most, 2), -1)
    for index, each in enumerate(patches):
        rows, columns = len(each) // each.columns, 48 * each.columns // side
        picture = each.values.reshape(rows, each.columns, 48, 48, 3).swapaxes(1, 2)
        cut = picture.reshape(48 * rows // side, side, columns, side, 3).swapaxes(1, 2).reshape(-1, 3 * side**2)
        values[index, : len(cut)] = torch.from_numpy(cut.copy()).double().mul(1 / 255).float()
        numbers = torch.arange(len(cut))
        places[index, : len(cut)] = torch.stack((numbers % columns, numbers // columns), 1)
    return {"pixel_values": values, "image_position_ids": places}


def _side(model: Any) -> int:
    return 16 if model.config.model_type == "gemma4" else 48


def reference_rows(directory: Path, patches: Sequence[ImagePatches]) -> list[Tensor]:
    """[N, H] of each image."""
    model = reference_model(directory)
    with torch.no_grad():
        found = model.get_image_features(**_inputs(patches, side=_side(model)), return_dict=True)
    return list(found.pooler_output)


def seen_logits(
    directory: Path, token_ids: Sequence[int], spans: Sequence[EmbeddedSpan], *, image_token: int = IMAGE_TOKEN
) -> Tensor:
    """float32 [len(token_ids), vocab], in one pass, with the masks that transformers generates with: its bare forward
    has images see each other in global layers, too, as no other implementation and not its own `generate` does."""
    ids, model = torch.tensor([token_ids]), reference_model(directory)
    with torch.no_grad():
        masks = model.create_masks_for_generate(
            model.config, model.get_input_embeddings()(ids), None, None, torch.arange(len(token_ids))[None],
            mm_token_type_ids=(ids == image_token).long(),
        )  # fmt: skip
        pictures = [span.embeddings for span in spans if isinstance(span.embeddings, ImagePatches)]
        inputs = _inputs(pictures, side=_side(model))
        logits: Tensor = model(input_ids=ids, attention_mask=masks, use_cache=False, **inputs).logits
    return logits[0].float()
