"""What an endpoint says of given tokens: the log probability of each, and of the likeliest in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from modelserve_tools.evaluation.client import ChatEndpoint, ContextTooLong, EndpointError, EndpointGone
from modelserve_tools.evaluation.exercise import Exercise

TOP = 20
"""Likeliest tokens that are asked for in each place: as many as servers give unless they are configured otherwise."""

Logprob = Annotated[float, Field(allow_inf_nan=False)]
Row = Mapping[int, float]
"""Log probabilities by token id: of the TOP likeliest tokens in a place, and of the one that stands there."""

_BY_ID = "token_id:"
_NOT_TAKEN = frozenset({400, 404, 422})


class NoScores(EndpointError):  # noqa: N818 - reads as the reason it states
    """The endpoint cannot say what is needed of any text: nothing is gained by asking for the next."""


class TokenList(BaseModel):
    tokens: list[int] = Field(min_length=2)


class ScoredToken(BaseModel):
    logprob: Logprob


class EchoedLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None] | None = None


class TextChoice(BaseModel):
    prompt_logprobs: list[dict[int, ScoredToken] | None] | None = None
    logprobs: EchoedLogprobs | None = None


class TextCompletion(BaseModel):
    choices: list[TextChoice] = Field(min_length=1)


class ScoringEndpoint:
    """One model of an endpoint, asked by token ids, so that two endpoints are asked the very same."""

    def __init__(self, endpoint: ChatEndpoint, *, model: str, name: str) -> None:
        """`name` is the endpoint's in messages."""
        self._endpoint = endpoint
        self._model = model
        self._name = name
        self._echoes = False  # scores come with an echo: prompt_logprobs were not taken

    async def tokens(self, exercise: Exercise) -> tuple[int, ...]:
        """The prompt that the exercise's messages are. Raises EndpointError, and NoScores without a /tokenize."""
        body: dict[str, Any] = {"model": self._model, "messages": list(exercise.messages)}
        if exercise.tools:
            body["tools"] = list(exercise.tools)
        if exercise.thinking:
            body["chat_template_kwargs"] = {"enable_thinking": True}
        try:
            listed, _ = await self._endpoint.post("/tokenize", body, TokenList)
        except EndpointError as error:
            if error.status in (404, 405):
                raise NoScores(
                    f"{self._name} has no /tokenize beside its /v1 ({error}): token ids of prompts come from there; "
                    "name the server itself, not a proxy that hides the route"
                ) from error
            raise
        return tuple(listed.tokens)

    async def answer(self, prompt: Sequence[int], *, max_tokens: int) -> tuple[int, ...]:
        """Token ids of the greedy answer, with the one that ends it. Raises EndpointError and NoScores."""
        completion = await self._complete(
            prompt, {"max_tokens": max_tokens, "logprobs": 1, "return_tokens_as_token_ids": True}
        )
        scored = completion.choices[0].logprobs
        if scored is None:
            raise NoScores(f"{self._name} gives no logprobs of completions: which tokens it answers with is unknown")
        return tuple(self._id(token) for token in scored.tokens)

    async def scores(self, tokens: Sequence[int]) -> list[Row]:
        """A row per token but the first. Raises EndpointError, and NoScores where the endpoint has no such thing."""
        if self._echoes:
            return await self._echoed(tokens)
        refused: EndpointError | None = None
        try:
            completion = await self._complete(tokens, {"max_tokens": 1, "prompt_logprobs": TOP})
        except (ContextTooLong, EndpointGone):
            raise
        except EndpointError as error:
            if error.status not in _NOT_TAKEN:
                raise
            refused = error
        else:
            listed = completion.choices[0].prompt_logprobs
            if listed is not None:
                scored = [{token: each.logprob for token, each in (entry or {}).items()} for entry in listed[1:]]
                return self._checked(tokens, scored)
        try:
            rows = await self._echoed(tokens)
        except (ContextTooLong, EndpointGone):
            raise
        except EndpointError as error:
            why = "prompt_logprobs are ignored" if refused is None else f"prompt_logprobs are refused ({refused})"
            raise NoScores(
                f"{self._name} does not score prompts: {why}, and echo with logprobs gives none by token id ({error}); "
                "name a server that takes prompt_logprobs on /v1/completions"
            ) from error
        self._echoes = True
        return rows

    async def _echoed(self, tokens: Sequence[int]) -> list[Row]:
        fields = {"max_tokens": 1, "echo": True, "logprobs": TOP, "return_tokens_as_token_ids": True}
        scored = (await self._complete(tokens, fields)).choices[0].logprobs
        if scored is None or scored.top_logprobs is None:
            raise NoScores("no logprobs in the answer")
        rows: list[Row] = []
        for token, logprob, top in zip(scored.tokens, scored.token_logprobs, scored.top_logprobs, strict=False):
            own = {} if logprob is None else {self._id(token): logprob}
            rows.append({self._id(other): value for other, value in (top or {}).items()} | own)
        return self._checked(tokens, rows[1 : len(tokens)])

    async def _complete(self, prompt: Sequence[int], fields: Mapping[str, Any]) -> TextCompletion:
        body = {"model": self._model, "prompt": list(prompt), "temperature": 0.0, **fields}
        completion, _ = await self._endpoint.post("completions", body, TextCompletion)
        return completion

    def _id(self, token: str) -> int:
        number = token.removeprefix(_BY_ID)
        if number == token or not number.isdecimal():
            raise NoScores(
                f"{self._name} names tokens by their text ({token!r}), though return_tokens_as_token_ids asked for ids"
            )
        return int(number)

    def _checked(self, tokens: Sequence[int], rows: Sequence[Row]) -> list[Row]:
        """Raises NoScores unless there is a row per token but the first, and the token is in its row."""
        if len(rows) != len(tokens) - 1:
            raise NoScores(
                f"{self._name} scored {len(rows)} tokens of a prompt of {len(tokens)}, not {len(tokens) - 1}"
            )
        for place, (token, row) in enumerate(zip(tokens[1:], rows, strict=True), start=1):
            if token not in row:
                raise NoScores(f"{self._name} scored another token than {token}, which it was given in place {place}")
        return list(rows)
