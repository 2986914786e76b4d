"""The items of a Responses input, and the chat messages they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator

from modelserve_worker.server.bodies.field_policy import INPUT_FIELDS, PART_FIELDS
from modelserve_worker.server.bodies.media_parts import Detail, InputAudioPart, refuse_file
from modelserve_worker.server.bodies.messages import MAX_CALL_ID_LENGTH
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.bodies.text_content import text_parts
from modelserve_worker.server.bodies.tools import FunctionName

_TEXT_KINDS = ("input_text", "output_text", "text")


class ImageContent(RequestModel):
    """An image as a part of a message."""

    ignored = PART_FIELDS
    described_as = "input.content."

    type: Literal["input_image"]
    image_url: str
    detail: Detail | None = None


class TextContent(RequestModel):
    """A part of a content as it is documented; the content's own check reads it."""

    type: Literal["input_text", "output_text", "text"]
    text: str


_Content = TextContent | ImageContent | InputAudioPart


def _text_only(value: Any, info: ValidationInfo) -> Any:
    return text_parts(value, _TEXT_KINDS, info)


def _kind_of(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _image(part: dict[str, Any], index: int) -> dict[str, Any]:
    refuse_file(part, str(index))
    read = ImageContent.model_validate(part)
    address = {"url": read.image_url, **({"detail": read.detail} if read.detail else {})}
    return {"type": "image_url", "image_url": address}


def _with_media(value: Any, info: ValidationInfo) -> Any:
    """As parts of a chat message, which read images and sounds."""
    return (
        [_read(part, index, info) for index, part in enumerate(value)]
        if isinstance(value, list)
        else _text_only(value, info)
    )


def _read(part: Any, index: int, info: ValidationInfo) -> Any:
    kind = _kind_of(part)
    if kind == "input_image":
        return _image(part, index)
    return part if kind == "input_audio" else _text_only([part], info)[0]


Seen = Annotated[
    str | list[dict[str, Any]],
    BeforeValidator(_with_media, json_schema_input_type=str | list[_Content]),
]


class ReasoningContent(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class _Item(RequestModel):
    ignored = INPUT_FIELDS
    described_as = "input."


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]

    @field_validator("content", mode="before", json_schema_input_type=str | list[_Content])
    @classmethod
    def _parts(cls, value: Any, info: ValidationInfo) -> Any:
        return _with_media(value, info) if info.data.get("role") == "user" else _text_only(value, info)


class FunctionCallItem(_Item):
    """A call that the model made in an earlier response."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=MAX_CALL_ID_LENGTH)
    name: FunctionName
    arguments: str


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=MAX_CALL_ID_LENGTH)
    output: Seen


class ReasoningItem(_Item):
    """What the model thought in an earlier response. Only `content` is read."""

    type: Literal["reasoning"]
    content: list[dict[str, Any]] = Field(default_factory=list)

    @field_validator("content", mode="before", json_schema_input_type=list[ReasoningContent])
    @classmethod
    def _text_only(cls, value: Any, info: ValidationInfo) -> Any:
        return text_parts(value, ("reasoning_text",), info)

    def thought(self) -> str:
        return "".join(part["text"] for part in self.content)


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def chat_messages(items: Sequence[InputItem], *, instructions: str | None) -> list[dict[str, Any]]:
    """Chat messages: thought, text and calls that follow each other are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": item.content})
        else:
            _add_to_assistant(messages, item)
    return [message for message in messages if len(message) > 1]  # a thought without text leaves nothing


def _add_to_assistant(messages: list[dict[str, Any]], item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    begins = isinstance(item, ReasoningItem) or (isinstance(item, MessageItem) and "content" in (last or {}))
    if last is None or begins:
        last = {"role": "assistant"}
        messages.append(last)
    if isinstance(item, ReasoningItem):
        if thought := item.thought():
            last["reasoning_content"] = thought
    elif isinstance(item, MessageItem):
        last["content"] = item.content
    else:
        function = {"name": item.name, "arguments": item.arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
