"""GET and PUT /v1/adapters, and vLLM's calls that load and unload one adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from modelserve.errors import InvalidInput
from modelserve_worker.server.adapters.desired import MOST_BYTES, DesiredSet, LoadAdapter, UnloadAdapter
from modelserve_worker.server.adapters.service import AdapterService
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.http.management_keys import SET_FILE
from modelserve_worker.server.http.request_context import RequestContext
from modelserve_worker.server.request_body import RequestBodies
from modelserve_worker.server.settings import ServerSettings

Body = TypeVar("Body")


async def show_adapters(request: Request) -> Response:
    return JSONResponse(_managed(request).document())


async def take_adapters(request: Request) -> Response:
    service = _managed(request)
    bodies: RequestBodies = request.app.state.bodies
    desired = await bodies.prepare(request, DesiredSet, _itself, most_bytes=MOST_BYTES)
    service.take(desired)
    return JSONResponse(service.document())


async def load_adapter(request: Request) -> Response:
    service = _by_hand(request)
    bodies: RequestBodies = request.app.state.bodies
    body = await bodies.prepare(request, LoadAdapter, _itself)
    await service.load(body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    service = _by_hand(request)
    bodies: RequestBodies = request.app.state.bodies
    body = await bodies.prepare(request, UnloadAdapter, _itself)
    service.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def read_set(directory: Path) -> DesiredSet | None:
    """The set in a directory that a pod mounts; None where there is none yet. Raises InvalidInput."""
    try:
        return DesiredSet.model_validate(json.loads((directory / SET_FILE).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        raise InvalidInput(f"{directory / SET_FILE}: {error}", field="adapters") from error


def _managed(request: Request) -> AdapterService:
    """Raises ApiError 404 where no set is taken, and 401 from who may not."""
    settings: ServerSettings = request.app.state.settings
    service = _service(request)
    if RequestContext.of(request.scope).manages or settings.adapter_endpoints:
        return service
    if settings.adapter_set_directory is None:
        raise _no_route(request)
    raise ApiError("the API key is none of those that sets of adapters are taken by: send one as X-Api-Key", status=401)


def _by_hand(request: Request) -> AdapterService:
    settings: ServerSettings = request.app.state.settings
    if not settings.adapter_endpoints:
        raise _no_route(request)
    return _service(request)


def _service(request: Request) -> AdapterService:
    service: AdapterService | None = request.app.state.adapters
    if service is None:
        raise _no_route(request)
    return service


def _no_route(request: Request) -> ApiError:
    return ApiError(f"no such route: {request.method} {request.url.path}", status=404)


def _itself(body: Body) -> Body:
    """All that is made of a body which is taken on the loop."""
    return body
