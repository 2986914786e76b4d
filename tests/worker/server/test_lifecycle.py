"""Loading, draining, failures, disconnects: what kubelet, clients and the engine see."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from modelserve.errors import InvalidInput
from modelserve_worker.server.lifecycle import bind
from modelserve_worker.server.state import Phase, ServedModel, ServerState
from modelserve_worker.text.checkpoint_text import load_checkpoint_text

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_health_and_readiness_while_loading(server: Any, http: httpx.Client) -> None:
    state: ServerState = server.state
    state.phase, state.engine, state.detail = Phase.LOADING, None, "weights: 3 of 7 GB"
    assert http.get("/health").json() == {"status": "loading", "detail": "weights: 3 of 7 GB"}
    assert http.get("/health").status_code == 200
    assert (http.get("/ready").status_code, http.get("/ready").json()["detail"]) == (503, "weights: 3 of 7 GB")
    refused = http.post("/v1/chat/completions", json=CHAT)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert "loading (weights: 3 of 7 GB)" in refused.json()["error"]["message"]
    assert http.get("/v1/models").status_code == http.get("/v1/plan").status_code == 503


def test_ready_and_informative(http: httpx.Client) -> None:
    assert (http.get("/ready").status_code, http.get("/health").status_code) == (200, 200)
    assert http.get("/v1/plan").json() == {"maxModelLen": 512}
    assert http.get("/version").json()["version"].count(".") == 2


def test_a_dead_engine_is_reported(server: Any, http: httpx.Client) -> None:
    server.engine.dead = "the device is gone"
    assert http.get("/health").status_code == http.get("/ready").status_code == 503
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 503


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_aborts_within_a_step(server: Any, http: httpx.Client, stream: bool) -> None:
    server.engine.step_seconds = 0.2
    body = CHAT | {"stream": stream, "ignore_eos": True, "max_tokens": 400, "n": 2}
    if stream:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert next(response.iter_lines()).startswith("data: ")
    else:
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
            server.eventually(lambda: len(server.engine.steps) == 2)
    gone = dict(server.engine.steps)
    server.eventually(lambda: len(server.engine.aborted) == 2 and server.state.open_requests == 0)
    assert server.engine.running == set()
    assert max(server.engine.steps[request_id] - gone[request_id] for request_id in gone) <= 1
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


async def test_a_disconnect_before_the_first_token_aborts(server: Any) -> None:
    server.engine.step_seconds = 30.0
    async with httpx.AsyncClient(base_url=server.url) as client:
        task = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        await asyncio.to_thread(server.eventually, lambda: len(server.engine.running) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.to_thread(server.eventually, lambda: server.engine.running == set())
    assert len(server.engine.aborted) == 1


def test_a_failure_in_mid_stream_is_an_error_event(server: Any, http: httpx.Client) -> None:
    server.engine.fail_after = 3
    events = http.post("/v1/chat/completions", json=CHAT | {"stream": True}).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["message"] == "the step failed: overheated"
    assert events[-2:] == ["data: [DONE]", ""]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="overheated"):
            list(client.chat.completions.create(model="tiny", messages=CHAT["messages"], stream=True))
        with pytest.raises(openai.InternalServerError, match="overheated"):
            client.chat.completions.create(model="tiny", messages=CHAT["messages"])


def test_one_failed_choice_ends_the_others(server: Any, http: httpx.Client) -> None:
    server.engine.fail_after = 2
    assert http.post("/v1/chat/completions", json=CHAT | {"n": 5}).status_code == 500
    server.eventually(lambda: server.engine.running == set() and server.state.open_requests == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_engine_refuses_is_a_400_and_no_one_elses(server: Any, http: httpx.Client, stream: bool) -> None:
    server.engine.step_seconds = 0.02
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as other:
        lines = other.iter_lines()
        next(lines)
        server.engine.refusal = InvalidInput("7 pages are asked for and there are 5", field="max_tokens")
        refused = http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "stream": stream})
        server.engine.refusal = None
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["message"], error["param"]) == ("7 pages are asked for and there are 5", "max_tokens")
        assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_an_engine_that_dies_before_the_first_token_is_a_503(server: Any, http: httpx.Client) -> None:
    server.engine.step_seconds = 600.0

    def die() -> None:
        server.eventually(lambda: len(server.engine.running) == 1)
        server.engine.dead = "the device is gone"

    with ThreadPoolExecutor(1) as pool:
        dying = pool.submit(die)
        answer = http.post("/v1/chat/completions", json=CHAT | {"stream": True})
        dying.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


def test_a_stop_string_ends_its_sequence_in_the_engine_and_leaves_the_others(server: Any, http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": ["ab END never said", "a longer prompt without it"], "stop": ["END"]}
    answer = http.post("/v1/completions", json=body | {"max_tokens": 100}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab ", "a longer prompt without it"]
    assert [choice["stop_reason"] for choice in answer["choices"]] == ["END", None]
    assert server.engine.ended == [f"{answer['id']}-0"]
    assert server.engine.steps[f"{answer['id']}-0"] == len("ab END")


def test_requests_that_die_with_the_engine_count_as_errors(server: Any, http: httpx.Client) -> None:
    """An abort is a client's; these clients were still waiting."""
    server.engine.step_seconds = 0.05
    body = CHAT | {"stream": True, "ignore_eos": True, "max_tokens": 400}
    with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.engine.dead = "the device is gone"
        assert any("the device is gone" in line for line in lines)
    metrics = http.get("/metrics").text.splitlines()
    assert 'vllm:request_success_total{finished_reason="error",model_name="tiny"} 1.0' in metrics
    assert 'vllm:request_success_total{finished_reason="abort",model_name="tiny"} 0.0' in metrics


def test_metrics_under_the_names_that_dashboards_read(server: Any, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json=CHAT)
    lines = set(http.get("/metrics").text.splitlines())
    tokens = len(b"user\nhello\nmodel\n") + 1
    for line in (
        'vllm:num_requests_running{model_name="tiny"} 0.0',
        'vllm:num_requests_waiting{model_name="tiny"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="tiny"} 0.25',
        'vllm:cache_config_info{block_size="64",model_name="tiny",num_gpu_blocks="10"} 1.0',
        'vllm:prompt_tokens_total{model_name="tiny"} 11.0',
        'vllm:generation_tokens_total{model_name="tiny"} 12.0',
        'vllm:num_preemptions_total{model_name="tiny"} 2.0',
        'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 1.0',
        'vllm:request_success_total{finished_reason="abort",model_name="tiny"} 0.0',
        'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        f'vllm:inter_token_latency_seconds_count{{model_name="tiny"}} {tokens - 1}.0',
        'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
        f'vllm:request_generation_tokens_sum{{model_name="tiny"}} {tokens}.0',
        'modelserve_pages_used{kind="global",model_name="tiny"} 5.0',
        'modelserve_pages_total{kind="sliding",model_name="tiny"} 20.0',
    ):
        assert line in lines


def test_sampling_defaults_come_from_the_checkpoint(
    server: Any, http: httpx.Client, model_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_directory / "tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 64, "top_p": 0.95}')
    server.state.model = ServedModel("tiny", load_checkpoint_text(tmp_path), vocab_size=512)
    for body in ({}, {"top_k": -1, "temperature": 0, "top_p": 1}):
        assert http.post("/v1/completions", json={"model": "tiny", "prompt": "a"} | body).status_code == 200
    first, second = (request.sampling for request in server.engine.requests)
    assert (first.temperature, first.top_k, first.top_p) == (0.7, 64, 0.95)
    assert (second.temperature, second.top_k, second.top_p) == (0.0, 0, 1.0)
    assert first.seed != second.seed


def test_small_writes_of_accepted_connections_do_not_wait_for_acknowledgements() -> None:
    """With Nagle's algorithm an event after the headers waits for the client's delayed ACK: 40 ms of every answer."""
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert client.getpeername() == listener.getsockname()
