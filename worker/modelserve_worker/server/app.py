"""The application: its routes, what stands in front of them, and what its errors look like."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.server.adapters.metrics import AdapterMetrics
from modelserve_worker.server.adapters.routes import load_adapter, show_adapters, take_adapters, unload_adapter
from modelserve_worker.server.adapters.service import AdapterService
from modelserve_worker.server.answers.chat import ChatAnswer
from modelserve_worker.server.answers.completions import CompletionAnswer
from modelserve_worker.server.answers.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
    tokenizer_info,
)
from modelserve_worker.server.anthropic.answer import MessagesAnswer
from modelserve_worker.server.anthropic.request import CountTokensRequest, MessagesRequest, count_tokens
from modelserve_worker.server.bodies.field_policy import FieldPolicy
from modelserve_worker.server.bodies.ignored_fields import IgnoredFields
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest, CompletionRequest
from modelserve_worker.server.errors.error_response import error_response
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.health import health, load, plan, ready, show_version
from modelserve_worker.server.http.access_log import AccessLog
from modelserve_worker.server.http.authentication import ApiKeys, Authentication
from modelserve_worker.server.http.body_limits import OpenBodies
from modelserve_worker.server.http.entrance import Entrance
from modelserve_worker.server.http.loading_gate import LoadingGate
from modelserve_worker.server.http.management_keys import ADAPTERS_PATH, KEYS_FILE, ManagementKeys
from modelserve_worker.server.http.streaming import EventStreamResponse
from modelserve_worker.server.http.tracing import Tracing
from modelserve_worker.server.inference import answer, as_api_error, result
from modelserve_worker.server.json_text import to_json
from modelserve_worker.server.media_metrics import IMAGES, SOUNDS, MediaMetrics
from modelserve_worker.server.openapi import openapi_document
from modelserve_worker.server.request_body import RequestBodies
from modelserve_worker.server.responses.answer import ResponsesAnswer
from modelserve_worker.server.responses.request import ResponsesRequest
from modelserve_worker.server.settings import ServerSettings
from modelserve_worker.server.state import ServedAdapter, ServerState
from modelserve_worker.server.transcriptions.routes import transcriptions, translations


def create_app(
    state: ServerState,
    metrics: WorkerMetrics,
    settings: ServerSettings | None = None,
    open_bodies: OpenBodies | None = None,
    adapters: AdapterService | None = None,
) -> Starlette:
    """The application. It may be served while the engine is still loading: `state` says so. `adapters`: those that
    come and go; None where there is no room for any."""
    settings = settings or ServerSettings()
    open_bodies = open_bodies or OpenBodies()
    routes = [
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages_count_tokens, methods=["POST"]),
        Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
        Route("/v1/audio/translations", translations, methods=["POST"]),
        Route("/tokenize", tokenize_text, methods=["POST"]),
        Route("/detokenize", detokenize_ids, methods=["POST"]),
        Route("/tokenizer_info", show_tokenizer),
        Route("/openapi.json", show_openapi),
        Route(ADAPTERS_PATH, show_adapters),
        Route(ADAPTERS_PATH, take_adapters, methods=["PUT"]),
        Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
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
        middleware=[
            Middleware(
                Entrance,
                open_bodies=open_bodies,
                metrics=metrics,
                access_log=AccessLog(settings.access_log),
                tracing=Tracing.from_environment(os.environ, state.model.name),
                routes=routes,
            ),
            *_cross_origin(settings),
            Middleware(
                Authentication,
                keys=ApiKeys(settings.api_keys, settings.api_key_file),
                share_prefixes=settings.share_prefixes,
                management=_management(settings, adapters),
            ),
            Middleware(LoadingGate, state=state),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # a redirect would be built from the Host header, and lose a body on the way
    app.state.server = state
    app.state.metrics, app.state.settings, app.state.adapters = metrics, settings, adapters
    if adapters is not None:
        state.adapters = adapters.registry
        metrics.registry.register(AdapterMetrics(adapters, state.model.name))
    if state.model.images is not None:
        image_metrics = MediaMetrics(metrics.registry, state.model.name, IMAGES)
        state.model = replace(state.model, image_metrics=image_metrics)
    if state.model.audio is not None:
        audio_metrics = MediaMetrics(metrics.registry, state.model.name, SOUNDS)
        state.model = replace(state.model, audio_metrics=audio_metrics)
    ignored_fields = IgnoredFields(metrics.registry, state.model.name)
    app.state.bodies = RequestBodies(
        state,
        open_bodies,
        FieldPolicy(strict=settings.strict_fields, on_ignored=ignored_fields.count),
        gap_s=settings.body_gap_seconds,
        total_s=settings.body_seconds,
    )
    return app


def _management(settings: ServerSettings, adapters: AdapterService | None) -> ManagementKeys | None:
    directory = settings.adapter_set_directory
    return None if directory is None or adapters is None else ManagementKeys(directory / KEYS_FILE)


def _cross_origin(settings: ServerSettings) -> list[Middleware]:
    """CORS, where pages of some origins may call: without it, browsers keep all other origins out."""
    if not settings.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key", "x-request-id"],
            expose_headers=["x-request-id"],
        )
    ]


async def completions(request: Request) -> Response | EventStreamResponse:
    return await answer(request, CompletionRequest, CompletionAnswer)


async def chat_completions(request: Request) -> Response | EventStreamResponse:
    return await answer(request, ChatCompletionRequest, ChatAnswer)


async def responses(request: Request) -> Response | EventStreamResponse:
    return await answer(request, ResponsesRequest, ResponsesAnswer)


async def messages(request: Request) -> Response | EventStreamResponse:
    return await answer(request, MessagesRequest, MessagesAnswer)


async def messages_count_tokens(request: Request) -> Response:
    return await result(request, CountTokensRequest, count_tokens)


async def tokenize_text(request: Request) -> Response:
    return await result(request, TokenizeRequest, tokenize)


async def detokenize_ids(request: Request) -> Response:
    return await result(request, DetokenizeRequest, detokenize)


async def list_models(request: Request) -> Response:
    state: ServerState = request.app.state.server
    cards = [_model_card(state, name) for name in state.model.names]
    cards += [_adapter_card(state, each) for each in state.served_adapters]
    return JSONResponse({"object": "list", "data": cards})


async def show_model(request: Request) -> Response:
    state: ServerState = request.app.state.server
    name = request.path_params["name"]
    if state.require_model(name).adapter:
        plain = name.partition("@")[0]
        found = next((each for each in state.served_adapters if each.name == plain), None)
        if found is not None:
            return JSONResponse(_adapter_card(state, found._replace(name=name)))
    return JSONResponse(_model_card(state, name))


def _model_card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.model.created,
        "owned_by": "modelserve",
        "root": state.model.name,
        "max_model_len": state.serving_engine().max_model_len,
        "input_modalities": state.model.modalities,
    }


def _adapter_card(state: ServerState, adapter: ServedAdapter) -> dict[str, Any]:
    """As vLLM has it: where it came from, and whose adapter it is."""
    return {**_model_card(state, adapter.name), "root": adapter.uri, "parent": state.model.name}


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
    return error_response(as_api_error(error), request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "Starlette calls it for no other"
    status = error.status_code
    text = {404: "no such route", 405: "this route does not answer that method"}.get(status, "the request failed")
    path = request.url.path
    # The router's own headers: a 405 names the methods that its route does answer.
    return error_response(ApiError(f"{text}: {request.method} {path}", status=status, headers=error.headers), path)
