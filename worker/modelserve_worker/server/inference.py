"""Answers a body, whole or as a stream, or by what follows from the body alone; whatever its route."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import groupby
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from modelserve.errors import InvalidInput
from modelserve_worker.engine_client import EngineBusy, EngineDead
from modelserve_worker.server.answers.preparation import SequenceSpec
from modelserve_worker.server.answers.prompt_media import attach_media
from modelserve_worker.server.answers.sequences import GenerationError, Reply, SequenceRunner
from modelserve_worker.server.answers.tokens import DetokenizeRequest, TokenizeRequest
from modelserve_worker.server.anthropic.request import CountTokensRequest, MessagesRequest
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest, CompletionRequest
from modelserve_worker.server.errors.errors import ApiError, from_validation, internal_error, unavailable
from modelserve_worker.server.http.request_context import CLIENT_LEFT, RequestContext
from modelserve_worker.server.http.streaming import (
    ClientDisconnectError,
    EventStreamResponse,
    run_until_disconnect,
)
from modelserve_worker.server.json_text import to_json
from modelserve_worker.server.request_body import RequestBodies
from modelserve_worker.server.responses.request import ResponsesRequest
from modelserve_worker.server.state import ServedModel, ServerState

log = logging.getLogger(__name__)
AnswerBody = TypeVar("AnswerBody", CompletionRequest, ChatCompletionRequest, ResponsesRequest, MessagesRequest)
ResultBody = TypeVar("ResultBody", CountTokensRequest, TokenizeRequest, DetokenizeRequest)
SESSION_HEADER = "x-session-id"
FAILURES = (ApiError, InvalidInput, GenerationError, EngineBusy, EngineDead)


class Answer(Protocol):
    """An answer in the shapes of one route; making it raises ApiError when the request cannot be served.

    `stream_end` is sent behind the last event, also behind the one of `failure`.
    """

    specs: list[SequenceSpec]
    stream_end: bytes

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        ...

    async def whole(self, runner: SequenceRunner) -> bytes:
        """The body of the response, encoded."""
        ...

    async def events(self, replies: Sequence[Reply]) -> bytes:
        """Encoded server-sent events of what these replies say that was not told; empty where there is nothing.

        What one step says (or several, where the client is slow) is told at once.
        """
        ...

    def last_events(self) -> bytes:
        """Encoded, behind the events of replies that are all complete; often empty."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The event that tells of an error in a stream that has begun."""
        ...


async def answer(
    request: Request, body_type: type[AnswerBody], make_answer: Callable[..., Answer]
) -> Response | EventStreamResponse:
    """Read the body, call `make_answer(body, model, max_model_len=...)` off the loop, and run it. Raises ApiError."""
    state: ServerState = request.app.state.server
    bodies: RequestBodies = request.app.state.bodies
    context = RequestContext.of(request.scope)

    asked: list[ServedModel] = []  # found once, also where images are fetched or sounds decoded first

    def make(body: AnswerBody) -> tuple[bool, Answer]:
        if not asked:
            session = request.headers.get(SESSION_HEADER) or body.session or context.request_id
            asked.append(state.require_model(body.model, tenant=context.tenant, session=session, keep=context.keep))
        model = replace(asked[0], fetched=context.fetched, heard=context.heard)
        return body.stream, make_answer(body, model, max_model_len=state.serving_engine().max_model_len)

    stream, prepared = await bodies.prepare(request, body_type, make)
    return await respond(request, prepared, stream=stream)


async def respond(
    request: Request, prepared: Answer, *, stream: bool, media_type: str = "application/json"
) -> Response | EventStreamResponse:
    """Run what was prepared for a request. Raises ApiError."""
    state: ServerState = request.app.state.server
    context = RequestContext.of(request.scope)
    context.prompt_tokens = prepared.num_prompt_tokens
    context.account.hold_tokens(prepared.num_prompt_tokens)
    await _attach_media(prepared, state, context)
    runner = SequenceRunner(state.serving_engine(), state.model.text.vocabulary, request.app.state.metrics, context)
    if stream:
        return EventStreamResponse(stream_events(prepared, runner, context), prepared.stream_end)
    try:
        content = await run_until_disconnect(request.receive, prepared.whole(runner))
    except ClientDisconnectError:
        return Response(status_code=CLIENT_LEFT)  # nobody reads it; the access log shows why the request ended
    except FAILURES as error:
        raise as_api_error(error) from error
    return Response(content, media_type=media_type)


async def _attach_media(prepared: Answer, state: ServerState, context: RequestContext) -> None:
    """Of each prompt, which several answers may share. As they were sent they are not kept while it is answered."""
    context.fetched.clear()
    context.heard.clear()
    for media, specs in groupby(prepared.specs, key=lambda spec: spec.media):
        if media:
            await attach_media([spec.request for spec in specs], media, state.model, context)
    prepared.specs[:] = [replace(spec, media=()) if spec.media else spec for spec in prepared.specs]


async def result(request: Request, body_type: type[ResultBody], compute: Callable[..., dict[str, Any]]) -> Response:
    """What `compute(body, model, max_model_len=...)` makes of the body without the engine. Raises ApiError."""
    state: ServerState = request.app.state.server
    bodies: RequestBodies = request.app.state.bodies
    context = RequestContext.of(request.scope)

    def make(body: ResultBody) -> bytes:
        found = state.require_model(body.model or state.model.name, tenant=context.tenant)
        model = replace(found, fetched=context.fetched, heard=context.heard)
        try:
            return to_json(compute(body, model, max_model_len=state.serving_engine().max_model_len))
        except ValidationError as error:  # of the request that the body stands for
            raise from_validation(error) from error

    return Response(await bodies.prepare(request, body_type, make), media_type="application/json")


async def stream_events(answer: Answer, runner: SequenceRunner, context: RequestContext) -> AsyncGenerator[bytes, None]:
    """The events of an answer, with an error event behind them where it failed, whose status `context` keeps.

    Raises ApiError for what fails before there is an event: it gets its own status then.
    """
    begun = False
    try:
        async with aclosing(runner.stream(answer.specs)) as steps:
            async for replies in steps:
                if events := await answer.events(replies):
                    begun = True
                    yield events
        if last := answer.last_events():
            yield last
    except FAILURES as error:
        failure = as_api_error(error)
        if not begun:
            raise failure from error
        context.broken = failure.status
        yield answer.failure(failure)
    except Exception:
        if not begun:
            raise
        log.exception("a stream failed")
        context.broken = internal_error().status
        yield answer.failure(internal_error())


def as_api_error(error: Exception) -> ApiError:
    """One of FAILURES as the answer that its client gets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidInput):
        return ApiError(str(error), param=error.field, code="invalid_value")
    if isinstance(error, EngineBusy):
        return ApiError(str(error), status=429, code="server_busy")
    if isinstance(error, EngineDead):
        return unavailable(f"the engine has stopped: {error}")
    return ApiError(str(error), status=500, code="generation_failed")
