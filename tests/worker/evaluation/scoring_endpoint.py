"""A scripted endpoint with /tokenize and /v1/completions: what it gives, leaves out or refuses is the test's."""

from __future__ import annotations

from math import log
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

ANSWER = (901, 902, 1)


class ScoringServer:
    """Its distribution in every place: the token given is as likely as `own`, the next ids share the rest as 8:4:2."""

    def __init__(self, *, own: float = 0.5, shift: int = 0, tokenizes: bool = True, scores: str = "prompt") -> None:
        """`scores`: "prompt" as prompt_logprobs, "echo" with the echo alone, "text" with an echo that names tokens by
        text, "none". `shift` is added to every id of a prompt."""
        self.own, self._shift, self._scores = own, shift, scores
        self.requests: list[dict[str, Any]] = []
        self.failing = 0  # of the next scores, how many are refused
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        if tokenizes:
            routes.append(Route("/tokenize", self._tokenize, methods=["POST"]))
        self.app = Starlette(routes=routes)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "scripted", "max_model_len": 10}]})  # no exercise fits: texts alone

    async def _tokenize(self, request: Request) -> Response:
        text = "".join(message["content"] or "" for message in (await request.json())["messages"])
        return JSONResponse({"tokens": [2, *(self._shift + ord(letter) for letter in text)]})

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if "prompt_logprobs" not in body and "echo" not in body:
            return JSONResponse({"choices": [{"logprobs": self._named(ANSWER)}]})
        if self.failing:
            self.failing -= 1
            return JSONResponse({"error": {"message": "overheated"}}, status_code=500)
        prompt = body["prompt"]
        if "prompt_logprobs" in body:
            if self._scores != "prompt":
                return JSONResponse({"error": {"message": "prompt_logprobs: unknown field"}}, status_code=400)
            rows = [{str(t): {"logprob": v} for t, v in self._row(token).items()} for token in prompt[1:]]
            return JSONResponse({"choices": [{"prompt_logprobs": [None, *rows]}]})
        return JSONResponse({"choices": [{"logprobs": None if self._scores == "none" else self._named((*prompt, 5))}]})

    def _row(self, token: int) -> dict[int, float]:
        left = 1 - self.own
        return {token: log(self.own), **{token + i: log(left * share / 16) for i, share in enumerate((8, 4, 2), 1)}}

    def _named(self, tokens: tuple[int, ...]) -> dict[str, Any]:
        prefix = "t" if self._scores == "text" else "token_id:"
        rows = [self._row(token) for token in tokens]
        return {
            "tokens": [f"{prefix}{token}" for token in tokens],
            "token_logprobs": [None, *(row[token] for token, row in zip(tokens[1:], rows[1:], strict=True))],
            "top_logprobs": [None, *({f"{prefix}{t}": v for t, v in row.items()} for row in rows[1:])],
        }
