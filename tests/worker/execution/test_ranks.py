"""Two ranks on the CPU: same logits as one, and a rank that dies ends the replica within seconds."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from model_checkpoints import make_checkpoint, random_tokens

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve_worker.batch import SampledTokens
from modelserve_worker.engine_client import EngineDead
from modelserve_worker.request import SamplingParams
from modelserve_worker.startup import replica as ranks
from modelserve_worker.startup.memory import InsufficientMemory
from modelserve_worker.startup.replica import LaunchedReplica, RankDiedError, WorkerRanks, launch

SAMPLED = SamplingParams(seed=3, max_tokens=1, temperature=1.0, top_p=0.9)
BY_CANDIDATES = replace(SAMPLED, top_k=40)  # each rank sends its share's best, not its logits
PROMPT = random_tokens(40, seed=4)


@pytest.fixture(autouse=True)
def _no_group_stays() -> Iterator[None]:
    """A replica whose rank has died leaves its group half-joined: a worker exits after it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _args(directory: Path, **changes) -> EngineArgs:
    return EngineArgs(
        model=str(directory), device="cpu", cpu_memory_bytes=3 << 30, debug_kv_stamps=True, max_num_batched_tokens=256
    ).model_copy(update=changes)


def _results(
    replica: LaunchedReplica, driver_for, steps: int, *, allowed: Sequence[int] = (), sampling: SamplingParams = SAMPLED
) -> list[SampledTokens]:
    """Of a prompt, then of sampled tokens one by one, with `allowed` of these alone."""
    driver = driver_for(replica.geometry, min(replica.pool_bytes, 1 << 24))
    ids, results = PROMPT, []
    for count in range(steps):
        share = driver.share(
            "r", ids, samples=True, sampling=sampling, prompt=tuple(PROMPT), num_output_tokens=count
        )  # fmt: skip
        batch = driver.batch(share)
        if sampling.prompt_logprobs is not None and not count:
            given = np.array([len(PROMPT) - 1], dtype=np.int32)
            batch = replace(batch, sampled=given + 1, given=given, targets=np.array(PROMPT[1:], dtype=np.int32))
        if allowed:
            step = replica.runner.execute(replace(batch, constrained=np.zeros(1, dtype=np.int32)))
            step = step.constrain(_mask(allowed, replica.architecture.vocab_size))
        else:
            step = replica.runner.execute(batch)
        results.append(step.result())
        ids = [int(results[-1].token_ids[0])]
    return results


def _tokens(replica: LaunchedReplica, driver_for, steps: int, **options) -> list[int]:
    return [int(result.token_ids[0]) for result in _results(replica, driver_for, steps, **options)]


def _assert_scores_agree(results: list[SampledTokens], others: list[SampledTokens]) -> None:
    """Tokens, their log probabilities, and those of the prompt: logits of shares are products of other shapes."""
    for result, other in zip(results, others, strict=True):
        assert result.token_ids.tolist() == other.token_ids.tolist()
        mine, theirs = result.logprobs[0], other.logprobs[0]
        assert (mine.rank, [token for token, _ in mine.top]) == (theirs.rank, [token for token, _ in theirs.top])
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    ((first, prompt),), ((_, other_prompt),) = results[0].prompt_logprobs.values(), others[0].prompt_logprobs.values()
    assert first == 1
    assert len(prompt.logprobs) == len(PROMPT) - 1
    np.testing.assert_allclose(prompt.logprobs, other_prompt.logprobs, atol=1e-4)


def _mask(allowed: Sequence[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)[None]


def _threads_of_group() -> list[str]:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


@pytest.mark.drawn
@pytest.mark.parametrize("variant", ["31B", "E4B"])
def test_two_ranks_say_what_one_says(tmp_path, driver_for, variant) -> None:
    make_checkpoint(variant, tmp_path, seed=6)
    allowed = range(30, 250, 7)
    single = launch(_args(tmp_path))
    alone = _tokens(single, driver_for, 12)
    masked = _tokens(single, driver_for, 6, allowed=allowed)
    by_candidates = _tokens(single, driver_for, 6, sampling=BY_CANDIDATES)
    both = _tokens(single, driver_for, 6, allowed=allowed, sampling=BY_CANDIDATES)
    assert set(masked) | set(both) <= set(allowed)
    assert not set(alone) <= set(allowed)
    scored = _results(single, driver_for, 2, sampling=replace(BY_CANDIDATES, logprobs=3, prompt_logprobs=3))
    replica = launch(_args(tmp_path, tensor_parallel_size=2))
    try:
        assert replica.pool_bytes == replica.memory.pool_bytes > 0
        assert _tokens(replica, driver_for, 12) == alone
        assert _tokens(replica, driver_for, 6, allowed=allowed) == masked
        assert _tokens(replica, driver_for, 6, sampling=BY_CANDIDATES) == by_candidates
        assert _tokens(replica, driver_for, 6, allowed=allowed, sampling=BY_CANDIDATES) == both
        shared = _results(replica, driver_for, 2, sampling=replace(BY_CANDIDATES, logprobs=3, prompt_logprobs=3))
        _assert_scores_agree(shared, scored)
        # A step refused before any collective is refused on both ranks, and the next one works.
        driver = driver_for(replica.geometry, 1 << 24)
        with pytest.raises(InvalidInput, match="token id outside"):
            replica.runner.execute(driver.batch(driver.share("x", [1 << 20, 2]))).result()
        assert _tokens(replica, driver_for, 3) == alone[:3]
        assert _threads_of_group()
    finally:
        replica.runner.shutdown()
    assert [process.exitcode for process in replica.runner._workers._processes] == [0]
    assert multiprocessing.active_children() == []
    assert not torch.distributed.is_initialized()
    assert not _threads_of_group(), "one that wants the interpreter while it is torn down aborts the process"


def test_a_killed_rank_fails_the_step_and_all_that_follow(tmp_path, driver_for) -> None:
    make_checkpoint("31B", tmp_path, seed=6)
    replica = launch(_args(tmp_path, tensor_parallel_size=2))
    try:
        assert len(_tokens(replica, driver_for, 2)) == 2
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(RankDiedError, match=r"modelserve-rank-1 \(exit code -9\)"):
                _tokens(replica, driver_for, 1)
        assert issubclass(RankDiedError, EngineDead), "no step after it can succeed, so the engine ends with it"
    finally:
        replica.runner.shutdown()


def test_a_rank_that_dies_or_hangs_while_idle_is_noticed_and_nobody_else_is_ended(tmp_path, driver_for) -> None:
    """`check` is what an idle engine asks once a second. A stopped rank is no dead one: it goes on when it can."""
    make_checkpoint("31B", tmp_path, seed=6)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]) as bystander:
        replica = launch(_args(tmp_path, tensor_parallel_size=2))
        try:
            (child,) = (each for each in multiprocessing.active_children() if each.name.startswith("modelserve-rank"))
            first = _tokens(replica, driver_for, 3)
            os.kill(child.pid, signal.SIGSTOP)
            replica.runner.check()
            os.kill(child.pid, signal.SIGCONT)
            assert _tokens(replica, driver_for, 3) == first
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            deadline = time.monotonic() + 60
            while not replica.runner._workers.has_died() and time.monotonic() < deadline:
                time.sleep(0.05)
            with pytest.raises(RankDiedError, match=r"modelserve-rank-1 \(exit code -9\) ended between steps"):
                replica.runner.check()
        finally:
            replica.runner.shutdown()
        assert bystander.poll() is None
        bystander.kill()
    assert not list(Path("/dev/shm").glob(f"*{os.getpid()}*")), "the ring is gone"


def test_an_exit_code_that_another_thread_collects_is_waited_for() -> None:
    class Ended:
        codes: ClassVar = [None, None, -9, -9]

        @property
        def exitcode(self) -> int | None:
            return self.codes.pop(0)

    assert ranks._exit_code(Ended()) == -9


def test_ranks_that_come_to_other_tokens_end(tmp_path, driver_for, monkeypatch) -> None:
    """Rank 0 here sees another checksum than it should; steps before it were right and stay so."""
    make_checkpoint("31B", tmp_path, seed=6)
    replica = launch(_args(tmp_path, tensor_parallel_size=2))
    try:
        assert len(_tokens(replica, driver_for, 3)) == 3
        monkeypatch.setattr(ranks, "token_checksum", lambda tokens: 1)
        with pytest.raises(RankDiedError, match="rank 1 sampled other tokens than rank 0 in step"):
            _tokens(replica, driver_for, 30)  # rank 1 notes a step a moment after rank 0 has it
        with pytest.raises(RankDiedError):
            replica.runner.check()
    finally:
        replica.runner.shutdown()


def test_a_step_that_rank_0_alone_cannot_sample_ends_the_group(tmp_path, driver_for, monkeypatch) -> None:
    """The other rank waits for rank 0's candidates, which never come; the step before was right and stays so."""
    make_checkpoint("31B", tmp_path, seed=6)
    replica = launch(_args(tmp_path, tensor_parallel_size=2))
    try:
        driver = driver_for(replica.geometry, 1 << 24)
        first = driver.batch(driver.share("r", PROMPT, samples=True, sampling=BY_CANDIDATES))
        token = int(replica.runner.execute(first).result().token_ids[0])
        second = driver.batch(driver.share("r", [token], samples=True, sampling=BY_CANDIDATES, num_output_tokens=1))
        step = replica.runner.execute(replace(second, constrained=np.zeros(1, dtype=np.int32)))

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("no memory for masks")

        monkeypatch.setattr(replica.runner._local._sampler, "sample", fail)
        with pytest.raises(RankDiedError, match="no memory for masks"):
            step.constrain(_mask(range(30), replica.architecture.vocab_size)).result()
        with pytest.raises(RankDiedError):
            _tokens(replica, driver_for, 1)
    finally:
        replica.runner.shutdown()
    assert 0 <= token < replica.architecture.vocab_size


def test_a_rank_that_ends_before_it_is_ready_says_why(tmp_path) -> None:
    """Rank 0 would wait for it for ever; what the rank said is in the error."""
    workers = WorkerRanks(_args(tmp_path / "absent", tensor_parallel_size=2))
    try:
        with pytest.raises(RankDiedError, match=r"exit code 1\) ended before it was ready: rank 1: InvalidCheckpoint"):
            workers.start_beside(lambda: time.sleep(60))
    finally:
        workers.stop()


def test_ranks_end_when_rank_0_is_killed(tmp_path) -> None:
    make_checkpoint("31B", tmp_path, seed=6)
    code = (
        "import multiprocessing, sys, time\n"
        "from modelserve.engine_args import EngineArgs\n"
        "from modelserve_worker.startup.replica import launch\n"
        "if __name__ == '__main__':\n"
        "    launch(EngineArgs.model_validate_json(sys.argv[1]))\n"
        "    print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    script = tmp_path / "rank0.py"
    script.write_text(code)
    args = _args(tmp_path, tensor_parallel_size=2).model_dump_json()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, str(script), args], stdout=subprocess.PIPE, text=True, env=environment
    ) as root:
        assert root.stdout is not None
        child = int(root.stdout.readline())
        root.kill()
    deadline = time.monotonic() + 60
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("config", "changes", "error", "message"),
    [
        ({"num_attention_heads": 3}, {}, InvalidInput, "num_attention_heads"),
        ({}, {"cpu_memory_bytes": 1 << 20}, InsufficientMemory, "bytes are missing per device"),
    ],
)
def test_bad_input_is_rank_0s_verdict_not_a_dead_rank(tmp_path, config, changes, error, message) -> None:
    """In a process of its own: a failed launch leaves a half-joined group, and the worker exits after it."""
    make_checkpoint("31B", tmp_path, seed=6)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(error, match=message):
        launch(_args(tmp_path, tensor_parallel_size=2, **changes))
    assert multiprocessing.active_children() == []
