"""Sounds of a conversation: how many rows each becomes is known once it is decoded, on the event loop.

What makes a prompt says which sounds it wants decoded (SoundsUndecoded), and is called again when they are, as with
addresses that are to be fetched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from modelserve.sizing.media.audio_input import SOUND_BYTES
from modelserve_worker.media.audio_reader import AudioReader, DecodedSound, SentSound
from modelserve_worker.media.data_url import data_of
from modelserve_worker.media.media_error import MediaError
from modelserve_worker.server.errors.media_refusals import as_answer
from modelserve_worker.server.http.request_context import MediaSpan, RequestContext
from modelserve_worker.server.state import ServedModel


class SoundsUndecoded(Exception):  # noqa: N818 - no fault: what a request still lacks
    """`sounds`: by part, within their bounds; of the same `namespace` known ones are not decoded again."""

    def __init__(self, sounds: Mapping[str, SentSound], namespace: str) -> None:
        super().__init__(f"{len(sounds)} sounds are to be decoded")
        self.sounds = sounds
        self.namespace = namespace


def decoded_sounds(
    parts: Sequence[tuple[str, Mapping[str, str]]], model: ServedModel, *, namespace: str
) -> dict[str, DecodedSound]:
    """By part. Raises MediaError, and SoundsUndecoded with all of a request where one is not decoded."""
    if not parts:
        return {}
    reader = model.audio
    assert reader is not None, "who hears nothing has refused them"
    sent = {param: _look(part, param, reader, model.fetched) for param, part in parts}
    if any(sound.key not in model.heard for sound in sent.values()):
        raise SoundsUndecoded(sent, namespace)
    return {param: model.heard[sound.key] for param, sound in sent.items()}


def _look(part: Mapping[str, str], param: str, reader: AudioReader, fetched: Mapping[str, bytes]) -> SentSound:
    url = part["url"]
    try:
        return reader.look(fetched[url] if url in fetched else data_of(url, most_bytes=SOUND_BYTES, what="sound"))
    except MediaError as error:
        error.param = error.param or param
        raise


async def decode_sounds(
    wanted: SoundsUndecoded,
    model: ServedModel,
    context: RequestContext,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Put what is wanted into `context.heard`; their frames are held until the request is answered. Raises ApiError for
    the first that is no such sound."""
    reader, metrics = model.audio, model.audio_metrics
    assert reader is not None, "nothing asks for sounds where there is no reader"
    started = clock()
    for param, sound in wanted.sounds.items():
        known, began = reader.known(sound, wanted.namespace) is not None, clock()
        context.account.hold_more(reader.audio.sound_bytes)
        try:
            made = await reader.read(sound, wanted.namespace)
        except MediaError as error:
            error.param = error.param or param
            if metrics is not None:
                metrics.refused(error)
            raise as_answer(error, "messages") from error
        context.account.hold_more(made.frames.values.nbytes - reader.audio.sound_bytes)
        context.heard[sound.key] = made
        if metrics is not None:
            metrics.read(len(made.frames), None if known else clock() - began)
    context.media_spans.append(MediaSpan("sounds decode", len(wanted.sounds), started, clock()))
