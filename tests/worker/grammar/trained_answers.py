"""Answers of a trained checkpoint to request bodies, without HTTP: prepared, run and read as the server does it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelserve.engine_args import EngineArgs
from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine_startup import build_engine
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.server.answers.preparation import SequenceSpec, chat_sequences, completion_sequences
from modelserve_worker.server.answers.sequences import Reply
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest, CompletionRequest
from modelserve_worker.server.state import ServedModel
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

MODELS = Path(__file__).parents[2] / "models"
MODEL = MODELS / "gemma4-tiny-ple"
MODEL_LEN = 2048


class TrainedModel:
    """One engine on the CPU, and the text side of its checkpoint."""

    def __init__(self, directory: Path = MODEL, **engine_args: Any) -> None:
        args = {"model": str(directory), "device": "cpu", "max_model_len": MODEL_LEN, "cpu_memory_bytes": 2 << 30}
        built = build_engine(EngineArgs.model_validate(args | engine_args), lambda done, total: None)
        self.engine: Engine = built.engine
        self.served = ServedModel("tiny", load_checkpoint_text(directory), vocab_size=2112)
        self.vocabulary = self.served.text.vocabulary
        self._metrics = WorkerMetrics("tiny")
        self._bodies = 0

    def chat(self, **body: Any) -> list[SequenceSpec]:
        request = ChatCompletionRequest.model_validate({"model": "tiny", **body})
        self._bodies += 1
        return chat_sequences(request, self.served, response_id=f"chat-{self._bodies}", max_model_len=MODEL_LEN)

    def completion(self, **body: Any) -> list[SequenceSpec]:
        request = CompletionRequest.model_validate({"model": "tiny", **body})
        self._bodies += 1
        return completion_sequences(request, self.served, response_id=f"cmpl-{self._bodies}", max_model_len=MODEL_LEN)

    def run(self, specs: Sequence[SequenceSpec]) -> list[Reply]:
        """All sequences together, until each has ended; a reply that ends early aborts its request."""
        replies = {spec.request.request_id: Reply(spec, self.vocabulary, self._metrics) for spec in specs}
        for spec in specs:
            self.engine.add(spec.request)
        while self.engine.has_work:
            for output in self.engine.step():
                reply = replies[output.request_id]
                if reply.finish_reason is None:
                    reply.read(output)
                    if reply.finish_reason is not None and output.finish_reason is None:
                        self.engine.abort(output.request_id)
        return list(replies.values())
