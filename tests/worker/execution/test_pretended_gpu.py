"""What a GPU would refuse is refused without one, and a worker starts and drafts on it: no device is mixed up, nothing
waits for the device in a capture, and no captured step reads the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from assisted import write_assistant
from model_checkpoints import COMMON, TOWERS, VARIANTS
from pretended_gpu import PretendedError, pretended_gpu
from unified_reference import image_span, random_image, seen_prompt

from modelserve.engine_args import EngineArgs
from modelserve_worker.engine.engine import Engine
from modelserve_worker.kernels.compiling import kernel_cache
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler
from modelserve_worker.startup.replica import launch

LONGEST, SLOTS = 256, 3
SAMPLINGS = (
    {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1},
    {"temperature": 1.0, "logprobs": 3, "top_k": 20, "top_p": 0.9},
    {
        "temperature": 1.0,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "logit_bias": ((7, 1.0),),
        "min_tokens": 3,
    },
    {"temperature": 1.0, "min_p": 0.05},
)


def test_what_a_gpu_would_refuse_is_refused() -> None:
    with pretended_gpu():
        here = torch.arange(4, dtype=torch.int32, device="cuda")
        there, pinned = torch.ones(4), torch.ones(4, pin_memory=True)
        with pytest.raises(PretendedError, match="cpu and cuda:0 together"):
            here + there
        with pytest.raises(RuntimeError, match="numpy"):
            here.numpy()
        for waits in (
            here.tolist,
            lambda: here[here > 2],
            lambda: here.cpu(),
            lambda: here.copy_(pinned),
            here.sum().item,
        ):
            with pytest.raises(PretendedError, match="in a capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                waits()
        torch.cuda.set_sync_debug_mode("error")
        here.to(torch.int64)
        here.copy_(pinned, non_blocking=True)
        with pytest.raises(PretendedError, match="waits for the device"):
            here.copy_(there, non_blocking=True)


def test_a_graph_reads_memory_at_each_replay_and_the_host_at_its_capture() -> None:
    with pretended_gpu():
        given, known = torch.ones(4, device="cuda"), 2.0
        graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            lost = given * known
            kept = lost + 1.0
        del lost
        given.fill_(10.0)
        known = 5.0
        graph.replay()
        assert kept.tolist() == [21.0] * 4
        with torch.cuda.graph(other):
            more = kept + 1.0
        given.fill_(1.0)
        other.replay()
        assert more.tolist() == [22.0] * 4
        graph.replay()
        other.replay()
        assert more.tolist() == [4.0] * 4


def test_what_a_capture_gave_back_is_overwritten_by_graphs_of_later_ones() -> None:
    with pretended_gpu():
        given = torch.ones(4, device="cuda")
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            made = given * 2
        address = made.inner
        del made
        with torch.cuda.graph(second):
            given += 1.0
        first.replay()
        assert not address.isnan().any()
        second.replay()
        assert address.isnan().all()


@pytest.mark.drawn
@pytest.mark.parametrize(("variant", "profile", "capability", "flags"), [
    ("E4B", "fast", 90, {"num_speculative_tokens": 3, "images_per_request": 1, "max_soft_tokens": 70}),
    ("26B-A4B", "exact", 80, {"prompt_lookup": True, "kv_cache_dtype": "int8"}),
])  # fmt: skip
def test_a_worker_starts_and_answers_with_drafts(
    variant: str, profile: str, capability: int, flags: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a start, captures included; then requests of every way of sampling, whose steps wait for nothing, nor for
    an image that chunks cut."""
    monkeypatch.setattr(kernel_cache, "use_kernel_cache", lambda: None)
    text = COMMON | VARIANTS[variant] | {"head_dim": 64, "global_head_dim": 256}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    config = {"model_type": "gemma4", "dtype": "bfloat16", "eos_token_id": [1], "text_config": text}
    if images := flags.get("images_per_request", 0):
        tower = TOWERS["clipped"] | {"num_hidden_layers": 2, "patch_size": 16, "pooling_kernel_size": 3}
        config["vision_config"] = tower | {"position_embedding_size": 210}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if "num_speculative_tokens" in flags:
        write_assistant(tmp_path / "drafter", tmp_path, seed=1, hidden=64)
        flags = flags | {"drafter": str(tmp_path / "drafter")}
    with pretended_gpu(capability, blind=True) as gpu:
        replica = launch(EngineArgs(
            model=str(tmp_path), load_format="dummy", device="cuda", max_num_batched_tokens=64, max_num_seqs=SLOTS,
            max_model_len=LONGEST, profile=profile, gpu_memory_utilization=0.4, **flags,
        ))  # fmt: skip
        assert len(gpu.graphs) > SLOTS
        assert not (images and torch.backends.cuda.cudnn_sdp_enabled()), "it makes a plan for each length of an image"
        runner, exact = replica.runner, profile == "exact"
        limits = SchedulerLimits(64, SLOTS, LONGEST, (), captured_rows=replica.captured_rows, exact=exact)
        pool = 8 * replica.geometry.held_bytes(LONGEST) // 128 * 128
        scheduler = Scheduler(
            limits, replica.geometry, pool, draft_tokens=runner.draft_tokens, asked_drafts=runner.asked_drafts
        )
        engine, execute, told = Engine(scheduler, runner), runner.execute, 0

        def without_waiting(batch):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return execute(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.execute = without_waiting
        for number, sampling in enumerate(SAMPLINGS):
            prompt = tuple(3 + (7 * place + number) % 200 for place in range(1 + 40 * number))
            engine.add(
                Request(str(number), prompt, SamplingParams(seed=number, max_tokens=9, ignore_eos=True, **sampling))
            )
        picture = image_span(20, random_image(7, 10, seed=1), seed=1, mutual=False)
        for number in range(2 * images):
            seen = SamplingParams(seed=number, max_tokens=9, ignore_eos=True)
            engine.add(Request(f"image-{number}", seen_prompt(120, (picture,), seed=number), seen, spans=(picture,)))
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
                told += len(output.token_ids)
        runner.shutdown()
    assert told == 9 * (len(SAMPLINGS) + 2 * images)
    assert scheduler.stats().draft_tokens_total > 0
