"""Constrained rows in a device that runs ahead: the step is launched early, its sampling when its masks are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from small_pages import EOS, GEOMETRY

from modelserve_worker.batch import Int32Array, SampledTokens, ScheduledBatch
from modelserve_worker.engine.engine import Engine
from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

MODEL = Path(__file__).parents[2] / "models" / "gemma4-tiny-ple"


@dataclass
class MaskedRunner:
    """Samples the highest token that may be, and 300 where any may. Fails steps as told."""

    launches_ahead: bool = True
    events: list[tuple[str, int]] = field(default_factory=list)
    failing: set[int] = field(default_factory=set)

    def execute(self, batch: ScheduledBatch) -> Step:
        self.events.append(("launch", batch.step))
        return Step(self, batch, np.full(int(batch.drawn.sum()), 300, dtype=np.int32))

    def shutdown(self) -> None: ...


@dataclass
class Step:
    runner: MaskedRunner
    batch: ScheduledBatch
    tokens: Int32Array
    sampled: bool = False

    def done(self) -> bool:
        return True

    def constrain(self, masks: Int32Array) -> Step:
        self.runner.events.append(("sample", self.batch.step))
        assert len(masks) == len(self.batch.constrained)
        for row, mask in zip(self.batch.constrained, masks, strict=True):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            self.tokens[row] = allowed.max()
        return Step(self.runner, self.batch, self.tokens, sampled=True)

    def result(self) -> SampledTokens:
        assert self.sampled or not len(self.batch.constrained), "constrained rows are sampled with their masks"
        self.runner.events.append(("result", self.batch.step))
        if self.batch.step in self.runner.failing:
            raise RuntimeError("out of order")
        return SampledTokens(self.batch.step, self.tokens, {})


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(MODEL / "tokenizer.json", vocab_size=2112, eos_token_ids=[EOS])


def _engine(runner: MaskedRunner, grammars: GrammarCompiler | None) -> Engine:
    limits = SchedulerLimits(64, 64, 100, (EOS,))
    return Engine(Scheduler(limits, GEOMETRY, 64 * GEOMETRY.held_bytes(100)), runner, grammars)


def _request(name: str, *, grammar: str | None = None, max_tokens: int = 12) -> Request:
    return Request(name, (5, 6, 7), SamplingParams(seed=0, max_tokens=max_tokens), grammar=grammar)


def _run(engine: Engine, *requests: Request) -> dict[str, list[list[int]]]:
    """Tokens of each step, by request."""
    for request in requests:
        if request.grammar is not None:
            assert engine._grammars is not None
            engine._grammars.compile(request.grammar).result()
        engine.add(request)
    steps: dict[str, list[list[int]]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        outputs = {output.request_id: output for output in engine.step()}
        for name, told in steps.items():
            told.append(list(outputs[name].token_ids) if name in outputs else [])
    return steps


def test_a_step_is_launched_before_the_masks_of_its_rows_are_known(grammars) -> None:
    runner = MaskedRunner()
    steps = _run(_engine(runner, grammars), _request("bound", grammar='start: "0123456789"'), _request("free"))
    assert [t for told in steps["bound"] for t in told], "the answer was sampled under its masks"
    for number in range(2, 5):
        order = [("launch", number + 1), ("result", number), ("sample", number + 1)]
        places = [runner.events.index(event) for event in order]
        assert places == sorted(places), runner.events


def test_neighbours_keep_their_pace_and_a_constrained_answer_has_it_too(grammars) -> None:
    steps = _run(_engine(MaskedRunner(), grammars), _request("bound", grammar='start: "0123456789"'), _request("free"))
    first = next(number for number, told in enumerate(steps["free"]) if told)
    assert [len(told) for told in steps["free"][first:]] == [1] * 12, "a token every step, from the first one on"
    bound = [len(told) for told in steps["bound"][first:]]
    length = sum(bound)
    assert bound[:length] == [1] * length
    assert length < 12, "it ended with its grammar; its token in flight was discarded"


@pytest.mark.parametrize("launches_ahead", [True, False])
def test_a_failed_step_fails_those_in_it_and_others_go_on(grammars, launches_ahead) -> None:
    runner = MaskedRunner(launches_ahead=launches_ahead, failing={2})
    engine = _engine(runner, grammars)
    first = [_request("bound", grammar="start: /[0-9]{30}/"), _request("free")]
    for request in first:
        if request.grammar is not None:
            grammars.compile(request.grammar).result()
        engine.add(request)
    ends = {}
    while engine.has_work:
        ends |= {output.request_id: output.finish_reason for output in engine.step() if output.finish_reason}
    assert ends == {"bound": "error", "free": "error"}
    later = _run(engine, _request("later", grammar='start: "0"'), _request("free later", max_tokens=2))
    assert [t for told in later["free later"] for t in told] == [300, 300]
    assert len([t for told in later["later"] for t in told]) == 1


def test_an_engine_without_a_tokenizer_refuses_grammars_and_nothing_else() -> None:
    engine = _engine(MaskedRunner(), None)
    with pytest.raises(Exception, match="cannot follow a grammar"):
        engine.add(_request("bound", grammar='start: "a"'))
    assert [len(told) for told in _run(engine, _request("free", max_tokens=1))["free"]].count(1) == 1
