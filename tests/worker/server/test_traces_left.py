"""What a request leaves behind: its id, a line in the log, counts by status, vLLM's histograms, a span."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import Histogram
from starlette.datastructures import Headers
from starlette.routing import Route

from modelserve_worker.metrics import _TOKEN_SECONDS, WorkerMetrics
from modelserve_worker.request import FinishReason
from modelserve_worker.scheduling.stats import StepEvents, TimedStep
from modelserve_worker.server.http import access_log
from modelserve_worker.server.http.access_log import AccessLog
from modelserve_worker.server.http.body_limits import OpenBodies
from modelserve_worker.server.http.entrance import Entrance
from modelserve_worker.server.http.request_context import MediaSpan, RequestContext
from modelserve_worker.server.http.tracing import Tracing

Lines = Callable[[int], list[str]]
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 2}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.INFO, access_log.log.name)

    def lines(count: int) -> list[str]:
        """All lines, once there are `count`: one is written when its client has been answered."""
        deadline = time.monotonic() + 60
        while len(caplog.records) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return [record.getMessage() for record in caplog.records]

    return lines


def test_ids_are_given_back_or_made(server: Any) -> None:
    given = httpx.post(f"{server.url}/v1/completions", json=TEXT, headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = {httpx.get(f"{server.url}/health", headers={"x-request-id": bad}).headers["x-request-id"]
            for bad in ("", "a b", "x" * 129, "a\tb")}  # fmt: skip
    assert len(made) == 4
    assert all(len(each) == 32 for each in made)
    assert httpx.get(f"{server.url}/nowhere").headers["x-request-id"], "refusals, too"


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_has_lengths_and_times(server: Any, lines: Lines, stream: bool) -> None:
    httpx.get(f"{server.url}/health")
    httpx.post(f"{server.url}/v1/completions", json=TEXT | {"stream": stream}, headers={"x-request-id": "abc-1"})
    (line,) = lines(1)
    assert line.startswith("POST /v1/completions 200 request_id=abc-1 client=127.0.0.1 body_bytes=")
    fields = dict(part.split("=", 1) for part in line.split(" ")[3:])
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == ("3", "2")
    assert 0 <= float(fields["first_token_ms"]) <= float(fields["total_ms"])


def test_statuses_are_counted_by_route(server: Any) -> None:
    httpx.post(f"{server.url}/v1/completions", json=TEXT)
    httpx.post(f"{server.url}/v1/completions", json=TEXT | {"n": 0})
    httpx.get(f"{server.url}/a/path/nobody/knows")
    for name in ("tiny", "another", "of/several/parts", "{name:path}"):
        httpx.get(f"{server.url}/v1/models/{name}")
    httpx.post(f"{server.url}/v1/models/tiny")
    httpx.request("BREW", f"{server.url}/health")

    def counts() -> dict[tuple[str, ...], float]:
        return {
            (sample.labels["method"], sample.labels["handler"], sample.labels["status"]): sample.value
            for family in server.metrics.registry.collect() if family.name == "http_requests"
            for sample in family.samples if sample.name.endswith("_total")
        }  # fmt: skip

    expected = {
        ("POST", "/v1/completions", "200"): 1,
        ("POST", "/v1/completions", "400"): 1,
        ("GET", "none", "404"): 1,
        ("other", "/health", "405"): 1,
        ("GET", "/v1/models/{name}", "200"): 1,
        ("GET", "/v1/models/{name}", "404"): 3,
        ("POST", "/v1/models/{name}", "405"): 1,
    }
    deadline = time.monotonic() + 60  # a request is counted once its answer has gone out
    while counts() != expected and time.monotonic() < deadline:
        time.sleep(0.02)
    assert counts() == expected


def _context(**fields: Any) -> RequestContext:
    with OpenBodies().account() as account:
        return RequestContext("abc-1", "key-1", account, arrival_s=0.0, **fields)


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        log = AccessLog("json")
        access_log.log.handlers[0].setStream(sys.stderr)  # type: ignore[attr-defined]
        access_log.log.setLevel(logging.INFO)
        log.write(_context(body_bytes=9, prompt_tokens=3), method="POST", path='/a"\n', status=200)
        line = json.loads(capsys.readouterr().err)
    finally:
        access_log.log.handlers.clear()
        access_log.log.propagate = True
    assert (line["path"], line["status"], line["request_id"], line["prompt_tokens"]) == ('/a"\n', 200, "abc-1", 3)


def test_refusals_are_told_at_a_bounded_rate(lines: Lines) -> None:
    now = 1000.0
    log = AccessLog("text", lambda: now)
    for _ in range(1000):
        log.write(_context(), method="GET", path="/x", status=429)
    log.write(_context(), method="GET", path="/x\n", status=200)
    assert [line.split()[2] for line in lines(121)] == ["429"] * 120 + ["200"]
    assert "\n" not in lines(121)[-1]
    now = 1061.0
    log.write(_context(), method="GET", path="/x", status=429)
    assert "kept_back=880" in lines(122)[-1]


def test_the_parts_of_a_request_are_timed() -> None:
    metrics = WorkerMetrics("tiny", iter((103.0, 107.0)).__next__)
    timer = metrics.start_request(5, arrival_s=100.0)
    timer.admitted(101.0)
    timer.tokens(1)
    timer.tokens(1)
    timer.finish(FinishReason.STOP)
    sums = {
        name: metrics.registry.get_sample_value(f"vllm:request_{name}_time_seconds_sum", {"model_name": "tiny"})
        for name in ("queue", "prefill", "decode", "inference")
    }
    assert sums == {"queue": 1.0, "prefill": 2.0, "decode": 4.0, "inference": 6.0}
    timed = [TimedStep(0.25, 3, 10.0, 0, 0.0), TimedStep(0.5, 3, 10.0, 497, 9.0), TimedStep(0.125, 0, 0.0, 500, 9.0)]
    metrics.observe_steps(StepEvents(step_tokens=[3, 500], timed_steps=timed))
    assert metrics.registry.get_sample_value("vllm:iteration_tokens_total_sum", {"model_name": "tiny"}) == 503
    seconds = {
        kind: metrics.registry.get_sample_value("modelserve_step_seconds_sum", {"model_name": "tiny", "kind": kind})
        for kind in ("decode", "mixed", "prefill")
    }
    assert seconds == {"decode": 0.25, "mixed": 0.5, "prefill": 0.125}


def test_tokens_of_one_event_count_as_often_as_they_are() -> None:
    """The histogram of waits between tokens says what prometheus_client's own would say."""
    now = 9.0
    metrics = WorkerMetrics("tiny", lambda: now)
    theirs = Histogram("theirs", "", ["model_name"], buckets=_TOKEN_SECONDS, registry=None).labels("tiny")
    timer = metrics.start_request(5, arrival_s=0.0)
    timer.tokens(3)  # the first of an answer follow no other
    for wait, tokens in [(0.0, 1), (1 / 64, 1), (1 / 32, 2), (0.5, 4), (80.0, 1), (81.0, 1), (1.0, 1), (1.0, 0)]:
        now += wait
        timer.tokens(tokens)
        for _ in range(tokens):
            theirs.observe(wait / tokens)
    (family,) = metrics.inter_token.collect()
    said = {(sample.name.removeprefix(family.name), sample.labels.get("le")): sample.value for sample in family.samples}
    expected = {(sample.name, sample.labels.get("le")): sample.value for sample in theirs._child_samples()}
    assert said.keys() == expected.keys()
    assert said[("_count", None)] == 11
    for name, value in expected.items():
        assert name[0] == "_created" or said[name] == pytest.approx(value), name


def test_spans_of_images_and_sounds_are_within_their_requests() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    now = time.monotonic()
    context = _context(
        media_spans=[MediaSpan("images fetch", 2, now - 3, now - 2), MediaSpan("sounds decode", 3, now - 2, now - 1)]
    )
    Tracing(provider, "tiny").record(context, Headers(), method="POST", path="/v1/chat/completions", status=200)
    fetch, decode, whole = exporter.get_finished_spans()
    assert [each.name for each in (fetch, decode)] == ["images fetch", "sounds decode"]
    assert (fetch.attributes["modelserve.images"], decode.attributes["modelserve.sounds"]) == (2, 3)
    assert {each.parent.span_id for each in (fetch, decode)} == {whole.context.span_id}
    for each in (fetch, decode):
        assert each.end_time - each.start_time == pytest.approx(1e9, abs=1000)
        assert whole.start_time < each.start_time
        assert each.end_time < whole.end_time


async def test_a_span_tells_a_request_to_its_caller() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        context = RequestContext.of(scope)
        context.prompt_tokens = 7
        context.note_tokens(2, admitted_s=context.arrival_s)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    entrance = Entrance(
        app, open_bodies=OpenBodies(), metrics=WorkerMetrics("tiny"), access_log=AccessLog("off"),
        tracing=Tracing(provider, "tiny"), routes=[Route("/v1/completions", app)],
    )  # fmt: skip
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "client": ("::1", 1),
        "headers": [(b"traceparent", f"00-{trace}-{parent}-01".encode())],
    }  # fmt: skip

    async def send(_: Any) -> None:
        pass

    await entrance(scope, None, send)  # type: ignore[arg-type]
    (span,) = exporter.get_finished_spans()
    assert (span.name, f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (
        "POST /v1/completions", trace, parent,
    )  # fmt: skip
    assert (span.attributes["gen_ai.usage.input_tokens"], span.attributes["gen_ai.usage.output_tokens"]) == (7, 2)
    assert span.attributes["http.response.status_code"] == 200


def test_without_the_library_the_log_says_what_to_install(tmp_path: Path) -> None:
    assert Tracing.from_environment({}, "tiny") is None
    (tmp_path / "opentelemetry.py").write_text("raise ImportError")  # found before the installed one
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318",
    }
    asked = f"import os; from {Tracing.__module__} import Tracing; print(Tracing.from_environment(os.environ, 'tiny'))"
    ended = subprocess.run(
        [sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout == "None\n"
    assert "install modelserve[worker,otel], or unset OTEL_EXPORTER_OTLP_ENDPOINT" in ended.stderr
