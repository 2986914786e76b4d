"""API keys: who has none is kept out of all but probes and metrics, and keys may change while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from modelserve.errors import InvalidInput
from modelserve_worker.server.http import authentication
from modelserve_worker.server.http.authentication import OPEN_PATHS, ApiKeys
from modelserve_worker.server.settings import ServerSettings
from modelserve_worker.server.state import ServerState

TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
ORIGIN = "https://chat.example"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# those of the batch jobs\nfirst-key\n\n second-key \n")
    return path


@pytest.fixture
def guarded(serve_with: Any, served_model: Any, echo_engine: Any, key_file: Path) -> Iterator[Any]:
    state = ServerState(served_model)
    state.mark_ready(echo_engine)
    settings = ServerSettings(api_keys=("third-key",), api_key_file=key_file, allowed_origins=(ORIGIN,))
    with serve_with(state, echo_engine, settings) as live:
        yield live


def _status(server: Any, **headers: str) -> int:
    return httpx.post(f"{server.url}/v1/completions", json=TEXT, headers=headers).status_code


def test_every_key_opens_and_nothing_else_does(guarded: Any) -> None:
    for key in ("first-key", "second-key", "third-key"):
        assert _status(guarded, authorization=f"Bearer {key}") == 200
        assert _status(guarded, **{"x-api-key": key}) == 200
    for wrong in (
        "fourth-key",
        "first-ke",
        "first-key2",
        "# those of the batch jobs",
        "ключ".encode().decode("latin-1"),
    ):
        assert httpx.post(
            f"{guarded.url}/v1/completions", json=TEXT, headers={b"authorization": b"Bearer " + wrong.encode("latin-1")}
        ).status_code == 401  # fmt: skip
    assert _status(guarded, authorization="Basic first-key") == 401
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="nobody", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="is none of this server's keys"),
    ):
        client.models.list()


def test_a_refusal_has_the_shape_of_all_errors(guarded: Any) -> None:
    response = httpx.post(f"{guarded.url}/v1/completions", json=TEXT)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "is missing" in error["message"]


def test_every_api_asks_for_a_key_in_its_own_way(guarded: Any) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 2},
        "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [300]},
    }
    for path, body in bodies.items():
        refused = httpx.post(guarded.url + path, json=body)
        assert refused.status_code == 401, path
        assert refused.json()["error"]["type"] == "authentication_error"
        assert (refused.json().get("type") == "error") == path.startswith("/v1/messages")
        assert httpx.post(guarded.url + path, json=body, headers={"x-api-key": "first-key"}).status_code == 200, path


def test_probes_and_metrics_are_open(guarded: Any) -> None:
    for path in OPEN_PATHS:
        assert httpx.get(guarded.url + path).status_code == 200, path
    for path in ("/v1/models", "/nowhere"):
        assert httpx.get(guarded.url + path).status_code == 401, path


def test_a_rotated_file_is_read_again(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the kubelet does it: another file takes the place of the old one."""
    caplog.set_level(logging.INFO, authentication.__name__)
    keys = ApiKeys(file=key_file, look_interval_s=0.0)
    assert keys.name_of("first-key")
    other = key_file.with_name("other")
    other.write_text("fifth-key\n")
    other.replace(key_file)
    assert keys.name_of("fifth-key")
    assert not keys.name_of("first-key")
    for damage in ("unlink", "empty"):
        if damage == "unlink":
            key_file.unlink()
        else:
            key_file.write_text("\n")
        for _ in range(3):
            assert keys.name_of("fifth-key"), "the last keys stay in force"
            assert not keys.name_of("nobody")
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    key_file.write_text("sixth-key\n")
    assert keys.name_of("sixth-key")
    assert not any("-key" in record.getMessage().replace(str(key_file), "") for record in caplog.records)


def test_a_file_without_keys_is_a_wrong_setting_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        ApiKeys(file=tmp_path / "nowhere")
    (tmp_path / "empty").write_text("# none\n")
    with pytest.raises(InvalidInput, match="holds no key"):
        ApiKeys(file=tmp_path / "empty")


def test_without_keys_anybody_may_ask(server: Any) -> None:
    assert _status(server) == 200


def test_pages_of_other_origins_may_call_where_it_is_allowed(guarded: Any, server: Any) -> None:
    asked = {
        "origin": ORIGIN, "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }  # fmt: skip
    answer = httpx.options(f"{guarded.url}/v1/completions", headers=asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert httpx.options(f"{guarded.url}/v1/completions", headers=asked | {"origin": "https://evil"}).status_code == 400
    off = httpx.options(f"{server.url}/v1/completions", headers=asked)
    assert (off.status_code, "access-control-allow-origin" in off.headers) == (405, False)
