"""A worker starts with steps of every size that a ModelServe may ask for: its start runs none that it cannot take."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from assisted import ASSISTANT, TARGET, assistant_for
from model_checkpoints import load_checkpoint

from modelserve.api import API_VERSION, KIND, ModelServe
from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE, CPU
from modelserve.planning import AcceleratorOffer, engine_args_for, plan
from modelserve.planning.evaluation import Refusal
from modelserve.planning.planner import consider
from modelserve.published import published_model
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve_worker.cache.kv_cache import KVCache
from modelserve_worker.drafters.prompt_lookup import PromptLookup
from modelserve_worker.engine_startup import build_engine
from modelserve_worker.request import FinishReason, Request, SamplingParams
from modelserve_worker.runner.model_runner import GPUModelRunner
from modelserve_worker.startup.profile_steps import heaviest_steps

LOOKUP, ASSISTED, EXACT = {"prompt_lookup": True}, {"drafter": str(ASSISTANT)}, {"profile": "exact"}
PAIRS, PLACES = 500, ("CPU", "NVIDIA-L4", "NVIDIA-H200")


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("tokens", "seqs", "more"),
    [
        (16, 4, {}), (32, 4, {}), (8, 1, {}), (16, 16, {}), (16, 1, {}), (63, 2, {}), (65, 65, {}), (1, 1, {}),
        (16, 64, {}), (16, 4, {"max_num_mixed_tokens": 131_072}), (512, 4, {"max_num_mixed_tokens": 16}),
        (16, 4, LOOKUP), (16, 16, LOOKUP | {"num_speculative_tokens": 16}), (1, 1, LOOKUP),
        (16, 4, ASSISTED), (16, 16, ASSISTED | {"num_speculative_tokens": 16}), (32, 4, ASSISTED | LOOKUP),
        (16, 4, EXACT), (16, 4, EXACT | LOOKUP), (16, 4, {"kv_cache_dtype": "int8"}),
    ],
)  # fmt: skip
def test_a_worker_starts_with_steps_of_any_size_and_answers(tokens: int, seqs: int, more: dict[str, Any]) -> None:
    """What the engine's process runs, in this one; prompts are longer than a step, and as many as a step and one."""
    args = EngineArgs(
        model=str(TARGET), device="cpu", max_num_batched_tokens=tokens, max_num_seqs=seqs, max_model_len=128,
        cpu_memory_bytes=2 << 30, **more,
    )  # fmt: skip
    engine = build_engine(args, lambda done, total: None).engine
    answers: Counter[str] = Counter()
    for number in range(min(seqs, 3) + 1):
        prompt = tuple(3 + (5 * place + number) % 60 for place in range(70 if tokens > 1 else 5))
        engine.add(Request(str(number), prompt, SamplingParams(seed=number, max_tokens=3, ignore_eos=True)))
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason in (None, FinishReason.LENGTH), output.error
            answers[output.request_id] += len(output.token_ids)
    assert answers == {str(number): 3 for number in range(min(seqs, 3) + 1)}


def _engine_settings(rng: random.Random) -> dict[str, Any]:
    """Each of them as the CRD allows it, the least and the most often among them."""

    def drawn(least: int, most: int) -> int:
        limit, near = rng.choice((least, least, least, most)), least + rng.randint(1, 64)
        return rng.choice((limit, near, int(least * (most / least) ** rng.random())))

    settings: dict[str, Any] = {"maxNumBatchedTokens": drawn(16, 1 << 17), "maxNumSeqs": drawn(1, 4096)}
    if rng.random() < 0.5:
        settings["maxNumMixedTokens"] = drawn(16, 1 << 17)
    if rng.random() < 0.25:
        settings["profile"] = "exact"
    return settings


def _spec(engine: dict[str, Any], product: str, drafter: dict[str, Any] | None) -> dict[str, Any]:
    memory = {"resources": {"limits": {"memory": "64Gi"}}}
    spec = {"model": {"uri": "hf://google/gemma-4-E2B-it"}, "engine": engine, "pod": memory if product == "CPU" else {}}
    return {**spec, "accelerators": {"products": [product]}, **({"drafter": drafter} if drafter else {})}


def test_every_size_that_the_schema_allows_is_refused_by_name_or_starts() -> None:
    """`PAIRS` of them through the plan to the runner's own constructor, over a small model, and each step that the
    start runs, on the CPU and on a GPU, through what packs it."""
    rng, told = random.Random(7), Counter[str]()
    facts = published_model("hf://google/gemma-4-E2B-it")
    assert facts is not None
    model, device = load_checkpoint(TARGET), torch.device("cpu")
    architecture = model.architecture
    longest = architecture.max_position_embeddings
    geometry = cache_geometry(
        architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.V_ONLY, tensor_parallel_size=1
    )
    page_bytes = geometry.global_page.page_bytes + geometry.sliding_page.page_bytes
    cache = KVCache(geometry, page_bytes, device=device)
    for _ in range(PAIRS):
        engine, product = _engine_settings(rng), rng.choice(PLACES)
        drafter = rng.choice((None, {"promptLookup": True}, {"published": True}))
        if drafter is not None and rng.random() < 0.5:
            drafter = drafter | {"numSpeculativeTokens": rng.randint(1, 16)}
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "gemma"}}
        body = {**document, "spec": _spec(engine, product, drafter)}
        if engine["maxNumSeqs"] > engine["maxNumBatchedTokens"]:
            with pytest.raises(InvalidInput, match="maxNumSeqs must be at most maxNumBatchedTokens"):
                ModelServe.parse(body)
            told["seqs over tokens"] += 1
            continue
        parsed = ModelServe.parse(body)
        offer = AcceleratorOffer(CPU if product == "CPU" else CATALOGUE[product], 1)
        best = consider(parsed.spec, facts.architecture, [offer])[0].evaluation
        if isinstance(best, Refusal):
            assert best.limited_by == "Memory"
            assert best.shortfall_bytes
            told["memory"] += 1
            continue
        planned = plan(parsed.spec, facts.architecture, [offer])
        args = engine_args_for(planned, parsed.spec, model_directory=str(TARGET), drafter_directories=(str(ASSISTANT),))
        drafts, sizes = args.speculative.num_tokens, {
            "max_num_batched_tokens": args.max_num_batched_tokens, "max_num_seqs": args.max_num_seqs
        }  # fmt: skip
        proposing = None
        if args.drafter:
            proposing = assistant_for(model, ASSISTANT, num_tokens=drafts, slots=args.max_num_seqs)
        elif args.prompt_lookup:
            proposing = PromptLookup(
                num_tokens=drafts, max_num_seqs=args.max_num_seqs, max_model_len=longest, device=device
            )
        runner = GPUModelRunner(model, cache, **sizes, max_model_len=longest, drafter=proposing)
        for on_gpu in (False, True):
            for batch in heaviest_steps(
                args, longest=longest, on_gpu=on_gpu, draft_tokens=drafts, asked=runner.asked_drafts
            ):
                runner._packer.pack(batch)
        told[f"{product} with {'drafts' if drafts else 'none'}"] += 1
    assert set(told) == {
        "seqs over tokens", "memory", *(f"{product} with {what}" for product in PLACES for what in ("drafts", "none"))
    }  # fmt: skip
    assert min(told.values()) > 5, told
