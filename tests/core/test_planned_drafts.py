"""Drafts in plans: what they take and bring, where they pay, and that a plan without them is the one it was."""

from __future__ import annotations

from typing import Any

import pytest
from architecture_of import architecture_of

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE
from modelserve.planning import AcceleratorOffer, engine_args_for, plan
from modelserve.planning.speed.draft_time import DraftSpeed
from modelserve.planning.speed.drafted_steps import DraftedSteps, DraftWay, VerifyingSteps
from modelserve.planning.speed.step_time import RankSpeed
from modelserve.published import assistant_of, published_model
from modelserve.sizing.cuda_graphs import decode_graph_rows
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.speculation import Speculation
from modelserve.sizing.weights.assistant import assistant_weight_bytes

PUBLISHED = {"published": True}


def _plan(
    variant: str = "31B-it", *, product: str = "NVIDIA-H200", gpus: int = 1, drafter: Any = None, **fields: Any
) -> PlanStatus:
    spec = _spec(variant, drafter=drafter, **fields)
    facts = published_model(spec.model.uri)
    assert facts is not None
    offers = [AcceleratorOffer(CATALOGUE[product], gpus)]
    return plan(spec, facts.architecture, offers, weight_format=facts.format)


def _spec(variant: str = "31B-it", *, drafter: Any = None, **fields: Any) -> ModelServeSpec:
    asked = {"drafter": drafter} if drafter is not None else {}
    return ModelServeSpec.model_validate({"model": {"uri": f"hf://google/gemma-4-{variant}"}, **asked, **fields})


def _chosen(planned: PlanStatus) -> Any:
    return next(each for each in planned.candidates if each.verdict == "Chosen")


@pytest.mark.parametrize(
    ("variant", "requests", "drafts", "context", "step_ms", "tokens"),
    [
        ("31B", 1, 4, 2048, 17.08, 3.40), ("31B", 1, 8, 2048, 18.96, 4.32), ("31B", 8, 4, 2048, 22.11, 3.53),
        ("E4B", 1, 4, 1024, 3.90, 3.49), ("E4B", 8, 4, 1024, 5.71, 3.40),
    ],
)  # fmt: skip
def test_steps_with_drafts_are_expected_near_what_was_measured(
    variant: str, requests: int, drafts: int, context: int, step_ms: float, tokens: float
) -> None:
    """docs/benchmarks.md, "Drafts": one H200, acceptance simulated as here."""
    architecture = architecture_of(variant)
    layout = KVCacheLayout.least(architecture)
    geometry = cache_geometry(architecture, dtype=KVCacheDtype.BFLOAT16, layout=layout, tensor_parallel_size=1)
    device = CATALOGUE["NVIDIA-H200"]
    speed = RankSpeed(architecture, device, geometry, tensor_parallel=1, weight_format=None)
    proposing = DraftSpeed(assistant_of(variant), device, geometry, tensor_parallel=1)
    verifying = VerifyingSteps(speed, max_num_seqs=8, speculation=Speculation(drafts, assistant_of(variant)))
    steps = DraftedSteps(verifying, (DraftWay(proposing, (0.8, *[0.82] * (drafts - 1))),), fixed=True)
    found = steps.step(requests, context=context + 128)
    assert found.tokens == pytest.approx(tokens, rel=0.05)
    assert found.time.seconds / found.tokens * 1e3 == pytest.approx(step_ms / tokens, rel=0.08)


@pytest.mark.parametrize("drafts", [1, 3, 8, 16])
@pytest.mark.parametrize("most", [1, 7, 64, 256])
def test_a_step_with_drafts_is_the_smallest_captured_one_with_room(drafts: int, most: int) -> None:
    facts, device = published_model("hf://google/gemma-4-26B-A4B-it"), CATALOGUE["NVIDIA-H200"]
    assert facts is not None
    geometry = cache_geometry(
        facts.architecture, dtype=KVCacheDtype.BFLOAT16, layout=KVCacheLayout.V_ONLY, tensor_parallel_size=1
    )
    speed = RankSpeed(facts.architecture, device, geometry, tensor_parallel=1, weight_format=None)
    speculation = Speculation(drafts)
    steps = VerifyingSteps(speed, max_num_seqs=most, speculation=speculation)
    captured = sorted(rows for rows, of in decode_graph_rows(most, speculation) if of == 1 + drafts)
    for requests in range(1, most + 1):
        least = next(rows for rows in captured if speculation.segments(rows, most) >= requests)
        assert steps.least_rows(requests) == least
        rows = min(requests * (1 + drafts), captured[-1])
        size = next(each for each in captured if each >= max(rows, least))
        found = steps.time(rows, drafted=True, requests=requests, cache=0.5, drafts=0.25)
        assert found == speed.step(decodes=size)._replace(
            weights=speed.weights_seconds(rows), attention=speed.drafted_attention_seconds(size), cache=0.5, drafts=0.25
        )


def test_a_published_assistant_is_planned_where_it_pays() -> None:
    plain, drafted = _plan(workload={"concurrency": 1}), _plan(drafter=PUBLISHED, workload={"concurrency": 1})
    assert plain.drafter is None
    assert drafted.drafter is not None
    assert drafted.drafter.to_json() == {"uri": "hf://google/gemma-4-31B-it-assistant", "revision": "main"}
    assert plain.per_gpu is not None
    assert drafted.per_gpu is not None
    assistant = assistant_weight_bytes(assistant_of("31B"), tensor_parallel_size=1)
    assert drafted.per_gpu.weights_bytes - plain.per_gpu.weights_bytes == assistant
    assert drafted.per_gpu.overhead_bytes > plain.per_gpu.overhead_bytes, "its graphs"
    assert drafted.hash != plain.hash
    speed = _chosen(drafted).speed
    assert speed.drafts.time_per_output_token_ms == _chosen(plain).speed.time_per_output_token_ms
    assert float(speed.time_per_output_token_ms) < 0.5 * float(speed.drafts.time_per_output_token_ms)
    assert (speed.drafts.acceptance, speed.drafts.source) == ("0.75", "Assumed")
    assert "drafts" not in _chosen(plain).speed.to_json()


def test_where_it_does_not_pay_it_is_left_out_with_the_figures() -> None:
    many = {"concurrency": 256, "inputTokens": 256, "outputTokens": 256}
    plain, drafted = _plan("E2B-it", workload=many), _plan("E2B-it", drafter=PUBLISHED, workload=many)
    assert drafted.drafter is None
    assert drafted.hash == plain.hash
    assert drafted.per_gpu == plain.per_gpu
    assert "is left out: 256 requests would have" in (drafted.message or "")
    named = _plan("E2B-it", drafter={"uri": "hf://google/gemma-4-E2B-it-assistant"}, workload=many)
    assert named.drafter is not None, "one that is named is used"


def test_it_is_left_out_where_ranks_cannot_share_it_or_there_is_no_room() -> None:
    eight = _plan("E4B-it", drafter=PUBLISHED, gpus=8, parallelism={"tensor": 8}, workload={"concurrency": 1})
    assert (eight.fits, eight.drafter) == (True, None)
    assert "4 query heads are not shared evenly by 8 GPUs" in (eight.message or "")
    full = {"context": {"maxModelLen": 131072}, "kvCache": {"dtype": "int8"}}
    tight = [_plan("31B-it-qat-w4a16-ct", product="NVIDIA-GeForce-RTX-3090", gpus=2, **full, drafter=d)
             for d in (None, {"uri": "hf://google/gemma-4-31B-it-assistant"})]  # fmt: skip
    assert all(each.fits for each in tight)


def test_acceptance_is_given_or_assumed_and_decides_how_many_are_verified() -> None:
    def speed(acceptance: str | None, variant: str = "31B-it", **drafter: Any) -> Any:
        given = {"draftAcceptance": acceptance} if acceptance else {}
        asked = {"uri": "hf://google/gemma-4-31B-it-assistant", **drafter}
        return _chosen(_plan(variant, drafter=asked, workload={"concurrency": 1, **given})).speed

    rates = [float(speed(each).output_tokens_per_second) for each in ("0", "0.3", "0.6", "0.9")]
    assert rates == sorted(rates)
    assert speed("0").drafts.per_request == 0
    assert speed("0.9").drafts.per_request == 8
    assert speed("0.9", numSpeculativeTokens=3).drafts.per_request == 3
    assert speed("0.5").drafts.source == "Given"
    assert speed("0").output_tokens_per_second == speed("0").drafts.output_tokens_per_second, "it rests"
    assert speed(None, "31B-it-qat-w4a16-ct").drafts.acceptance == "0.60"


def test_another_lineage_is_said_and_another_model_refused() -> None:
    quantised = _plan("31B-it-qat-w4a16-ct", drafter=PUBLISHED, workload={"concurrency": 1})
    assert quantised.drafter is not None
    assert "trained for quantisation" in (quantised.message or "")
    with pytest.raises(InvalidInput, match=r"spec\.drafter\.uri: .*assistant of another model"):
        _plan(drafter={"uri": "hf://google/gemma-4-12B-it-assistant"})
    base = _plan("31B", drafter=PUBLISHED)
    assert base.drafter is None
    assert "no assistant is published with hf://google/gemma-4-31B" in (base.message or "")


def test_prompt_lookup_needs_no_assistant_and_nobody_knows_what_it_brings() -> None:
    planned = _plan(drafter={"promptLookup": True, "numSpeculativeTokens": 5})
    assert planned.drafter is not None
    assert planned.drafter.to_json() == {"promptLookup": True, "numSpeculativeTokens": 5}
    assert _chosen(planned).speed.drafts is None
    both = _plan(drafter={"promptLookup": True, "published": True}, workload={"concurrency": 1})
    assert both.drafter is not None
    assert both.drafter.to_json() == {
        "uri": "hf://google/gemma-4-31B-it-assistant", "revision": "main", "promptLookup": True
    }  # fmt: skip


def test_the_worker_is_given_what_the_plan_has() -> None:
    spec = _spec(drafter={"uri": "hf://google/gemma-4-31B-it-assistant", "numSpeculativeTokens": 4})
    planned = _plan(drafter=spec.drafter.to_json() if spec.drafter else None)
    arguments = engine_args_for(planned, spec, model_directory="/m", drafter_directories=("/d",))
    assert (arguments.drafter, arguments.drafter_optional, arguments.num_speculative_tokens) == ("/d", True, 4)
    assert not {"drafter", "drafterOptional", "promptLookup"} & arguments.dialect("0.1.0").keys()
    other = _plan(drafter={"uri": "hf://google/gemma-4-31B-it-assistant", "numSpeculativeTokens": 4, "revision": "v2"})
    assert other.hash != planned.hash, "another revision is another plan"


@pytest.mark.parametrize(
    ("drafter", "wrong"),
    [
        ({"published": True, "uri": "hf://google/x"}, "uri and published"),
        ({"numSpeculativeTokens": 4}, "of what proposes tokens"),
        ({"revision": "v1"}, "of what proposes tokens"),
        ({"promptLookup": True, "numSpeculativeTokens": 17}, "less than or equal to 16"),
    ],
)
def test_what_says_nothing_or_two_things_is_refused(drafter: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        _spec(drafter=drafter)
