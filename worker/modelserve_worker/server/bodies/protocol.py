"""Request bodies of the API. A field that is not here is refused by name."""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BeforeValidator, FailFast, Field, field_validator, model_validator

from modelserve_worker.server.bodies.field_policy import CHAT_FIELDS, COMPLETION_FIELDS, STREAM_OPTIONS_FIELDS
from modelserve_worker.server.bodies.media_parts import MediaSettings
from modelserve_worker.server.bodies.messages import MAX_MESSAGES, Message
from modelserve_worker.server.bodies.prediction import Prediction
from modelserve_worker.server.bodies.request_model import RequestModel, whole_numbers
from modelserve_worker.server.bodies.structured_output import (
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
    forced_tools,
    offered_tools,
)
from modelserve_worker.server.bodies.tools import MAX_TOOLS, Tool
from modelserve_worker.server.errors.errors import FieldError
from modelserve_worker.server.json_text import nested_deeper
from modelserve_worker.text.repetition import RepetitionLimits
from modelserve_worker.text.tool_calls import MAX_DEPTH

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20
MAX_PATTERN_SIZE = 256  # each of these is a comparison per token
MAX_ID_DIGITS = 10  # of a token id written as text; Python refuses to read a number of thousands of digits

LARGEST_COUNT = (1 << 31) - 1  # a top_k beyond 64 bits would fail every request of its step


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    if nested_deeper(value, MAX_DEPTH):
        raise ValueError(f"objects and lists are nested more than {MAX_DEPTH} deep")
    return value


BoundedObject = Annotated[dict[str, Any], AfterValidator(_bounded)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], BeforeValidator(whole_numbers)]
_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompts = (
    _Text
    | _Ids
    | Annotated[list[_Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
)


def _token_ids(values: list[Any]) -> Sequence[int]:
    """The ids of a prompt, at least one. Raises ValueError.

    Nearly always that is one pass in C: packing takes nothing but integers of 32 bits (in a third of the time in which
    an array takes them). But it takes true for 1, so where the least is no more than that, types are looked at; and
    what it does not take may still be right.
    """
    try:
        ids = array("i", struct.pack(f"{len(values)}i", *values))
        if np.min(ids) > 1:
            return ids
    except struct.error:
        pass
    whole: list[Any] = whole_numbers(values)
    if set(map(type, whole)) != {int} or min(whole) < 0:
        wrong = next(value for value in whole if type(value) is not int or value < 0)
        raise ValueError(f"token ids are integers from 0 on, not {str(wrong)[:40]!r}")
    return whole


class StreamOptions(RequestModel):
    ignored = STREAM_OPTIONS_FIELDS
    described_as = "stream_options."

    include_usage: bool = False


class RepetitionDetection(RequestModel):
    """vLLM's: ends an answer that repeats itself, with finish_reason "length" and stop_reason "repetition_detected"."""

    max_pattern_size: int = Field(ge=0, le=MAX_PATTERN_SIZE, description="tokens of one round at most; 0 is off")
    min_pattern_size: int = Field(default=0, ge=0, description="tokens of one round at least; 0 means 1")
    min_count: int = Field(default=0, ge=0, le=LARGEST_COUNT, description="rounds, from 2 on")

    @model_validator(mode="after")
    def _sizes_and_count(self) -> RepetitionDetection:
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError(f"min_count is {self.min_count}; something is repeated from 2 on")
        if self.max_pattern_size and self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"min_pattern_size {self.min_pattern_size} exceeds max_pattern_size {self.max_pattern_size}"
            )
        return self

    def limits(self) -> RepetitionLimits | None:
        """None where it is off."""
        least = max(1, self.min_pattern_size)
        return RepetitionLimits(self.max_pattern_size, least, self.min_count) if self.max_pattern_size else None


class SamplingFields(RequestModel):
    """What completions and chat completions share. Defaults left None come from generation_config.json."""

    model: str
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, le=LARGEST_COUNT, description="-1 and 0 switch it off")
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=10.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict,
        max_length=1024,
        json_schema_extra={"propertyNames": {"pattern": f"^[0-9]{{1,{MAX_ID_DIGITS}}}$"}},
    )
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list, max_length=256)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetection | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    return_tokens_as_token_ids: bool = Field(default=False, description="log probabilities name tokens by their ids")
    cache_salt: CacheSalt | None = Field(
        default=None, description="Only requests with the same one read each other's cached prefixes."
    )

    @field_validator(
        "stop",
        mode="before",
        json_schema_input_type=StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)],
    )
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _token_id_keys(cls, value: dict[str, float]) -> dict[str, float]:
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
                raise ValueError(f"keys are token ids, not {key[:40]!r}")
        return value

    @model_validator(mode="after")
    def _options_of_streams(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options is allowed only with stream=true")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_whole(self) -> SamplingFields:
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "prompt_logprobs come with a whole answer; leave stream out")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    ignored = COMPLETION_FIELDS

    prompt: list[str | Sequence[int]]
    max_tokens: int | None = Field(default=None, ge=0, le=LARGEST_COUNT, description="0: the prompt's scores alone")
    response_format: ResponseFormat | None = None
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool = True

    @field_validator("prompt", mode="plain", json_schema_input_type=Prompts)
    @classmethod
    def _list_of_prompts(cls, value: Any) -> list[str | Sequence[int]]:
        """One text, several texts, one list of token ids or several of them: all become a list of prompts.

        Plain, as what it passes must not be checked again, one token id at a time.
        """
        if isinstance(value, str):
            prompts: list[Any] = [value]
        elif not isinstance(value, list):
            raise ValueError("a prompt is a string, a list of strings, a list of token ids, or a list of such lists")
        else:
            prompts = [value] if value and isinstance(value[0], int | float) else value
        for prompt in prompts:
            if not isinstance(prompt, str | list):
                raise ValueError(f"a prompt is a string or a list of token ids, not {str(prompt)[:40]!r}")
            if not prompt:
                raise ValueError("a prompt must not be empty; it needs at least one character or token id")
        if not prompts:
            raise ValueError("the list of prompts must not be empty")
        if len(prompts) > MAX_PROMPTS:
            raise ValueError(f"there are {len(prompts)} prompts; the limit is {MAX_PROMPTS}")
        return [prompt if isinstance(prompt, str) else _token_ids(prompt) for prompt in prompts]

    @property
    def is_encoded(self) -> bool:
        compiles = self.response_format is not None or self.structured_outputs is not None
        return len(self.prompt) == self.n == 1 and not isinstance(self.prompt[0], str) and not (self.echo or compiles)

    @property
    def scored_alternatives(self) -> int | None:
        """How many alternatives to report for each token of the prompt; None when its tokens are not scored."""
        asked = [count for count in (self.logprobs if self.echo else None, self.prompt_logprobs) if count is not None]
        return max(asked, default=None)


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    ignored = CHAT_FIELDS

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    modalities: list[Literal["text"]] | None = None
    mm_processor_kwargs: MediaSettings | None = None
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: int | None = Field(
        default=None, ge=-1, le=LARGEST_COUNT, description="tokens of thoughts at most; -1 switches it off"
    )
    thinking_budget: int | None = Field(
        default=None, ge=-1, le=LARGEST_COUNT, description="another name of thinking_token_budget"
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # chat templates write the beginning-of-sequence token themselves
    chat_template_kwargs: BoundedObject = Field(default_factory=dict)

    @field_validator("tools", mode="after")
    @classmethod
    def _distinct_names(cls, tools: list[Tool]) -> list[Tool]:
        names = Counter(tool.function.name for tool in tools)
        twice = sorted(name for name, count in names.items() if count > 1)
        if twice:
            raise ValueError(f"two functions are named {twice[0]!r}; names must differ")
        return tools

    @model_validator(mode="after")
    def _forced_tools_exist(self) -> ChatCompletionRequest:
        forced_tools(self.tools, self.tool_choice)
        return self

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs is allowed only with logprobs=true")
        return self

    @model_validator(mode="after")
    def _one_end_of_the_prompt(self) -> ChatCompletionRequest:
        if self.continue_final_message:
            if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
                raise FieldError(
                    "continue_final_message",
                    "continue_final_message and add_generation_prompt exclude each other; set one of them",
                )
            if self.messages[-1].role != "assistant" or self.messages[-1].tool_calls:
                raise FieldError(
                    "continue_final_message",
                    "continue_final_message needs a last message of role assistant without tool_calls",
                )
        return self

    @model_validator(mode="after")
    def _one_budget(self) -> ChatCompletionRequest:
        if None not in (self.thinking_token_budget, self.thinking_budget):
            raise ValueError("thinking_token_budget and thinking_budget are one thing; send one of them")
        return self

    @property
    def thought_tokens(self) -> int | None:
        """Tokens that thoughts may have; None: as many as they like."""
        asked = self.thinking_budget if self.thinking_token_budget is None else self.thinking_token_budget
        return None if asked is None or asked < 0 else asked

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools the model is told of: those that it may call, so that nothing invites another call."""
        return offered_tools(self.tools, self.tool_choice)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template. A template's own enable_thinking wins over the general reasoning_effort."""
        thinking = {} if self.reasoning_effort is None else {"enable_thinking": self.reasoning_effort != "none"}
        return thinking | self.chat_template_kwargs
