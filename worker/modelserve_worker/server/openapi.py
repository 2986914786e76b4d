"""GET /openapi.json: the API as this server answers it, made from the models that read the requests."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from modelserve_worker.server.adapters.desired import DesiredSet, LoadAdapter, UnloadAdapter
from modelserve_worker.server.answers.tokens import DetokenizeRequest, TokenizeRequest
from modelserve_worker.server.anthropic.request import CountTokensRequest, MessagesRequest
from modelserve_worker.server.bodies.protocol import LARGEST_COUNT, ChatCompletionRequest, CompletionRequest
from modelserve_worker.server.bodies.response_schemas import SCHEMAS
from modelserve_worker.server.responses.request import ResponsesRequest
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.server.transcriptions.request import TranscriptionRequest, TranslationRequest

_REF = "#/components/schemas/{model}"
_LENGTHS = {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"}
_NEEDS = {"stream_options": "stream", "top_logprobs": "logprobs"}  # fields that are refused unless another is true
_NO_TOKEN = 1 << 31  # the bound of token ids in the models

_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_ABOUT = "A field of a request that is null counts as left out. docs/clients.md says what is absent, and why."


@dataclass(frozen=True)
class _Route:
    """`answer` names the schema of the 200; a route that `streams` may also answer with server-sent events."""

    path: str
    summary: str
    answer: str
    body: type[BaseModel] | None = None
    streams: bool = False
    method: str = ""  # empty: post where there is a body, else get
    form: bool = False  # its body is one, and its answer may be text
    unavailable: bool = False  # answers 503 with the same schema where the server is not there yet


ROUTES = (
    _Route("/v1/models", "The served names", "ModelList"),
    _Route("/v1/models/{model}", "One served name", "ModelCard"),
    _Route("/v1/completions", "Continue a text", "Completion", CompletionRequest, streams=True),
    _Route("/v1/chat/completions", "Answer a conversation", "ChatCompletion", ChatCompletionRequest, streams=True),
    _Route("/v1/responses", "Answer a conversation (Responses API)", "Response", ResponsesRequest, streams=True),
    _Route(
        "/v1/messages", "Answer a conversation (Anthropic's API)", "AnthropicMessage", MessagesRequest, streams=True
    ),
    _Route("/v1/messages/count_tokens", "Count the tokens of its prompt", "InputTokens", CountTokensRequest),
    _Route("/tokenize", "Token ids of a text or a conversation", "Tokens", TokenizeRequest),
    _Route("/detokenize", "Text of token ids", "Text", DetokenizeRequest),
    _Route("/tokenizer_info", "Settings of the tokenizer, and the chat template", "Settings"),
    _Route("/v1/plan", "The memory plan, predicted beside allocated", "Settings"),
    _Route("/health", "Whether the process is worth keeping", "Health", unavailable=True),
    _Route("/ping", "The same", "Health", unavailable=True),
    _Route("/ready", "Whether new requests are accepted", "Health", unavailable=True),
    _Route("/load", "How many requests are being answered", "Load"),
    _Route("/version", "The version of the server", "Version"),
    _Route("/metrics", "Metrics for Prometheus", "Metrics"),
    _Route("/openapi.json", "This document", "Settings"),
)

AUDIO_ROUTES = (
    _Route(
        "/v1/audio/transcriptions", "The text of a recording", "Transcription", TranscriptionRequest, streams=True,
        form=True,
    ),
    _Route(
        "/v1/audio/translations", "The same in English", "Transcription", TranslationRequest, streams=True, form=True
    ),
)  # fmt: skip
"""Of servers that hear."""

ADAPTER_ROUTES = (
    _Route("/v1/adapters", "Adapters, and how far each is", "Adapters"),
    _Route("/v1/adapters", "Serve this set of adapters", "Adapters", DesiredSet, method="put"),
    _Route("/v1/load_lora_adapter", "Serve an adapter", "Told", LoadAdapter),
    _Route("/v1/unload_lora_adapter", "Serve it no more", "Told", UnloadAdapter),
)
"""Of servers with room for adapters."""


def openapi_document(state: ServerState) -> dict[str, Any]:
    """OpenAPI 3.1. Names, vocabulary and longest context are those of the served model."""
    routes = ROUTES + (() if state.adapters is None else ADAPTER_ROUTES)
    routes += () if state.model.audio is None else AUDIO_ROUTES
    bodies = [route.body for route in routes if route.body is not None]
    _, generated = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    schemas: dict[str, Any] = generated["$defs"]
    max_model_len = state.engine.max_model_len if state.engine is not None else None
    names = {"type": "string"} if state.adapters is not None else {"type": "string", "enum": list(state.model.names)}
    _bound(list(schemas.values()), state.model, names, max_model_len)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[_method(route)] = _operation(route, names)
    return {
        "openapi": "3.1.0",
        "info": {"title": "modelserve", "version": version("modelserve"), "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": SCHEMAS | schemas},
    }


def _method(route: _Route) -> str:
    return route.method or ("get" if route.body is None else "post")


def _operation(route: _Route, names: dict[str, Any]) -> dict[str, Any]:
    media = "text/plain" if route.answer in ("Metrics", "Told") else "application/json"
    answers = {media: {"schema": {"$ref": _REF.format(model=route.answer)}}}
    if route.form:
        answers["text/plain"] = {"schema": {"type": "string"}}
    streamed = {"text/event-stream": {"schema": _EVENT}} if route.streams else {}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": answers | streamed}}
    if route.unavailable:
        responses["503"] = {"description": "not now", "content": answers}
    error = "AnthropicError" if route.path.startswith("/v1/messages") else "Error"
    schema = {"$ref": _REF.format(model=error)}
    responses["default"] = {"description": "why not", "content": {"application/json": {"schema": schema}}}
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    if route.body is not None:
        schema = {"$ref": _REF.format(model=route.body.__name__)}
        sent = "multipart/form-data" if route.form else "application/json"
        operation["requestBody"] = {"required": True, "content": {sent: {"schema": schema}}}
    if "{model}" in route.path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": names}]
    return operation


def _bound(schema: Any, model: ServedModel, names: dict[str, Any], max_model_len: int | None) -> None:
    """Write what the models of the bodies cannot say: names (those of adapters come and go), vocabulary and context of
    the served model, and needs.

    A field that may be null may as well be left out; that is said once, not with every field.
    """
    if isinstance(schema, list):
        for each in schema:
            _bound(each, model, names, max_model_len)
    if not isinstance(schema, dict):
        return
    options = schema.get("anyOf", [])
    if {"type": "null"} in options:
        options.remove({"type": "null"})
        schema.pop("default", None)
    if schema.get("exclusiveMaximum") == _NO_TOKEN:
        del schema["exclusiveMaximum"]
        schema["maximum"] = model.vocab_size - 1
    properties = schema.get("properties", {})
    if "model" in properties:
        properties["model"] = dict(names)
    for name in _LENGTHS & set(properties):
        numbers = [option for option in properties[name].get("anyOf", [properties[name]]) if "minimum" in option]
        numbers[0]["maximum"] = max_model_len or LARGEST_COUNT
    needs = {name: needed for name, needed in _NEEDS.items() if {name, needed} <= set(properties)}
    if needs:
        schema["dependentSchemas"] = {
            name: {"properties": {needed: {"const": True}}, "required": [needed]} for name, needed in needs.items()
        }
    for each in schema.values():
        _bound(each, model, names, max_model_len)
