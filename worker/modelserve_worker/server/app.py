"""The routes, and how a body becomes an answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from modelserve.errors import InvalidInput
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.server.admission import Admission
from modelserve_worker.server.answer import Answer
from modelserve_worker.server.anthropic.answer import MessagesAnswer, error_body
from modelserve_worker.server.anthropic.request import CountTokensRequest, MessagesRequest, count_tokens
from modelserve_worker.server.chat import ChatAnswer
from modelserve_worker.server.completions import CompletionAnswer
from modelserve_worker.server.errors import ApiError, from_validation, unavailable
from modelserve_worker.server.health import health, load, plan, ready, show_version
from modelserve_worker.server.json_text import read_json, to_json
from modelserve_worker.server.openapi import openapi_document
from modelserve_worker.server.protocol import ChatCompletionRequest, CompletionRequest
from modelserve_worker.server.responses.answer import ResponsesAnswer
from modelserve_worker.server.responses.request import ResponsesRequest
from modelserve_worker.server.sequences import GenerationError, SequenceRunner
from modelserve_worker.server.state import ServerState
from modelserve_worker.server.streaming import (
    ClientDisconnectError,
    EventStreamResponse,
    run_until_disconnect,
)
from modelserve_worker.server.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize, tokenizer_info

log = logging.getLogger(__name__)
Body = TypeVar("Body", bound=BaseModel)
AnswerBody = TypeVar("AnswerBody", CompletionRequest, ChatCompletionRequest, ResponsesRequest, MessagesRequest)
ResultBody = TypeVar("ResultBody", CountTokensRequest, TokenizeRequest, DetokenizeRequest)
_FAILURES = (ApiError, InvalidInput, GenerationError, EngineDead)


def create_app(state: ServerState, metrics: WorkerMetrics) -> Starlette:
    """The application. It may be served while the engine is still loading: `state` says so."""
    routes = [
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages_count_tokens, methods=["POST"]),
        Route("/tokenize", tokenize_text, methods=["POST"]),
        Route("/detokenize", detokenize_ids, methods=["POST"]),
        Route("/tokenizer_info", show_tokenizer),
        Route("/openapi.json", show_openapi),
        Route("/v1/plan", plan),
        Route("/health", health),
        Route("/ping", health),
        Route("/ready", ready),
        Route("/load", load),
        Route("/metrics", show_metrics),
        Route("/version", show_version),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Admission, state=state)],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected_error},
    )
    app.state.server = state
    app.state.metrics = metrics
    return app


async def completions(request: Request) -> Response | EventStreamResponse:
    return await _answer(request, CompletionRequest, CompletionAnswer)


async def chat_completions(request: Request) -> Response | EventStreamResponse:
    return await _answer(request, ChatCompletionRequest, ChatAnswer)


async def responses(request: Request) -> Response | EventStreamResponse:
    return await _answer(request, ResponsesRequest, ResponsesAnswer)


async def messages(request: Request) -> Response | EventStreamResponse:
    return await _answer(request, MessagesRequest, MessagesAnswer)


async def messages_count_tokens(request: Request) -> Response:
    return await _result(request, CountTokensRequest, count_tokens)


async def tokenize_text(request: Request) -> Response:
    return await _result(request, TokenizeRequest, tokenize)


async def detokenize_ids(request: Request) -> Response:
    return await _result(request, DetokenizeRequest, detokenize)


async def _answer(
    request: Request, body_type: type[AnswerBody], answer_type: Callable[..., Answer]
) -> Response | EventStreamResponse:
    state: ServerState = request.app.state.server
    data = await _body(request)

    def prepare() -> tuple[AnswerBody, Answer]:
        body = _parse(data, body_type)
        model = state.require_model(body.model)
        return body, answer_type(body, model, max_model_len=state.serving_engine().max_model_len)

    # Parsing, rendering and encoding a long prompt takes tens of milliseconds: not on the loop that streams answers.
    body, answer = await asyncio.to_thread(prepare)
    runner = SequenceRunner(state.serving_engine(), state.model.text.vocabulary, request.app.state.metrics)
    if body.stream:
        return EventStreamResponse(_events(answer, runner))
    try:
        document = await run_until_disconnect(request.receive, answer.whole(runner))
    except ClientDisconnectError:
        return Response(status_code=499)  # nobody reads it; the access log shows why the request ended
    except _FAILURES as error:
        raise _as_api_error(error) from error
    return Response(to_json(document), media_type="application/json")


async def _result(request: Request, body_type: type[ResultBody], compute: Callable[..., dict[str, Any]]) -> Response:
    """What follows from the body alone, without the engine."""
    state: ServerState = request.app.state.server
    data = await _body(request)

    def work() -> bytes:
        body = _parse(data, body_type)
        model = state.require_model(body.model or state.model.name)
        try:
            return to_json(compute(body, model, max_model_len=state.serving_engine().max_model_len))
        except ValidationError as error:  # of the request that the body stands for
            raise from_validation(error) from error

    return Response(await asyncio.to_thread(work), media_type="application/json")


async def _events(answer: Answer, runner: SequenceRunner) -> AsyncGenerator[bytes, None]:
    """The stream of an answer with its end, after an error event where it failed.

    Raises ApiError for what fails before there is an event: it gets its own status then.
    """
    begun = False
    try:
        async with aclosing(answer.events(runner)) as events:
            async for chunk in events:
                begun = True
                yield chunk
    except _FAILURES as error:
        if not begun:
            raise _as_api_error(error) from error
        yield answer.failure(_as_api_error(error))
    except Exception:
        if not begun:
            raise
        log.exception("a stream failed")
        yield answer.failure(_internal_error())
    if answer.stream_end:
        yield answer.stream_end


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise ApiError("the client left before its request was complete", status=499) from error


def _parse(data: bytes, body_type: type[Body]) -> Body:
    try:
        document = read_json(data)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(document, dict):
        raise ApiError(f"the body must be a JSON object, not {type(document).__name__}", code="invalid_json")
    try:
        return body_type.model_validate(document)
    except ValidationError as error:
        raise from_validation(error) from error


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidInput):
        return ApiError(str(error), param=error.field, code="invalid_value")
    if isinstance(error, EngineDead):
        return unavailable(f"the engine has stopped: {error}")
    return ApiError(str(error), status=500, code="generation_failed")


def _internal_error() -> ApiError:
    return ApiError("the server failed; its log says why", status=500, code="internal_error")


async def list_models(request: Request) -> Response:
    state: ServerState = request.app.state.server
    return JSONResponse({"object": "list", "data": [_model_card(state, name) for name in state.model.names]})


async def show_model(request: Request) -> Response:
    state: ServerState = request.app.state.server
    name = request.path_params["name"]
    state.require_model(name)
    return JSONResponse(_model_card(state, name))


def _model_card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.model.created,
        "owned_by": "modelserve",
        "root": state.model.name,
        "max_model_len": state.serving_engine().max_model_len,
    }


async def show_metrics(request: Request) -> Response:
    metrics: WorkerMetrics = request.app.state.metrics
    return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def show_tokenizer(request: Request) -> Response:
    return await _document(tokenizer_info, request.app.state.server.model)


async def show_openapi(request: Request) -> Response:
    return await _document(openapi_document, request.app.state.server)


async def _document(describe: Callable[[Any], dict[str, Any]], subject: Any) -> Response:
    """One that is large: made off the loop that streams answers."""
    content = await asyncio.to_thread(lambda: to_json(describe(subject)))
    return Response(content, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    return _in_shape_of(request, _as_api_error(error))


def _in_shape_of(request: Request, error: ApiError) -> Response:
    """The error as the clients of the route read it."""
    return error.response(error_body(error) if request.url.path.startswith("/v1/messages") else None)


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = {404: "no such route", 405: "this route does not answer that method"}.get(status, "the request failed")
    return _in_shape_of(request, ApiError(f"{text}: {request.method} {request.url.path}", status=status))


async def _unexpected_error(request: Request, _: Exception) -> Response:
    return _in_shape_of(request, _internal_error())
