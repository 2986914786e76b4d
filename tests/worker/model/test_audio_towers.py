"""Prompts with sounds say what transformers says of the same frames, however they are computed.

E2B and E4B hear by a conformer with clipped linears, and have per-layer embeddings; the 12B hears samples as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from allocated_bytes import AllocatedBytes
from hearing_reference import heard_logits, heard_prompt, random_sound, reference_sound_rows, sound_span
from model_checkpoints import load_checkpoint, make_towered, make_unified, random_tokens
from paged_logits import Forced, Traffic, geometry_of, replay
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.inspection import inspect_checkpoint
from modelserve.model.audio import AudioArchitecture
from modelserve.sizing.media.audio_embedder import (
    audio_embedder_bytes,
    audio_rows_bytes,
    audio_shapes,
    kept_sounds_bytes,
)
from modelserve.sizing.media.audio_input import AudioInput
from modelserve_worker.embedded_spans import EmbeddedSpan
from modelserve_worker.kernels.operations import PLAIN_EXACT
from modelserve_worker.models import audio_tower
from modelserve_worker.models.audio_tower import AudioEmbedder, AudioTower, block_layout
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.models.tower_linear import TowerLinear
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.prompt_spans import check_spans
from modelserve_worker.step import audio_rows, embedded_rows
from modelserve_worker.step.audio_rows import rows_of_sounds
from modelserve_worker.weights.files import InvalidCheckpoint

TOLERANCE = 2e-4
LENGTH = 130
FRAMES = [1, 47, 48, 49, 97, 160, 4, 241]  # of sounds: below, at and above blocks of 12 rows of four frames
VARIANTS = ["E2B", "12B"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(variant: str) -> Path:
        directory = tmp_path_factory.mktemp(variant)
        if variant == "12B":
            make_unified(directory, seed=3)
        else:
            make_towered(variant, directory, seed=3, hears=True)
        return directory

    return make


def audio_of(directory: Path) -> AudioArchitecture:
    return AudioArchitecture.from_config(json.loads((directory / "config.json").read_text()))


@cache
def model_that_hears(directory: Path) -> Gemma4ForCausalLM:
    return load_checkpoint(directory, audio=audio_of(directory))


def embedder_of(directory: Path) -> AudioTower | AudioEmbedder:
    embedder = model_that_hears(directory).audio_embedder
    assert embedder is not None
    return embedder


def tower_of(directory: Path) -> AudioTower:
    tower = embedder_of(directory)
    assert isinstance(tower, AudioTower)
    return tower


@cache
def wanted_rows(directory: Path) -> list[Tensor]:
    return reference_sound_rows(directory, [random_sound(n, audio_of(directory), seed=n) for n in FRAMES])


def rows_off(directory: Path, *, together: bool = True) -> float:
    """How far the worst row is off, of sounds that are encoded together, or one by one."""
    sounds = [random_sound(n, audio_of(directory), seed=n) for n in FRAMES]
    embedder = embedder_of(directory)
    if together:
        made = list(torch.split(rows_of_sounds(sounds, embedder), [len(each) for each in sounds]))
    else:
        made = [rows_of_sounds([each], embedder) for each in sounds]
    assert [len(each) for each in made] == [len(each) for each in wanted_rows(directory)]
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(made, wanted_rows(directory), strict=True))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("variant", ["E2B", "E4B", "12B"])
def test_rows_of_sounds_alone_and_packed(variant: str, together: bool, checkpoints: Callable[[str], Path]) -> None:
    assert rows_off(checkpoints(variant), together=together) <= 5e-5


def _everything_is_real(lengths: Any, *, keys: int) -> Any:
    places, real, _ = _LAYOUT(lengths, keys=keys)
    distance = keys + np.arange(keys)[:, None] - np.arange(2 * keys)
    seen = np.broadcast_to((distance >= 0) & (distance < keys), (len(real) // keys, 1, keys, 2 * keys))
    return places, np.ones_like(real), np.ascontiguousarray(seen)


def _seen_beyond(lengths: Any, *, keys: int, more: int) -> Any:
    """One key more, or one less, or one ahead."""
    places, real, seen = _LAYOUT(lengths, keys=keys)
    return places, real, np.ascontiguousarray(np.roll(seen, more, axis=-1) & np.roll(seen, 0, axis=-1))


def _whole_sounds_apart_by_nothing(lengths: Any, *, keys: int) -> Any:
    """As if all of them were one."""
    whole, real, seen = _LAYOUT([sum(lengths)], keys=keys)
    return whole, real, seen


def _unpadded(self: AudioTower, frames: Tensor) -> Tensor:
    """Convolutions that do not see zeros behind the end, but the last frame again."""
    x = frames[None, None]
    for weight, norm in ((self.first, self.first_norm), (self.second, self.second_norm)):
        x = functional.pad(x, (1, 1, 1, 1), mode="replicate")
        x = functional.conv2d(x, weight, stride=2).permute(0, 2, 3, 1)
        x = functional.layer_norm(x, norm.shape, norm, None, 1e-6).relu_().permute(0, 3, 1, 2)
    return functional.linear(x[0].permute(1, 2, 0).flatten(1), self.entry)


def _channels_first(self: AudioTower, frames: Tensor) -> Tensor:
    x = frames[None, None]
    for weight, norm in ((self.first, self.first_norm), (self.second, self.second_norm)):
        x = functional.conv2d(x, weight, stride=2, padding=1).permute(0, 2, 3, 1)
        x = functional.layer_norm(x, norm.shape, norm, None, 1e-6).relu_().permute(0, 3, 1, 2)
    return functional.linear(x[0].permute(1, 0, 2).flatten(1), self.entry)


_LAYOUT, _BY_DISTANCE, _CUT = block_layout, audio_tower.by_distance, audio_tower._cut
_SINUSOIDS = audio_tower.sinusoids
_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "zeros between sounds are sounds": (audio_rows, "block_layout", _everything_is_real),
    "sounds are one": (audio_rows, "block_layout", _whole_sounds_apart_by_nothing),
    "a key is left out": (audio_rows, "block_layout", lambda n, **k: _seen_beyond(n, **k, more=1)),
    "distances are one off": (audio_tower, "by_distance", lambda x: _BY_DISTANCE(x.roll(1, -1))),
    "distances run the other way": (audio_tower, "by_distance", lambda x: _BY_DISTANCE(x.flip(-1))),
    "cosines come first": (audio_tower, "sinusoids", lambda *a, **k: _SINUSOIDS(*a, **k).roll(16, -1)),
    "the end is no zero": (AudioTower, "_subsampled", _unpadded),
    "channels before bins": (AudioTower, "_subsampled", _channels_first),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_the_comparison_of_rows_notices(
    fault: str, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*_FAULTS[fault])
    assert rows_off(checkpoints("E2B")) > 1e-3


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_cap", 5.0), ("residual_weight", 1.0), ("most", 0.7), ("invalid_logit", -1.0), ("kernel", None)],
)
def test_what_the_config_says_is_noticed(
    field: str, value: Any, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = tower_of(checkpoints("E2B"))
    if field == "kernel":
        for layer in tower.layers:
            flipped = torch.nn.Parameter(layer.convolution.weight.flip(-1), requires_grad=False)  # type: ignore[union-attr]
            monkeypatch.setitem(layer.convolution._parameters, "weight", flipped)  # type: ignore[union-attr, arg-type]
    else:
        other = tower.tower.model_copy(update={field: value})
        for module in tower.modules():
            if hasattr(module, "tower"):
                monkeypatch.setattr(module, "tower", other)
    assert rows_off(checkpoints("E2B")) > 1e-3


def test_each_bound_is_noticed(checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every linear of a layer, of what goes in and of what comes out."""
    directory = checkpoints("E2B")
    linears = {
        name: each for name, each in tower_of(directory).layers[1].named_modules() if isinstance(each, TowerLinear)
    }
    assert len(linears) == 8
    rows_off(directory)
    for name, linear in linears.items():
        for side in (slice(0, 2), slice(2, 4)):
            loose = [list(each) for each in linear._limits]
            for each in loose:
                each[side] = [-1e9, 1e9]
            with monkeypatch.context() as patched:
                patched.setitem(linear.__dict__, "_limits", loose)
                assert rows_off(directory) > 1e-3, (name, side)


@cache
def spans(directory: Path) -> tuple[EmbeddedSpan, ...]:
    """Two neighbours with their marks alone between them, one of many windows, and one of a single row."""
    audio = audio_of(directory)
    sizes = ((4, 23), (12, 190), (70, 100), (110, 2)) if audio.tower else ((4, 6), (12, 48), (70, 25), (110, 1))
    return tuple(sound_span(at, random_sound(frames, audio, seed=at), seed=at) for at, frames in sizes)


@cache
def expected(directory: Path) -> tuple[tuple[int, ...], Tensor]:
    tokens = heard_prompt(LENGTH, spans(directory), seed=5)
    return tokens, heard_logits(directory, tokens, spans(directory)).log_softmax(-1)[: LENGTH - 1]


def heard(directory: Path, **changes: Any) -> Forced:
    return replace(Forced(expected(directory)[0], LENGTH - 4, spans=spans(directory)), **changes)


def differs(logits: Tensor, wanted: Tensor) -> float:
    return float((logits.log_softmax(-1) - wanted).abs().max())


@pytest.mark.drawn
@pytest.mark.parametrize("chunk", [5, 37, 512])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_prompt_in_chunks(variant: str, chunk: int, checkpoints: Callable[[str], Path]) -> None:
    """Chunks end inside sounds, whose rows see what is before them alone."""
    directory = checkpoints(variant)
    done = replay(model_that_hears(directory), Traffic((heard(directory),), chunk=chunk))
    assert differs(done.logits[0], expected(directory)[1]) <= TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_beside_others_and_two_steps_in_flight(variant: str, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints(variant)
    others = tuple(
        Forced(tuple(random_tokens(length, seed=length)), length // 2, arrives=i) for i, length in enumerate((40, 7))
    )
    traffic = Traffic((*others, heard(directory, arrives=1), heard(directory, arrives=3)), chunk=48, steps_in_flight=2)
    done = replay(model_that_hears(directory), traffic)
    for logits in done.logits[2:]:
        assert differs(logits, expected(directory)[1]) <= TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_sounds_and_another_mask_are_noticed(variant: str, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints(variant)
    tokens, wanted = expected(directory)
    first, long, after, one = spans(directory)
    other = random_sound(len(after.embeddings.values), audio_of(directory), seed=99)  # type: ignore[union-attr]
    for name, held in {
        "another mask": (first, replace(long, mutual=True), after, one),
        "another sound": (first, long, replace(after, embeddings=other), one),
    }.items():
        done = replay(model_that_hears(directory), Traffic((Forced(tokens, LENGTH - 4, spans=held),)))
        assert differs(done.logits[0], wanted) > 10 * TOLERANCE, name


class Sounds:
    """How many rows each run of what embeds them made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[list[int]] = []
        monkeypatch.setattr(embedded_rows, "rows_of_sounds", self)

    def __call__(self, sounds: Any, embedder: Any) -> Tensor:
        self.runs.append([len(each) for each in sounds])
        return rows_of_sounds(sounds, embedder)


def test_a_sound_is_encoded_once(checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """However its rows are cut into chunks; without room to keep them it is encoded again."""
    directory = checkpoints("E2B")
    ran, sizes = Sounds(monkeypatch), [len(each) for each in spans(directory)]
    done = replay(model_that_hears(directory), Traffic((heard(directory),), chunk=5))
    assert sorted(chain.from_iterable(ran.runs)) == sorted(sizes)
    ran.runs.clear()
    replay(model_that_hears(directory), Traffic((heard(directory),), chunk=512))
    assert ran.runs == [sizes]
    monkeypatch.setattr(embedded_rows, "kept_sounds", lambda *_, **__: 0)
    ran.runs.clear()
    done = replay(model_that_hears(directory), Traffic((heard(directory),), chunk=5))
    assert len(ran.runs) > 4
    assert differs(done.logits[0], expected(directory)[1]) <= TOLERANCE


def test_of_frames_by_themselves_each_is_embedded_once(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoints("12B")
    ran = Sounds(monkeypatch)
    replay(model_that_hears(directory), Traffic((heard(directory),), chunk=5))
    assert max(chain.from_iterable(ran.runs)) <= 5
    assert sum(chain.from_iterable(ran.runs)) == sum(len(each) for each in spans(directory))


@pytest.mark.parametrize("variant", VARIANTS)
def test_known_rows_are_read_again_and_others_never(
    variant: str, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit runs no tower for a sound that lies before it, and another sound is no hit; preemption encodes again."""
    directory = checkpoints(variant)
    model, audio = model_that_hears(directory), audio_of(directory)
    count = 40 * audio.frames_per_row
    long = sound_span(60, random_sound(count, audio, seed=1), seed=1)
    tokens = heard_prompt(180, (long,), seed=8)
    other = replace(long, embeddings=random_sound(count, audio, seed=2), key=b"other" + bytes(11))
    asked = [(long,), (long,), (other,)]
    ran = Sounds(monkeypatch)
    requests = tuple(Forced(tokens, 176, arrives=20 * i, spans=s) for i, s in enumerate(asked))
    done = replay(model, Traffic(requests, chunk=64, prefix_caching=True))
    assert min(done.positions[1]) > long.end
    assert min(done.positions[2]) <= long.start
    assert sum(chain.from_iterable(ran.runs)) == 80
    for positions, logits, held in zip(done.positions, done.logits, asked, strict=True):
        wanted = heard_logits(directory, tokens, held).log_softmax(-1)[positions]
        assert differs(logits, wanted) <= TOLERANCE
    old = Forced(tuple(random_tokens(140, seed=1)), 60)
    held = spans(directory)[:2]
    young = Forced(heard_prompt(140, held, seed=6), 62, arrives=1, spans=held)
    geometry = geometry_of(model)
    pool = 2 * (geometry.held_bytes(140) - geometry.global_page.page_bytes)
    done = replay(model, Traffic((old, young), chunk=40, pool_bytes=pool), audited=False)
    assert done.preemptions > 0
    wanted = heard_logits(directory, young.token_ids, young.spans).log_softmax(-1)[:139]
    assert differs(done.logits[1], wanted) <= TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_exact_rows_know_neither_chunks_nor_neighbours(variant: str, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints(variant)
    model = load_checkpoint(directory, operations=PLAIN_EXACT, audio=audio_of(directory))
    alone, cut = (replay(model, Traffic((heard(directory),), chunk=chunk)).logits[0] for chunk in (512, 7))
    assert differs(alone, expected(directory)[1]) <= TOLERANCE
    if variant == "E2B":
        assert torch.equal(alone, cut)
    assert differs(cut, expected(directory)[1]) <= TOLERANCE


def test_tensors_are_read_where_sounds_are_planned_alone(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """Each by name: one that is absent, misshapen or quantised is refused by it; text alone does not care."""
    directory = checkpoints("E2B")
    audio, tower = audio_of(directory), tower_of(directory)
    assert sorted(tuple(each.shape) for each in tower.parameters()) == sorted(audio_shapes(audio, 64))
    assert load_checkpoint(directory).audio_embedder is None
    assert inspect_checkpoint(directory).audio == audio
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    down = "model.audio_tower.layers.1.feed_forward2.ffw_layer_2"
    tensors = load_file(tmp_path / "model.safetensors")
    for changed, words in (
        ({f"{down}.output_max": None}, rf"tensor '{down}.output_max' is in no file"),
        ({f"{down}.linear.weight": torch.ones(32, 7)}, r"ffw_layer_2\.linear\.weight.* has shape \[32, 7\], expected"),
        ({f"{down}.linear.weight_scale": torch.ones(1)}, r"ffw_layer_2\.linear\.weight_scale' .* is quantised"),
        ({"model.audio_tower.post.weight": torch.ones(3)}, r"unexpected tensor 'model\.audio_tower\.post\.weight'"),
    ):
        held = {name: each for name, each in (tensors | changed).items() if each is not None}
        save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
        load_checkpoint(tmp_path)
        with pytest.raises(InvalidCheckpoint, match=words):
            load_checkpoint(tmp_path, audio=audio)
        assert (inspect_checkpoint(tmp_path).audio is None) == ("quant" in words)
    deaf = {name: each for name, each in tensors.items() if "audio" not in name}
    save_file(deaf, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert inspect_checkpoint(tmp_path).audio is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_kept_rows_are_counted_to_the_byte(variant: str, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints(variant)
    model, audio = model_that_hears(directory), audio_of(directory)
    architecture = model.architecture.model_copy(update={"dtype": "float32"})
    assert model.parameter_bytes() - load_checkpoint(directory).parameter_bytes() == audio_embedder_bytes(
        audio, architecture, segments=False
    )
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 64}
    room = AudioInput(1, 4, audio)
    most = embedded_rows.MostRows(sound=room.max_soft_tokens)
    slots = embedded_rows.SlotEmbeddings(model, device=torch.device("cpu"), most=most, **limits)
    assert slots.kept_bytes == kept_sounds_bytes(room, architecture, max_num_seqs=3)


@pytest.mark.drawn
@pytest.mark.parametrize("seconds", [(30,), (11, 9, 20), (4,) * 8])
@pytest.mark.parametrize("heads", [8, 2])
def test_what_a_plan_counts_is_what_is_allocated(
    seconds: tuple[int, ...], heads: int, checkpoints: Callable[[str], Path]
) -> None:
    """In the proportions of E4B's tower: convolutions hold the most of a long sound, layers of many short ones."""
    directory = checkpoints("E2B")
    model, audio = model_that_hears(directory), audio_of(directory)
    architecture = model.architecture.model_copy(update={"dtype": "float32"})
    assert audio.tower is not None
    tower = audio.tower.model_copy(update={"hidden_size": 256, "heads": heads, "channels": (128, 32)})
    audio = audio.model_copy(update={"tower": tower})
    wide = AudioTower(audio, 64, model.placement)
    torch.manual_seed(1)
    for each in wide.parameters():
        each.copy_(torch.randn(each.shape) * 0.1)
    sounds = [random_sound(audio.frames(16_000 * each), audio, seed=each) for each in seconds]
    rows_of_sounds(sounds, wide)  # bounds are read
    with AllocatedBytes() as allocated:
        made = rows_of_sounds(sounds, wide)
    counted = audio_rows_bytes(AudioInput(8, max(seconds), audio), architecture, max_num_batched_tokens=len(made))
    assert 0.8 * counted <= allocated.most + made.nbytes <= counted, "the rows are once more in the step"


def test_which_spans_of_sounds_are_refused(checkpoints: Callable[[str], Path]) -> None:
    audio = audio_of(checkpoints("E2B"))
    good = random_sound(9, audio, seed=1)
    for frames, values, words in (
        (good, 0, "frames of a sound, and the model takes none"),
        (replace(good, values=good.values[:, :5]), 128, r"frames of shape \[9, 5\]; they must be \[rows, 128\]"),
        (replace(good, values=good.values.astype(np.float64)), 128, "frames of float64; they must be float32"),
        (replace(good, rows=0), 128, "0 rows of 9 frames"),
        (replace(good, rows=10), 128, "10 rows of 9 frames"),
    ):
        request = Request("x", [1] * 20, SamplingParams(seed=0, max_tokens=1), spans=(sound_span(2, frames, seed=1),))
        with pytest.raises(InvalidInput, match=words):
            check_spans(request, 512, hidden_size=64, patch_values=0, frame_values=values)


def test_which_conformers_are_refused(checkpoints: Callable[[str], Path]) -> None:
    config = json.loads((checkpoints("E2B") / "config.json").read_text())
    audio = config["audio_config"]
    for changes, kind, words in (
        ({"hidden_act": "relu"}, UnsupportedModel, r"hidden_act 'relu': encoders of Gemma 4 have 'silu'; leave"),
        ({"attention_context_left": 9}, UnsupportedModel, "attention_context_left 9: .* have 13"),
        ({"attention_context_right": 2}, UnsupportedModel, "attention_context_right 2"),
        ({"hidden_size": 30}, InvalidInput, "30 is not 4 heads"),
        ({"conv_kernel_size": 40}, InvalidInput, "convolution that looks at 40 frames"),
        ({"subsampling_conv_channels": [1, 2, 3]}, InvalidInput, "audio_config"),
        ({"num_hidden_layers": None}, InvalidInput, "audio_config"),
    ):
        with pytest.raises(kind, match=words):
            AudioArchitecture.from_config(config | {"audio_config": audio | changes})
    lacking = {name: value for name, value in audio.items() if name != "num_attention_heads"}
    with pytest.raises(InvalidInput, match=r"lacks 'audio_config\.num_attention_heads'"):
        AudioArchitecture.from_config(config | {"audio_config": lacking})
    for without in ({"audio_config": None}, {"model_type": "gemma3"}):
        with pytest.raises(UnsupportedModel, match="E2B, E4B and the unified 12B hear"):
            AudioArchitecture.from_config(config | without)
        assert AudioArchitecture.found(config | without) is None
    assert audio_of(checkpoints("E2B")).problem(30) is None
    assert "longer than the 30 s" in (audio_of(checkpoints("E2B")).problem(31) or "")
    assert audio_of(checkpoints("12B")).problem(600) is None
