"""`modelserve-eval` as people and gates call it: output, files, exit codes, Ctrl-C."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from scripted_endpoint import Script, ScriptedEndpoint, listening, refusal, right, wrong
from starlette.responses import Response

from modelserve_tools.evaluation.__main__ import main
from modelserve_tools.evaluation.exercise import Exercise
from modelserve_tools.evaluation.progress import Progress
from modelserve_tools.evaluation.publishing import BadInput, read_api_key
from modelserve_tools.evaluation.skills import exercise

SKILLS = ("--skills", "facts,recall", "--distances", "10,400", "--n", "4", "--n-at", "400=2", "--seed", "7")
COMMAND = [sys.executable, "-m", "modelserve_tools.evaluation"]


def _exercises() -> Iterator[Exercise]:
    yield from (exercise("facts", seed=7, index=i) for i in range(4))
    yield from (exercise("recall", seed=7, index=i, distance=10) for i in range(4))
    yield from (exercise("recall", seed=7, index=i, distance=400) for i in range(2))


@contextmanager
def _served(script: Script = right, **options: int) -> Iterator[tuple[str, ScriptedEndpoint]]:
    endpoint = ScriptedEndpoint(_exercises(), script, **options)
    with listening(endpoint.app) as url:
        yield url, endpoint


def _without_times(text: str) -> str:
    return re.sub(r" +\d+\.\d$", " T", text, flags=re.MULTILINE)


def test_a_table_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with _served() as (url, endpoint):
        assert main(["--base-url", url, *SKILLS, "--at-least", "100"]) == 0
    shown = capsys.readouterr()
    assert _without_times(shown.out) == (
        f"tiny-0 at {url}\n"
        "\n"
        "SKILL   DISTANCE  N  EXACT %  95 % INTERVAL  ERRORS  MEDIAN MS\n"
        "facts          -  4    100.0  51.0 to 100.0       0 T\n"
        "recall        10  4    100.0  51.0 to 100.0       0 T\n"
        "recall       400  2    100.0  34.2 to 100.0       0 T\n"
    )
    assert shown.err == ""
    assert len(endpoint.requests) == 10
    assert {body["model"] for body in endpoint.requests} == {"tiny-0"}


def test_json_on_standard_output_sends_the_table_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with _served() as (url, _):
        assert main(["--base-url", url, *SKILLS, "--json", "-"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert [(cell["skill"], cell["distance"], cell["outcomes"]) for cell in document["cells"]] == [
        ("facts", None, "1111"), ("recall", 10, "1111"), ("recall", 400, "11"),
    ]  # fmt: skip
    assert (document["model"], document["base_url"], document["complete"]) == ("tiny-0", url, True)
    assert {cell["seed"] for cell in document["cells"]} == {7}
    assert shown.err.startswith("tiny-0 at ")


def test_a_gate_and_the_wrong_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures, results = tmp_path / "failures.jsonl", tmp_path / "results.json"
    far = exercise("recall", seed=7, index=1, distance=400)
    with _served(lambda asked, _: (wrong if asked == far else right)(asked)) as (url, _):
        arguments = ["--base-url", url, *SKILLS, "--failures", str(failures), "--json", str(results)]
        assert main(arguments) == 0
        assert main([*arguments, "--at-least", "50"]) == 0
        assert main([*arguments, "--at-least", "50.1"]) == 1
    assert capsys.readouterr().err == "modelserve-eval: below 50.1 %: recall at 400: 50.0 %\n"
    (line,) = map(json.loads, failures.read_text().splitlines())
    assert line == {
        "skill": "recall", "distance": 400, "seed": 7, "index": 1, "reason": "the content differs",
        "prompt_end": far.messages[-1]["content"][-200:],
        "expected": {"content": far.answer.content, "reasoning": "", "tool_calls": []},
        "got": {"content": "I do not know.", "reasoning": "", "tool_calls": [], "finish_reason": "stop"},
    }  # fmt: skip
    assert json.loads(results.read_text())["cells"][2]["outcomes"] == "10"


def test_errors_end_with_3_even_where_the_gate_holds(capsys: pytest.CaptureFixture[str]) -> None:
    bad = exercise("recall", seed=7, index=2, distance=10)
    with _served(lambda asked, _: refusal(500, "overheated") if asked == bad else right(asked)) as (url, _):
        assert main(["--base-url", url, *SKILLS, "--at-least", "100"]) == 3
    shown = capsys.readouterr()
    assert f"recall at 10: first error: HTTP 500 from {url}/chat/completions: overheated" in shown.out
    assert shown.err == "modelserve-eval: 1 of 10 questions got no answer that could be marked\n"


def test_a_cell_that_the_server_cannot_hold_is_skipped_and_holds_no_gate(capsys: pytest.CaptureFixture[str]) -> None:
    with _served(max_model_len=300) as (url, _):
        assert main(["--base-url", url, *SKILLS]) == 0
        assert re.search(
            r"recall +400  skipped: needs at least \d{3} tokens, the server has 300", capsys.readouterr().out
        )
        assert main(["--base-url", url, *SKILLS, "--at-least", "90"]) == 1
    assert capsys.readouterr().err == "modelserve-eval: below 90 %: recall at 400: not measured\n"


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    scripts: list[Script] = [right, wrong]
    for file, script in zip(files, scripts, strict=True):
        with _served(script) as (url, _):
            assert main(["--base-url", url, *SKILLS, "--json", file]) == 0
    capsys.readouterr()
    assert main(["--compare", *files]) == 0
    assert "facts          -      4  100.0  0.0  -100.0" in capsys.readouterr().out
    assert main(["--compare", *files, "--json", "-"]) == 0
    assert [cell["lost"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [4, 4, 2]
    (tmp_path / "b.json").write_text("{}")
    assert main(["--compare", *files]) == 2
    assert capsys.readouterr().err.startswith(f"modelserve-eval: {files[1]}: ")


def test_a_variable_that_is_empty_holds_no_key() -> None:
    with pytest.raises(BadInput, match="--api-key-env EMPTY_KEY: the variable is not set; export it"):
        read_api_key("EMPTY_KEY", {"EMPTY_KEY": ""})


def test_the_model_and_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    key = os.environ["PYTEST_CURRENT_TEST"]
    with _served(models=2) as (url, endpoint):
        assert main(["--base-url", url, *SKILLS]) == 2
        assert capsys.readouterr().err == f"modelserve-eval: {url} serves tiny-0, tiny-1; choose one with --model\n"
        assert main(["--base-url", url, *SKILLS, "--model", "huge"]) == 2
        expected = f"modelserve-eval: --model huge: {url} serves tiny-0, tiny-1; name one of them\n"
        assert capsys.readouterr().err == expected
        assert main(["--base-url", url, *SKILLS, "--api-key-env", "NO_SUCH_KEY"]) == 2
        assert "NO_SUCH_KEY: the variable is not set; export it" in capsys.readouterr().err
        assert set(endpoint.keys) == {None}
        endpoint.keys.clear()
        assert main(["--base-url", url, *SKILLS, "--model", "tiny-1", "--api-key-env", "PYTEST_CURRENT_TEST"]) == 0
        assert set(endpoint.keys) == {f"Bearer {key}"}
        assert {body["model"] for body in endpoint.requests} == {"tiny-1"}


def test_an_endpoint_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with _served() as (url, _):
        pass
    assert main(["--base-url", url, *SKILLS]) == 3
    assert capsys.readouterr().err.startswith(f"modelserve-eval: no answer from {url}/models: ")


def test_an_address_without_its_v1(capsys: pytest.CaptureFixture[str]) -> None:
    with _served() as (url, _):
        assert main(["--base-url", url.removesuffix("/v1"), *SKILLS]) == 3
    assert "HTTP 404 from " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "one of the arguments --base-url --compare is required"),
        (["--base-url", "localhost:8000"], "'localhost:8000' is no HTTP address; write it as http://HOST:PORT/v1"),
        (["--base-url", "http://"], "'http://' is no HTTP address; write it as http://HOST:PORT/v1"),
        (["--base-url", "http://a:b/v1"], "'http://a:b/v1' is no HTTP address; write it as http://HOST:PORT/v1"),
        (["--skills", "recal"], "no skill 'recal'; there are all, short, long, chat, arithmetic"),
        (["--distances", "10,x"], "'x' is no whole number from 1 on"),
        (["--distances", "0"], "0 is out of range; give a whole number from 1 on"),
        (["--n", "0"], "0 is out of range; give a whole number from 1 on"),
        (["--n-at", "1000"], "'' is no whole number from 1 on"),
        (["--n-at", "77=5"], "--n-at: distance 77 is not measured; --distances has 10, 100, 1000"),
        (["--seed", "-1"], "'-1' is no whole number from 0 on"),
        (["--concurrency", "5000"], "5000 is out of range; give a whole number from 1 to 1024"),
        (["--timeout", "nan"], "'nan' is no number from 0.001 to 86400"),
        (["--at-least", "101"], "'101' is no number from 0 to 100"),
        (["--compare", "a", "b"], "argument --compare: not allowed with argument --base-url"),
    ],
)
def test_wrong_flags_say_the_value_and_the_remedy(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [] if not arguments or "--base-url" in arguments else ["--base-url", "http://127.0.0.1:9/v1"]
    with pytest.raises(SystemExit) as raised:
        main([*base, *arguments])
    assert raised.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_comparison_takes_no_gate(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--compare", "a", "b", "--at-least", "90"])
    assert "--compare asks no questions: leave out --at-least and --failures" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--failures"])
def test_a_file_that_cannot_be_written_is_known_before_the_first_question(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / "file"
    with _served() as (url, endpoint):
        assert main(["--base-url", url, *SKILLS, flag, str(path)]) == 2
        assert endpoint.requests == []
    expected = f"modelserve-eval: {path} cannot be written (No such file or directory); name another file\n"
    assert capsys.readouterr().err == expected


def test_ctrl_c_shows_what_is_done(tmp_path: Path) -> None:
    stuck = exercise("recall", seed=7, index=3, distance=10)

    async def hang(asked: Exercise, _: int) -> Response:
        if asked == stuck:
            reached.touch()
            await asyncio.sleep(60)
        return right(asked)

    reached, results = tmp_path / "reached", tmp_path / "results.json"
    with _served(hang) as (url, _):
        arguments = ["--base-url", url, *SKILLS, "--concurrency", "1", "--json", str(results)]
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )
        while not reached.exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "modelserve-eval: interrupted; the figures are of what was answered until then\n"
    assert _without_times(out).splitlines()[0] == f"tiny-0 at {url}, stopped before its end"
    assert [cell["outcomes"] for cell in json.loads(results.read_text())["cells"]] == ["1111", "111-", "--"]
    assert json.loads(results.read_text())["complete"] is False


def test_the_installed_command_is_this_one_and_imports_no_engine() -> None:
    (script,) = entry_points(group="console_scripts", name="modelserve-eval")
    assert script.load() is main
    code = (
        "import sys; from modelserve_tools.evaluation.__main__ import main\n"
        "print([m for m in ('torch', 'starlette', 'tokenizers', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_names_every_skill_and_exit_code() -> None:
    command = [str(Path(sys.executable).with_name("modelserve-eval")), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "200"})
    for word in ("tool_call", "needle", "--at-least", "130 interrupted"):
        assert word in done.stdout


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals_only() -> None:
    terminal, file = _Terminal(), io.StringIO()
    for stream in (terminal, file):
        progress = Progress(stream)
        progress.show(1, 12)
        progress.show(2, 12)
        progress.clear()
    assert terminal.getvalue() == "\r1 of 12\r2 of 12\r       \r"
    assert file.getvalue() == ""
