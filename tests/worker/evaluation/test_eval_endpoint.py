"""The client against an endpoint in the same process, and the run that asks through it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from scripted_endpoint import Script, ScriptedEndpoint, completion, refusal, right, wrong
from starlette.responses import PlainTextResponse, Response

from modelserve_tools.evaluation.cells import Cell, plan_cells
from modelserve_tools.evaluation.client import Backoff, ChatEndpoint, EndpointGone, chat_body, open_http
from modelserve_tools.evaluation.exercise import Answer, Exercise, ToolCall
from modelserve_tools.evaluation.measurement import Failure, Measurement
from modelserve_tools.evaluation.replies import ModelCard
from modelserve_tools.evaluation.report import CellResult
from modelserve_tools.evaluation.skills import exercise

QUICK = Backoff(attempts=3, first_s=0.001, longest_s=0.002)
ARITHMETIC = Cell("arithmetic", None, 5)


def _exercise_of(cell: Cell, index: int) -> Exercise:
    return exercise(cell.skill, seed=0, index=index, distance=cell.distance)


def _is_second_or_fourth(asked: Exercise) -> bool:
    return asked in (_exercise_of(ARITHMETIC, 1), _exercise_of(ARITHMETIC, 3))


def _endpoint(cells: Sequence[Cell], script: Script) -> ScriptedEndpoint:
    return ScriptedEndpoint([_exercise_of(cell, i) for cell in cells for i in range(cell.n)], script)


async def _run(
    cells: Sequence[Cell],
    transport: httpx.AsyncBaseTransport,
    *,
    max_model_len: int | None = None,
    concurrency: int = 4,
    failures: list[Failure] | None = None,
    **of_endpoint: Any,
) -> tuple[CellResult, ...]:
    measurement = Measurement(
        cells,
        exercise_of=_exercise_of,
        thinking_tokens=0,
        on_failure=(failures if failures is not None else []).append,
        on_progress=lambda done, total: None,
    )
    async with httpx.AsyncClient(base_url="http://endpoint/v1", transport=transport, timeout=5) as http:
        endpoint = ChatEndpoint(http, backoff=QUICK, **of_endpoint)
        await measurement.run(
            endpoint, model=ModelCard(id="tiny", max_model_len=max_model_len), concurrency=concurrency
        )
    return measurement.results(seed=0)


async def _ask(cells: Sequence[Cell], script: Script, **options: object) -> tuple[CellResult, ...]:
    return await _run(cells, httpx.ASGITransport(_endpoint(cells, script).app), **options)


async def test_every_skill_can_be_answered_rightly() -> None:
    short = ["arithmetic", "json", "tool_call", "tool_response", "thinking", "chat"]
    cells = plan_cells(short=short, long=["recall", "needle"], distances=[10, 500], n=6, n_at={500: 2})
    results = await _ask(cells, right)
    assert [(each.skill, each.distance, each.outcomes) for each in results] == [
        *((skill, None, "111111") for skill in short),
        ("recall", 10, "111111"), ("recall", 500, "11"), ("needle", 10, "111111"), ("needle", 500, "11"),
    ]  # fmt: skip
    assert all(each.median_ms is not None and each.median_ms > 0 for each in results)
    assert len({each.fingerprint for each in results}) == len(results)


async def test_wrong_answers_are_told_with_what_was_expected() -> None:
    failures: list[Failure] = []
    (result,) = await _ask(
        [ARITHMETIC], lambda e, _: (wrong if _is_second_or_fourth(e) else right)(e), failures=failures
    )
    assert (result.outcomes, result.answered, result.errors, result.exact_match) == ("10101", 5, 0, 60.0)
    assert {failure.index for failure in failures} == {1, 3}
    assert all(failure.exercise == _exercise_of(ARITHMETIC, failure.index) for failure in failures)
    assert {(f.reply.content, f.reason) for f in failures} == {("I do not know.", "the content differs")}


async def test_a_busy_endpoint_is_asked_again() -> None:
    def busy_at_first(asked: Exercise, attempt: int) -> Response:
        return right(asked) if attempt == 2 else refusal((503, 429)[attempt], "later", **{"retry-after": "1"})

    (result,) = await _ask([ARITHMETIC], busy_at_first)
    assert (result.outcomes, result.errors) == ("11111", 0)


CHAT_URL = "http://endpoint/v1/chat/completions"
NO_COMPLETION = f"{CHAT_URL} answered no ChatCompletion:"


@pytest.mark.parametrize(
    ("reply", "attempts", "text"),
    [
        (lambda: refusal(503, "still\nloading"), 3, f"HTTP 503 from {CHAT_URL}: still loading"),
        (lambda: refusal(500, "overheated"), 1, f"HTTP 500 from {CHAT_URL}: overheated"),
        (lambda: PlainTextResponse("gateway", 502), 1, f"HTTP 502 from {CHAT_URL}: gateway"),
        (lambda: PlainTextResponse("[1, 2]", 404), 1, f"HTTP 404 from {CHAT_URL}: [1, 2]"),
        (lambda: PlainTextResponse('{"choices": [', 200), 1, f"{NO_COMPLETION} body: Invalid JSON"),
        (lambda: PlainTextResponse('{"choices": []}', 200), 1, f"{NO_COMPLETION} choices: List should have at least 1"),
    ],
)
async def test_what_is_no_answer_is_an_error_and_not_wrong(
    reply: Callable[[], Response], attempts: int, text: str
) -> None:
    endpoint = _endpoint([ARITHMETIC], lambda asked, _: reply() if _is_second_or_fourth(asked) else right(asked))
    failures: list[Failure] = []
    (result,) = await _run([ARITHMETIC], httpx.ASGITransport(endpoint.app), failures=failures)
    assert (result.outcomes, result.answered, result.errors, result.exact_match) == ("1e1e1", 3, 2, 100.0)
    assert (result.first_error or "").startswith(text)
    assert failures == []
    assert len(endpoint.requests) == 3 + 2 * attempts


async def test_a_reply_that_takes_too_long_is_an_error_and_not_asked_again() -> None:
    timeouts = 0

    def slow(request: httpx.Request) -> httpx.Response:
        nonlocal timeouts
        timeouts += 1
        raise httpx.ReadTimeout("", request=request)

    (result,) = await _run([ARITHMETIC], httpx.MockTransport(slow))
    assert (result.outcomes, timeouts) == ("eeeee", 5)
    assert result.first_error == "no reply within 5 s; --timeout raises that"


async def test_a_broken_connection_is_tried_again_and_then_an_error() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset by peer", request=request)

    (result,) = await _run([Cell("arithmetic", None, 2)], httpx.MockTransport(broken))
    assert (result.outcomes, result.first_error) == ("ee", "the connection broke: reset by peer")


async def test_a_reply_that_cannot_be_decoded_is_an_error() -> None:
    def garbled(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip"))

    (result,) = await _run([Cell("arithmetic", None, 2)], httpx.MockTransport(garbled))
    assert result.outcomes == "ee"
    assert (result.first_error or "").startswith("no reply: ")


async def test_an_endpoint_that_is_gone_ends_the_run() -> None:
    attempts = 0

    def gone(request: httpx.Request) -> httpx.Response:
        nonlocal attempts
        attempts += 1
        raise httpx.ConnectError("refused", request=request)

    (result,) = await _run([Cell("arithmetic", None, 50)], httpx.MockTransport(gone), concurrency=2)
    assert attempts == 2 * QUICK.attempts
    assert (result.outcomes, result.first_error) == ("-" * 50, None)


async def test_the_list_of_models_is_asked_for_once() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with httpx.AsyncClient(base_url="http://endpoint/v1", transport=httpx.MockTransport(gone)) as http:
        with pytest.raises(EndpointGone, match="no answer from http://endpoint/v1/models: refused"):
            await ChatEndpoint(http, backoff=QUICK).models()


async def test_cells_that_cannot_fit_are_not_asked() -> None:
    cells = plan_cells(short=["arithmetic"], long=["recall"], distances=[10, 1000], n=3, n_at={})
    endpoint = _endpoint(cells, right)
    results = await _run(cells, httpx.ASGITransport(endpoint.app), max_model_len=500)
    assert [result.outcomes for result in results] == ["111", "111", ""]
    assert (results[2].skipped or "").startswith("needs at least 1")
    assert (results[2].skipped or "").endswith(" tokens, the server has 500")
    assert len(endpoint.requests) == 6


@pytest.mark.parametrize(
    "message", ["This model's maximum context length is 500 tokens.", "the request exceeds the available context size"]
)
async def test_an_endpoint_that_says_too_long_skips_the_cell(message: str) -> None:
    cells = [Cell("recall", 10, 2), Cell("recall", 1000, 40)]
    endpoint = _endpoint(cells, lambda asked, _: refusal(400, message) if asked.distance == 1000 else right(asked))
    near, far = await _run(cells, httpx.ASGITransport(endpoint.app))
    assert (near.outcomes, near.skipped) == ("11", None)
    assert (far.outcomes, far.skipped, far.errors, far.first_error) == ("", message, 0, None)
    assert len(endpoint.requests) < 12


async def test_one_prompt_that_is_too_long_drops_what_the_others_of_its_cell_said() -> None:
    last = _exercise_of(ARITHMETIC, 4)

    async def late(asked: Exercise, _: int) -> Response:
        await asyncio.sleep(0.05 if asked == _exercise_of(ARITHMETIC, 0) else 0)
        return refusal(400, "context length") if asked == last else right(asked)

    (result,) = await _ask([ARITHMETIC], late, concurrency=5)
    assert (result.outcomes, result.skipped, result.median_ms) == ("", "context length", None)


async def test_a_distance_that_a_skill_cannot_bridge_is_skipped_with_its_reason() -> None:
    (result,) = await _run([Cell("recall", 10**6, 2)], httpx.MockTransport(lambda request: httpx.Response(500)))
    assert "ask for fewer tokens" in (result.skipped or "")


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_requests_are_bounded(concurrency: int) -> None:
    async def slow(asked: Exercise, _: int) -> Response:
        await asyncio.sleep(0.01)
        return right(asked)

    cells = [Cell("arithmetic", None, 12)]
    endpoint = _endpoint(cells, slow)
    (result,) = await _run(cells, httpx.ASGITransport(endpoint.app), concurrency=concurrency)
    assert (endpoint.most_open, result.outcomes) == (concurrency, "1" * 12)


async def test_latency_is_of_the_reply_without_the_waits_before_it() -> None:
    now = 100.0

    async def wait(seconds: float) -> None:
        nonlocal now
        now += 1.0

    async def slow(asked: Exercise, attempt: int) -> Response:
        nonlocal now
        now += 0.02
        return right(asked) if attempt else refusal(503, "later")

    cells = [Cell("arithmetic", None, 3)]
    (result,) = await _ask(cells, slow, concurrency=1, clock=lambda: now, pause=wait)
    assert result.median_ms == pytest.approx(20)
    assert now == pytest.approx(100 + 3 * (1 + 2 * 0.02)), "one wait and two answers for each question"


def test_the_request_is_a_plain_chat_completion() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    answer = Answer("9", "4 + 5", (ToolCall("add", {"a": "ü"}),))
    asked = Exercise("x", ({"role": "user", "content": "?"},), answer, tools=(tool,), thinking=True)
    assert chat_body(asked, model="tiny") == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "?"}],
        "temperature": 0.0,
        "max_tokens": 32 + 1 + 5 + len("add{'a': 'ü'}".encode()),
        "tools": [tool],
        "chat_template_kwargs": {"enable_thinking": True},
    }
    plain = chat_body(Exercise("x", asked.messages, Answer("9")), model="tiny", thinking_tokens=1000)
    assert plain.keys() == {"model", "messages", "temperature", "max_tokens"}
    longer = chat_body(asked, model="tiny", thinking_tokens=1000)
    assert longer["max_tokens"] == 1000 + chat_body(asked, model="tiny")["max_tokens"]
    assert plain["max_tokens"] == 33  # only where thinking is asked for


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_both_names_of_the_thought_are_read(field: str) -> None:
    def think(asked: Exercise, _: int) -> Response:
        return completion(asked.answer.content, **{field: "hm"})

    (result,) = await _ask([Cell("thinking", None, 3)], think)
    assert result.outcomes == "111"


def test_backoff_doubles_up_to_its_bound() -> None:
    backoff = Backoff(first_s=0.5, longest_s=8.0)
    assert [backoff.seconds(attempt) for attempt in range(6)] == [0.5, 1, 2, 4, 8, 8]
    assert backoff.seconds(0, asked="3") == 3
    assert backoff.seconds(0, asked="3600") == 8
    assert backoff.seconds(3, asked="1") == 4
    assert backoff.seconds(0, asked="Wed, 21 Oct 2026 07:28:00 GMT") == 0.5


async def test_the_pool_bounds_connections_and_sends_the_key() -> None:
    async with open_http("http://endpoint/v1", api_key="secret", timeout_s=3, connections=2) as http:
        request = http.build_request("GET", "models")
        assert (str(request.url), request.headers["authorization"]) == ("http://endpoint/v1/models", "Bearer secret")
        assert (http.timeout.read, http.timeout.connect, http.timeout.pool) == (3, 3, None)
