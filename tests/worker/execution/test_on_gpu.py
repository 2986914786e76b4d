"""The same runner on a GPU: near the reference, and no step waits for the device before its result is asked for."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from full_logits import compute_logits, forward_hidden, teacher_forced_logits
from launch_order import one_after_the_other
from model_checkpoints import make_checkpoint, random_tokens, reference_logits

from modelserve.engine_args import EngineArgs
from modelserve_worker.batch import IN_FLIGHT
from modelserve_worker.request import SamplingParams
from modelserve_worker.startup.replica import launch

CUDA = torch.device("cuda")
POOL = 1 << 26
TAKEN = {"head_dim": 256, "global_head_dim": 512}  # by the kernels, on Hopper by its own; the rest runs plain PyTorch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("variant", ["31B", "E4B"])
@pytest.mark.parametrize(("dtype", "kv_dtype", "limit"), [
    ("float32", "auto", 1e-3), ("bfloat16", "auto", 0.1), ("bfloat16", "int8", 0.2), ("bfloat16", "fp8_e4m3", 0.5),
])  # fmt: skip
@pytest.mark.parametrize("shape", [{}, TAKEN], ids=["plain", "kernels"])
def test_logits_are_near_the_reference(tmp_path, driver_for, variant, dtype, kv_dtype, limit, shape) -> None:
    make_checkpoint(variant, tmp_path, seed=2, **shape)
    args = EngineArgs(
        model=str(tmp_path), device="cuda", dtype=dtype, kv_cache_dtype=kv_dtype, gpu_memory_utilization=0.2
    )
    replica = launch(args)
    assert replica.table.on_kernels == (shape == TAKEN and dtype == "bfloat16")
    driver, prompt, done, parts, last = driver_for(replica.geometry, POOL), random_tokens(300, seed=3), 0, [], []
    for count in (130, 1, 1, 100, 68):
        batch = driver.batch(driver.share("r", prompt[done : done + count]))
        parts.append(teacher_forced_logits(replica.runner, batch).cpu())
        done += count
    expected = reference_logits(tmp_path, prompt)
    assert (torch.cat(parts) - expected).abs().mean() < limit
    for begin, end in itertools.pairwise((0, 130, 131, 299, 300)):  # the last row of a step alone
        batch = driver.batch(driver.share("s", prompt[begin:end], slot=1))
        last.append(compute_logits(replica.runner.model, forward_hidden(replica.runner, batch)).cpu())
    assert (torch.cat(last) - expected[[129, 130, 298, 299]]).abs().mean() < limit


@pytest.mark.parametrize("variant", ["31B", "E4B"])
def test_steps_are_launched_without_waiting(tmp_path, driver_for, variant) -> None:
    make_checkpoint(variant, tmp_path, seed=2, **TAKEN)
    replica = launch(EngineArgs(model=str(tmp_path), device="cuda", dtype="bfloat16", gpu_memory_utilization=0.2))
    assert replica.table.on_kernels
    sampling = SamplingParams(
        seed=5, max_tokens=9, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.2, logprobs=2,
        logit_bias=((7, 1.0),), min_tokens=3,
    )  # fmt: skip
    prompt = random_tokens(100, seed=3)

    def tokens(*, overlap: bool) -> list[int]:
        driver, ids, pending, found = driver_for(replica.geometry, POOL), prompt, [], []
        for step in range(12):
            share = driver.share(
                "r", ids, samples=True, slot=1, sampling=sampling, prompt=tuple(prompt), num_output_tokens=step
            )
            torch.cuda.set_sync_debug_mode("error")
            try:
                pending.append(replica.runner.execute(driver.batch(share)))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            if len(pending) > 1 or not overlap:
                found += pending.pop(0).result().token_ids.tolist()
            ids = [IN_FLIGHT] if overlap else [found[-1]]
        return found + [token for step in pending for token in step.result().token_ids.tolist()]

    assert tokens(overlap=True) == tokens(overlap=False)


def test_steps_in_which_more_and_more_requests_draw_take_no_more_memory(tmp_path, driver_for) -> None:
    """Captured steps with a prompt, whose head is launched behind them: logits of each size in the memory of graphs."""
    make_checkpoint("31B", tmp_path, seed=2, vocab_size=262_144, **TAKEN)
    replica = launch(EngineArgs(model=str(tmp_path), device="cuda", dtype="bfloat16", gpu_memory_utilization=0.2))
    assert replica.captured_rows
    driver, reserved = driver_for(replica.geometry, 16 * POOL), []
    for requests in range(1, 49):
        shares = [driver.share(f"r{i}", [7], samples=True) for i in range(requests)]
        shares.append(driver.share(f"prompt{requests}", random_tokens(24, seed=requests), samples=True, slot=63))
        assert (replica.runner.execute(driver.batch(*shares)).result().token_ids >= 0).all()
        del driver.tables[f"prompt{requests}"]
        reserved.append(torch.cuda.memory_reserved())
    assert set(reserved) == {reserved[0]}


@pytest.mark.parametrize("variant", ["31B", "E4B"])
def test_no_bit_depends_on_kernels_that_start_before_others_end(tmp_path, driver_for, variant) -> None:
    """Logits of chunks and of one decode, and tokens of captured steps, beside launches that all wait their turn."""
    make_checkpoint(variant, tmp_path, seed=2, **TAKEN)
    prompt = random_tokens(300, seed=3)

    def outcome() -> tuple[list[torch.Tensor], list[int]]:
        gc.collect()
        torch.cuda.empty_cache()
        replica = launch(EngineArgs(model=str(tmp_path), device="cuda", dtype="bfloat16", gpu_memory_utilization=0.2))
        assert replica.table.on_kernels
        driver, done, logits, tokens = driver_for(replica.geometry, POOL), 0, [], []
        for count in (200, 1, 99):
            batch = driver.batch(driver.share("chunks", prompt[done : done + count]))
            logits.append(teacher_forced_logits(replica.runner, batch).cpu())
            done += count
        ids, sampling = prompt[:50], SamplingParams(seed=5, max_tokens=33, temperature=1.0)
        whole = tuple(ids)
        for step in range(32):
            share = driver.share(
                "tokens", ids, samples=True, slot=1, sampling=sampling, prompt=whole, num_output_tokens=step
            )
            tokens += replica.runner.execute(driver.batch(share)).result().token_ids.tolist()
            ids = tokens[-1:]
        return logits, tokens

    logits, tokens = outcome()
    with one_after_the_other():
        logits_in_turn, tokens_in_turn = outcome()
    assert all(torch.equal(early, late) for early, late in zip(logits, logits_in_turn, strict=True))
    assert tokens == tokens_in_turn
