"""Sounds to send, in each format, and the architectures that hear them."""

from __future__ import annotations

import io

import numpy as np
import soundfile
from numpy.typing import NDArray

from modelserve.model.audio import RATE, AudioArchitecture

TOWERED = AudioArchitecture.from_config(
    {
        "model_type": "gemma4",
        "audio_config": {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "conv_kernel_size": 5,
            "subsampling_conv_channels": [8, 4], "output_proj_dims": 24,
        },
    }
)  # fmt: skip
UNIFIED = AudioArchitecture(embed_size=640)


def noise(seconds: float, *, rate: int = RATE, seed: int = 1, channels: int = 1) -> NDArray[np.float32]:
    """[n], or [n, channels]: louder and quieter by turns, and no two parts alike."""
    generator = np.random.default_rng(seed)
    count = round(seconds * rate)
    loud = 0.02 + 0.2 * (1 + np.sin(np.arange(count) * 3.0 / rate))[:, None]
    made = (loud * generator.standard_normal((count, channels))).clip(-1, 1).astype(np.float32)
    return made[:, 0] if channels == 1 else made


def saved(samples: NDArray[np.float32], kind: str = "WAV", *, rate: int = RATE, subtype: str | None = None) -> bytes:
    held = io.BytesIO()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(held, "w", rate, channels, format=kind, subtype=subtype) as file:
        for at in range(0, len(samples), rate):  # what writes OGG falls over longer ones
            file.write(samples[at : at + rate])
    return held.getvalue()
