"""SIGTERM under load: pooled clients without retries see no error while the worker leaves its Service."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from worker_process import MODEL, Worker, serving

BODY: dict[str, Any] = {"model": MODEL.name, "prompt": [2, 3], "ignore_eos": True, "max_tokens": 4}
CLIENTS = 6
AFTER = 25  # requests of each client that begin after the signal


class Hammer:
    """A stock client with kept connections and no retries, which asks again at once, every other time for a stream."""

    def __init__(self, url: str) -> None:
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self.errors: list[str] = []
        self.answered = 0
        self.signalled = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        after = 0
        while after < AFTER and len(self.errors) < 3:
            after += self.signalled.is_set()
            try:
                self._ask(stream=self.answered % 2 == 1)
                self.answered += 1
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
        self.client.close()

    def _ask(self, *, stream: bool) -> None:
        arguments: dict[str, Any] = {"model": MODEL.name, "prompt": "page", "max_tokens": 4}
        extra = {"ignore_eos": True}
        if not stream:
            answer = self.client.completions.create(**arguments, extra_body=extra)
            assert answer.choices[0].finish_reason == "length"
            return
        chunks = list(self.client.completions.create(**arguments, stream=True, extra_body=extra))
        assert chunks[-1].choices[0].finish_reason == "length"


def _eventually(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _refuses_connections(worker: Worker) -> bool:
    try:
        httpx.get(f"{worker.http.base_url}/health")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it stopped to listen before it had taken this one
        return False
    return False


def test_pooled_clients_without_retries_see_no_error(tmp_path: Path) -> None:
    """Also new connections are answered for the delay; a long one, so that a slow machine changes nothing."""
    with serving(tmp_path, "--shutdown-delay-seconds", "600", step_seconds=0.002) as worker:
        worker.wait_until_ready()
        url = str(worker.http.base_url)
        hammers = [Hammer(url) for _ in range(CLIENTS)]
        _eventually(lambda: all(each.answered > 3 or each.errors for each in hammers))
        worker.process.send_signal(signal.SIGTERM)
        _eventually(lambda: worker.http.get("/ready").status_code == 503)
        for each in hammers:
            each.signalled.set()
        for each in hammers:
            each.thread.join(timeout=120)
        assert [error for each in hammers for error in each.errors] == []
        assert worker.http.get("/ready").json() == {"status": "draining", "detail": "draining"}
        assert worker.http.get("/health").status_code == 200
        answer = worker.http.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        refused = worker.http.post("/v1/completions", json=BODY | {"max_tokens": -1})
        assert (refused.status_code, refused.headers["connection"]) == (400, "close")
        assert worker.process.poll() is None


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[tuple[Worker, http.client.HTTPConnection]]:
    """A worker without a delay, and a connection to it that was used and is kept."""
    with serving(tmp_path, step_seconds=0.01) as worker:
        worker.wait_until_ready()
        connection = http.client.HTTPConnection(str(worker.http.base_url.host), worker.http.base_url.port, timeout=60)
        _post(connection)
        try:
            yield worker, connection
        finally:
            connection.close()


def _post(connection: http.client.HTTPConnection) -> str | None:
    connection.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 4)
    return answer.getheader("connection")


def test_a_kept_connection_is_answered_and_ended_after_the_last_new_one(
    kept: tuple[Worker, http.client.HTTPConnection],
) -> None:
    worker, connection = kept
    worker.http.close()
    worker.process.send_signal(signal.SIGTERM)
    _eventually(lambda: _refuses_connections(worker))
    assert _post(connection) == "close"
    assert worker.process.wait(60) == 0


def test_behind_a_stream_the_connection_takes_one_more_request(
    kept: tuple[Worker, http.client.HTTPConnection],
) -> None:
    """To close it right behind the stream's last byte would cross the client's next request."""
    worker, connection = kept
    body = json.dumps(BODY | {"stream": True, "max_tokens": 100})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.readline()
    worker.http.close()  # or its own idle connection would be waited for
    worker.process.send_signal(signal.SIGTERM)
    assert answer.read().endswith(b"data: [DONE]\n\n")
    assert _post(connection) == "close"
    assert worker.process.wait(60) == 0


def test_a_connection_that_nobody_uses_is_closed_and_holds_nothing_up(
    kept: tuple[Worker, http.client.HTTPConnection],
) -> None:
    worker, connection = kept
    worker.process.send_signal(signal.SIGTERM)
    assert connection.sock.recv(1) == b"", "its end, and no reset"
    assert worker.process.wait(60) == 0
