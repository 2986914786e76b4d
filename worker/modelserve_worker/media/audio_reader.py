"""From a sound's bytes to its frames: looked at first, which costs nothing, and decoded where it is not known.

How many rows a sound becomes follows from the samples that were decoded: its header may say anything. So it is decoded
before its prompt is made.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from modelserve.model.audio import RATE, TOWER_SECONDS
from modelserve.sizing.media.audio_input import (
    HELD_FRAMES_BYTES,
    KNOWN_FRAMES_BYTES,
    RECORDING_SECONDS,
    SOUND_BYTES,
    AudioInput,
)
from modelserve_worker.embedded_spans import KEY_BYTES, AudioFrames
from modelserve_worker.media.decode_order import SoundOrder
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.media.media_error import MediaTooLarge
from modelserve_worker.media.sound_header import sound_format

PREPROCESSOR = 1  # of cached rows: another number wherever the same bytes become other frames


class SentSound(NamedTuple):
    """A sound within its bounds, not decoded. `key` is that of its rows."""

    data: bytes
    format: str
    key: bytes


class DecodedSound(NamedTuple):
    """Frames of a sound, or of a piece of a recording, of so many samples at 16,000 a second."""

    frames: AudioFrames
    samples: int
    key: bytes


class AudioReader:
    """Of one model with room for `audio`. For any thread.

    `most_held_bytes`: frames that open requests may have, which whoever reads them counts; `known_bytes`: of sounds
    that were decoded before.
    """

    def __init__(
        self,
        audio: AudioInput,
        pool: DecodePool,
        *,
        most_held_bytes: int = HELD_FRAMES_BYTES,
        known_bytes: int = KNOWN_FRAMES_BYTES,
    ) -> None:
        self.audio = audio
        self.most_held_bytes = most_held_bytes
        self._pool = pool
        self._waiting = ThreadPoolExecutor(pool.processes, thread_name_prefix="sounds")
        self._known: OrderedDict[tuple[str, bytes], DecodedSound] = OrderedDict()  # the last used at the end
        self._room = known_bytes
        self._lock = threading.Lock()

    def look(self, data: bytes) -> SentSound:
        """Bound it by its size and its first bytes. Raises MediaTooLarge and MediaUndecodable."""
        if len(data) > SOUND_BYTES:
            raise MediaTooLarge(
                f"the sound has {len(data)} bytes; the limit is {SOUND_BYTES}: send it shorter, or as FLAC or OGG"
            )
        kind = sound_format(data)
        digest = hashlib.sha256(hashlib.sha256(data).digest() + f"audio {PREPROCESSOR}".encode()).digest()
        return SentSound(data, kind, digest[:KEY_BYTES])

    async def read(self, sound: SentSound, namespace: str) -> DecodedSound:
        """`frames`, off the loop where it is not known. So many are decoded at a time, and the others wait."""
        if (known := self.known(sound, namespace)) is not None:
            return known
        return await asyncio.get_running_loop().run_in_executor(self._waiting, self.frames, sound, namespace)

    def frames(self, sound: SentSound, namespace: str) -> DecodedSound:
        """Decode it, unless requests of the same `namespace` sent it lately. Raises AudioTooLong, AudioTooShort,
        MediaTooLarge and MediaUndecodable."""
        if (known := self.known(sound, namespace)) is not None:
            return known
        ((samples, frames),) = self._decoded(sound, self.audio.seconds, piece_samples=0)
        made = DecodedSound(frames, samples, sound.key)
        self._keep((namespace, sound.key), made)
        return made

    async def pieces(self, recording: SentSound) -> list[DecodedSound]:
        """A recording cut at quiet places into sounds of TOWER_SECONDS at most. Raises as `frames`."""
        return await asyncio.get_running_loop().run_in_executor(self._waiting, self._pieces, recording)

    def _pieces(self, recording: SentSound) -> list[DecodedSound]:
        made = self._decoded(recording, RECORDING_SECONDS, piece_samples=min(TOWER_SECONDS, self.audio.seconds) * RATE)
        keys = (hashlib.sha256(recording.key + f"piece {number}".encode()).digest() for number in range(len(made)))
        return [
            DecodedSound(frames, samples, key[:KEY_BYTES]) for (samples, frames), key in zip(made, keys, strict=True)
        ]

    def _decoded(self, sound: SentSound, seconds: int, *, piece_samples: int) -> list[tuple[int, AudioFrames]]:
        """Samples and frames of each sound that it was cut into."""
        architecture = self.audio.architecture
        order = SoundOrder(
            format=sound.format,
            seconds=seconds,
            piece_samples=piece_samples,
            frame_samples=0 if architecture.tower is not None else architecture.embed_size,
            least_samples=architecture.least_samples,
        )
        answer = self._pool.decode(sound.data, order)
        (count,) = struct.unpack_from("<I", answer)
        sizes = struct.unpack_from(f"<{2 * count}I", answer, 4)
        values = np.frombuffer(answer, dtype=np.float32, offset=4 + 8 * count).reshape(-1, architecture.frame_values)
        made, at = [], 0
        for samples, frames in zip(sizes[::2], sizes[1::2], strict=True):
            assert frames == architecture.frames(samples), "another number of frames than its samples become"
            rows = architecture.soft_tokens(samples)
            made.append((samples, AudioFrames(values[at : at + frames].copy(), rows)))
            at += frames
        assert at == len(values), "frames of no sound"
        return made

    def known(self, sound: SentSound, namespace: str) -> DecodedSound | None:
        with self._lock:
            known = self._known.get((namespace, sound.key))
            if known is not None:
                self._known.move_to_end((namespace, sound.key))
            return known

    def _keep(self, name: tuple[str, bytes], made: DecodedSound) -> None:
        size = made.frames.values.nbytes
        with self._lock:
            if name in self._known:
                return
            while self._known and size > self._room:
                _, gone = self._known.popitem(last=False)
                self._room += gone.frames.values.nbytes
            if size <= self._room:
                self._known[name] = made
                self._room -= size

    def close(self) -> None:
        self._pool.close()
        self._waiting.shutdown(wait=False, cancel_futures=True)
