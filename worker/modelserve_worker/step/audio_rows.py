"""Rows of sounds on the device, made of their frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from modelserve_worker.embedded_spans import AudioFrames
from modelserve_worker.models.audio_tower import AudioEmbedder, AudioTower, Blocks, block_layout
from modelserve_worker.step.staging import upload


def rows_of_sounds(sounds: Sequence[AudioFrames], embedder: AudioTower | AudioEmbedder) -> Tensor:
    """Rows [sum of N, H] of whole sounds, one behind the other; of the 12B of any frames."""
    device, values = embedder.projection.device, [each.values for each in sounds]
    sent = upload(values[0] if len(values) == 1 else np.concatenate(values), device)
    made: Tensor
    if isinstance(embedder, AudioEmbedder):
        made = embedder(sent)
        return made
    places, real, seen = block_layout([len(each) for each in sounds], keys=embedder.tower.keys)
    blocks = Blocks(upload(places, device), upload(real, device).to(embedder.entry.dtype), upload(seen, device))
    made = embedder(sent, [len(each) for each in values], blocks)
    return made
