"""The spectrum that the encoder hears: logarithms of magnitudes on the mel scale, 128 bins every 10 ms.

    m = ln(|rfft_512(w x)| M + 0.001)

of frames x of 320 samples, w the periodic Hann window, M triangles between points that are equally far apart on the
scale 2595 log10(1 + f / 700) from 0 to 8,000 Hz. 160 zeros lie before the first sample, and no frame reaches behind the
last: the reference has those as zeros and masks them, which comes to the same.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from modelserve.model.audio import HOP, RATE, WINDOW, mel_frames
from modelserve.model.audio_tower import MEL_BINS

_FFT = 512
_FLOOR = np.float32(1e-3)
_AT_A_TIME = 3_000  # frames: 30 s, whose complex spectrum has 6 MB


def log_mel(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """samples float32 [n] at 16,000 a second -> float32 [mel_frames(n), 128]."""
    count = mel_frames(len(samples))
    padded = np.concatenate((np.zeros(WINDOW // 2, dtype=np.float32), samples))
    if not count:
        return np.zeros((0, MEL_BINS), dtype=np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:count]
    made = [_log_mel(frames[at : at + _AT_A_TIME]) for at in range(0, count, _AT_A_TIME)]
    return np.concatenate(made)


def _log_mel(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    magnitudes = np.abs(np.fft.rfft(frames * _window(), n=_FFT, axis=-1)).astype(np.float32)
    made: NDArray[np.float32] = np.log(magnitudes @ mel_triangles() + _FLOOR)
    return made


@cache
def _window() -> NDArray[np.float32]:
    turns = 2 * np.pi * np.arange(WINDOW) / WINDOW
    return (0.5 - 0.5 * np.cos(turns)).astype(np.float32)


@cache
def mel_triangles() -> NDArray[np.float32]:
    """[257, 128]: what each frequency adds to each bin."""
    highest = 2595.0 * np.log10(1.0 + RATE / 2 / 700.0)
    corners = 700.0 * (10.0 ** (np.linspace(0.0, highest, MEL_BINS + 2) / 2595.0) - 1.0)
    frequencies = np.linspace(0.0, RATE / 2, _FFT // 2 + 1)[:, None]
    rising = (frequencies - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - frequencies) / (corners[2:] - corners[1:-1])
    return np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32)
