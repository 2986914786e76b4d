"""spec.modalities.audio in plans: what hearing takes of a GPU, of its node and of a container, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from modelserve.api import ModelServe, PlanStatus
from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.hardware import CATALOGUE, CPU_PRODUCT
from modelserve.inspection import inspect_checkpoint, read_audio
from modelserve.model.model_facts import ModelFacts
from modelserve.planning.changes import plan_changes
from modelserve.planning.engine_settings import engine_args_for, plan_hash
from modelserve.planning.planner import plan
from modelserve.planning.pools.host_capacity import HostCapacity
from modelserve.planning.pools.offers import AcceleratorOffer
from modelserve.published import published_model, published_uris
from modelserve.sizing.media.audio_embedder import audio_embedder_bytes
from modelserve.sizing.media.audio_input import (
    HELD_FRAMES_BYTES,
    AudioInput,
    audio_host_bytes,
    held_frames_bytes,
    recording_bytes,
)
from modelserve.sizing.media.image_input import DECODER_BYTES
from modelserve.units import MIB
from modelserve_operator.manifests.pod_resources import worker_resources

URI = "hf://google/gemma-4-E4B-it"


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
    return plan(_serve(uri, **fields).spec, facts.architecture, offers, images=facts.images, audio=facts.audio)


def _audio(per_request: int = 4, **fields: Any) -> dict[str, Any]:
    return {"audio": {"perRequest": per_request, **fields}}


def test_which_published_models_hear() -> None:
    for uri in published_uris():
        facts = published_model(uri)
        assert facts is not None
        assert (facts.audio is not None) == bool(re.search(r"E[24]B|12B", uri))
        if facts.audio is not None:
            assert (facts.audio.tower is None) == ("12B" in uri)
        assert ModelFacts.model_validate_json(facts.model_dump_json(by_alias=True)) == facts


@pytest.mark.parametrize(
    ("variant", "parameters"),  # as transformers counts them, and four bounds of each of 120 linears
    [("E2B", 307_183_904 + 480), ("E4B", 308_756_768 + 480), ("12B", 2_457_600)],
)
def test_hearing_is_memory_that_the_pool_does_not_get(variant: str, parameters: int) -> None:
    uri = f"hf://google/gemma-4-{variant}-it"
    facts = published_model(uri)
    assert facts is not None
    assert facts.audio is not None
    assert audio_embedder_bytes(facts.audio, facts.architecture, segments=False) == 2 * parameters
    bare, hears = _plan(uri=uri), _plan(uri=uri, modalities=_audio())
    two = _plan(uri=uri, modalities=_audio(), parallelism={"tensor": 2})
    assert bare.audio is None
    assert hears.audio is not None
    assert two.audio is not None
    assert bare.per_gpu is not None
    assert hears.per_gpu is not None
    assert two.audio.embedder_bytes == hears.audio.embedder_bytes, "whole on each"
    assert 0 <= hears.audio.embedder_bytes - 2 * parameters < 2 * MIB * 120
    kept = 8 * 750 * 2 * facts.architecture.hidden_size if facts.audio.tower else 0
    assert hears.audio.cache_bytes == kept
    taken = hears.audio.embedder_bytes + hears.audio.rows_bytes + kept
    assert 0 <= bare.per_gpu.kv_pool_bytes - hears.per_gpu.kv_pool_bytes - taken < 128
    assert (hears.audio.per_request, hears.audio.seconds) == (4, 30)
    assert "4 sounds a request of 30 s at most take" in (hears.message or "")
    assert re.search(r"GiB, [\d,]+ tokens of cache, and .* of the host", hears.message or "")
    assert "sounds none -> 4 of 30 s" in list(plan_changes(bare, hears))


def test_beside_images_hearing_takes_what_it_needs_beyond_them() -> None:
    """One after the other, a step makes rows of both in the memory of the larger; the same processes decode them."""
    image = {"image": {"perRequest": 4, "maxSoftTokens": 1120}}
    sees, hears = _plan(modalities=image), _plan(modalities=_audio())
    both = _plan(modalities=image | _audio())
    assert sees.images is not None
    assert both.images is not None
    assert hears.audio is not None
    assert both.audio is not None
    assert both.images == sees.images
    assert both.audio.rows_bytes == max(0, hears.audio.rows_bytes - sees.images.rows_bytes)
    assert both.audio.embedder_bytes == hears.audio.embedder_bytes
    assert hears.audio.host_bytes - both.audio.host_bytes == 2 * DECODER_BYTES
    assert (hears.audio.decoders, both.audio.decoders, both.images.decoders) == (2, None, 2)
    cpus = [worker_resources({}, each, downloaded_bytes=None)["requests"]["cpu"] for each in (sees, hears, both)]
    assert cpus == ["4", "4", "4"]


def test_workers_are_told_and_nothing_is_said_without() -> None:
    bare, hears = _plan(), _plan(modalities=_audio(2, seconds=20))
    spec = _serve().spec
    told = engine_args_for(hears, spec, model_directory="/m")
    assert (told.audio_per_request, told.audio_seconds) == (2, 20)
    silent = engine_args_for(bare, spec, model_directory="/m").model_dump(exclude_unset=True)
    assert not {"audio_per_request", "audio_seconds"} & silent.keys(), "no hash of what is there changes"
    assert plan_hash(bare, spec) != plan_hash(hears, spec)
    assert _plan(modalities={}) == bare
    assert "audio" not in bare.to_json()
    assert PlanStatus.model_validate(hears.to_json()) == hears


def test_decoding_is_asked_of_the_node() -> None:
    bare, hears = _plan(), _plan(modalities=_audio(1))
    assert hears.audio is not None
    asked = [worker_resources({}, each, downloaded_bytes=None)["requests"] for each in (bare, hears)]
    assert int(asked[1]["memory"]) - int(asked[0]["memory"]) == hears.audio.host_bytes > 2 * DECODER_BYTES
    assert [each["cpu"] for each in asked] == ["2", "4"]
    small = AcceleratorOffer(CATALOGUE["NVIDIA-H200"], 1, host=HostCapacity(memory_bytes=7 << 30, cpu_millis=64_000))
    refused = _plan(small, modalities=_audio())
    assert (refused.accelerator, refused.candidates[0].limited_by) == (None, "HostMemory")
    assert "of it sounds" in (refused.candidates[0].message or "")
    assert "with modalities.audio left out" in (refused.candidates[0].remedy or "")
    both = _plan(small, modalities=_audio() | {"image": {"perRequest": 1}})
    assert "with modalities left out" in (both.candidates[0].remedy or "")


def test_frames_of_open_requests_are_bounded_and_hold_those_of_any_one() -> None:
    for uri, seconds in ((URI, 30), ("hf://google/gemma-4-12B-it", 600)):
        facts = published_model(uri)
        assert facts is not None
        assert facts.audio is not None
        audio = AudioInput(16, seconds, facts.audio)
        assert 16 * audio.sound_bytes <= HELD_FRAMES_BYTES
        assert held_frames_bytes(audio) - recording_bytes(facts.audio) <= HELD_FRAMES_BYTES
        alone, both = (audio_host_bytes(audio, ranks=n, on_cpu=False, decoders=True) for n in (1, 2))
        assert both - alone == held_frames_bytes(audio)


@pytest.mark.parametrize("uri", ["hf://google/gemma-4-31B-it", "hf://google/gemma-4-26B-A4B-it"])
def test_a_model_that_does_not_hear_is_refused_by_name(uri: str) -> None:
    with pytest.raises(InvalidInput, match=r"modalities\.audio: .* hears nothing here: E2B, E4B and 12B do"):
        _plan(uri=uri, modalities=_audio())


def test_longer_sounds_than_the_encoder_hears_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"audio\.seconds: a sound of 31 s is longer than the 30 s that the model's"):
        _plan(modalities=_audio(seconds=31))
    assert _plan(uri="hf://google/gemma-4-12B-it", modalities=_audio(seconds=600)).audio is not None


@pytest.mark.parametrize(
    "audio",
    [{}, {"perRequest": 0}, {"perRequest": 17}, {"perRequest": 1, "seconds": 0}, {"perRequest": 1, "seconds": 601}],
)
def test_what_no_spec_may_say(audio: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"modalities\.audio\."):
        _serve(modalities={"audio": audio})


@pytest.mark.parametrize("variant", ["E2B", "12B"])
def test_a_container_pays_for_its_decoder_and_an_inspection_tells_that_a_model_hears(
    variant: str, tmp_path: Path
) -> None:
    from model_checkpoints import make_towered, make_unified

    if variant == "12B":
        make_unified(tmp_path, seed=1)
    else:
        make_towered(variant, tmp_path, seed=1, hears=True)
    facts = inspect_checkpoint(tmp_path)
    assert facts.audio is not None
    assert (facts.audio.tower is None) == (variant == "12B")
    fields: dict[str, Any] = {"accelerators": {"products": [CPU_PRODUCT]}, "context": {"maxModelLen": 512}}
    pools = []
    for each in (_serve(**fields).spec, _serve(**fields, modalities=_audio(1, seconds=5)).spec):
        offers = [AcceleratorOffer(CATALOGUE[CPU_PRODUCT], 1)]
        found = plan(each, facts.architecture, offers, weight_format=facts.format, audio=facts.audio)
        assert found.per_gpu is not None
        pools.append(found.per_gpu.kv_pool_bytes)
    assert pools[0] - pools[1] > DECODER_BYTES
    args = EngineArgs(model=str(tmp_path), audio_per_request=1, audio_seconds=5)
    assert read_audio(args) == AudioInput(1, 5, facts.audio)
    assert read_audio(EngineArgs(model=str(tmp_path))) is None
