"""Transformers' logits of prompts with images for a unified checkpoint, and such prompts of random patches."""

from __future__ import annotations

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


def unified_model(directory: Path) -> Any:
    from transformers import Gemma4UnifiedForConditionalGeneration

    return Gemma4UnifiedForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _inputs(patches: Sequence[ImagePatches]) -> dict[str, Tensor]:
    """As the processor hands images over: padded to the longest, padding at (-1, -1)."""
    most = max(map(len, patches))
    values, places = torch.zeros(len(patches), most, 48 * 48 * 3), torch.full((len(patches), most, 2), -1)
    for index, each in enumerate(patches):
        values[index, : len(each)] = torch.from_numpy(each.values).double().mul(1 / 255).float()
        for number in range(len(each)):
            places[index, number] = torch.tensor([number % each.columns, number // each.columns])
    return {"pixel_values": values, "image_position_ids": places}


def reference_rows(directory: Path, patches: Sequence[ImagePatches]) -> list[Tensor]:
    """[N, H] of each image."""
    with torch.no_grad():
        found = unified_model(directory).get_image_features(**_inputs(patches), return_dict=True)
    return list(found.pooler_output)


def seen_logits(
    directory: Path, token_ids: Sequence[int], spans: Sequence[EmbeddedSpan], *, image_token: int = IMAGE_TOKEN
) -> Tensor:
    """float32 [len(token_ids), vocab], in one pass, with the masks that transformers generates with: its bare forward
    has images see each other in global layers, too, as no other implementation and not its own `generate` does."""
    ids, model = torch.tensor([token_ids]), unified_model(directory)
    with torch.no_grad():
        masks = model.create_masks_for_generate(
            model.config, model.get_input_embeddings()(ids), None, None, torch.arange(len(token_ids))[None],
            mm_token_type_ids=(ids == image_token).long(),
        )  # fmt: skip
        inputs = _inputs([span.embeddings for span in spans if isinstance(span.embeddings, ImagePatches)])
        logits: Tensor = model(input_ids=ids, attention_mask=masks, use_cache=False, **inputs).logits
    return logits[0].float()
