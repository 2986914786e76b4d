"""The bodies of /v1/messages and its count_tokens, and the chat completion they stand for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from modelserve_worker.server.answers.preparation import chat_prompt
from modelserve_worker.server.answers.translation import chat_request
from modelserve_worker.server.anthropic.blocks import MessageParam, TextBlock, chat_messages
from modelserve_worker.server.bodies.field_policy import ANTHROPIC_FIELDS, THINKING_FIELDS, TOOL_FIELDS
from modelserve_worker.server.bodies.protocol import (
    LARGEST_COUNT,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    CacheSalt,
    ChatCompletionRequest,
)
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.bodies.text_content import text_parts
from modelserve_worker.server.bodies.tools import MAX_TOOLS, FunctionName
from modelserve_worker.server.state import ServedModel

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ToolParam(RequestModel):
    """A function that the model may call; Anthropic's own tools are not there."""

    ignored = TOOL_FIELDS
    described_as = "tools."

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None

    def chat_tool(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function | {"strict": self.strict}}


class ToolChoice(RequestModel):
    type: Literal["auto", "any", "none", "tool"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False

    def chat_choice(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return _CHOICES[self.type]


class Thinking(RequestModel):
    ignored = THINKING_FIELDS
    described_as = "thinking."

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")

    def response_format(self) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": self.schema_}}


class OutputConfig(RequestModel):
    """What the answer looks like; `effort` counts where thoughts are on, and never switches them on."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(RequestModel):
    """POST /v1/messages/count_tokens: what /v1/messages takes, less what says how to sample."""

    ignored = ANTHROPIC_FIELDS

    model: str
    messages: list[MessageParam] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[ToolParam] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    @field_validator("system", mode="before", json_schema_input_type=str | list[TextBlock])
    @classmethod
    def _text_only(cls, value: Any, info: ValidationInfo) -> Any:
        return text_parts(value, ("text",), info)

    def chat_fields(self) -> dict[str, Any]:
        messages = chat_messages(self.messages)
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        choice = self.tool_choice or ToolChoice(type="auto")
        return {
            "model": self.model,
            "messages": messages,
            "continue_final_message": self.messages[-1].role == "assistant",  # Anthropic's way to begin the answer
            "tools": [tool.chat_tool() for tool in self.tools] or None,
            "tool_choice": choice.chat_choice(),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "reasoning_effort": self._effort(),
            "response_format": self.output_config.format and self.output_config.format.response_format(),
            "thinking_token_budget": self._thought_tokens(),
        }

    def _thought_tokens(self) -> int | None:
        if self.thinking is None or self.thinking.type != "enabled":
            return None
        return self.thinking.budget_tokens

    def _effort(self) -> str | None:
        if self.thinking is None or self.thinking.type == "disabled":
            return None if self.thinking is None else "none"
        effort = self.output_config.effort or "medium"
        return "xhigh" if effort == "max" else effort


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=LARGEST_COUNT)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]] = Field(
        default_factory=list, max_length=MAX_STOP_STRINGS
    )
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0.0, le=1.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0, le=LARGEST_COUNT)
    cache_salt: CacheSalt | None = None

    def chat(self) -> ChatCompletionRequest:
        """The chat completion that this request stands for. Raises ApiError."""
        sampling = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "cache_salt": self.cache_salt,
        }
        return chat_request(self.chat_fields() | sampling)


def count_tokens(body: CountTokensRequest, model: ServedModel, *, max_model_len: int) -> dict[str, int]:
    """How many tokens the prompt of the same request to /v1/messages has. Raises ApiError."""
    return {"input_tokens": len(chat_prompt(chat_request(body.chat_fields()), model, max_model_len=max_model_len))}
