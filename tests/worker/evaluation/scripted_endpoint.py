"""An OpenAI-compatible endpoint that knows the answers to given exercises and says what a test wants it to."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from modelserve_tools.evaluation.cells import fingerprint
from modelserve_tools.evaluation.exercise import Exercise

Script = Callable[[Exercise, int], Awaitable[Response] | Response]


def completion(content: str | None, *, finish_reason: str = "stop", **message: Any) -> Response:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, **message},
        "finish_reason": finish_reason,
    }
    return JSONResponse({"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]})


def right(exercise: Exercise, _: int = 0) -> Response:
    answer = exercise.answer
    message: dict[str, Any] = {"reasoning_content": answer.reasoning} if exercise.thinking else {}
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": "1", "type": "function", "function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))}}
            for c in answer.tool_calls
        ]
        return completion(None, finish_reason="tool_calls", **message)
    return completion(answer.content, **message)


def wrong(exercise: Exercise, _: int = 0) -> Response:
    return completion("I do not know.")


def refusal(status: int, message: str, **headers: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": None}}, status_code=status, headers=headers)


class ScriptedEndpoint:
    """`script` answers the attempt of that number, from 0, at the exercise whose question was asked."""

    def __init__(
        self,
        exercises: Iterable[Exercise],
        script: Script = right,
        *,
        max_model_len: int | None = None,
        models: int = 1,
    ) -> None:
        self._exercises = {fingerprint(exercise): exercise for exercise in exercises}
        self._attempts: dict[str, int] = {}
        self._script = script
        self._cards = [{"id": f"tiny-{i}", "object": "model", "max_model_len": max_model_len} for i in range(models)]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.open = self.most_open = 0
        self.asked = threading.Event()
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": self._cards})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.asked.set()
        thinking = body.get("chat_template_kwargs", {}).get("enable_thinking", False)
        asked = Exercise(
            "", tuple(body["messages"]), answer=None, tools=tuple(body.get("tools", ())), thinking=thinking
        )
        key = fingerprint(asked)
        attempt = self._attempts[key] = self._attempts.get(key, -1) + 1
        try:
            reply = self._script(self._exercises[key], attempt)
            return reply if isinstance(reply, Response) else await reply
        finally:
            self.open -= 1


@contextmanager
def listening(app: Starlette) -> Iterator[str]:
    """Serve the app on a loopback port; gives the base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
