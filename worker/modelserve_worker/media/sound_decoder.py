"""A sound as its decoder makes it: one channel of 16,000 samples a second, whole or cut at quiet places, in frames.

Headers lie, so the length is what was read: a sample more than may be, and it is too long.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from modelserve.model.audio import RATE
from modelserve.sizing.media.audio_input import HIGHEST_RATE, LOWEST_RATE, MOST_CHANNELS
from modelserve_worker.media.decode_order import SoundOrder
from modelserve_worker.media.quiet_cuts import cuts
from modelserve_worker.media.spectrum import log_mel

Samples = NDArray[np.float32]

_MAJOR = {"WAV": ("WAV", "WAVEX"), "FLAC": ("FLAC",), "OGG": ("OGG",), "MP3": ("MP3",)}
_BLOCK = 1 << 16  # samples of all channels that are read at a time
_LOUDEST = 1e6  # files of floats may hold anything; integers of 16 bits that were never scaled are 32,768 at most


class TooLong(ValueError):  # noqa: N818 - as its client is told
    """More than the seconds that it may have."""


class TooShort(ValueError):  # noqa: N818
    """Fewer samples than a row is made of."""


def decoded(data: bytes, order: SoundOrder) -> bytes:
    """How many sounds it was cut into, uint32, of each how many samples and frames it has, and all frames in float32.
    Raises TooLong, TooShort, or what libsndfile does for a file that is broken."""
    samples = _heard(data, order)
    ends = cuts(samples, order.piece_samples) if order.piece_samples else [len(samples)]
    pieces = [samples[first:end] for first, end in zip([0, *ends], ends, strict=False)]
    for piece in pieces:
        if len(piece) < order.least_samples:
            raise TooShort(
                f"the sound has {len(piece)} samples at {RATE} a second; the model hears no fewer than "
                f"{order.least_samples}"
            )
    frames = [_frames(piece, order.frame_samples) for piece in pieces]
    sizes = (number for piece, made in zip(pieces, frames, strict=True) for number in (len(piece), len(made)))
    head = struct.pack(f"<I{2 * len(pieces)}I", len(pieces), *sizes)
    return b"".join((head, *(each.tobytes() for each in frames)))


def _heard(data: bytes, order: SoundOrder) -> Samples:
    """All of it, [n] at RATE."""
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        if file.format not in _MAJOR[order.format]:
            raise ValueError(f"it begins as {order.format} and is {file.format}")
        if not LOWEST_RATE <= file.samplerate <= HIGHEST_RATE:
            raise ValueError(
                f"it has {file.samplerate} samples a second; {LOWEST_RATE} to {HIGHEST_RATE} are read: resample it"
            )
        if file.channels > MOST_CHANNELS:
            raise ValueError(f"it has {file.channels} channels; the limit is {MOST_CHANNELS}: mix them down")
        most = order.seconds * file.samplerate
        resample = soxr.ResampleStream(file.samplerate, RATE, 1, dtype="float32", quality="HQ")
        parts = [resample.resample_chunk(part) for part in _mixed(file, most)]
        parts.append(resample.resample_chunk(np.zeros(0, dtype=np.float32), last=True))
    samples: Samples = np.concatenate(parts)[: order.seconds * RATE]  # a rounding may add one
    if not np.isfinite(samples).all():
        raise ValueError("it holds samples that are no numbers")
    return samples


def _mixed(file: soundfile.SoundFile, most: int) -> Iterator[Samples]:
    """The mean of its channels, block by block. Raises TooLong once there is one sample more than `most`."""
    read, each = 0, max(1, _BLOCK // file.channels)
    while True:
        block = file.read(min(each, most + 1 - read), dtype="float32", always_2d=True)
        if not len(block):
            return
        read += len(block)
        if read > most:
            raise TooLong(
                f"the sound is longer than {most / file.samplerate:g} s; the model hears no more at a time: send it in "
                "parts"
            )
        if not np.abs(block).max() <= _LOUDEST:  # nor for what is no number
            raise ValueError(f"it holds samples that are no numbers, or beyond {_LOUDEST:g}")
        yield block.mean(axis=1, dtype=np.float32)


def _frames(samples: Samples, frame_samples: int) -> Samples:
    """[F, bins] of its spectrum, or [F, frame_samples] of the samples themselves, zeros behind the last."""
    if not frame_samples:
        return log_mel(samples)
    count = -(-len(samples) // frame_samples)
    padded = np.zeros(count * frame_samples, dtype=np.float32)
    padded[: len(samples)] = samples
    return padded.reshape(count, frame_samples)
