"""The messages of a chat request, field by field; which fields a role may have is `conversation`'s business."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, GetJsonSchemaHandler, ValidationInfo, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from modelserve_worker.server.bodies.field_policy import CALL_FIELDS, MESSAGE_FIELDS, PART_FIELDS
from modelserve_worker.server.bodies.media_parts import AudioUrlPart, ImageUrlPart, InputAudioPart
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.bodies.text_content import text_parts
from modelserve_worker.server.bodies.tools import FunctionName

MAX_MESSAGES = 32768
MAX_CALLS = 128  # in one message
MAX_CALL_ID_LENGTH = 256
ONLY_ASSISTANT = ("tool_calls", "reasoning_content", "reasoning")
_SEEN = ("user", "tool")  # roles whose messages may have images and sounds
_SAID = ("content", *ONLY_ASSISTANT)


class CalledFunction(RequestModel):
    """`arguments` is a JSON object as text; empty for none, and any text of a call that was cut (conversation.py)."""

    ignored = CALL_FIELDS
    described_as = "tool_calls.function."

    name: FunctionName
    arguments: str


class MessageToolCall(RequestModel):
    """A call that the assistant made."""

    ignored = CALL_FIELDS
    described_as = "tool_calls."

    id: str = Field(min_length=1, max_length=MAX_CALL_ID_LENGTH)
    type: Literal["function"] = "function"
    function: CalledFunction


class TextPart(RequestModel):
    """A part of a content as it is documented; the content's own check reads it."""

    ignored = PART_FIELDS
    described_as = "messages.content."

    type: Literal["text"]
    text: str


_Part = TextPart | ImageUrlPart | InputAudioPart | AudioUrlPart


class Message(RequestModel):
    """One message of a conversation. `content` is text, or a list of {"type": "text", "text": ...} parts, and of
    image_url, input_audio and audio_url parts in what the user says and tools return.

    `reasoning` is the name some clients send `reasoning_content` back under.
    """

    ignored = MESSAGE_FIELDS
    described_as = "messages."

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, str]] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] = Field(default_factory=list, max_length=MAX_CALLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[_Part])
    @classmethod
    def _parts(cls, value: Any, info: ValidationInfo) -> Any:
        return text_parts(value, ("text",), info, media=info.data.get("role") in _SEEN)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """One schema for each kind of role, with the fields that it may have and must have."""
        reference = handler(core)
        schema = handler.resolve_ref_schema(reference)
        fields = schema.pop("properties")
        asks = {"role": {"type": "string", "enum": ["system", "developer", "user"]}}
        answers = {"role": {"const": "assistant"}, **{name: fields[name] for name in ONLY_ASSISTANT}}
        returns = {"role": {"const": "tool"}, "tool_call_id": fields["tool_call_id"]}
        kinds: tuple[tuple[dict[str, Any], list[str]], ...]
        kinds = ((asks, ["content"]), (answers, []), (returns, ["content", "tool_call_id"]))
        for key in ("type", "required", "additionalProperties"):
            schema.pop(key)
        schema["oneOf"] = [
            {
                "type": "object",
                "properties": {"content": fields["content"], "name": fields["name"], **own},
                "required": ["role", *required],
                "additionalProperties": False,
            }
            for own, required in kinds
        ]
        # The calls of an assistant need no content.
        schema["oneOf"][1]["anyOf"] = [{"required": [name]} for name in _SAID]
        return reference
