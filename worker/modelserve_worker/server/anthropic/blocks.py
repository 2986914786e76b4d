"""The content blocks of Anthropic's messages, and the chat messages they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from modelserve_worker.server.bodies.field_policy import BLOCK_FIELDS
from modelserve_worker.server.bodies.media_parts import refuse_file
from modelserve_worker.server.bodies.messages import MAX_CALL_ID_LENGTH
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.bodies.text_content import text_parts
from modelserve_worker.server.bodies.tools import FunctionName


class _Block(RequestModel):
    ignored = BLOCK_FIELDS
    described_as = "content."


class TextBlock(_Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(_Block):
    """What the model thought in an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(_Block):
    """A call that the model made in an earlier answer."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_CALL_ID_LENGTH)
    name: FunctionName
    input: dict[str, Any]


class Base64Source(RequestModel):
    """The image itself; its format is read from its bytes, whatever `media_type` says."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    def address(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(RequestModel):
    """An address that is not a data: URL is refused."""

    type: Literal["url"]
    url: str

    def address(self) -> str:
        return self.url


class ImageBlock(_Block):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    def part(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.source.address()}}


class ToolResultBlock(_Block):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=MAX_CALL_ID_LENGTH)
    content: str | list[TextBlock | ImageBlock] = ""

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextBlock | ImageBlock])
    @classmethod
    def _parts(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list):
            return text_parts(value, ("text",), info)
        return [_seen(block, index) or text_parts([block], ("text",), info)[0] for index, block in enumerate(value)]

    def result(self) -> str | list[dict[str, Any]]:
        """As the content of a chat message."""
        if isinstance(self.content, str):
            return self.content
        return [_part(block) for block in self.content]


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    return {"type": "text", "text": block.text} if isinstance(block, TextBlock) else block.part()


def _seen(block: Any, index: int) -> dict[str, Any] | None:
    """A block that is an image; None for another."""
    if not isinstance(block, dict) or block.get("type") != "image":
        return None
    _refuse_file(block, index)
    return block


def _refuse_file(block: Mapping[str, Any], index: int) -> None:
    if isinstance(source := block.get("source"), dict):
        refuse_file(source, f"{index}.source")


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


_MEDIA = ("document", "container_upload", "search_result")


def _one_block(value: Any) -> Any:
    for index, block in enumerate(value if isinstance(value, list) else ()):
        if isinstance(block, dict) and block.get("type") in _MEDIA:
            raise ValueError(f"content part {block['type']!r} is not supported: this server reads text and images")
        _seen(block, index)
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class UserMessage(RequestModel):
    role: Literal["user"]
    content: Annotated[list[UserBlock], BeforeValidator(_one_block, json_schema_input_type=str | list[UserBlock])]


class AssistantMessage(RequestModel):
    role: Literal["assistant"]
    content: Annotated[
        list[AssistantBlock], BeforeValidator(_one_block, json_schema_input_type=str | list[AssistantBlock])
    ]


MessageParam = Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]


def chat_messages(messages: Sequence[MessageParam]) -> list[dict[str, Any]]:
    """Chat messages: the results in a message of the user come before what else it says."""
    ready: list[dict[str, Any]] = []
    for message in messages:
        text = [_part(block) for block in message.content if isinstance(block, TextBlock | ImageBlock)]
        if isinstance(message, UserMessage):
            results = [block for block in message.content if isinstance(block, ToolResultBlock)]
            ready += [{"role": "tool", "tool_call_id": r.tool_use_id, "content": r.result()} for r in results]
            if text or not results:
                ready.append({"role": "user", "content": text})
        else:
            ready.append(_of_assistant(message.content, text))
    return ready


def _of_assistant(blocks: Sequence[AssistantBlock], text: list[dict[str, Any]]) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": text or None}
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        said["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.input)}} for call in calls
        ]
    elif not text:
        said["content"] = ""
    if thought := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        said["reasoning_content"] = thought
    return said
