"""Two drafters that a spec names together: both counted, each measured, one left out where that is better."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from modelserve.api import GROUP, KIND, VERSION, ModelServeSpec, PlanStatus
from modelserve.cli.kubectl_plugin import Kubectl, _inspected
from modelserve.cli.plan_command import PlanOptions, run_plan
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE
from modelserve.model.model_facts import FACTS_KEY
from modelserve.planning import AcceleratorOffer, engine_args_for, plan
from modelserve.planning.changes import plan_changes
from modelserve.planning.evaluation import Fit, evaluate
from modelserve.planning.learned import Learned, pair_of
from modelserve.planning.speed.expected_speed import drafted_steps, rank_speed
from modelserve.planning.wishes import wishes
from modelserve.published import published_assistant, published_model

MODEL = "hf://google/gemma-4-31B-it"
MTP = {"kind": "MTP", "uri": f"{MODEL}-assistant"}
DFLASH = {"kind": "DFlash", "uri": "hf://z-lab/gemma-4-31B-it-DFlash"}
DSPARK = {"kind": "DSpark", "uri": "hf://RedHatAI/gemma-4-31B-it-speculator.dspark"}
BOTH = {"models": [DFLASH, MTP]}


def _spec(drafter: dict[str, Any], *, uri: str = MODEL, **fields: Any) -> ModelServeSpec:
    return ModelServeSpec.model_validate({"model": {"uri": uri}, "drafter": drafter, **fields})


def _plan(
    spec: ModelServeSpec, *, product: str = "NVIDIA-H200", gpus: int = 1, acceptance: dict[str, float] | None = None
) -> PlanStatus:
    facts = published_model(spec.model.uri)
    assert facts is not None
    known = {pair_of(spec.model.uri, uri): chance for uri, chance in (acceptance or {}).items()}
    offers = [AcceleratorOffer(CATALOGUE[product], gpus)]
    return plan(spec, facts.architecture, offers, weight_format=facts.format, learned=Learned(acceptance=known))


def _bytes(planned: PlanStatus, term: str) -> int:
    assert planned.per_gpu is not None
    return int(planned.per_gpu.to_json()[term])


def test_both_are_planned_in_the_workers_order_and_counted() -> None:
    both, mtp, dflash = (_plan(_spec(each)) for each in (BOTH, {"uri": MTP["uri"]}, {"uri": DFLASH["uri"]}))
    assert both.drafter is not None
    assert both.drafter.to_json() == {"models": [{**MTP, "revision": "main"}, {**DFLASH, "revision": "main"}]}
    plain = _plan(_spec({}))
    weights = [_bytes(each, "weightsBytes") for each in (plain, mtp, dflash, both)]
    assert weights[3] - weights[0] == (weights[1] - weights[0]) + (weights[2] - weights[0])
    assert both.per_request == dflash.per_request != mtp.per_request, "an assistant keeps nothing of a request"
    assert len({each.hash for each in (plain, both, mtp, dflash)}) == 4
    arguments = engine_args_for(both, _spec(BOTH), model_directory="/m", drafter_directories=("/a", "/b"))
    assert (arguments.drafter, arguments.drafters, arguments.drafter_optional) == (["/a", "/b"], ("/a", "/b"), True)
    assert f"are proposed by {MTP['uri']} or {DFLASH['uri']}" in (both.message or "")
    told = f"drafts {MTP['uri']} at main -> {MTP['uri']} at main or {DFLASH['uri']} at main"
    assert told in list(plan_changes(mtp, both))


def test_a_list_of_one_is_the_plan_of_its_address() -> None:
    one, uri = (_plan(_spec(each)) for each in ({"models": [DFLASH]}, {"uri": DFLASH["uri"]}))
    assert one == uri


def test_each_load_is_drafted_by_the_one_that_brings_more() -> None:
    """Of equal chances: one pass for a block where few are served, few drafts one after the other in crowds."""
    facts = published_model(MODEL)
    assert facts is not None
    measured = {pair_of(MODEL, MTP["uri"]): 0.75, pair_of(MODEL, DFLASH["uri"]): 0.75}
    found = wishes(_spec(BOTH), weight_format=facts.format, learned=Learned(acceptance=measured))
    assert found.drafts is not None
    wished = replace(found, drafts=found.drafts.of_target(facts.architecture))
    fit = evaluate(wished, facts.architecture, CATALOGUE["NVIDIA-H200"], gpus=1)
    assert isinstance(fit, Fit)
    steps = drafted_steps(fit, rank_speed(fit, facts.architecture, wished), wished)
    assert steps is not None
    assert [steps.step(requests, context=2048).drafter for requests in (1, 4, 16, 64, 128)] == [1, 1, 1, 0, 0]


def test_the_load_tells_which_of_them_drafts_it() -> None:
    made = _plan(_spec(BOTH, workload={"concurrency": 1}), acceptance={DFLASH["uri"]: 0.82})
    (chosen,) = (each for each in made.candidates if each.verdict == "Chosen")
    assert chosen.speed is not None
    assert chosen.speed.drafts is not None
    told = chosen.speed.drafts
    assert (told.drafter, told.acceptance, told.source, told.per_request) == (DFLASH["uri"], "0.82", "Measured", 15)
    assert made.draft_acceptances == {DFLASH["uri"]: "0.82"}
    assert f"15 of each request by {DFLASH['uri']}" in (made.message or "")


def test_one_whose_memory_the_load_needs_is_left_out() -> None:
    made = _plan(_spec(BOTH, workload={"concurrency": 64}))
    assert f"the drafter {DFLASH['uri']} is left out: the pool would hold 63 of 64 requests" in (made.message or "")


def test_one_that_brings_nothing_beside_the_other_is_left_out_once_that_is_measured() -> None:
    poor = {MTP["uri"]: 0.8, DFLASH["uri"]: 0.3}
    made = _plan(_spec(BOTH), acceptance=poor)
    assert made.drafter is not None
    assert made.drafter.to_json() == {"uri": MTP["uri"], "revision": "main"}
    assert f"the drafter {DFLASH['uri']} is left out: as often as workers measured" in (made.message or "")
    assert "at 1, 4, 16, 64 and 128 requests" in (made.message or "")
    assert made.draft_acceptances == {MTP["uri"]: "0.80", DFLASH["uri"]: "0.30"}, "so the next plan knows it, too"
    half = _plan(_spec(BOTH), acceptance={DFLASH["uri"]: 0.3})
    assert half.drafter is not None
    assert half.drafter.models is not None, "what is assumed of the other is no reason"


def test_one_is_left_out_where_both_have_no_room_or_cost_the_asked_cache() -> None:
    fits = _plan(_spec({"uri": MTP["uri"]}, context={"maxModelLen": 1024}), product="NVIDIA-A100-SXM4-80GB")
    assert fits.fits
    spec = _spec(BOTH, context={"maxModelLen": 131072})
    made = _plan(spec, product="NVIDIA-A100-SXM4-80GB")
    assert made.drafter is not None
    assert made.drafter.to_json() == {"uri": MTP["uri"], "revision": "main"}
    assert f"the drafter {DFLASH['uri']} is left out: the" in (made.message or "")


def test_one_that_ranks_cannot_share_is_left_out_by_itself() -> None:
    made = _plan(_spec(BOTH, parallelism={"tensor": 8}), gpus=8)
    alone = _plan(_spec({"uri": MTP["uri"]}, parallelism={"tensor": 8}), gpus=8)
    named = () if made.drafter is None else tuple(uri for uri, _ in made.drafter.named)
    expected = () if alone.drafter is None else (MTP["uri"],)
    assert named == (*expected, DFLASH["uri"])


@pytest.mark.parametrize(
    ("drafter", "wrong"),
    [
        ({"models": [DFLASH, DSPARK]}, "one of kind MTP and one of kind DFlash or DSpark"),
        ({"models": [MTP, {**MTP, "uri": "hf://google/gemma-4-12B-it-assistant"}]}, "they are MTP and MTP"),
        ({"models": [MTP], "uri": DFLASH["uri"]}, "leave uri, published and revision out"),
        ({"models": [MTP], "published": True}, "leave uri, published and revision out"),
        ({**BOTH, "numSpeculativeTokens": 4}, "leave it out, or name one"),
        ({"models": []}, "at least 1 item"),
        ({"models": [{"uri": MTP["uri"]}]}, "kind"),
    ],
)
def test_a_list_that_says_nothing_or_two_things_is_refused(drafter: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wrong)):
        _spec(drafter)


@pytest.mark.parametrize(
    ("models", "wrong"),
    [
        ([{**DFLASH, "kind": "MTP"}], f"{DFLASH['uri']} is of kind DFlash, not MTP: set kind to DFlash"),
        ([{**DSPARK, "kind": "DFlash"}], f"{DSPARK['uri']} is of kind DSpark, not DFlash"),
        (
            [MTP, {"kind": "DSpark", "uri": "hf://deepseek-ai/dspark_gemma4_12b_block7"}],
            "hf://deepseek-ai/dspark_gemma4_12b_block7: the drafter's hidden_size 3840 is not the model's hidden_size",
        ),
    ],
)
def test_one_of_another_kind_or_model_is_refused_by_name(models: list[dict[str, str]], wrong: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(f"spec.drafter.models: {wrong}")):
        _plan(_spec({"models": models}))


class _Kubectl:
    """Answers of a cluster that keeps what was found of a model and of both its drafters."""

    def __init__(self, live: dict[str, Any], facts: list[str]) -> None:
        self._live, self._facts = live, facts

    def optional(self, *arguments: str) -> list[dict[str, Any]]:
        if arguments[0] != "configmap":
            return [self._live]
        return [{"data": {FACTS_KEY: text}} for text in self._facts]


def test_kubectl_plans_with_what_was_found_of_each_of_two() -> None:
    facts = {each["uri"]: published_assistant(each["uri"]) for each in (MTP, DFLASH)}
    renamed = {"pvc://drafters/mtp": facts[MTP["uri"]], "pvc://drafters/block": facts[DFLASH["uri"]]}
    mine = [{"kind": kind, "uri": uri} for kind, uri in zip(("MTP", "DFlash"), renamed, strict=True)]
    live = {"metadata": {"name": "big"}, "spec": {"model": {"uri": "pvc://models/big"}, "drafter": {"models": mine}}}
    texts = [each.model_dump_json(by_alias=True) for each in renamed.values() if each is not None]
    _, found = _inspected(cast(Kubectl, _Kubectl(live, texts[::-1])), [live])
    assert found == renamed


def test_directories_of_this_machine_are_planned_as_both(tmp_path: Path) -> None:
    models = Path(__file__).parents[1] / "models"
    spec = {
        "model": {"uri": f"file://{models / 'gemma4-tiny-keqv'}"}, "accelerators": {"products": ["CPU"]},
        "drafter": {"models": [
            {"kind": "DFlash", "uri": f"file://{models / 'gemma4-tiny-keqv-dflash'}"},
            {"kind": "MTP", "uri": f"file://{models / 'gemma4-tiny-keqv-assistant'}"},
        ]},
    }  # fmt: skip
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": "tiny"}, "spec": spec}
    (file := tmp_path / "serve.yaml").write_text(yaml.safe_dump(body))
    text, code = run_plan(PlanOptions(file=str(file), output="json"))
    assert code == 0
    (entry,) = json.loads(text)
    assert [each["kind"] for each in entry["plan"]["drafter"]["models"]] == ["MTP", "DFlash"]
