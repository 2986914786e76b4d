"""What sounds cost a worker beside tokens and weights: host memory and processors. Bytes unless they say otherwise.

All of it is bounded by the worker, and counted in what a pod asks for only where sounds are planned.
"""

from __future__ import annotations

from typing import NamedTuple

from modelserve.model.audio import RATE, TOWER_SECONDS, AudioArchitecture
from modelserve.sizing.media.image_input import DECODER_BYTES, decode_processes
from modelserve.units import MIB

MOST_PER_REQUEST = 16
DEFAULT_SECONDS = TOWER_SECONDS
MOST_SECONDS = 600
"""Of a sound of models that take longer ones than TOWER_SECONDS."""

SOUND_BYTES = 24 * MIB
"""Of one sound as it is sent: what OpenAI's clients may send to be transcribed, but for a little."""

SOUND_BYTES_OF_REQUEST = 48 * MIB
MOST_CHANNELS = 16
LOWEST_RATE, HIGHEST_RATE = 1_000, 384_000
"""Samples a second of what is decoded."""

RECORDING_SECONDS = 1_800
"""Of a recording that is transcribed, which is cut into sounds of TOWER_SECONDS at most."""

HELD_FRAMES_BYTES = 640 * MIB  # 16 sounds of 600 s have 614 MB where they come as samples
HELD_REQUESTS = 64  # with as many sounds as they may have
KNOWN_FRAMES_BYTES = 32 * MIB
"""Frames of sounds that were decoded before, so that a known one is not decoded again."""


class AudioInput(NamedTuple):
    """Room for sounds in a worker: how many of a request, how many seconds each, and what makes rows of them."""

    per_request: int
    seconds: int
    architecture: AudioArchitecture

    @property
    def max_soft_tokens(self) -> int:
        """Rows of the longest sound."""
        return self.architecture.soft_tokens(self.seconds * RATE)

    @property
    def sound_bytes(self) -> int:
        """Frames of the longest sound, in float32."""
        return frames_bytes(self.architecture, self.seconds * RATE)


def frames_bytes(architecture: AudioArchitecture, samples: int) -> int:
    return 4 * architecture.frames(samples) * architecture.frame_values


def recording_bytes(architecture: AudioArchitecture) -> int:
    """Frames of the longest recording, but for some at cuts."""
    return frames_bytes(architecture, RECORDING_SECONDS * RATE)


def held_frames_bytes(audio: AudioInput) -> int:
    """Frames that open requests may have in the front end: of HELD_REQUESTS, within HELD_FRAMES_BYTES, which any one
    request's fit into, and of a recording. What would exceed it is refused (429)."""
    chat = min(HELD_REQUESTS * audio.per_request * audio.sound_bytes, HELD_FRAMES_BYTES)
    return chat + recording_bytes(audio.architecture)


def sent_bytes(per_request: int) -> int:
    """Of all sounds of one request as they are sent."""
    return min(per_request * SOUND_BYTES, SOUND_BYTES_OF_REQUEST)


def audio_host_bytes(audio: AudioInput, *, ranks: int, on_cpu: bool, decoders: bool) -> int:
    """Host memory of a worker for sounds: with `decoders`, those (where images have them, they are the same), frames in
    front end and ranks, known ones, and a body with sounds while it is read: as bytes, as text and as files."""
    held = held_frames_bytes(audio)
    bodies = 3 * sent_bytes(audio.per_request)
    pool = decode_processes(on_cpu=on_cpu) * DECODER_BYTES if decoders else 0
    return pool + (1 + max(1, ranks)) * held + KNOWN_FRAMES_BYTES + bodies
