"""Profile `exact` in a plan: it is told to the worker and the status, costs time, and changes no other plan."""

from __future__ import annotations

from decimal import Decimal

from rank_of import rank_of

from modelserve.api import ModelServeSpec
from modelserve.engine_args import EngineArgs
from modelserve.hardware import CATALOGUE
from modelserve.planning import AcceleratorOffer, engine_args_for, plan, plan_hash
from modelserve.published import published_model
from modelserve.sizing.cuda_graphs import graphs_bytes

URI = "hf://google/gemma-4-31B-it"


def planned(**engine: str):
    spec = ModelServeSpec.model_validate({"model": {"uri": URI}} | ({"engine": engine} if engine else {}))
    return spec, plan(spec, published_model(URI).architecture, [AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 1)])


def test_the_profile_reaches_the_worker_and_changes_the_hash() -> None:
    (left_out, fast), (asked, same), (exactly, exact) = planned(), planned(profile="fast"), planned(profile="exact")
    assert plan_hash(fast, left_out) == plan_hash(same, asked) != plan_hash(exact, exactly)
    assert engine_args_for(exact, exactly, model_directory="/m").profile == "exact"
    assert (fast.engine.profile, exact.engine.profile) == (None, "exact")


def test_a_worker_of_the_release_before_is_not_told() -> None:
    assert "profile" not in EngineArgs(model="/m", profile="exact").dialect("0.1.0")


def test_exact_steps_take_longer_and_say_that_they_are_assumed() -> None:
    (_, fast), (_, exact) = planned(), planned(profile="exact")
    for name in ("time_to_first_token_ms", "time_per_output_token_ms"):
        before, after = (Decimal(getattr(each.candidates[0].speed, name)) for each in (fast, exact))
        assert before < after
    assert "profile exact" in (exact.candidates[0].message or "")
    assert "profile exact" not in (fast.candidates[0].message or "")


def test_a_step_that_is_never_narrowed_has_its_hidden_states_in_the_plan() -> None:
    (_, fast), (_, exact) = planned(), planned(profile="exact")
    model, chunk, sequences = published_model(URI).architecture, 8192, exact.engine.max_num_seqs
    assert (exact.engine.max_num_batched_tokens, fast.engine.max_num_seqs) == (chunk, sequences)
    captured = {
        each: graphs_bytes(model, rank_of(model, max_num_seqs=sequences, profile=each)) for each in ("fast", "exact")
    }
    more = exact.per_gpu.overhead_bytes - fast.per_gpu.overhead_bytes
    assert more == captured["exact"] - captured["fast"] > 0
    assert captured["exact"] > chunk * model.hidden_size * 2
