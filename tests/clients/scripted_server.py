"""The product's server with its text and protocols, and a model that does what its prompt asks for.

A client must find its way through a whole conversation, so the model's part of it is scripted: it calls the function
it was told of, answers from the result, thinks where the prompt asks for thoughts, and says JSON where it is asked to.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from tokenizers import Tokenizer

from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.tokenizer_files import build_tokenizer, write_tokenizer
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.request import FinishReason, PromptLogprobs, Request, RequestOutput, TokenLogprobs
from modelserve_worker.scheduling.stats import EngineStats
from modelserve_worker.server.app import create_app
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

ENDS = {106: "<turn|>", 50: "<|tool_response>"}
_DECLARED = re.compile(r"<\|tool>declaration:([^{]+)\{(.*?)<tool\|>", re.DOTALL)
_JSON = '{"city": "Paris", "degrees": 21}'


def reply(prompt: str) -> str:
    """What the model says to a rendered prompt."""
    declared = dict(_DECLARED.findall(prompt))
    turn = prompt.rpartition("<|turn>user\n")[2]
    answered = "<tool_response|>" in turn or "Observation:" in prompt  # as smolagents tells a result
    for name, about in declared.items():
        if "degrees" in about:
            return f'<|tool_call>call:{name}{{city:<|"|>Paris<|"|>,degrees:21}}<tool_call|><|tool_response>'
        if answered and name == "final_answer":
            return f'<|tool_call>call:{name}{{answer:<|"|>21 in Paris<|"|>}}<tool_call|><|tool_response>'
        if not answered and "city" in about:
            return f'<|tool_call>call:{name}{{city:<|"|>Paris<|"|>}}<tool_call|><|tool_response>'
    if answered:
        return "It is 21 degrees.<turn|>"
    if "code block" in prompt or "```" in prompt:
        return f"```json\n{_JSON}\n```<turn|>"
    if "JSON" in turn:
        return f"{_JSON}<turn|>"
    thought = "<|channel>thought\nLet me see.<channel|>" if "<|think|>" in prompt else ""
    return f"{thought}Hello from Paris.<turn|>"


def _scores(request: Request, *, alternatives: int) -> PromptLogprobs:
    """Every token of a prompt is the second likeliest."""
    count = len(request.prompt_token_ids) - 1
    return PromptLogprobs(
        np.full(count, -1.0, dtype=np.float32),
        np.full(count, 2, dtype=np.int32),
        np.tile(np.arange(300, 300 + alternatives, dtype=np.int32), (count, 1)),
        np.tile(-0.5 - np.arange(alternatives, dtype=np.float32), (count, 1)),
    )


class ScriptedEngine:
    """Says `reply` of the prompt, four tokens a step."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer

    async def generate(
        self, requests: Sequence[Request], *, client: str = ""
    ) -> AsyncGenerator[list[RequestOutput], None]:
        for request in requests:
            prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            tokens = self._tokenizer.encode(reply(prompt), add_special_tokens=False).ids
            sampling = request.sampling
            if sampling.ignore_eos:
                tokens = (tokens * sampling.max_tokens)[: sampling.max_tokens]
            cut = len(tokens) >= sampling.max_tokens and (sampling.ignore_eos or len(tokens) > sampling.max_tokens)
            tokens = tokens[: sampling.max_tokens]
            for start in range(0, len(tokens), 4):
                group = tuple(tokens[start : start + 4])
                output = RequestOutput(request.request_id, group)
                if start == 0 and sampling.prompt_logprobs is not None:
                    output = output._replace(prompt_logprobs=_scores(request, alternatives=sampling.prompt_logprobs))
                if sampling.logprobs is not None:
                    output = output._replace(logprobs=(TokenLogprobs(-1.0, 1, ()),) * len(group))
                if start + 4 < len(tokens):
                    yield [output]
                elif cut:
                    yield [output._replace(finish_reason=FinishReason.LENGTH)]
                else:
                    assert group[-1] in ENDS
                    yield [output._replace(finish_reason=FinishReason.STOP, stop_token_id=group[-1])]

    def abort(self, request_id: str) -> None:
        """The steps of a request end with its stream."""

    def is_alive(self) -> bool:
        return True

    def plan_report(self) -> dict[str, Any]:
        return {"maxModelLen": self.max_model_len}


@contextmanager
def scripted_server(directory: Path, *, max_model_len: int = 32768) -> Iterator[str]:
    """The address of a running server; `directory` takes its tokenizer."""
    write_tokenizer(directory, chat_template=chat_template("e4b"))
    model = ServedModel("tiny", load_checkpoint_text(directory), vocab_size=512, aliases=("gpt-4o",))
    metrics = WorkerMetrics(model.name)
    metrics.observe_engine(EngineStats, cache_config={})
    state = ServerState(model)
    state.mark_ready(ScriptedEngine(build_tokenizer(), max_model_len=max_model_len))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(state, metrics), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listener.close()
