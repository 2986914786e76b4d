"""`modelserve-bench` without flags: it finds out what an endpoint takes, and says what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streaming_endpoint import Reply, StreamingEndpoint, as_asked

from modelserve_tools.bench.__main__ import main
from modelserve_tools.bench.discovery import fitting

Refusal = Callable[[dict[str, Any]], str | None]


def _refusing(refusal: Refusal) -> Any:
    """An endpoint that answers as asked what `refusal` has nothing against."""

    async def script(body: dict[str, Any], reply: Reply) -> None:
        if (what := refusal(body)) is not None:
            await reply.document({"error": {"message": what}}, status=400)
        elif "stream" in body:
            await as_asked(body, reply)
        else:
            await reply.document({"choices": [{"text": "a"}]})

    return script


def _vocabulary(size: int) -> Refusal:
    def refusal(body: dict[str, Any]) -> str | None:
        prompt = body.get("prompt")
        beyond = max(prompt) if isinstance(prompt, list) else 0
        return f"token id {beyond} is outside the vocabulary" if beyond >= size else None

    return refusal


def _run(tmp_path: Path, endpoint: StreamingEndpoint, *flags: str, code: int = 0) -> tuple[dict[str, Any], list[Any]]:
    """The document, and the bodies that were part of the load."""
    path = tmp_path / "bench.json"
    with endpoint.listening() as url:
        assert main(["--base-url", url, "--num-requests", "3", "--json", str(path), *flags]) == code
    document: dict[str, Any] = json.loads(path.read_text())
    return document, [body for body in endpoint.bodies if "stream" in body]


@pytest.mark.parametrize("size", [2, 5, 512, 1001, 32_000, 254_999])
def test_a_smaller_vocabulary_is_found(tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = StreamingEndpoint(_refusing(_vocabulary(size)))
    document, bodies = _run(tmp_path, endpoint)
    ids = {token_id for body in bodies for token_id in body["prompt"]}
    first = min(1000, (size - 1) // 2)
    assert ids <= set(range(first, size))
    assert document["found"] == [f"it takes token ids up to {size - 1}: prompts are of {first} and above"]
    assert document["found"][0] in capsys.readouterr().out
    assert (document["loads"][0]["ok"], document["loads"][0]["input_tokens_mean"]) == (3, 1024.0)
    assert len(endpoint.bodies) - len(bodies) < 24


def test_one_probe_is_enough_where_all_is_as_it_mostly_is(tmp_path: Path) -> None:
    endpoint = StreamingEndpoint(_refusing(_vocabulary(262_144)))
    document, bodies = _run(tmp_path, endpoint)
    assert document["found"] == []
    assert len(endpoint.bodies) == len(bodies) + 1
    assert all(body["ignore_eos"] and min(body["prompt"]) >= 1000 for body in bodies)


def test_an_endpoint_that_knows_openai_alone(tmp_path: Path) -> None:
    """No completions, no ignore_eos."""
    refusal = _refusing(lambda body: "unknown field ignore_eos" if "ignore_eos" in body else None)
    document, bodies = _run(tmp_path, StreamingEndpoint(refusal, routes=["/v1/chat/completions"]))
    assert document["found"] == [
        "it has no completions: requests are chats",
        "it does not take ignore_eos: answers may be shorter than asked",
    ]
    assert all("ignore_eos" not in body and len(body["messages"][0]["content"].split()) == 1024 for body in bodies)


def test_an_endpoint_that_takes_no_token_ids(tmp_path: Path) -> None:
    refusal = _refusing(lambda body: "prompt must be a string" if isinstance(body["prompt"], list) else None)
    document, bodies = _run(tmp_path, StreamingEndpoint(refusal))
    assert document["found"] == ["it takes no token ids: prompts are words"]
    assert all(isinstance(body["prompt"], str) and body["ignore_eos"] for body in bodies)


def test_a_smaller_vocabulary_and_no_ignore_eos(tmp_path: Path) -> None:
    def refusal(body: dict[str, Any]) -> str | None:
        return "unknown field" if "ignore_eos" in body else _vocabulary(300)(body)

    document, bodies = _run(tmp_path, StreamingEndpoint(_refusing(refusal)))
    assert len(document["found"]) == 2
    assert all("ignore_eos" not in body and max(body["prompt"]) < 300 for body in bodies)


def test_lengths_fit_a_small_context(tmp_path: Path) -> None:
    document, bodies = _run(tmp_path, StreamingEndpoint(_refusing(lambda _: None), max_model_len=512))
    assert {(len(body["prompt"]), body["max_tokens"]) for body in bodies} == {(384, 128)}
    assert document["found"] == ["its context has 512 tokens: prompts of 384, answers of 128"]
    assert fitting(None, None, 512, text=True)[:2] == (192, 128)
    assert fitting(None, None, None, text=False) == (1024, 128, ())
    assert fitting(2000, None, 100, text=False)[:2] == (2000, 25), "what was asked for is sent, and refused"
    assert fitting(None, None, 1152, text=False) == (1024, 128, ())


def test_what_flags_say_is_not_asked(tmp_path: Path) -> None:
    """And what they say is sent, also where it is refused: a refusal is a figure of its own."""
    endpoint = StreamingEndpoint(_refusing(_vocabulary(300)))
    flags = ["--api", "completions", "--vocab-size", "2000", "--ignore-eos"]
    document, bodies = _run(tmp_path, endpoint, *flags, code=1)
    assert (document["found"], len(endpoint.bodies)) == ([], len(bodies))
    assert document["loads"][0]["failed"] == 3


@pytest.mark.parametrize(("status", "said"), [(401, "HTTP 401"), (503, "HTTP 503"), (400, "it took no request")])
def test_an_endpoint_that_takes_nothing_is_none(status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        await reply.document({"error": {"message": f"not for {body['model']}"}}, status=status)

    with StreamingEndpoint(script).listening() as url:
        assert main(["--base-url", url]) == 3
    shown = capsys.readouterr().err
    assert said in shown
    assert "not for stub" in shown
