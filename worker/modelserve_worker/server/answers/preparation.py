"""From a validated body to sequences for the engine: tokens, limits, sampling parameters with the model's defaults."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.answer import Thought
from modelserve_worker.request import GRAMMAR_FIELD, Request, SamplingParams, ThinkingBudget
from modelserve_worker.server.answers.conversation import INSTRUCTIONS, template_messages
from modelserve_worker.server.answers.prompt_media import PlacedMedia, Sent, placed_media, sent_media
from modelserve_worker.server.answers.prompt_tokens import (
    CONTEXT_CODE,
    CONTEXT_EXCEEDED,
    encode,
    invalid_text,
    require_in_vocabulary,
    too_many_tokens,
)
from modelserve_worker.server.bodies.protocol import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
)
from modelserve_worker.server.bodies.structured_output import AskedGrammar, answer_grammar, grammar_source
from modelserve_worker.server.errors.errors import ApiError
from modelserve_worker.server.state import ServedModel
from modelserve_worker.text.chat_template import ChatTemplateError
from modelserve_worker.text.markers import Markers
from modelserve_worker.text.prompt_encoder import GUARD, InvalidTextError
from modelserve_worker.text.repetition import RepetitionLimits
from modelserve_worker.text.reply import PLAIN_TEXT, ReplyFormat

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_SEEDS = 1 << 63
_NO_MARKERS = Markers.of({})
_TURN = "<|turn>"
_THINK = "<|think|>"  # the token by which a prompt asks for thoughts


@dataclass(frozen=True)
class SequenceSpec:
    """One answer to generate: choice `index` of the response."""

    index: int
    request: Request
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    reply_format: ReplyFormat
    grammar_field: str = GRAMMAR_FIELD  # which of its client's fields asked for the grammar, where there is one
    repetition: RepetitionLimits | None = None  # what ends it as a loop
    prompt_only: bool = False  # max_tokens 0: the engine samples one token, and nobody hears of it
    media: tuple[PlacedMedia, ...] = ()  # of its prompt, which become the request's spans before it is sent


class _ChatPrompt(NamedTuple):
    """`checkpoints`: positions at which later requests begin to differ: behind the instructions, where other
    conversations do, and where the next turn of this one does."""

    token_ids: array[int]
    checkpoints: tuple[int, ...]
    media: tuple[PlacedMedia, ...]


def completion_prompts(body: CompletionRequest, model: ServedModel, *, max_model_len: int) -> list[array[int]]:
    """Token ids of every prompt. Raises ApiError."""
    prompts = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            ends = body.add_special_tokens
            encoded, _ = encode(
                prompt, model, param="prompt", add_special_tokens=ends, most_tokens=max_model_len, salt=body.cache_salt
            )
            prompts.append(encoded)
        else:
            require_in_vocabulary(prompt, model, param="prompt")
            prompts.append(array("i", prompt))
    return prompts


def chat_prompt(body: ChatCompletionRequest, model: ServedModel, *, max_model_len: int) -> array[int]:
    """Token ids of the rendered conversation; markers that its texts spell are text. Raises ApiError."""
    return _chat_prompt(body, model, max_model_len=max_model_len).token_ids


def _chat_prompt(
    body: ChatCompletionRequest,
    model: ServedModel,
    *,
    max_model_len: int,
    media: Sequence[tuple[str, Sent]] | None = None,
) -> _ChatPrompt:
    """The same, with where it has images and sounds and where later requests begin to differ."""
    template = model.text.chat_template
    if template is None:
        raise ApiError(
            f"the checkpoint of {model.name!r} has no chat template; use /v1/completions, "
            "or add chat_template.jinja to the checkpoint",
            param="messages", code="no_chat_template",
        )  # fmt: skip
    reserved = sorted(template.reserved_names & set(body.chat_template_kwargs))
    if reserved:
        param = f"chat_template_kwargs.{reserved[0]}"
        raise ApiError(f"{param} is set by the server; remove it", param=param, code="invalid_value")
    if len(body.messages) > max_model_len:  # each has a token at least
        raise too_many_tokens(len(body.messages), max_model_len, param="messages")
    sent = sent_media(body, model) if media is None else media
    tools = [tool.model_dump(exclude_unset=True) for tool in body.offered_tools]
    guarded = model.text.encoder.guarded
    try:
        messages = guarded(template_messages(body.messages))
        variables = guarded({**body.template_variables, "tools": tools or None})
        text = template.render(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=variables,
        )
    except InvalidTextError as error:
        raise invalid_text("messages") from error
    except ChatTemplateError as error:
        reason = str(error).replace(GUARD, "")
        raise ApiError(f"the chat template refused the messages: {reason}", param="messages") from error
    mark = 0 if body.continue_final_message else template.history_length(messages, text, variables=variables)
    ends = body.add_special_tokens
    prompt, history = encode(
        text,
        model,
        param="messages",
        add_special_tokens=ends,
        most_tokens=max_model_len,
        mark=mark,
        salt=body.cache_salt,
    )
    prompt, history, placed = placed_media(prompt, history, sent, model.text.vocabulary.ids, most_tokens=max_model_len)
    turns = np.flatnonzero(np.asarray(prompt) == model.text.vocabulary.ids.get(_TURN, -1))
    instructed = bool(tools) or (bool(messages) and messages[0]["role"] in INSTRUCTIONS)
    shared = int(turns[1]) if instructed and len(turns) > 1 else 0
    return _ChatPrompt(prompt, tuple(sorted({shared, history} - {0, len(prompt)})), placed)


def completion_sequences(
    body: CompletionRequest, model: ServedModel, *, response_id: str, max_model_len: int
) -> list[SequenceSpec]:
    """The answers to every prompt, in order. Raises ApiError."""
    prompts = completion_prompts(body, model, max_model_len=max_model_len)
    if len(prompts) * body.n > MAX_PROMPTS:
        raise ApiError(
            f"{len(prompts)} prompts times n={body.n} are {len(prompts) * body.n} answers; the limit is {MAX_PROMPTS}",
            param="n", code="invalid_value",
        )  # fmt: skip
    grammar = _grammar(body)
    specs: list[SequenceSpec] = []
    for prompt in prompts:
        asked = None if body.max_tokens is None else max(1, body.max_tokens)
        room = _room(prompt, model_len=max_model_len, asked=asked, param="max_tokens", source="prompt")
        max_tokens = asked or min(DEFAULT_COMPLETION_TOKENS, room)
        specs += _choices(
            body,
            prompt,
            model,
            response_id=response_id,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.scored_alternatives,
            first_index=len(specs),
            grammar=grammar,
            prompt_only=body.max_tokens == 0,
        )
    return specs


def chat_sequences(
    body: ChatCompletionRequest,
    model: ServedModel,
    *,
    response_id: str,
    max_model_len: int,
    media: Sequence[tuple[str, Sent]] | None = None,
) -> list[SequenceSpec]:
    """The n answers to a conversation. `media`: what its parts of images and sounds are; left out, they say it. Raises
    ApiError."""
    prompt, checkpoints, placed = _chat_prompt(body, model, max_model_len=max_model_len, media=media)
    asked = body.max_completion_tokens or body.max_tokens
    param = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    room = _room(prompt, model_len=max_model_len, asked=asked, param=param, source="messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    predicted = array("i")
    if body.prediction is not None and body.prediction.text:
        predicted, _ = encode(
            body.prediction.text, model, param="prediction.content", add_special_tokens=False,
            most_tokens=max_model_len, salt=body.cache_salt,
        )  # fmt: skip
    return _choices(
        body,
        prompt,
        model,
        response_id=response_id,
        max_tokens=asked or room,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        first_index=0,
        grammar=_chat_grammar(body, prompt, model),
        thinking_budget=_thinking_budget(body, prompt, model),
        reply_format=_reply_format(body, prompt, model),
        checkpoints=checkpoints,
        predicted=predicted,
        media=placed,
    )


def _grammar(
    body: CompletionRequest | ChatCompletionRequest,
    markers: Markers = _NO_MARKERS,
    thought: Thought = Thought.NONE,
    **calls: Any,
) -> AskedGrammar | None:
    """What the answer must match; None where any answer will do. Raises ApiError."""
    try:
        answer = answer_grammar(
            response_format=body.response_format, structured_outputs=body.structured_outputs, **calls
        )
        return None if answer is None else AskedGrammar(grammar_source(answer, markers, thought), answer.field)
    except InvalidInput as error:
        raise ApiError(str(error), param=error.field, code="invalid_value") from error


def _chat_grammar(body: ChatCompletionRequest, prompt: array[int], model: ServedModel) -> AskedGrammar | None:
    """The grammar begins behind the thought that may stand before the answer. Raises ApiError."""
    vocabulary = model.text.vocabulary
    markers = Markers.of(vocabulary.ids)
    thought = Thought.NONE
    if markers.tail_of_open_thought(prompt) is not None:
        thought = Thought.OPEN
    elif markers.thought_open is not None and vocabulary.ids.get(_THINK) in prompt:
        thought = Thought.POSSIBLE
    return _grammar(
        body,
        markers,
        thought,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
    )


def _thinking_budget(body: ChatCompletionRequest, prompt: array[int], model: ServedModel) -> ThinkingBudget | None:
    """None where none is asked for, or the model has no thoughts."""
    markers = Markers.of(model.text.vocabulary.ids)
    if body.thought_tokens is None or markers.thought_open is None or markers.thought_close is None:
        return None
    closes = [markers.thought_close, *([] if markers.call_open is None else [markers.call_open])]
    begun = markers.tail_of_open_thought(prompt) is not None
    return ThinkingBudget(body.thought_tokens, markers.thought_open, tuple(closes), begun)


def _reply_format(body: ChatCompletionRequest, prompt: array[int], model: ServedModel) -> ReplyFormat:
    """Who asks to see special tokens gets the answer as the model wrote it; without tools no call is looked for."""
    if not body.skip_special_tokens:
        return ReplyFormat()
    markers = Markers.of(model.text.vocabulary.ids)
    return ReplyFormat(
        markers=markers,
        tool_calls=bool(body.offered_tools),
        one_call=not body.parallel_tool_calls,  # a promise that ending the answer behind a call keeps
        prompt_tail=markers.tail_of_open_thought(prompt),
    )


def _choices(
    body: SamplingFields,
    prompt: array[int],
    model: ServedModel,
    *,
    response_id: str,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    first_index: int,
    grammar: AskedGrammar | None,
    thinking_budget: ThinkingBudget | None = None,
    reply_format: ReplyFormat = PLAIN_TEXT,
    prompt_only: bool = False,
    checkpoints: tuple[int, ...] = (),
    predicted: Sequence[int] = (),
    media: tuple[PlacedMedia, ...] = (),
) -> list[SequenceSpec]:
    """The n answers to one prompt. With a seed, answer i of a prompt is the same whatever else is in the body.

    They share the prompt, so the first alone has its tokens scored.
    """
    if body.min_tokens > max_tokens:
        raise ApiError(f"min_tokens {body.min_tokens} exceeds max_tokens {max_tokens}", param="min_tokens")
    seed = secrets.randbelow(_SEEDS) if body.seed is None else body.seed
    sampling = _sampling(body, model, seed=seed, max_tokens=max_tokens, logprobs=logprobs)
    return [
        SequenceSpec(
            index=first_index + choice,
            request=Request(
                f"{response_id}-{first_index + choice}",
                prompt,
                replace(sampling, seed=(seed + choice) % _SEEDS, prompt_logprobs=None if choice else prompt_logprobs),
                grammar=None if grammar is None else grammar.source,
                thinking_budget=thinking_budget,
                cache_salt=body.cache_salt or "",
                adapter=model.adapter,
                checkpoints=checkpoints,
                predicted_token_ids=predicted,
            ),
            stop=tuple(body.stop),
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            reply_format=reply_format,
            grammar_field=GRAMMAR_FIELD if grammar is None else grammar.field,
            repetition=None if body.repetition_detection is None else body.repetition_detection.limits(),
            prompt_only=prompt_only,
            media=media,
        )
        for choice in range(body.n)
    ]


def _sampling(
    body: SamplingFields, model: ServedModel, *, seed: int, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    logit_bias = tuple((int(key), bias) for key, bias in body.logit_bias.items())
    require_in_vocabulary([token_id for token_id, _ in logit_bias], model, param="logit_bias")
    require_in_vocabulary(body.stop_token_ids, model, param="stop_token_ids")
    defaults = model.text.defaults
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_k=max(0, top_k),
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        repetition_penalty=(
            defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
        ),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=logit_bias,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop_token_ids=tuple(body.stop_token_ids),
        logprobs=logprobs,
    )


def _room(prompt: array[int], *, model_len: int, asked: int | None, param: str, source: str) -> int:
    """Tokens that may still follow the prompt, which came in the field `source`. Raises ApiError with the numbers when
    `asked`, the field `param`, exceeds it."""
    room = model_len - len(prompt)
    wanted = 1 if asked is None else asked
    if wanted > room:
        raise ApiError(
            f"{CONTEXT_EXCEEDED.format(model_len)} The prompt has {len(prompt)} tokens and {wanted} are asked for, "
            f"together {len(prompt) + wanted}. Shorten the prompt"
            + (f", or ask for at most {room}" if asked is not None and room > 0 else ""),
            param=source if asked is None or room <= 0 else param, code=CONTEXT_CODE,
        )  # fmt: skip
    return room
