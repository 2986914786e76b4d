"""A real server on a loopback port, with an engine that answers with the prompt's own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import EchoEngine, LiveServer, serve

from modelserve_tools.tiny.__main__ import chat_template
from modelserve_tools.tiny.tokenizer_files import write_tokenizer
from modelserve_worker.server.state import ServedModel, ServerState
from modelserve_worker.text.checkpoint_text import load_checkpoint_text


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    write_tokenizer(directory, chat_template=chat_template("e4b"))
    return directory


@pytest.fixture
def served_model(model_directory: Path) -> ServedModel:
    return ServedModel("tiny", load_checkpoint_text(model_directory), vocab_size=512)


@pytest.fixture
def echo_engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def serve_with() -> Any:
    """`serve`, for tests that need settings of their own."""
    return serve


@pytest.fixture
def server(served_model: ServedModel, echo_engine: EchoEngine) -> Iterator[LiveServer]:
    state = ServerState(served_model)
    state.mark_ready(echo_engine)
    with serve(state, echo_engine) as live:
        yield live
