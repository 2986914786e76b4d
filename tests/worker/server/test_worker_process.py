"""The real worker as a process, on the CPU: load, serve the stock client, drain on SIGTERM, say why it cannot start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from localcluster.processes import free_ports
from modelserve.termination import TERMINAL_EXIT_CODE
from modelserve_tools.tiny.__main__ import write_checkpoint

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_checkpoint(directory)
    return directory


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "modelserve_worker", *arguments]


@contextmanager
def _worker(config: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        _command("serve", "--config", str(config), "--port", str(port)),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
    reader.start()
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, "".join(lines)
            assert time.monotonic() < deadline, "".join(lines)
            try:
                if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        process.stderr.close()


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> Path:
    path = tmp_path / "engine.yaml"
    settings = {
        "model": str(checkpoint), "servedModelName": "tiny", "device": "cpu", "host": "127.0.0.1",
        "maxModelLen": 2048, "cpuMemoryBytes": 3_000_000_000, "maxNumSeqs": 64, "drainSeconds": 60,
    }  # fmt: skip
    path.write_text(json.dumps(settings))  # JSON is YAML
    return path


def _metric(port: int, name: str) -> float:
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text.splitlines()
    start = name if "{" in name else name + "{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(start))


def test_concurrent_clients_a_killed_one_and_a_drain(config: Path) -> None:
    (port,) = free_ports(1)
    base_url = f"http://127.0.0.1:{port}/v1"
    with _worker(config, port) as worker, openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        def ask(number: int) -> int:
            answer = client.chat.completions.create(
                model="tiny", messages=MESSAGES, seed=number, max_tokens=8, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            return answer.usage.completion_tokens

        with httpx.stream(
            "POST", f"{base_url}/chat/completions",
            json={"model": "tiny", "messages": MESSAGES, "stream": True, "ignore_eos": True, "max_tokens": 1500},
            timeout=60,
        ) as killed, ThreadPoolExecutor(64) as pool:  # fmt: skip
            lines = killed.iter_lines()  # kept: the end of an iterator is the end of its connection
            assert next(lines).startswith("data: ")
            answers = pool.map(ask, range(64))
            killed.close()
            assert list(answers) == [8] * 64
        deadline = time.monotonic() + 60
        while _metric(port, "modelserve_pages_used") or _metric(port, "vllm:num_requests_running"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert _metric(port, "vllm:num_preemptions_total") == 0

        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, max_tokens=40, extra_body={"ignore_eos": True}
        )
        next(stream)
        worker.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert worker.wait(timeout=60) == 0


def test_the_same_seed_says_the_same_alone_and_in_company(config: Path) -> None:
    (port,) = free_ports(1)
    base_url = f"http://127.0.0.1:{port}/v1"
    with _worker(config, port), openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

        def ask(seed: int) -> str:
            answer = client.completions.create(
                model="tiny", prompt="once upon", seed=seed, max_tokens=24, extra_body={"skip_special_tokens": False}
            )
            return answer.choices[0].text

        alone = [ask(seed) for seed in range(6)]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, range(6))) == alone
        assert len(set(alone)) == 6
        _two_turns(client)
        cached = _metric(port, 'vllm:prompt_tokens_by_source_total{model_name="tiny",source="local_cache_hit"}')
        assert (
            cached == _metric(port, "vllm:prompt_tokens_cached_total") == _metric(port, "vllm:prefix_cache_hits_total")
        )
        assert cached > 400
        assert _metric(port, "modelserve_kv_cached_bytes") > 0
        speed = httpx.get(f"{base_url}/plan").json()["speed"]
        decodes = [each for each in speed if (each["kind"], each["requests"]) == ("Decode", 1)]
        assert [each["steps"] >= 20 and each["milliseconds"] > 0 for each in decodes] == [True]
        assert _metric(port, "modelserve_step_seconds_count") >= decodes[0]["steps"]


def _two_turns(client: openai.OpenAI) -> None:
    """The second computes what is new, and the last token of the answer; with another salt everything."""
    messages = [{"role": "system", "content": "be brief. " * 20}, {"role": "user", "content": "hello"}]

    def ask(**extra: object) -> tuple[int, int, str]:
        body = {"ignore_eos": True, "stop_token_ids": [], **extra}
        answer = client.chat.completions.create(
            model="tiny", messages=messages, seed=1, max_tokens=8, temperature=0, extra_body=body,
            logit_bias={"300": 100},
        )  # fmt: skip
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return (
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens or 0,
            answer.choices[0].message.content or "",
        )

    prompt, cached, said = ask()
    assert cached == 0
    assert ask()[:2] == (prompt, prompt - 1)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
    longer, cached, _ = ask()
    assert longer > prompt
    assert prompt - 16 <= cached < longer  # a prompt may end with an empty thought, which no history has
    assert ask(cache_salt="mine")[:2] == (longer, 0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "{checkpoint}", "--port", "x"], "InvalidEngineArgs: port: "),
        (["--model", "{checkpoint}", "--no-such-flag"], "InvalidEngineArgs: unrecognized arguments: --no-such-flag"),
        (["--config", "{checkpoint}/tokenizer.json"], "InvalidEngineArgs: "),
        (["--model", "{checkpoint}/nowhere"], "InvalidCheckpoint: "),
        (
            ["--model", "{checkpoint}", "--port", "0", "--device", "cpu", "--cpu-memory-bytes", "1000000"],
            "InsufficientMemory: ",
        ),
    ],
)
def test_what_no_restart_can_help_ends_with_its_reason(checkpoint: Path, arguments: list[str], reason: str) -> None:
    filled = [argument.format(checkpoint=checkpoint) for argument in arguments]
    done = subprocess.run(_command("serve", *filled), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == TERMINAL_EXIT_CODE
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_broken_weights_end_with_their_reason(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as weights:
        weights.truncate(10_000)
    command = _command("serve", "--model", str(tmp_path), "--port", "0", "--device", "cpu")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, "InvalidCheckpoint: " in done.stderr) == (TERMINAL_EXIT_CODE, True), done.stderr


def test_a_format_that_is_not_served_ends_with_what_to_use(tmp_path: Path) -> None:
    """Before anything is loaded, by the process that reads the config."""
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}})
    )
    command = _command("serve", "--model", str(tmp_path), "--port", "0", "--device", "cpu")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == TERMINAL_EXIT_CODE, done.stderr
    assert "UnsupportedModel: quantization_config: quant_method bitsandbytes is not served; use a GPTQ" in done.stderr
    assert "Traceback" not in done.stderr


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _spawned(pid: int) -> int:
    """The one child that multiprocessing has spawned, beside its resource tracker."""
    (found,) = (child for child in _children(pid) if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text())
    return found


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("victim", ["front end", "rank"])
def test_a_replica_of_two_ranks_ends_as_one(checkpoint: Path, config: Path, victim: str) -> None:
    """Whichever process is killed, the others end: nothing is left that holds a device."""
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tensorParallelSize": 2}))
    (port,) = free_ports(1)
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, "ignore_eos": True, "max_tokens": 1500}
    with (
        _worker(config, port) as worker,
        httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        engine = _spawned(worker.pid)
        rank = _spawned(engine)
        os.kill(worker.pid if victim == "front end" else rank, signal.SIGKILL)
        if victim == "rank":
            error = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")][-1]
            assert "modelserve-rank-1 (exit code -9)" in error["error"]["message"]
            assert worker.wait(timeout=60) == 1
        deadline = time.monotonic() + 60
        while _is_running(engine) or _is_running(rank):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _cannot_be_process_1() -> bool:
    """New PID namespaces are for root."""
    if shutil.which("unshare") is None:
        return True
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode != 0


@pytest.mark.skipif(_cannot_be_process_1(), reason="needs unshare and the right to make a PID namespace")
@pytest.mark.parametrize("command", ["serve", "fetch"])
def test_process_1_ends_on_sigterm_while_it_still_reads_its_modules(tmp_path: Path, command: str) -> None:
    """The kernel keeps signals from one without a handler, and a pod in deletion would wait out its grace period."""
    slow = f"import pathlib, time\npathlib.Path({str(tmp_path / 'reading')!r}).touch()\ntime.sleep(600)\n"
    (tmp_path / "uvicorn.py").write_text(slow)
    started = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", *_command(command, "--model", str(tmp_path))],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "reading").exists():
            assert started.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (child,) = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        assert started.wait(60) == 0
    finally:
        started.kill()
        started.wait()
