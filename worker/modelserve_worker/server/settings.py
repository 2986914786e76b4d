"""What the front end lets in: settings of the HTTP server that the engine does not know."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from modelserve.model.adapters.addresses import DOWNLOADS_BYTES
from modelserve_worker.server.http.access_log import AccessLogFormat


class ServerSettings(BaseModel):
    """Settings of the server in front of the engine; none of them changes an answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_keys: tuple[str, ...] = Field(default=(), description="Keys that may ask; none and no file: anybody may.")
    api_key_file: Path | None = Field(default=None, description="File with one key a line; read again as it changes.")
    share_prefixes: bool = Field(
        default=False, description="Requests with different keys read each other's cached prefixes."
    )
    allowed_origins: tuple[str, ...] = Field(
        default=(), description="Origins whose pages may call the API from a browser (CORS); '*' stands for all."
    )
    max_waiting_requests: int = Field(
        default=256, ge=1, description="Most sequences that wait for the engine; beyond it a request gets a 429."
    )
    max_connections: int | None = Field(
        default=None, ge=1, description="Most open connections; default: what the limit of open files leaves room for."
    )
    write_seconds: float = Field(
        default=120.0, gt=0, description="Most seconds in which a client reads nothing of what waits for it."
    )
    header_seconds: float = Field(default=20.0, gt=0, description="Most seconds for the head of a request.")
    access_log: AccessLogFormat = Field(default="text", description="text, json (one object a line) or off.")
    strict_fields: bool = Field(default=False, description="Refuse fields that are otherwise ignored.")
    adapter_endpoints: bool = Field(
        default=False, description="Anybody who may ask may load and unload adapters, and say which are served."
    )
    adapter_directory: Path | None = Field(
        default=None, description="Directory below which /v1/load_lora_adapter takes paths."
    )
    adapter_cache_directory: Path = Field(
        default=Path(tempfile.gettempdir()) / "modelserve-adapters",
        description="Directory of this worker alone for adapters that it downloads.",
    )
    adapter_cache_bytes: int = Field(
        default=DOWNLOADS_BYTES, ge=1 << 20, description="Most bytes of these; those in use stay, others make room."
    )
    adapter_set_directory: Path | None = Field(
        default=None,
        description="Directory with adapters.json, the set to start with, and management-keys, digests of the keys by "
        "which others are taken; both may come later.",
    )
    body_gap_seconds: float = Field(default=20.0, gt=0, description="Most seconds between two pieces of a body.")
    body_seconds: float = Field(default=120.0, gt=0, description="Most seconds for all of a body.")
