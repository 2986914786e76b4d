"""`modelserve-bench` as people and gates call it: output, files, exit codes, Ctrl-C."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from streaming_endpoint import DONE, Reply, StreamingEndpoint, as_asked, completion_event, encoded

from modelserve_tools.bench.__main__ import main

KNOWN = ("--api", "completions", "--vocab-size", "255000", "--ignore-eos")  # nothing is asked of the endpoint first
SMALL = ("--input-tokens", "16", "--output-tokens", "5", *KNOWN)


def _document(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_loads_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint, path = StreamingEndpoint(), tmp_path / "bench.json"
    arguments = [*SMALL, "--concurrency", "1,3", "--seed", "7", "--json", str(path), "--records"]
    with endpoint.listening() as url:
        assert main(["--base-url", url, *arguments]) == 0
    shown = capsys.readouterr()
    head, nothing, headings, *rows = shown.out.splitlines()[-5:]  # a note may say that a short run is all driver
    assert head == f"stub at {url}/v1, seed 7"
    assert nothing == ""
    assert headings.split()[:8] == ["LOAD", "OK", "FAILED", "IN", "OUT", "REQ/S", "OUT", "TOK/S"]
    assert [row.split()[:5] for row in rows] == [["c=1", "4", "0", "16", "5"], ["c=3", "12", "0", "16", "5"]]
    assert shown.err == ""
    document = _document(path)
    assert document["format"] == "modelserve-bench/1"
    assert document["command"] == ["modelserve-bench", "--base-url", url, *arguments]
    assert (document["model"], document["seed"], document["complete"]) == ("stub", 7, True)
    assert document["models"]["data"] == [{"id": "stub", "max_model_len": 4096}]
    assert document["version"] == {"version": "1.2.3"}
    one, three = document["loads"]
    assert (one["concurrency"], one["requests"], one["ok"], one["warmup_requests"]) == (1, 4, 4, 1)
    assert (three["concurrency"], three["requests"], three["ok"], three["warmup_requests"]) == (3, 12, 12, 3)
    assert (three["input_tokens_mean"], three["output_tokens_mean"], three["tokens_per_event"]) == (16.0, 5.0, 1.0)
    assert (three["ttft_ms"]["n"], three["tpot_ms"]["n"], three["itl_ms"]["n"]) == (12, 12, 48)
    assert three["output_tokens_per_s"] == pytest.approx(60 / three["duration_s"], rel=0.01)
    assert three["total_tokens_per_s"] == pytest.approx(252 / three["duration_s"], rel=0.01)
    for record in three["records"]:
        assert len(record["event_s"]) == 5
        assert 0 < record["event_s"][0] <= record["event_s"][-1] <= record["end_s"]
    assert endpoint.most_open <= 3
    prompts = [tuple(body["prompt"]) for body in endpoint.bodies]
    assert len(prompts) == len(set(prompts)) == 1 + 4 + 3 + 12
    assert all(1000 <= token < 255_000 for prompt in prompts for token in prompt)
    assert {body["model"] for body in endpoint.bodies} == {"stub"}


def test_json_on_standard_output_has_no_records_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    with StreamingEndpoint().listening() as url:
        assert main(["--base-url", f"{url}/v1", *SMALL, "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["loads"][0]["records"] is None
    assert f"stub at {url}/v1, seed 0" in shown.err.splitlines()


def test_failures_are_counted_by_kind_and_the_others_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        asked = len(endpoint.bodies) - 1
        if asked in (1, 3):
            await reply.document({"error": {"message": f"overheated at {asked}"}}, status=503)
        elif asked == 4:
            await reply.head()
            await reply.send(encoded({"error": {"message": "lost the device"}}) + DONE)
            await reply.end()
        elif asked == 5:
            await reply.head()
            await reply.send(encoded(completion_event()))
            await reply.cut()
        elif asked == 6:
            await as_asked(body, reply, tokens=3)
        else:
            await as_asked(body, reply)

    endpoint, path = StreamingEndpoint(script), tmp_path / "bench.json"
    with endpoint.listening() as url:
        arguments = ["--num-requests", "8", "--warmup-requests", "0", "--json", str(path)]
        assert main(["--base-url", url, *SMALL, *arguments]) == 1
    shown = capsys.readouterr()
    expected = "5 of 8 requests failed or had not the asked length; the lines above the table say why"
    assert shown.err == f"modelserve-bench: {expected}\n"
    (load,) = _document(path)["loads"]
    assert (load["ok"], load["failed"], load["wrong_length"], load["unfinished"]) == (4, 4, 1, 0)
    faults = {fault["kind"]: (fault["count"], fault["first"]) for fault in load["faults"]}
    assert faults.pop("connection broke")[0] == 1
    assert faults == {
        "HTTP 503": (2, "request 1: overheated at 1"),
        "error in the stream": (1, "request 4: lost the device"),
        "wrong length": (1, "request 6: 3 tokens where 5 were asked for (finish_reason length)"),
    }
    assert "c=1: 2 x HTTP 503, first: request 1: overheated at 1" in shown.out.splitlines()
    assert (load["ttft_ms"]["n"], load["output_tokens_mean"]) == (4, (5 + 5 + 5 + 3) / 4)


def test_a_failed_warm_up_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        if len(endpoint.bodies) == 1:
            await reply.document({"error": {"message": "cold"}}, status=500)
        else:
            await as_asked(body, reply)

    endpoint = StreamingEndpoint(script)
    with endpoint.listening() as url:
        assert main(["--base-url", url, *SMALL]) == 1
    assert "c=1: warm-up: 1 x HTTP 500, first: request 0: cold" in capsys.readouterr().out


def test_an_answer_may_end_earlier_only_where_that_was_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    async def short(body: dict[str, Any], reply: Reply) -> None:
        await as_asked(body, reply, tokens=4)

    async def long(body: dict[str, Any], reply: Reply) -> None:
        await as_asked(body, reply, tokens=6)

    with StreamingEndpoint(short).listening() as url:
        assert main(["--base-url", url, *SMALL]) == 1
        assert main(["--base-url", url, *SMALL, "--no-ignore-eos"]) == 0
        assert main(["--base-url", url, *SMALL, "--no-ignore-eos", "--min-tokens"]) == 1
    with StreamingEndpoint(long).listening() as url:
        assert main(["--base-url", url, *SMALL, "--no-ignore-eos"]) == 1
    assert "6 tokens where 5 were asked for" in capsys.readouterr().out


def test_a_timeout_is_a_failure_of_its_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        if len(endpoint.bodies) == 2:
            await asyncio.sleep(3600)
        await as_asked(body, reply)

    endpoint = StreamingEndpoint(script)
    with endpoint.listening() as url:
        arguments = ["--timeout", "5", "--warmup-requests", "0", "--num-requests", "3"]
        assert main(["--base-url", url, *SMALL, *arguments]) == 1
    shown = capsys.readouterr().out
    assert "c=1: 1 x timeout, first: request 1: no whole answer within 5 s; --timeout raises that" in shown
    assert shown.splitlines()[-1].split()[:3] == ["c=1", "2", "1"]


def test_without_usage_tokens_are_counted_by_events(capsys: pytest.CaptureFixture[str]) -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        await reply.head()
        await reply.send(encoded(*[completion_event()] * 4, completion_event(finish_reason="length")) + DONE)
        await reply.end()

    with StreamingEndpoint(script).listening() as url:
        assert main(["--base-url", url, *SMALL]) == 0
    assert "c=1: the server sends no usage: tokens are counted by events" in capsys.readouterr().out


def test_several_tokens_in_an_event_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        await reply.head()
        usage = {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 5}}
        await reply.send(encoded(completion_event(), completion_event(finish_reason="length"), usage) + DONE)
        await reply.end()

    path = tmp_path / "bench.json"
    with StreamingEndpoint(script).listening() as url:
        assert main(["--base-url", url, *SMALL, "--json", str(path)]) == 0
    assert "c=1: 2.50 tokens an event: ITL is between events, TPOT per token" in capsys.readouterr().out
    (load,) = _document(path)["loads"]
    assert (load["itl_ms"]["n"], load["tpot_ms"]["n"]) == (4, 4)


def test_an_open_loop_and_drawn_lengths(tmp_path: Path) -> None:
    endpoint, path = StreamingEndpoint(), tmp_path / "bench.json"
    with endpoint.listening() as url:
        arguments = [
            "--rate",
            "200,400",
            "--num-requests",
            "10",
            "--input-range",
            "4:64",
            "--output-tokens",
            "2",
            *KNOWN,
        ]
        assert main(["--base-url", url, *arguments, "--json", str(path)]) == 0
    loads = _document(path)["loads"]
    assert [(load["rate"], load["concurrency"], load["ok"], load["late_ms"]["n"]) for load in loads] == [
        (200.0, None, 10, 10), (400.0, None, 10, 10),
    ]  # fmt: skip
    lengths = {len(body["prompt"]) for body in endpoint.bodies}
    assert len(lengths) > 3
    assert lengths <= set(range(4, 65))


def test_goodput_at_several_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint, path = StreamingEndpoint(), tmp_path / "bench.json"
    arguments = [*SMALL, "--rate", "100,200,400", "--num-requests", "5", "--json", str(path)]
    with endpoint.listening() as url:
        assert main(["--base-url", url, *arguments, "--goodput", "ttft:0.001,tpot:60000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5] == "good: TTFT at most 0.001 ms and TPOT at most 60000 ms"
    assert [line.split()[0] for line in lines[-3:]] == ["100/s", "200/s", "400/s"]
    for load in _document(path)["loads"]:
        goodput = load["goodput"]
        assert goodput["goals"] == {"ttft_ms": 0.001, "tpot_ms": 60000}
        assert (goodput["sent"], goodput["ttft_kept"], goodput["tpot_kept"], goodput["good"]) == (5, 0, 5, 0)


def test_a_chat_gets_words(capsys: pytest.CaptureFixture[str]) -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": "length"})
        usage = {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 2}}
        await reply.head()
        await reply.send(encoded(*({"choices": [choice]} for choice in choices), usage) + DONE)
        await reply.end()

    endpoint = StreamingEndpoint(script)
    with endpoint.listening() as url:
        assert main(["--base-url", url, *SMALL, "--api", "chat", "--output-tokens", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:5] == ["c=1", "4", "0", "20", "2"]
    assert {path for path in endpoint.paths if path.startswith("POST")} == {"POST /v1/chat/completions"}
    assert {len(body["messages"][0]["content"].split()) for body in endpoint.bodies} == {16}


def test_the_model_and_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    key = os.environ["PYTEST_CURRENT_TEST"]
    endpoint = StreamingEndpoint(models=("a", "b"))
    with endpoint.listening() as url:
        assert main(["--base-url", url, *SMALL]) == 2
        assert capsys.readouterr().err == f"modelserve-bench: {url}/v1 serves a, b; choose one with --model\n"
        assert main(["--base-url", url, *SMALL, "--model", "c"]) == 2
        assert capsys.readouterr().err == f"modelserve-bench: --model c: {url}/v1 serves a, b; name one of them\n"
        assert endpoint.bodies == []
        endpoint.keys.clear()
        assert main(["--base-url", url, *SMALL, "--model", "b", "--api-key-env", "PYTEST_CURRENT_TEST"]) == 0
    assert set(endpoint.keys) == {f"Bearer {key}"}
    assert {body["model"] for body in endpoint.bodies} == {"b"}


def test_an_endpoint_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with StreamingEndpoint().listening() as url:
        assert main(["--base-url", f"{url}/other", *SMALL]) == 3
        assert capsys.readouterr().err == f"modelserve-bench: HTTP 404 from {url}/other/models: no such route\n"
    assert main(["--base-url", url, *SMALL]) == 3
    assert capsys.readouterr().err.startswith(f"modelserve-bench: no answer from {url}/v1/models: ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--base-url", "localhost:8000"], "'localhost:8000' is no HTTP address; write it as http://HOST:PORT/v1"),
        (["--concurrency", "1,0"], "0 is out of range; give a whole number from 1 to 4096"),
        (["--rate", "0"], "'0' is no number from 0.0001 to 100000"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with argument"),
        (["--input-range", "100"], "'100' is no range; write it as LOW:HIGH, such as 100:8000"),
        (["--input-range", "9:8"], "'9:8' begins above its end; write it as LOW:HIGH"),
        (["--input-range", "9:10", "--input-tokens", "9"], "not allowed with argument"),
        (["--api", "chat", "--prompt", "token-ids"], "--prompt token-ids: a chat has messages of text"),
        (
            ["--vocab-size", "1000", "--first-token-id", "1000"],
            "--first-token-id 1000: must be below --vocab-size 1000",
        ),
        (
            ["--input-range", "100:200", "--shared-prefix-tokens", "100"],
            "--shared-prefix-tokens 100: must be below the shortest prompt, 100",
        ),
        (["--output-tokens", "0"], "0 is out of range; give a whole number from 1 to 16777216"),
        (["--goodput", "e2e:5"], "'e2e:5' is no goal; write ttft:MS, tpot:MS or both: ttft:500,tpot:50"),
        (["--temperature", "nan"], "'nan' is no number from 0 to 2"),
        (["--records"], "--records: there is no file to write them to; add --json FILE"),
        (["--warmup-requests", "-1"], "'-1' is no whole number from 0 to 1000000"),
    ],
)
def test_wrong_flags_say_the_value_and_the_remedy(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [] if "--base-url" in arguments else ["--base-url", "http://127.0.0.1:9"]
    with pytest.raises(SystemExit) as raised:
        main([*base, *arguments])
    assert raised.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_known_before_the_first_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, endpoint = tmp_path / "nowhere" / "file", StreamingEndpoint()
    with endpoint.listening() as url:
        assert main(["--base-url", url, *SMALL, "--json", str(path)]) == 2
    assert endpoint.paths == []
    expected = f"modelserve-bench: {path} cannot be written (No such file or directory); name another file\n"
    assert capsys.readouterr().err == expected


def test_ctrl_c_shows_what_is_done(tmp_path: Path) -> None:
    reached, path = tmp_path / "reached", tmp_path / "bench.json"

    async def script(body: dict[str, Any], reply: Reply) -> None:
        if len(endpoint.bodies) == 5:  # the fourth after one for warming up
            reached.touch()
            await asyncio.sleep(3600)
        await as_asked(body, reply)

    endpoint = StreamingEndpoint(script)
    with endpoint.listening() as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "modelserve_tools.bench", "--base-url", url, *SMALL, "--num-requests", "9",
             "--json", str(path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )  # fmt: skip
        while not reached.exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "modelserve-bench: interrupted; the figures are of what was answered until then\n"
    assert "c=1: 6 of 9 requests were not finished" in out.splitlines()
    assert f"stub at {url}/v1, seed 0, stopped before its end" in out.splitlines()
    (load,) = _document(path)["loads"]
    assert (load["ok"], load["failed"], load["unfinished"]) == (3, 0, 6)
    assert _document(path)["complete"] is False


def test_the_command_imports_no_engine_and_no_other_client() -> None:
    code = (
        "import sys; from modelserve_tools.bench.__main__ import main\n"
        "print([m for m in ('torch', 'starlette', 'tokenizers', 'jinja2', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_installed_command_is_this_one() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["modelserve-bench"].partition(":")
    assert getattr(importlib.import_module(module), function) is main


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_sessions_send_each_turn_behind_the_one_before_it(
    api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By token ids without the answers, whose ids the API does not tell; as a chat with them."""

    async def script(body: dict[str, Any], reply: Reply) -> None:
        await reply.head()
        chat = "messages" in body
        for i in range(2):
            word = f"said{len(body['messages'] if chat else [])}"
            delta = {"delta": {"content": word}} if chat else {"text": word}
            choice = {"index": 0, "finish_reason": "length" if i else None, **delta}
            await reply.send(encoded({"choices": [choice], "usage": None}))
        usage = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 30}}
        await reply.send(encoded({"choices": [], "usage": usage}) + DONE)
        await reply.end()

    endpoint, path = StreamingEndpoint(script), tmp_path / "bench.json"
    load = ["--turns", "3", "--turn-tokens", "7", "--num-requests", "2", "--concurrency", "2", "--warmup-requests", "1"]
    with endpoint.listening() as url:
        arguments = ["--api", api, *load, "--input-tokens", "16", "--output-tokens", "2", "--json", str(path)]
        assert main(["--base-url", url, *arguments]) == 0
    bodies = endpoint.bodies[-6:]  # before them, what the endpoint was asked first, and the warm-up
    sessions: dict[Any, list[Any]] = {}
    for body in bodies:
        first = body["messages"][0]["content"] if api == "chat" else tuple(body["prompt"][:16])
        sessions.setdefault(first, []).append(body["messages"] if api == "chat" else body["prompt"])
    assert len(sessions) == 2
    for one, two, three in sessions.values():
        assert (two[: len(one)], three[: len(two)]) == (one, two)
        if api == "chat":
            assert [message["role"] for message in three] == ["user", "assistant"] * 2 + ["user"]
            assert [message["content"] for message in three[1::2]] == ["said1said1", "said3said3"]
            assert len(three[4]["content"].split()) == 7
        else:
            assert [len(one), len(two), len(three)] == [16, 23, 30]
    (found,) = _document(path)["loads"]
    assert (found["requests"], found["ok"], found["warmup_requests"]) == (6, 6, 1)
    assert [(turn["turn"], turn["ok"], turn["cached_tokens_mean"]) for turn in found["turns"]] == [
        (1, 2, 30.0), (2, 2, 30.0), (3, 2, 30.0),
    ]  # fmt: skip
    shown = capsys.readouterr().out.splitlines()
    assert shown[-4].split()[:5] == ["LOAD", "TURN", "OK", "IN", "CACHED"]
    assert [line.split()[:5] for line in shown[-3:]] == [["c=2", str(turn), "2", "40", "30"] for turn in (1, 2, 3)]


def test_a_session_ends_with_the_turn_that_fails(tmp_path: Path) -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        if len(body["prompt"]) > 16:
            await reply.document({"error": {"message": "too long"}}, status=400)
        else:
            await as_asked(body, reply)

    endpoint, path = StreamingEndpoint(script), tmp_path / "bench.json"
    with endpoint.listening() as url:
        load = ["--turns", "3", "--num-requests", "2", "--think-time", "0.01", "--json", str(path)]
        assert main(["--base-url", url, *SMALL, *load]) == 1
    (found,) = _document(path)["loads"]
    assert (found["requests"], found["ok"], found["failed"], found["unfinished"]) == (6, 2, 2, 2)
    assert found["turns"] == [], "of the first turns alone"


def test_a_pause_between_turns_needs_turns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--base-url", "http://127.0.0.1:1", "--think-time", "2"])
    assert "a session of one turn has no next one; add --turns N" in capsys.readouterr().err
