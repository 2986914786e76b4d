"""How much one reads to follow a token: the files that a captured step of decodes runs through, and the types it meets.

docs/architecture.md lists the types from socket to socket; those of the engine's side are traced here.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from model_checkpoints import load_checkpoint, make_checkpoint, random_tokens
from paged_logits import geometry_of

from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.engine.engine import Engine
from modelserve_worker.engine.loop import EngineLoop
from modelserve_worker.engine.wire import StepReport
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.step.step_size import StepSize

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "worker" / "modelserve_worker"
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
MOST_TYPES, MOST_FILES = 12, 32


class Replayed:
    """Captured steps of decodes: what the model would leave, and none of its Python."""

    def __init__(self, vocab_size: int) -> None:
        self._logits = torch.randn(2, vocab_size)

    def size_for(self, batch: Any) -> StepSize:
        assert int(batch.lengths.max()) == 1, "the traced steps are decodes"
        return StepSize(2, 2)

    def replay(self, _step: Any, _size: StepSize) -> torch.Tensor:
        return self._logits


@pytest.fixture
def traced(tmp_path: Path) -> tuple[set[str], set[type]]:
    """(files, types of records passed between functions) of a step of two decodes, from the loop to the wire."""
    make_checkpoint("31B", tmp_path, seed=1)
    model = load_checkpoint(tmp_path)
    geometry = geometry_of(model)
    cache = KVCache(geometry, 1 << 22, device=torch.device("cpu"))
    runner = GPUModelRunner(model, cache, max_num_batched_tokens=64, max_num_seqs=2, max_model_len=128)
    sent: list[StepReport] = []
    engine = Engine(Scheduler(SchedulerLimits(64, 2, 128, ()), geometry, cache.pool_bytes), runner)
    loop = EngineLoop(engine, SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    for name in "ab":
        engine.add(Request(name, tuple(random_tokens(9, seed=3)), SamplingParams(seed=1, max_tokens=30)))
    for _ in range(4):  # their prompts, and the first decodes
        loop._step()
    runner._graphs = Replayed(model.architecture.vocab_size)  # type: ignore[assignment]
    loop._step()
    files: set[str] = set()
    types: set[type] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(PACKAGE):
            return
        if event == "call":
            files.add(str(path.relative_to(PACKAGE)))
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            values = [frame.f_locals[name] for name in names if name != "self"]
        else:
            values = [argument] if event == "return" else []
        for value in values:
            several = value if isinstance(value, list | tuple) and not hasattr(value, "_fields") else [value]
            types.update(type(each) for each in several if _record(each))

    sys.setprofile(note)
    try:
        loop._step()
    finally:
        sys.setprofile(None)
    assert sent
    assert sum(sent[-1].counts) == 2
    return files, types


def _record(value: Any) -> bool:
    ours = type(value).__module__.startswith("modelserve_worker.")
    return ours and (dataclasses.is_dataclass(value) or hasattr(value, "_fields"))


def listed() -> list[str]:
    """The types that the document names, in order."""
    passage = DOCUMENT[DOCUMENT.index("A token passes eleven types from socket to socket") :]
    return re.findall(r"`([A-Z]\w+)`", passage[: passage.index("`SequenceSpec` and `Reply`")])


def test_a_captured_step_is_read_in_few_files(traced: tuple[set[str], set[type]]) -> None:
    files, _ = traced
    assert 15 < len(files) <= MOST_FILES, sorted(files)
    assert {"engine/engine.py", "scheduling/scheduler.py", "runner/model_runner.py"} <= files


def test_the_types_that_hold_tokens_are_the_listed_ones(traced: tuple[set[str], set[type]]) -> None:
    """No record that a step hands on holds tokens and is not in the document; and what it lists is met."""
    _, types = traced
    names = listed()
    assert len(names) - names.count("ChatCompletionRequest") <= MOST_TYPES, "a body is one of two"
    holding = {each.__name__ for each in types if any(_holds_tokens(name) for name in _fields(each))}
    assert holding <= set(names)
    assert {"RunningRequest", "ScheduledBatch", "Step", "Segments", "SamplerOutput", "SampledTokens"} <= set(names)
    met = {each.__name__ for each in types}
    assert set(names) - met == {"CompletionRequest", "ChatCompletionRequest", "Request", "Text"}, "the front end's"


def _fields(record: type) -> list[str]:
    return (
        [field.name for field in dataclasses.fields(record)] if dataclasses.is_dataclass(record) else [*record._fields]
    )


def _holds_tokens(field: str) -> bool:
    """As fields that hold tokens are called here, and none that count them, nor the model's own that end requests."""
    return field == "tokens" or (field.endswith("token_ids") and field != "eos_token_ids")
