"""The functions that a chat request offers to the model."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from modelserve_worker.server.bodies.field_policy import TOOL_FIELDS
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.json_text import nested_deeper
from modelserve_worker.text.tool_calls import MAX_DEPTH, MAX_NAME_LENGTH

MAX_TOOLS = 1024  # gateways of MCP servers offer some hundreds
MAX_DESCRIPTION_LENGTH = 16 * 1024
MAX_PARAMETERS_LENGTH = 64 * 1024  # characters of JSON

FunctionName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_.:/-]{{1,{MAX_NAME_LENGTH}}}$")]


class FunctionDefinition(RequestModel):
    """`parameters` is a JSON schema, which the model sees, and is held to when it is `strict` or a call is forced."""

    name: FunctionName
    description: str | None = Field(default=None, max_length=MAX_DESCRIPTION_LENGTH)
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @field_validator("parameters", mode="after")
    @classmethod
    def _bounded(cls, value: dict[str, Any]) -> dict[str, Any]:
        if nested_deeper(value, MAX_DEPTH):
            raise ValueError(f"objects and lists are nested more than {MAX_DEPTH} deep; flatten the schema")
        length = len(json.dumps(value, ensure_ascii=False))
        if length > MAX_PARAMETERS_LENGTH:
            raise ValueError(f"the schema has {length} characters of JSON; the limit is {MAX_PARAMETERS_LENGTH}")
        return value


class Tool(RequestModel):
    """OpenAI's {"type": "function", "function": {...}}."""

    ignored = TOOL_FIELDS
    described_as = "tools."

    type: Literal["function"]
    function: FunctionDefinition
