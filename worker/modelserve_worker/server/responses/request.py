"""The body of POST /v1/responses, and the chat completion it stands for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from modelserve_worker.server.answers.translation import chat_request
from modelserve_worker.server.bodies.field_policy import REASONING_FIELDS, RESPONSES_FIELDS, STREAM_OPTIONS_FIELDS
from modelserve_worker.server.bodies.protocol import (
    LARGEST_COUNT,
    BoundedObject,
    CacheSalt,
    ChatCompletionRequest,
    ReasoningEffort,
)
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.bodies.tools import MAX_TOOLS, FunctionName
from modelserve_worker.server.errors.refused_fields import REFUSED_FIELDS
from modelserve_worker.server.responses.input_items import InputItem, chat_messages

_REFUSED = ("previous_response_id", "conversation", "prompt", "background", "context_management")


class FunctionTool(RequestModel):
    """A function that the model may call; OpenAI's built-in tools are not there."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def chat_tool(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class ChosenFunction(RequestModel):
    type: Literal["function"]
    name: FunctionName


class AllowedTools(RequestModel):
    """OpenAI's: of the tools, the model knows these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction] = Field(min_length=1, max_length=MAX_TOOLS)


class ReasoningOptions(RequestModel):
    """Thoughts come whole, as reasoning text."""

    ignored = REASONING_FIELDS
    described_as = "reasoning."

    effort: ReasoningEffort | None = None


class TextOptions(RequestModel):
    """`format` as in OpenAI's API; `verbosity` changes nothing."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None

    def response_format(self) -> dict[str, Any] | None:
        """The same in the shape of a chat completion, which has the schema one level deeper."""
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        return {"type": "json_schema", "json_schema": {k: v for k, v in self.format.items() if k != "type"}}


class ResponseStreamOptions(RequestModel):
    ignored = STREAM_OPTIONS_FIELDS
    described_as = "stream_options."


def _chat_function(chosen: ChosenFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": chosen.name}}


def _one_message(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(RequestModel):
    """POST /v1/responses. What names a state of the server is refused, as the server has none."""

    ignored = RESPONSES_FIELDS

    model: str
    input: Annotated[
        Annotated[list[InputItem], Field(min_length=1)],
        BeforeValidator(_one_message, json_schema_input_type=str | Annotated[list[InputItem], Field(min_length=1)]),
    ]
    instructions: str | None = None
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, le=LARGEST_COUNT, description="-1 and 0 switch it off")
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    cache_salt: CacheSalt | None = None
    include: list[str] = Field(default_factory=list, description="what there is comes unasked")

    # The response repeats these; they change nothing else.
    metadata: BoundedObject | None = None
    user: str | None = None

    previous_response_id: Annotated[Any, Field(json_schema_extra={"type": "null"})] = None
    conversation: Annotated[Any, Field(json_schema_extra={"type": "null"})] = None
    prompt: Annotated[Any, Field(json_schema_extra={"type": "null"})] = None
    context_management: Annotated[Any, Field(json_schema_extra={"type": "null"})] = None
    background: Annotated[Any, Field(json_schema_extra={"const": False})] = None

    @field_validator(*_REFUSED, mode="after")
    @classmethod
    def _refused(cls, value: Any, info: Any) -> Any:
        if value is not False:  # null did not come this far
            raise ValueError(f"not supported: {REFUSED_FIELDS[info.field_name]}")
        return value

    @field_validator("include", mode="after")
    @classmethod
    def _no_logprobs(cls, value: list[str]) -> list[str]:
        if "message.output_text.logprobs" in value:
            raise ValueError("log probabilities are not supported here; /v1/chat/completions has them")
        return value

    def chat(self) -> ChatCompletionRequest:
        """The chat completion that this request stands for. Raises ApiError."""
        return chat_request(
            {
                "model": self.model,
                "messages": chat_messages(self.input, instructions=self.instructions),
                "tools": [tool.chat_tool() for tool in self.tools] or None,
                "tool_choice": self._chat_choice(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "max_completion_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "seed": self.seed,
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
                "response_format": self.text.response_format() if self.text else None,
                "chat_template_kwargs": self.chat_template_kwargs,
                "cache_salt": self.cache_salt,
            }
        )

    def _chat_choice(self) -> str | dict[str, Any]:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            tools = [_chat_function(each) for each in choice.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
        return choice if isinstance(choice, str) else _chat_function(choice)

    def echoed(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": self.temperature,
            "text": {"format": (self.text.format if self.text else None) or {"type": "text"}},
            "tool_choice": self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.model_dump(),
            "tools": [{"strict": False, "parameters": {}, **tool.model_dump(exclude_none=True)} for tool in self.tools],
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }
