"""POST /v1/audio/transcriptions and /v1/audio/translations, from the form to the answer."""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from modelserve.sizing.media.audio_input import SOUND_BYTES, recording_bytes
from modelserve_worker.media.audio_reader import AudioReader, DecodedSound
from modelserve_worker.media.media_error import MediaError, ModalityNotServed
from modelserve_worker.server.errors.media_refusals import as_answer
from modelserve_worker.server.http.request_context import MediaSpan, RequestContext
from modelserve_worker.server.http.streaming import EventStreamResponse
from modelserve_worker.server.inference import SESSION_HEADER, respond
from modelserve_worker.server.request_body import RequestBodies
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.server.transcriptions.answer import TranscriptionAnswer
from modelserve_worker.server.transcriptions.form import boundary_of, read_form
from modelserve_worker.server.transcriptions.request import (
    TranscriptionRequest,
    TranslationRequest,
    document_of,
)

FORM_BYTES = SOUND_BYTES + 64 * 1024
Form = TypeVar("Form", bound=TranscriptionRequest)


async def transcriptions(request: Request) -> Response | EventStreamResponse:
    return await _answer(request, TranscriptionRequest)


async def translations(request: Request) -> Response | EventStreamResponse:
    return await _answer(request, TranslationRequest)


async def _answer(request: Request, form: type[Form]) -> Response | EventStreamResponse:
    state: ServerState = request.app.state.server
    bodies: RequestBodies = request.app.state.bodies
    context = RequestContext.of(request.scope)
    boundary = boundary_of(request.headers.get("content-type", ""))
    body = await bodies.form(
        request, form, lambda data: document_of(read_form(data, boundary)), most_bytes=FORM_BYTES,
        allowed_origins=request.app.state.settings.allowed_origins,
    )  # fmt: skip
    session = request.headers.get(SESSION_HEADER) or context.request_id
    model = state.require_model(body.model, tenant=context.tenant, session=session, keep=context.keep)
    sounds = await _sounds(body.file, model, context)
    length = state.serving_engine().max_model_len
    made = await asyncio.to_thread(
        lambda: TranscriptionAnswer(body.model_copy(update={"file": b""}), sounds, model, max_model_len=length)
    )
    return await respond(request, made, stream=body.stream, media_type=made.media_type)


async def _sounds(data: bytes, model: ServedModel, context: RequestContext) -> list[DecodedSound]:
    """Of the recording, which are held until it is answered. Raises ApiError."""
    reader, metrics, began = model.audio, model.audio_metrics, time.monotonic()
    try:
        if reader is None:
            raise ModalityNotServed("this server hears nothing; plan audio to have it hear (spec.modalities.audio)")
        sounds = await _decoded(reader, data, context)
    except MediaError as error:
        if metrics is not None:
            metrics.refused(error)
        raise as_answer(error, "file") from error
    ended = time.monotonic()
    context.media_spans.append(MediaSpan("sounds decode", len(sounds), began, ended))
    if metrics is not None:
        metrics.read(sum(len(each.frames) for each in sounds), ended - began)
    return sounds


async def _decoded(reader: AudioReader, data: bytes, context: RequestContext) -> list[DecodedSound]:
    recording, most = reader.look(data), recording_bytes(reader.audio.architecture)
    context.account.hold_more(most)
    sounds = await reader.pieces(recording)
    context.account.hold_more(sum(each.frames.values.nbytes for each in sounds) - most)
    return sounds
