"""What the webhook says of an apply is what the operator then does, told briefly, and to nobody else's harm."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from modelserve.model.model_facts import ModelFacts
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CLAIM, MODEL_SERVE, NODE
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.webhook.preview import preview
from modelserve_operator.webhook.reading import Reader
from modelserve_operator.webhook.review import NotAReviewError, Review, answer, review_of
from modelserve_operator.webhook.warm_supply import WarmSupply
from modelserve_operator.webhook.warning_lines import ALL_CHARACTERS, CUT, LINE_CHARACTERS, warning_lines

BIG = {"model": {"uri": "hf://google/gemma-4-31B-it"}}
H200, L4, L40S = ("NVIDIA-H200", 143_771), ("NVIDIA-L4", 23_034), ("NVIDIA-L40S", 46_068)


@pytest.fixture
def fleet(world):
    for product, memory in (H200, L4):
        world.add_node(product.lower(), product=product, memory_mib=memory, gpus=8 if product == H200[0] else 1)
    return world


def _body(world, spec: Mapping[str, Any] | None = None, *, name: str = "big") -> dict[str, Any]:
    """The object as it is, or as it would be with another spec; one that is not there has no uid."""
    known = world.cluster.objects.get((MODEL_SERVE, "ml", name))
    metadata = {"name": name, "namespace": "ml", "uid": ""}
    body: dict[str, Any] = {"apiVersion": "serving.modelserve.dev/v1alpha1", "kind": "ModelServe", "metadata": metadata}
    body = copy.deepcopy(known) if known is not None else body
    return body | ({"spec": dict(spec)} if spec is not None else {})


def _preview(world, spec: Mapping[str, Any], *, name: str = "big") -> list[str]:
    """Sentences about applying `spec`, over what the cluster has."""
    after = _body(world, spec, name=name)
    exists = (MODEL_SERVE, "ml", name) in world.cluster.objects
    bodies = (after, _body(world, name=name)) if exists else (after,)
    reader = Reader(world.cluster, world.gatherer.supply, clock=lambda: world.now)
    observed, *before = asyncio.run(reader.observe(*bodies))
    return list(preview(observed, before[0] if before else None, world.settings))


def test_the_choice_comes_first_then_what_others_lack_and_what_would_help(fleet) -> None:
    fleet.rest()
    said = _preview(fleet, BIG)
    assert said[0].startswith(
        "Plan: 1 x NVIDIA-H200 a replica, for requests of up to 262,144 tokens, 5.96 of them at once."
    )
    assert "KV pool" in said[1]
    assert "1 x NVIDIA-L4: needs" in said[2]
    assert "GiB missing" in said[2]
    assert said[3] == "1 x NVIDIA-L4: fits on 4 x NVIDIA-L4 of one node, or on 1 x NVIDIA-H100-80GB-HBM3."
    assert fleet.rest() == [], "nothing is written for it"


def test_where_nothing_fits_the_shortfall_is_said_and_nothing_is_refused(fleet) -> None:
    said = _preview(fleet, {**BIG, "accelerators": {"products": ["NVIDIA-L4"]}})
    assert said[0].startswith("No plan fits now.")
    assert "40.11 GiB missing" in said[1]
    assert "4 x NVIDIA-L4" in said[2]


@pytest.mark.parametrize(
    ("edit", "verdict"),
    [
        ({"replicas": 3}, "No new pods"),
        ({"pod": {"labels": {"team": "search"}}}, "New pods with the same plan"),
        ({"context": {"maxModelLen": 32768}}, "Re-plan"),
        ({"workload": {"concurrency": 64}, "accelerators": {"products": ["NVIDIA-H200"]}}, "Re-plan"),
    ],
)
def test_an_edit_is_previewed_as_what_the_operator_then_does(fleet, edit: dict[str, Any], verdict: str) -> None:
    fleet.create(BIG, name="big")
    fleet.make_ready()
    before, fleet.cluster.writes = fleet.revision("big"), []
    said = _preview(fleet, {**BIG, **edit})
    assert fleet.cluster.writes == []
    fleet.edit("big", **edit)
    now = fleet.revision("big")
    assert (now == before) is (verdict == "No new pods")
    assert said[0].startswith(verdict)
    assert labels.revision_name("big", now) in " ".join(said[:2])
    assert labels.revision_name("big", before) in " ".join(said[:2])
    if verdict == "No new pods":
        assert said[1] == "Replicas 1 -> 3, each on 1 x NVIDIA-H200."
    if "context" in edit:
        assert "maxModelLen 262,144 -> 32,768" in said[2]


def test_an_edit_back_names_the_revision_that_was_committed_before(fleet) -> None:
    fleet.create(BIG, name="big")
    fleet.make_ready()
    first = fleet.revision("big")
    fleet.edit("big", context={"maxModelLen": 32768})
    fleet.make_ready()
    said = _preview(fleet, BIG)
    assert said[0] == "Re-plan, back to an earlier revision: 1 x NVIDIA-H200 a replica."
    assert said[1].startswith(f"Revision big-{first} replaces big-")


def test_what_runs_stays_where_an_edit_does_not_fit(fleet) -> None:
    fleet.create(BIG, name="big")
    fleet.make_ready()
    said = _preview(fleet, {**BIG, "accelerators": {"products": ["NVIDIA-L4"]}})
    assert said[0].startswith("No plan fits now.")
    assert said[1] == f"Revision big-{fleet.revision('big')} on 1 x NVIDIA-H200 stays meanwhile."
    fleet.edit("big", accelerators={"products": ["NVIDIA-L4"]})
    assert fleet.condition("Available", "big") == ("True", "Serving"), "as it was said"


def test_a_lost_accelerator_is_said_of_the_plan_that_stays_and_the_proposal_beside_it(fleet) -> None:
    fleet.create(BIG, name="big")
    fleet.make_ready()
    fleet.add_node("b", product="NVIDIA-H100-80GB-HBM3", memory_mib=81_559, gpus=8)
    fleet.cluster.remove(NODE, "", "nvidia-h200")
    fleet.settle()
    said = _preview(fleet, {**BIG, "replicas": 2})
    assert said[0].startswith("No new pods")
    assert said[2].startswith("No node and no declared pool offers 1 x NVIDIA-H200 any more")
    assert said[3].startswith("Proposed beside it: plan ")
    assert "1 x NVIDIA-H200 -> 2 x NVIDIA-H100-80GB-HBM3" in said[4]


def test_a_plan_that_waits_for_approval_is_said_with_the_command(fleet) -> None:
    said = _preview(fleet, {**BIG, "plan": {"mode": "Manual"}})
    assert "waits for approval: 1 x NVIDIA-H200" in said[0]
    fleet.create({**BIG, "plan": {"mode": "Manual"}}, name="big")
    proposed = fleet.status("big")["proposedPlan"]["hash"]
    assert said[-1].endswith(f"kubectl annotate modelserve big --overwrite {labels.APPROVE_PLAN}={proposed}")
    previewed = _preview(fleet, {**BIG, "plan": {"mode": "PreviewOnly"}}, name="other")
    assert previewed[0].startswith("Previewed, nothing is started: 1 x NVIDIA-H200")


def test_a_cluster_without_accelerators_is_told_so(world) -> None:
    assert _preview(world, BIG)[0].startswith("No plan now: ")


def test_a_model_that_is_not_known_is_planned_once_its_facts_are(ready_world, tiny_spec: dict[str, Any]) -> None:
    assert _preview(ready_world, tiny_spec, name="other")[0].startswith("No plan yet: this model is not known")
    edited = {**tiny_spec, "context": {"maxModelLen": 1024}}
    assert _preview(ready_world, edited, name="tiny")[0] == "Re-plan: CPU a replica."


def test_a_stranger_who_does_not_know_the_uid_is_told_nothing_of_what_runs(
    ready_world, tiny_spec: dict[str, Any], tiny_facts: ModelFacts
) -> None:
    """Anybody who reaches the port may send a review: the API server does not say that it is it."""
    reader = Reader(ready_world.cluster, ready_world.gatherer.supply)
    forged = _body(ready_world, tiny_spec, name="tiny")
    forged["metadata"] = {**forged["metadata"], "uid": "guessed"}
    for observed in asyncio.run(reader.observe(forged, forged)):
        assert observed.history.revisions == ()
        assert observed.config_maps == ()


def test_a_refused_spec_says_what_the_operator_would(world) -> None:
    own = {"metadata": {"name": "own", "namespace": "ml"}, "spec": {"accessModes": ["ReadWriteOnce"]}, "status": {}}
    world.cluster.put(CLAIM, own)
    (said,) = _preview(world, {"model": {"uri": "pvc://own/model"}, "replicas": 2})
    assert said.startswith("Accepted, and not served: claim own is ReadWriteOnce")


def test_lines_are_short_few_and_printable() -> None:
    lines = warning_lines([f"sentence {number} " + "word\n\x07" * 60 for number in range(60)])
    assert max(map(len, lines)) <= LINE_CHARACTERS
    assert sum(len(line.encode()) for line in lines) <= ALL_CHARACTERS
    assert lines[-1] == CUT
    assert all(line.isprintable() for line in lines)
    assert warning_lines(["é" * 130]) == ["é" * 120, "  " + "é" * 10]
    assert warning_lines(["same", "same"]) == ["same"]


def _document(**request: Any) -> dict[str, Any]:
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "u", **request}}


def test_only_what_changes_a_decision_is_previewed() -> None:
    body = {"kind": "ModelServe", "metadata": {"name": "a", "namespace": "ml"}, "spec": {"replicas": 1}}
    labelled = {**body, "metadata": {**body["metadata"], "labels": {"team": "a"}}}
    edited = {**body, "spec": {"replicas": 2}}
    approved = {**body, "metadata": {**body["metadata"], "annotations": {labels.APPROVE_PLAN: "0123456789"}}}
    gone = {**edited, "metadata": {**edited["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}

    def concerns(**request: Any) -> bool:
        return review_of(_document(**request)).concerns_plans

    assert concerns(object=body)
    assert concerns(object=edited, oldObject=body)
    assert concerns(object=approved, oldObject=body)
    assert concerns(object=labelled, oldObject=body, dryRun=True)
    assert not concerns(object=labelled, oldObject=body)
    assert not concerns(object=gone, oldObject=body)
    assert not concerns(oldObject=body)


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"request": {}},
        _document(uid=""),
        _document(object=7),
        _document(object={"kind": "Pod", "metadata": {}}),
    ],
)
def test_what_is_no_review_is_refused_as_such(document: Any) -> None:
    with pytest.raises(NotAReviewError):
        review_of(document)


def test_every_answer_allows() -> None:
    assert answer("u", [])["response"] == {"uid": "u", "allowed": True}
    assert json.loads(json.dumps(answer("u", ["a"])))["response"]["warnings"] == ["a"]
    assert Review("u", None, None, dry_run=False).concerns_plans is False


def test_revisions_that_cannot_be_read_are_the_readers_to_report(fleet) -> None:
    fleet.create(BIG, name="big")

    async def refused(*_: Any, **__: Any) -> Any:
        raise KubeError(403, "controllerrevisions is forbidden")
        yield

    reader = Reader(fleet.cluster, fleet.gatherer.supply)
    fleet.cluster.pages = refused  # type: ignore[method-assign]
    with pytest.raises(KubeError):
        asyncio.run(reader.observe(_body(fleet), _body(fleet)))


async def test_previews_go_on_over_the_supply_before_while_another_is_put_together(
    fleet,
) -> None:
    ready = threading.Event()

    class Slow(WarmSupply):
        def put_together(self, supply: Supply) -> None:
            ready.wait(60)
            super().put_together(supply)

    supply = Slow(fleet.gatherer)
    await supply.first()
    before = supply.now
    following = asyncio.create_task(supply.follow())
    await asyncio.to_thread(fleet.add_node, "more", product=L40S[0], memory_mib=L40S[1], gpus=8)
    for _ in range(20):
        await asyncio.sleep(0.02)
        assert supply.now is before
    ready.set()
    while supply.now is before:  # noqa: ASYNC110 - nothing tells when it changes
        await asyncio.sleep(0.01)
    assert fleet.gatherer.supply() is supply.now
    assert len(supply.now.offered) == 1, "what the pools offer is there already"
    following.cancel()
