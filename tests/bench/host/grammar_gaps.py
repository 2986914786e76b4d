"""The neighbours' largest gap beside hostile grammars.

    python tests/bench grammar_gaps --runs 5

Needs no GPU and no model: a made-up vocabulary of 262,144 tokens, the product's scheduler, engine and grammars, and a
runner that takes --step-ms for a step and is not launched ahead, as on a CPU, so that nothing hides behind a device.
Two streams without a grammar run throughout. Beside them come --choices answers of each hostile grammar, schema and
expression of tests/worker/grammar/hostile_grammars.py in turn, without the front end's check: as if all were admitted.
Prints by run the largest time between two tokens of the streams, and beside which; ends with 1 above --most-ms. Other
programs on the machine count, so the largest CPU time of the engine's thread between two tokens stands beside it: that
is the gap of an idle machine, less the step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
from hostile_grammars import HOSTILE
from pydantic import ValidationError

from bench.host.token_masks import VOCABULARY, tokenizer_json
from modelserve.errors import InvalidInput
from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.batch import Int32Array, SampledTokens, ScheduledBatch
from modelserve_worker.engine.engine import Engine
from modelserve_worker.grammar import answer
from modelserve_worker.grammar.answer import Thought
from modelserve_worker.grammar.compiler import GrammarCompiler
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.server.bodies import structured_output
from modelserve_worker.server.bodies.protocol import ChatCompletionRequest
from modelserve_worker.text.markers import Markers

_MARKERS = Markers.of({"<|tool_call>": 48, "<tool_call|>": 49, '<|"|>': 52})
_LONGEST = 4096


@dataclass
class TimedRunner:
    """A step takes `step_s`; rows under a mask take a random token of those it allows."""

    step_s: float
    launches_ahead: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def execute(self, batch: ScheduledBatch) -> _Step:
        time.sleep(self.step_s)
        return _Step(batch, np.full(int(batch.sampled.sum()), 300, dtype=np.int32), self.rng)


@dataclass
class _Step:
    batch: ScheduledBatch
    tokens: Int32Array
    rng: random.Random

    def constrain(self, masks: Int32Array) -> _Step:
        for row, mask in zip(self.batch.constrained, masks, strict=True):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            self.tokens[row] = self.rng.choice(allowed)
        return self

    def result(self) -> SampledTokens:
        return SampledTokens(self.batch.step, self.tokens, {})


def sources() -> Iterator[tuple[str, str]]:
    """What each hostile body comes to, unchecked; those that are no grammar at all are left out."""
    with patch.object(structured_output, "check_grammar"), patch.object(answer, "endless_rules", return_value=None):
        for name, fields in HOSTILE.items():
            try:
                body = ChatCompletionRequest.model_validate(
                    {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
                )
                wanted = structured_output.answer_grammar(
                    response_format=body.response_format,
                    structured_outputs=body.structured_outputs,
                    tools=body.tools,
                    tool_choice=body.tool_choice,
                )
                assert wanted is not None
                yield name, structured_output.grammar_source(wanted, _MARKERS, Thought.NONE)
            except (InvalidInput, ValidationError):
                continue


class Neighbours:
    """Two streams, and when their tokens came."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0
        self._last: dict[str, float] = {}
        self._cpu_last: dict[str, float] = {}
        self.gap_s = self.cpu_s = 0.0

    def keep_going(self) -> None:
        while len(self._last) < 2:
            name = f"neighbour-{self._count}"
            self._count += 1
            self._last[name], self._cpu_last[name] = time.perf_counter(), time.thread_time()
            self._engine.add(Request(name, (5, 6, 7), SamplingParams(seed=0, max_tokens=2_000)))

    def step(self) -> dict[str, str]:
        """One step of the engine; by request how it ended."""
        self.keep_going()
        ends = {}
        for output in self._engine.step():
            name, now, cpu = output.request_id, time.perf_counter(), time.thread_time()
            if name in self._last:
                self.gap_s = max(self.gap_s, now - self._last[name])
                self.cpu_s = max(self.cpu_s, cpu - self._cpu_last[name])
                self._last[name], self._cpu_last[name] = now, cpu
            if output.finish_reason is not None:
                self._last.pop(output.request_id, None)
                ends[output.request_id] = output.finish_reason.value
        return ends


def run(
    engine: Engine, grammars: list[tuple[str, str]], *, choices: int, tokens: int
) -> tuple[dict[str, float], float]:
    """The largest gap in seconds beside each, and the largest CPU time of this thread between two tokens."""
    neighbours, gaps = Neighbours(engine), {}
    for name, source in grammars:
        for _ in range(3):
            neighbours.step()
        neighbours.gap_s = 0.0
        waiting = {f"{name}-{i}" for i in range(choices)}
        for i, request_id in enumerate(sorted(waiting)):
            sampling = SamplingParams(seed=i, max_tokens=tokens, ignore_eos=True)
            engine.add(Request(request_id, (5, 6, 7), sampling, grammar=source))
        while waiting:
            waiting -= neighbours.step().keys()
        gaps[name] = neighbours.gap_s
    return gaps, neighbours.cpu_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--choices", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--most-ms", type=float, default=500.0)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(json.dumps(tokenizer_json(random.Random(1))))
        compiler = GrammarCompiler(path, vocab_size=VOCABULARY, eos_token_ids=[1, 106, 50])
    facts = published_model("hf://google/gemma-4-31B-it")
    assert facts is not None
    geometry = cache_geometry(
        facts.architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.V_ONLY, tensor_parallel_size=1
    )
    limits = SchedulerLimits(2048, 64, _LONGEST, (1, 106, 50))
    grammars = list(sources())
    worst = []
    for number in range(1, flags.runs + 1):
        compiler._compiled.clear()
        scheduler = Scheduler(limits, geometry, 64 * geometry.held_bytes(_LONGEST))
        engine = Engine(scheduler, TimedRunner(flags.step_ms / 1e3), compiler)  # type: ignore[arg-type]
        gaps, cpu_s = run(engine, grammars, choices=flags.choices, tokens=flags.tokens)
        name = max(gaps, key=lambda each: gaps[each])
        worst.append(gaps[name])
        nothing = gaps["repetitions of nothing"]
        print(
            f"run {number}: {gaps[name] * 1e3:.0f} ms beside {name!r}, {nothing * 1e3:.0f} ms beside repetitions of "
            f"nothing; CPU of the engine's thread {cpu_s * 1e3:.0f} ms",
            flush=True,
        )
        for each in sorted(gaps, key=lambda each: -gaps[each])[: 6 if number == 1 else 0]:
            print(f"    {gaps[each] * 1e3:6.0f} ms {each}")
    print(f"largest {max(worst) * 1e3:.0f} ms, median of runs {statistics.median(worst) * 1e3:.0f} ms")
    return int(max(worst) * 1e3 > flags.most_ms)
