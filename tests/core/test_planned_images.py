"""spec.modalities.image in plans: what seeing takes of a GPU, of its node and of a container, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from modelserve.api import ModelServe, PlanStatus
from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE, CPU_PRODUCT
from modelserve.inspection import inspect_checkpoint, read_images
from modelserve.model.images import ImageArchitecture
from modelserve.model.model_facts import ModelFacts
from modelserve.planning.changes import plan_changes
from modelserve.planning.engine_settings import engine_args_for, plan_hash
from modelserve.planning.planner import plan
from modelserve.planning.pools.host_capacity import HostCapacity
from modelserve.planning.pools.offers import AcceleratorOffer
from modelserve.published import published_model, published_uris
from modelserve.sizing.media.embedder import embedder_bytes, embedder_shapes
from modelserve.sizing.media.image_input import (
    DECODER_BYTES,
    HELD_PIXELS_BYTES,
    ImageInput,
    held_pixels_bytes,
    image_host_bytes,
)
from modelserve.units import MIB
from modelserve_operator.manifests.pod_resources import worker_resources

URI = "hf://google/gemma-4-12B-it"
SEEN = ImageArchitecture(patch_side=48, embed_size=3840, positions=1120, mutual=True)


def _serve(uri: str = URI, **fields: Any) -> ModelServe:
    document = {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelServe",
        "metadata": {"name": "m"},
        "spec": {"model": {"uri": uri}, "context": {"maxModelLen": 32768}, **fields},
    }
    return ModelServe.parse(document)


def _plan(offer: AcceleratorOffer | None = None, uri: str = URI, **fields: Any) -> PlanStatus:
    facts = published_model(uri)
    assert facts is not None
    offers = [offer or AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 8)]
    return plan(_serve(uri, **fields).spec, facts.architecture, offers, images=facts.images)


def _image(per_request: int = 4, **fields: Any) -> dict[str, Any]:
    return {"image": {"perRequest": per_request, **fields}}


def test_which_published_models_see() -> None:
    """By their facts: all, and rows of an image see each other in the larger ones."""
    for uri in published_uris():
        facts = published_model(uri)
        assert facts is not None
        assert facts.images is not None
        assert facts.images.mutual == (not re.search(r"E[24]B", uri))
        assert (facts.images == SEEN) == ("12B" in uri) == (facts.images.tower is None)
        assert facts.images.patch_side == 48
        assert facts.images.longest >= 1120
        assert ModelFacts.model_validate_json(facts.model_dump_json(by_alias=True)) == facts


@pytest.mark.parametrize(
    ("variant", "parameters"),  # as transformers counts them, and of E2B and E4B four bounds of 112 linears each
    [("E2B", 168_544_256 + 448), ("E4B", 169_330_688 + 448), ("26B-A4B", 572_792_112 + 2 * 1152),
     ("31B", 575_741_232 + 2 * 1152)],
)  # fmt: skip
def test_towers_are_weights_of_each_gpu_and_memory_of_a_step(variant: str, parameters: int) -> None:
    uri = f"hf://google/gemma-4-{variant}-it"
    facts = published_model(uri)
    assert facts is not None
    assert facts.images is not None
    assert embedder_bytes(facts.images, facts.architecture, segments=False) == 2 * parameters
    bare, sees = _plan(uri=uri), _plan(uri=uri, modalities=_image(maxSoftTokens=1120))
    two = _plan(uri=uri, modalities=_image(maxSoftTokens=1120), parallelism={"tensor": 2})
    assert bare.per_gpu is not None
    assert sees.per_gpu is not None
    assert sees.images is not None
    assert two.images is not None
    assert two.images.embedder_bytes == sees.images.embedder_bytes, "whole on each"
    assert 0 <= sees.images.embedder_bytes - 2 * parameters < 2 * MIB * 2 * 28
    taken = sees.images.embedder_bytes + sees.images.rows_bytes + sees.images.cache_bytes
    assert 0 <= bare.per_gpu.kv_pool_bytes - sees.per_gpu.kv_pool_bytes - taken < 128
    kept = 0 if facts.images.mutual else 8 * 1120 * 2 * facts.architecture.hidden_size
    assert sees.images.cache_bytes == kept
    assert sees.per_gpu.weights_bytes == bare.per_gpu.weights_bytes + sees.images.embedder_bytes
    assert "4 images a request of 1120 tokens at most take" in (sees.message or "")


def test_a_step_of_a_model_whose_images_are_causal_may_be_shorter_than_one() -> None:
    engine = {"maxNumBatchedTokens": 256}
    found = _plan(uri="hf://google/gemma-4-E4B-it", modalities=_image(maxSoftTokens=1120), engine=engine)
    assert found.images is not None
    with pytest.raises(InvalidInput, match="is computed in one step, and a step has 256"):
        _plan(uri="hf://google/gemma-4-31B-it", modalities=_image(maxSoftTokens=1120), engine=engine)


def test_seeing_is_memory_that_the_pool_does_not_get() -> None:
    bare, sees = _plan(), _plan(modalities=_image())
    assert bare.images is None
    assert sees.images is not None
    assert bare.per_gpu is not None
    assert sees.per_gpu is not None
    parameters = 2 * (6912 * 3840 + 3840 + 1120 * 2 * 3840 + 3840 * 3840 + 2 * 6912 + 4 * 3840)
    facts = published_model(URI)
    assert facts is not None
    assert embedder_bytes(SEEN, facts.architecture, segments=False) == parameters
    assert parameters <= sees.images.embedder_bytes <= parameters + 3 * 2 * MIB
    assert len(embedder_shapes(SEEN, 3840)) == 10
    assert sees.per_gpu.weights_bytes == bare.per_gpu.weights_bytes + sees.images.embedder_bytes
    taken = sees.images.embedder_bytes + sees.images.rows_bytes
    assert 0 <= bare.per_gpu.kv_pool_bytes - sees.per_gpu.kv_pool_bytes - taken < 128
    assert (sees.images.per_request, sees.images.max_soft_tokens) == (4, 280)
    assert "4 images a request of 280 tokens at most take" in (sees.message or "")
    assert re.search(r"GiB, [\d,]+ tokens of cache, and", sees.message or "")
    assert "images none -> 4 of 280" in list(plan_changes(bare, sees))


def test_workers_are_told_and_nothing_is_said_without() -> None:
    bare, sees = _plan(), _plan(modalities=_image(2, maxSoftTokens=1120))
    spec = _serve().spec
    told = engine_args_for(sees, spec, model_directory="/m")
    assert (told.images_per_request, told.max_soft_tokens) == (2, 1120)
    silent = engine_args_for(bare, spec, model_directory="/m").model_dump(exclude_unset=True)
    assert not {"images_per_request", "max_soft_tokens"} & silent.keys(), "no hash of what is there changes"
    assert plan_hash(bare, spec) != plan_hash(sees, spec)
    assert _plan(modalities={}) == bare


def test_hosts_of_images_are_planned_and_told() -> None:
    hosts = ["images.example.com", "*.cdn.example.com", "http://plain.example.com"]
    bare, fetches = _plan(modalities=_image()), _plan(modalities=_image(urls=hosts))
    spec = _serve().spec
    assert fetches.images is not None
    assert fetches.images.urls == tuple(hosts)
    told = engine_args_for(fetches, spec, model_directory="/m")
    assert told.image_urls == hosts
    assert "image_urls" not in engine_args_for(bare, spec, model_directory="/m").model_dump(exclude_unset=True)
    assert plan_hash(bare, spec) != plan_hash(fetches, spec)
    assert "urls" not in str(bare.to_json())
    assert f"images from nowhere -> {', '.join(hosts)}" in list(plan_changes(bare, fetches))
    assert PlanStatus.model_validate(fetches.to_json()) == fetches
    for args in (EngineArgs(model="m", image_urls=hosts), EngineArgs.model_validate(told.dialect("0.2.0"))):
        assert args.image_urls == hosts


def test_decoding_is_asked_of_the_node() -> None:
    bare, sees = _plan(), _plan(modalities=_image(1, maxSoftTokens=1120))
    assert sees.images is not None
    asked = [worker_resources({}, each, downloaded_bytes=None)["requests"] for each in (bare, sees)]
    assert int(asked[1]["memory"]) - int(asked[0]["memory"]) == sees.images.host_bytes > 2 * DECODER_BYTES
    assert [each["cpu"] for each in asked] == ["2", "4"]
    small = AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 1, host=HostCapacity(memory_bytes=7 << 30, cpu_millis=64_000))
    assert _plan(small).accelerator == "NVIDIA-H200"
    refused = _plan(small, modalities=_image())
    assert (refused.accelerator, refused.candidates[0].limited_by) == (None, "HostMemory")
    assert "of it images" in (refused.candidates[0].message or "")
    assert "with modalities.image left out" in (refused.candidates[0].remedy or "")


def test_pixels_of_open_requests_are_bounded_and_hold_those_of_any_one() -> None:
    one = ImageInput(1, 280, SEEN)
    assert held_pixels_bytes(one) == 64 * 280 * 6912
    assert held_pixels_bytes(ImageInput(4, 1120, SEEN)) == HELD_PIXELS_BYTES
    assert 64 * 1120 * SEEN.patch_values < HELD_PIXELS_BYTES
    alone, both = (image_host_bytes(one, ranks=ranks, on_cpu=False) for ranks in (1, 2))
    assert both - alone == held_pixels_bytes(one)
    assert alone - image_host_bytes(one, ranks=1, on_cpu=True) == DECODER_BYTES


def test_steps_hold_an_image() -> None:
    """A step that nobody gave is as long as an image; one that is given and shorter is refused, with the remedy."""
    cpu = {"accelerators": {"products": [CPU_PRODUCT]}, "pod": {"resources": {"limits": {"memory": "64Gi"}}}}
    for tokens, steps in ((280, 512), (1120, 1120)):
        found = _plan(AcceleratorOffer(CATALOGUE[CPU_PRODUCT], 1), modalities=_image(maxSoftTokens=tokens), **cpu)
        assert found.engine is not None
        assert found.engine.max_num_batched_tokens == steps
        assert found.images is not None
        assert found.images.decoders == 1
    asked = worker_resources({}, found, downloaded_bytes=None)["requests"]
    assert asked["cpu"] == "2"
    with pytest.raises(InvalidInput, match=r"1120 soft tokens is computed in one step, and a step has 1000 "):
        _plan(modalities=_image(maxSoftTokens=1120), engine={"maxNumBatchedTokens": 1000})
    assert _plan(modalities=_image(maxSoftTokens=1120), engine={"maxNumBatchedTokens": 1120}).images is not None


def test_a_model_that_does_not_see_is_refused_by_name() -> None:
    """As of a GGUF file, of text alone, or of a tower that is quantised."""
    facts = published_model(URI)
    assert facts is not None
    offers = [AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 1)]
    with pytest.raises(
        InvalidInput, match=r"gemma-4-12B-it takes no images here: .* not quantised, beside a vision_co"
    ):
        plan(_serve(modalities=_image()).spec, facts.architecture, offers, images=None)


@pytest.mark.parametrize("image", [
    {}, {"perRequest": 0}, {"perRequest": 65}, {"perRequest": 1, "maxSoftTokens": 300}, {"perRequest": 1, "urls": []},
    {"perRequest": 1, "urls": ["*"]}, {"perRequest": 1, "urls": ["10.0.0.1"]}, {"perRequest": 1, "urls": ["a.b"] * 2},
    {"perRequest": 1, "urls": ["https://a.example.com"]}, {"perRequest": 1, "urls": ["a.example.com:8443"]},
])  # fmt: skip
def test_what_no_spec_may_say(image: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"modalities\.image\."):
        _serve(modalities={"image": image})


@pytest.mark.parametrize("hosts", [["*"], ["a.b", "a.b"], [f"h{n}.example.com" for n in range(65)]])
def test_what_no_worker_is_told(hosts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"stands twice|is no host|65 hosts; at most 64"):
        EngineArgs(model="m", image_urls=hosts)


def test_a_container_pays_for_its_decoder_and_an_inspection_tells_that_a_model_sees(unified_files: Path) -> None:
    facts = inspect_checkpoint(unified_files)
    assert facts.images is not None
    assert (facts.images.patch_side, facts.images.embed_size, facts.images.mutual) == (48, 40, True)
    spec = _serve(accelerators={"products": [CPU_PRODUCT]}, context={"maxModelLen": 512}).spec
    sees = _serve(
        accelerators={"products": [CPU_PRODUCT]}, context={"maxModelLen": 512}, modalities=_image(1, maxSoftTokens=70)
    ).spec
    offers = [AcceleratorOffer(CATALOGUE[CPU_PRODUCT], 1)]
    pools = []
    for each in (spec, sees):
        found = plan(each, facts.architecture, offers, weight_format=facts.format, images=facts.images)
        assert found.per_gpu is not None
        pools.append(found.per_gpu.kv_pool_bytes)
    assert pools[0] - pools[1] > DECODER_BYTES
    args = EngineArgs(model=str(unified_files), images_per_request=1, max_soft_tokens=70)
    assert read_images(args) == ImageInput(1, 70, facts.images)


@pytest.fixture
def unified_files(tmp_path: Path) -> Path:
    from model_checkpoints import make_unified

    make_unified(tmp_path, seed=1)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma4_unified"
    return tmp_path
