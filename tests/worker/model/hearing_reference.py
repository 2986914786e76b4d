"""Transformers' rows and logits of prompts with sounds, and such prompts of random frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from model_checkpoints import IMAGE_TOKEN, random_tokens
from torch import Tensor
from unified_reference import reference_model

from modelserve.model.audio import AudioArchitecture
from modelserve_worker.embedded_spans import AudioFrames, EmbeddedSpan

AUDIO_TOKEN = IMAGE_TOKEN + 4
BEGIN, END = 248, 249


def random_sound(frames: int, audio: AudioArchitecture, *, seed: int) -> AudioFrames:
    """Frames as of a spectrum, or of samples."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((frames, audio.frame_values)).astype(np.float32)
    values = values * 2 - 3 if audio.tower is not None else values * generator.uniform(0.01, 0.5, (frames, 1))
    return AudioFrames(values.astype(np.float32), -(-frames // audio.frames_per_row))


def sound_span(start: int, frames: AudioFrames, *, seed: int) -> EmbeddedSpan:
    return EmbeddedSpan(start, frames, b"sound" + seed.to_bytes(11, "little"), mutual=False)


def heard_prompt(length: int, spans: Sequence[EmbeddedSpan], *, seed: int) -> tuple[int, ...]:
    """Random tokens, and sounds between their marks."""
    tokens = random_tokens(length, seed=seed, vocab_size=240)
    for span in spans:
        tokens[span.start - 1 : span.end + 1] = [BEGIN, *[AUDIO_TOKEN] * len(span), END]
    return tuple(tokens)


def _inputs(sounds: Sequence[AudioFrames]) -> dict[str, Tensor]:
    """As the processor hands sounds over: padded to the longest, and longer, as it pads samples."""
    most = max(len(each.values) for each in sounds) + 3
    values = torch.zeros(len(sounds), most, sounds[0].values.shape[1])
    mask = torch.zeros(len(sounds), most, dtype=torch.bool)
    for index, each in enumerate(sounds):
        values[index, : len(each.values)], mask[index, : len(each.values)] = torch.from_numpy(each.values), True
    return {"input_features": values, "input_features_mask": mask}


def reference_sound_rows(directory: Path, sounds: Sequence[AudioFrames]) -> list[Tensor]:
    """[N, H] of each, of all together."""
    model = reference_model(directory)
    with torch.no_grad():
        found = model.model.get_audio_features(**_inputs(sounds), return_dict=True)
    return [rows[mask] for rows, mask in zip(found.pooler_output, found.attention_mask, strict=True)]


def heard_logits(directory: Path, token_ids: Sequence[int], spans: Sequence[EmbeddedSpan]) -> Tensor:
    """float32 [len(token_ids), vocab], in one pass."""
    ids, model = torch.tensor([token_ids]), reference_model(directory)
    with torch.no_grad():
        masks = model.create_masks_for_generate(
            model.config, model.get_input_embeddings()(ids), None, None, torch.arange(len(token_ids))[None],
            mm_token_type_ids=torch.zeros_like(ids),
        )  # fmt: skip
        sounds = [span.embeddings for span in spans if isinstance(span.embeddings, AudioFrames)]
        logits: Tensor = model(input_ids=ids, attention_mask=masks, use_cache=False, **_inputs(sounds)).logits
    return logits[0].float()
