"""The whole runner on the CPU: logits against transformers, tokens in flight, preemption, failed steps."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from full_logits import teacher_forced_logits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_checkpoints import VARIANTS, make_checkpoint, random_tokens, reference_logits

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve_worker.batch import IN_FLIGHT, NOT_A_NUMBER
from modelserve_worker.request import SamplingParams
from modelserve_worker.startup.replica import LaunchedReplica, launch

MEMORY = 1 << 30
LENGTHS = (8, 9, 10, 32, 75)  # window 9: W - 1, W, W + 1; a page; several of both kinds


@dataclasses.dataclass
class Served:
    replica: LaunchedReplica
    prompts: list[list[int]]
    expected: list[torch.Tensor]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator:
    """A launched replica of a variant with the reference's logits of some prompts."""
    made: dict[str, Served] = {}

    def serve(variant: str) -> Served:
        if variant not in made:
            directory = tmp_path_factory.mktemp(variant)
            make_checkpoint(variant, directory, seed=3)
            args = EngineArgs(model=str(directory), device="cpu", cpu_memory_bytes=MEMORY, debug_kv_stamps=True)
            prompts = [random_tokens(n, seed=n) for n in LENGTHS]
            made[variant] = Served(launch(args), prompts, [reference_logits(directory, p) for p in prompts])
        return made[variant]

    return serve


def forced_logits(served: Served, driver, rng: random.Random, *, preempt: bool) -> list[torch.Tensor]:
    """Teacher-forced logits of all prompts, cut and batched at random; preempted prompts start over."""
    runner = served.replica.runner
    done: list[list[torch.Tensor]] = [[] for _ in served.prompts]
    positions = [0] * len(served.prompts)
    while any(p < len(prompt) for p, prompt in zip(positions, served.prompts, strict=True)):
        shares = []
        for i, prompt in enumerate(served.prompts):
            left = len(prompt) - positions[i]
            if not left or rng.random() < 0.3:
                continue
            if preempt and positions[i] and rng.random() < 0.2:
                driver.release(str(i))
                positions[i], done[i] = 0, []
                left = len(prompt)
            count = min(left, rng.choice([1, 1, 2, 7, 9, 31, 64]))
            shares.append(driver.share(str(i), prompt[positions[i] : positions[i] + count]))
            positions[i] += count
        if not shares:
            continue
        batch = driver.batch(*shares)
        parts = teacher_forced_logits(runner, batch).split(batch.lengths.tolist())
        for share, logits in zip(driver.ordered(*shares), parts, strict=True):
            done[int(share.request_id)].append(logits)
    return [torch.cat(parts) for parts in done]


@pytest.mark.drawn
@pytest.mark.parametrize("variant", list(VARIANTS))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 20), preempt=st.booleans())
def test_logits_equal_the_reference_however_steps_are_cut(served, driver_for, variant, seed, preempt) -> None:
    """Chunks, batches, page tables and preemption are random; every read is checked against its stamps."""
    case = served(variant)
    driver = driver_for(case.replica.geometry, case.replica.pool_bytes, seed=seed)
    for logits, expected in zip(
        forced_logits(case, driver, random.Random(seed), preempt=preempt), case.expected, strict=True
    ):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def generate(served: Served, driver, prompt, sampling, *, tokens: int, overlap: bool, preempt_at: int | None = None):
    """Tokens of one request; with `overlap` each step is launched before the one before it has been read."""
    runner, outputs, launched = served.replica.runner, [], []
    pending = None
    while len(outputs) + (pending is not None) < tokens:
        known = prompt + outputs
        if preempt_at is not None and len(outputs) == preempt_at and pending is None:
            driver.release("r")
            preempt_at = None
        fresh = "r" not in driver.tables
        ids = known if fresh else [IN_FLIGHT if overlap else outputs[-1]]
        launched.append(
            driver.share(
                "r", ids, samples=True, slot=2, sampling=sampling, prompt=tuple(prompt), outputs=tuple(outputs),
                num_output_tokens=len(outputs) + (pending is not None),
            )
        )  # fmt: skip
        step = runner.execute(driver.batch(launched[-1]))
        if pending is not None:
            outputs.append(pending.result().token_ids[0])
        pending = step
        if not overlap or (preempt_at is not None and len(outputs) + 1 == preempt_at):
            outputs.append(pending.result().token_ids[0])
            pending = None
    if pending is not None:
        outputs.append(pending.result().token_ids[0])
    driver.release("r")
    return outputs


SEEDED = SamplingParams(
    seed=11, max_tokens=20, temperature=1.3, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.5
)


@pytest.mark.parametrize("sampling", [SEEDED, dataclasses.replace(SEEDED, temperature=0.0)], ids=["seeded", "greedy"])
def test_tokens_in_flight_and_preemption_say_the_same(served, driver_for, sampling) -> None:
    case = served("31B")
    driver = driver_for(case.replica.geometry, case.replica.pool_bytes)
    prompt = case.prompts[-1][:20]
    plain = generate(case, driver, prompt, sampling, tokens=16, overlap=False)
    assert generate(case, driver, prompt, sampling, tokens=16, overlap=True) == plain
    assert generate(case, driver, prompt, sampling, tokens=16, overlap=False, preempt_at=7) == plain
    assert generate(case, driver, prompt, dataclasses.replace(sampling, seed=12), tokens=16, overlap=True) != plain or (
        sampling.temperature == 0
    )


def test_greedy_tokens_and_logprobs_are_those_of_the_reference(served, driver_for) -> None:
    case = served("E4B")
    driver = driver_for(case.replica.geometry, case.replica.pool_bytes)
    greedy = SamplingParams(seed=0, max_tokens=1, temperature=0.0, logprobs=3)
    shares = [
        driver.share(str(i), p, samples=True, slot=i, sampling=greedy, prompt=tuple(p))
        for i, p in enumerate(case.prompts)
    ]
    sampled = case.replica.runner.execute(driver.batch(*shares)).result()
    for i, expected in enumerate(case.expected):
        logprobs, reported = expected[-1].log_softmax(0), sampled.logprobs[i]
        assert sampled.token_ids[i] == int(expected[-1].argmax())
        assert reported.rank == 1
        assert reported.logprob == pytest.approx(float(logprobs.max()), abs=1e-4)
        assert [t for t, _ in reported.top] == logprobs.topk(3).indices.tolist()


def test_a_failed_step_fails_alone(served, driver_for) -> None:
    case = served("31B")
    runner, driver = case.replica.runner, driver_for(case.replica.geometry, case.replica.pool_bytes)
    batch = driver.batch(driver.share("r", case.prompts[0], samples=True))

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    failing = runner.model.register_forward_pre_hook(fail)
    pending = runner.execute(batch)
    with pytest.raises(MemoryError, match="no room"):
        pending.result()
    failing.remove()
    broken = dataclasses.replace(batch, token_ids=np.full_like(batch.token_ids, 1 << 20))
    with pytest.raises(InvalidInput, match="a token id outside"):
        runner.execute(broken).result()
    assert runner.execute(batch).result().token_ids[0] == int(case.expected[0][-1].argmax())


def test_a_row_of_nan_is_marked_and_its_neighbours_are_right(served, driver_for) -> None:
    case = served("31B")
    runner, driver = case.replica.runner, driver_for(case.replica.geometry, case.replica.pool_bytes)
    shares = [driver.share(str(i), case.prompts[i], samples=True) for i in range(3)]
    row = torch.tensor([1])
    broken = runner.model.register_forward_hook(lambda _, __, hidden: hidden.index_fill(0, row, torch.nan))
    step = runner.execute(driver.batch(*shares))
    broken.remove()
    tokens = step.result().token_ids
    expected = [int(logits[-1].argmax()) for logits in case.expected[:3]]
    assert tokens.tolist() == [expected[0], NOT_A_NUMBER, expected[2]]


def test_a_step_without_samples_returns_none(served, driver_for) -> None:
    case = served("31B")
    driver = driver_for(case.replica.geometry, case.replica.pool_bytes)
    assert case.replica.runner.execute(driver.batch(driver.share("r", [5, 6, 7]))).result().token_ids.size == 0


@pytest.mark.drawn
@pytest.mark.parametrize("variant", ["12B", "E2B"])
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "bfloat16"])
def test_small_cache_formats_stay_near_and_do_not_depend_on_chunks(tmp_path, driver_for, variant, dtype) -> None:
    make_checkpoint(variant, tmp_path, seed=5)
    replica = launch(EngineArgs(model=str(tmp_path), device="cpu", cpu_memory_bytes=MEMORY, kv_cache_dtype=dtype))

    def change(seed: int) -> float:
        """The largest mean change of a prompt's logits by how it is cut, of their mean error."""
        prompt = random_tokens(70, seed=seed)
        results = []
        for cuts in ([70], [1] * 70, [33, 1, 36]):
            driver, done, parts = driver_for(replica.geometry, replica.pool_bytes), 0, []
            for count in cuts:
                batch = driver.batch(driver.share("r", prompt[done : done + count]))
                parts.append(teacher_forced_logits(replica.runner, batch))
                done += count
            results.append(torch.cat(parts))
        error = (results[0] - reference_logits(tmp_path, prompt)).abs().mean()
        assert 0 < error < (0.5 if dtype == "fp8_e4m3" else 0.1)
        return max(float((other - results[0]).abs().mean() / error) for other in results[1:])

    # Attention of one row sums in another order than that of 70, and in a prompt or two a value at the edge between two
    # stored steps takes the other one then. Rows quantised twice, or read in another format, would in all of them.
    assert any(change(seed) < 0.1 for seed in (1, 2, 3))


def test_random_weights_need_only_a_config(tmp_path: Path, driver_for) -> None:
    make_checkpoint("31B", tmp_path, seed=5)
    (tmp_path / "model.safetensors").unlink()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma4_text"
    replica = launch(EngineArgs(model=str(tmp_path), device="cpu", cpu_memory_bytes=MEMORY, load_format="dummy"))
    driver = driver_for(replica.geometry, replica.pool_bytes)
    share = driver.share("r", [5, 6], samples=True)
    assert 0 <= replica.runner.execute(driver.batch(share)).result().token_ids[0] < 256
