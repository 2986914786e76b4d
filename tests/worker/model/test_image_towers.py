"""Prompts with images of models with towers say what transformers says of the same pixels, however they are computed.

E2B has a clipped tower, per-layer embeddings and causal images; 31B and 26B-A4B a standardised one and images whose
rows see each other in sliding layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated_bytes import AllocatedBytes
from model_checkpoints import load_checkpoint, make_towered, random_tokens
from paged_logits import Forced, Traffic, geometry_of, replay
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from unified_reference import image_span, random_image, reference_rows, seen_logits, seen_prompt

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.inspection import inspect_checkpoint
from modelserve.model.images import ImageArchitecture
from modelserve.sizing.media.embedder import embedder_bytes, embedder_shapes, image_rows_bytes, kept_rows_bytes
from modelserve.sizing.media.image_input import ImageInput
from modelserve_worker.embedded_spans import EmbeddedSpan
from modelserve_worker.kernels.operations import PLAIN_EXACT
from modelserve_worker.models import image_tower
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.models.image_tower import ImageTower
from modelserve_worker.models.tower_linear import TowerLinear
from modelserve_worker.step import embedded_rows
from modelserve_worker.step.image_rows import KeptRows, packed, rows_of
from modelserve_worker.weights.files import InvalidCheckpoint

TOLERANCE = 2e-4
LENGTH = 100
PICTURES = [(3, 5), (7, 2), (1, 12)]  # rows and columns of soft tokens


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(variant: str) -> Path:
        directory = tmp_path_factory.mktemp(variant)
        make_towered(variant, directory, seed=3)
        return directory

    return make


def images_of(directory: Path) -> ImageArchitecture:
    return ImageArchitecture.from_config(json.loads((directory / "config.json").read_text()))


@cache
def model_that_sees(directory: Path) -> Gemma4ForCausalLM:
    return load_checkpoint(directory, images=images_of(directory))


def tower_of(directory: Path) -> ImageTower:
    tower = model_that_sees(directory).image_embedder
    assert isinstance(tower, ImageTower)
    return tower


@cache
def spans(directory: Path) -> tuple[EmbeddedSpan, ...]:
    """Less than a window; two neighbours with their marks alone between them, one of more than three windows; and one
    of a single row."""
    mutual = images_of(directory).mutual
    pictures = ((4, 2, 3), (14, 5, 6), (46, 3, 4), (70, 1, 1))
    return tuple(
        image_span(at, random_image(high, wide, seed=at), seed=at, mutual=mutual) for at, high, wide in pictures
    )


@cache
def expected(directory: Path) -> tuple[tuple[int, ...], Tensor]:
    tokens = seen_prompt(LENGTH, spans(directory), seed=5)
    return tokens, seen_logits(directory, tokens, spans(directory)).log_softmax(-1)[: LENGTH - 1]


def seen(directory: Path, **changes: Any) -> Forced:
    return replace(Forced(expected(directory)[0], LENGTH - 4, spans=spans(directory)), **changes)


def differs(logits: Tensor, wanted: Tensor) -> float:
    return float((logits.log_softmax(-1) - wanted).abs().max())


@cache
def wanted_rows(directory: Path) -> list[Tensor]:
    return reference_rows(directory, [random_image(*size, seed=size[0]) for size in PICTURES])


def rows_off(directory: Path) -> float:
    """Of several images that are encoded together, how far the worst row is off."""
    pictures = [random_image(*size, seed=size[0]) for size in PICTURES]
    made = torch.split(rows_of(pictures, tower_of(directory)), [len(each) for each in pictures])
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(made, wanted_rows(directory), strict=True))


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_rows_of_images_alone_and_packed(variant: str, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints(variant)
    assert rows_off(directory) <= 2e-5
    for size, wanted in zip(PICTURES, wanted_rows(directory), strict=True):
        alone = rows_of([random_image(*size, seed=size[0])], tower_of(directory))
        assert float((alone - wanted).abs().max()) <= 2e-5


def _all_together(self: Any, x: Tensor, turn: tuple[Tensor, Tensor], lengths: list[int]) -> Tensor:
    return _ATTENDED(self, x, turn, [sum(lengths)])


def _by_consecutive_rows(values: Tensor, *, pooled: int, side: int) -> Tensor:
    """Soft tokens whose patches are one behind the other in the image, and not a square of it."""
    squares = _SMALL(values, pooled=pooled, side=side).view(-1, pooled, pooled, 3 * side**2)
    return squares.transpose(1, 2).reshape(-1, 3 * side**2)


_ATTENDED, _SMALL = image_tower.TowerLayer._attended, image_tower.small_patches
_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "images see each other": (image_tower.TowerLayer, "_attended", _all_together),
    "patches in another order": (image_tower, "small_patches", _by_consecutive_rows),
    "columns are rows": (image_tower, "small_places", lambda *given: _PLACES(*given)[:, ::-1].copy()),
    "nothing is turned": (image_tower, "turned", lambda x, _: x),
    "turned by rows and columns": (image_tower, "angles", lambda places, **given: _ANGLES(places.flip(1), **given)),
    "the largest of a square": (ImageTower, "_pooled", lambda self, x: _pooled(self, x, "amax")),
    "sums of a square": (ImageTower, "_pooled", lambda self, x: _pooled(self, x, "sum")),
}
_OF_NO_EFFECT = ("E2B", "sums of a square")  # nothing but a norm, which takes their scale, comes behind them
_PLACES, _ANGLES = image_tower.small_places, image_tower.angles


def _pooled(tower: ImageTower, x: Tensor, how: str) -> Tensor:
    y = getattr(x.view(-1, 9, x.shape[-1]), how)(1) * x.shape[-1] ** 0.5
    if tower.bias is not None and tower.scale is not None:
        y = (y - tower.bias) * tower.scale
    return functional.rms_norm(y, y.shape[-1:], eps=1e-6)


@pytest.mark.parametrize(
    ("variant", "fault"),
    [(variant, fault) for variant in ("E2B", "31B") for fault in _FAULTS if (variant, fault) != _OF_NO_EFFECT],
)
def test_the_comparison_of_rows_notices(
    variant: str, fault: str, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*_FAULTS[fault])
    assert rows_off(checkpoints(variant)) > 0.01


@pytest.mark.parametrize(
    ("variant", "field", "value"), [("E2B", "bounds", None), ("31B", "bias", None), ("31B", "scale", "ones")]
)
def test_bounds_and_standards_are_noticed(
    variant: str, field: str, value: Any, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each linear's bounds by themselves, of what goes in and of what comes out; and what standardises."""
    tower = tower_of(checkpoints(variant))
    if field != "bounds":
        held = getattr(tower, field)
        other = torch.nn.Parameter(torch.ones_like(held), requires_grad=False) if value == "ones" else None
        monkeypatch.setitem(tower._parameters, field, other)
        assert rows_off(checkpoints(variant)) > 0.01
        return
    for name in ("qkv", "o", "gate_up", "down"):
        linear = getattr(tower.layers[1], name)
        limits = linear._limits
        for side in (slice(0, 2), slice(2, 4)):
            loose = [list(each) for each in limits]
            for each in loose:
                each[side] = [-1e9, 1e9]
            with monkeypatch.context() as patched:
                patched.setitem(linear.__dict__, "_limits", loose)
                assert rows_off(checkpoints(variant)) > 1e-3, (name, side)


def test_one_product_where_bounds_are_alike(checkpoints: Callable[[str], Path]) -> None:
    """As of queries, keys and values, which have the same input: the same numbers as each by itself."""
    linear = tower_of(checkpoints("E2B")).layers[0].qkv  # type: ignore[union-attr]
    assert isinstance(linear, TowerLinear)
    assert linear.bounds is not None
    alike = TowerLinear.__new__(TowerLinear)
    torch.nn.Module.__init__(alike)
    alike.outputs, alike.weight = linear.outputs, linear.weight
    alike.bounds = torch.nn.Parameter(linear.bounds.clone(), requires_grad=False)
    alike.bounds[1:, :2] = alike.bounds[0, :2]
    x = torch.randn(7, 32)
    parts = zip(torch.split(alike.weight, list(alike.outputs)), alike.bounds, strict=True)
    wanted = [functional.linear(x.clamp(*low), each).clamp(*high) for each, (low, high) in (
        (matrix, (bounds[:2].tolist(), bounds[2:].tolist())) for matrix, bounds in parts
    )]  # fmt: skip
    assert torch.allclose(alike(x), torch.cat(wanted, -1), atol=1e-6)


@pytest.mark.drawn
@pytest.mark.parametrize("chunk", [30, 37, 512])
@pytest.mark.parametrize("variant", ["E2B", "31B", "26B-A4B"])
def test_one_prompt_in_chunks(variant: str, chunk: int, checkpoints: Callable[[str], Path]) -> None:
    """The longest image fills the shortest chunk; of E2B chunks end inside images."""
    directory = checkpoints(variant)
    done = replay(model_that_sees(directory), Traffic((seen(directory),), chunk=chunk))
    assert differs(done.logits[0], expected(directory)[1]) <= TOLERANCE


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_beside_others_and_two_steps_in_flight(variant: str, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints(variant)
    others = tuple(
        Forced(tuple(random_tokens(length, seed=length)), length // 2, arrives=i) for i, length in enumerate((40, 7))
    )
    traffic = Traffic((*others, seen(directory, arrives=1), seen(directory, arrives=3)), chunk=48, steps_in_flight=2)
    done = replay(model_that_sees(directory), traffic)
    for logits in done.logits[2:]:
        assert differs(logits, expected(directory)[1]) <= TOLERANCE


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_a_wrong_mask_and_other_pixels_are_noticed(variant: str, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints(variant)
    tokens, wanted = expected(directory)
    first, long, after, one = spans(directory)
    for name, held in {
        "another mask": (first, replace(long, mutual=not long.mutual), after, one),
        "other pixels": (first, long, replace(after, embeddings=random_image(3, 4, seed=99)), one),
        "another shape": (first, replace(long, embeddings=replace(long.embeddings, columns=5)), after, one),
    }.items():
        done = replay(model_that_sees(directory), Traffic((Forced(tokens, LENGTH - 4, spans=held),)))
        assert differs(done.logits[0], wanted) > 10 * TOLERANCE, name


class Towers:
    """How many soft tokens each run of a tower had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[list[int]] = []
        monkeypatch.setattr(embedded_rows, "rows_of", self)

    def __call__(self, images: Any, embedder: Any) -> Tensor:
        self.runs.append([len(each) for each in images])
        return rows_of(images, embedder)


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_an_image_is_encoded_once(
    variant: str, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its rows are cut into chunks, and together with the others of its step; nothing is kept behind it."""
    directory = checkpoints(variant)
    ran = Towers(monkeypatch)
    longer = 0 if images_of(directory).mutual else 25
    done = replay(model_that_sees(directory), Traffic((seen(directory),), chunk=30 - longer))
    assert sorted(chain.from_iterable(ran.runs)) == [1, 6, 12, 30]
    assert differs(done.logits[0], expected(directory)[1]) <= TOLERANCE
    ran.runs.clear()
    replay(model_that_sees(directory), Traffic((seen(directory),), chunk=512))
    assert ran.runs == [[6, 30, 12, 1]]


def test_without_room_it_is_encoded_again(checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoints("E2B")
    monkeypatch.setattr(embedded_rows, "kept_images", lambda *_, **__: 0)
    ran = Towers(monkeypatch)
    done = replay(model_that_sees(directory), Traffic((seen(directory),), chunk=5))
    assert len(ran.runs) > 4
    assert differs(done.logits[0], expected(directory)[1]) <= TOLERANCE


def test_rows_that_were_used_longest_ago_go_first() -> None:
    kept = KeptRows(2, 4, 3, dtype=torch.float32, device=torch.device("cpu"))
    assert kept.nbytes == 2 * 4 * 3 * 4
    for name in ((0, 0), (1, 0)):
        kept.keep(name, torch.full((3, 3), float(name[0])))
    assert kept.find((0, 0)) is not None
    kept.keep((2, 1), torch.full((4, 3), 2.0))
    assert kept.find((1, 0)) is None
    found = kept.find((2, 1))
    assert found is not None
    assert found.tolist() == [[2.0] * 3] * 4
    kept.keep((3, 0), torch.zeros(5, 3))
    assert kept.find((3, 0)) is None, "it is larger than any image may be"
    kept.drop_slot(2)
    kept.keep((4, 0), torch.zeros(1, 3))
    assert kept.find((0, 0)) is not None, "there was room"
    kept.drop((0, 0))
    kept.drop((0, 0))
    assert KeptRows(0, 4, 3, dtype=torch.float32, device=torch.device("cpu")).keep((0, 0), torch.zeros(1, 3)) is None


def test_images_are_packed_in_order() -> None:
    for lengths, most, wanted in (
        ([], 10, []), ([3], 2, [[3]]), ([3, 3, 3], 6, [[3, 3], [3]]), ([6, 1, 7, 2], 8, [[6, 1], [7], [2]]),
        ([3, 3], 0, [[3], [3]]),
    ):  # fmt: skip
        assert [lengths[each] for each in packed(lengths, most=most)] == wanted


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_known_rows_are_read_again_and_others_never(
    variant: str, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit runs no tower for an image that lies before it, and another image is no hit; preemption encodes again."""
    directory = checkpoints(variant)
    model, mutual = model_that_sees(directory), images_of(directory).mutual
    picture = image_span(60, random_image(4, 10, seed=1), seed=1, mutual=mutual)
    tokens = seen_prompt(180, (picture,), seed=8)
    other = replace(picture, embeddings=random_image(4, 10, seed=2), key=b"other" + bytes(11))
    asked = [(picture,), (picture,), (other,)]
    ran = Towers(monkeypatch)
    requests = tuple(Forced(tokens, 176, arrives=20 * i, spans=s) for i, s in enumerate(asked))
    done = replay(model, Traffic(requests, chunk=64, prefix_caching=True))
    assert min(done.positions[1]) > picture.end
    assert min(done.positions[2]) <= picture.start
    assert ran.runs == [[40], [40]]
    for positions, logits, held in zip(done.positions, done.logits, asked, strict=True):
        wanted = seen_logits(directory, tokens, held).log_softmax(-1)[positions]
        assert differs(logits, wanted) <= TOLERANCE
    old = Forced(tuple(random_tokens(140, seed=1)), 60)
    young = Forced(seen_prompt(140, spans(directory)[:2], seed=6), 52, arrives=1, spans=spans(directory)[:2])
    geometry = geometry_of(model)
    pool = 2 * (geometry.held_bytes(140) - geometry.global_page.page_bytes)
    done = replay(model, Traffic((old, young), chunk=40, pool_bytes=pool), audited=False)
    assert done.preemptions > 0
    wanted = seen_logits(directory, young.token_ids, young.spans).log_softmax(-1)[:139]
    assert differs(done.logits[1], wanted) <= TOLERANCE


def test_exact_rows_know_neither_chunks_nor_neighbours(checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints("E2B")
    model = load_checkpoint(directory, operations=PLAIN_EXACT, images=images_of(directory))
    alone, cut = (replay(model, Traffic((seen(directory),), chunk=chunk)).logits[0] for chunk in (512, 7))
    assert torch.equal(alone, cut)
    assert differs(alone, expected(directory)[1]) <= TOLERANCE


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_tensors_are_read_where_images_are_planned_alone(
    variant: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each by name: one that is absent, misshapen or quantised is refused by it; text alone does not care."""
    directory = checkpoints(variant)
    images, tower = images_of(directory), tower_of(directory)
    shapes = embedder_shapes(images, 64)
    assert sorted(tuple(each.shape) for each in tower.parameters()) == sorted(shapes)
    assert load_checkpoint(directory).image_embedder is None
    assert inspect_checkpoint(directory).images == images
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    down = "model.vision_tower.encoder.layers.1.mlp.down_proj"
    tensors = load_file(tmp_path / "model.safetensors")
    gone = f"{down}.output_max" if variant == "E2B" else "model.vision_tower.std_scale"
    for changed, words in (
        ({gone: None}, rf"tensor '{gone}' is in no file"),
        ({f"{down}.linear.weight": torch.ones(32, 7)}, r"down_proj\.linear\.weight.* has shape \[32, 7\], expected"),
        ({f"{down}.linear.weight_scale": torch.ones(1)}, r"down_proj\.linear\.weight_scale' .* is quantised"),
        ({f"{down}.linear.weight": tensors[f"{down}.linear.weight"].to(torch.float8_e4m3fn)}, r"\(F8_E4M3\) is quant"),
        ({"model.vision_tower.post.weight": torch.ones(3)}, r"unexpected tensor 'model\.vision_tower\.post\.weight'"),
    ):
        held = {name: each for name, each in (tensors | changed).items() if each is not None}
        save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
        load_checkpoint(tmp_path)
        with pytest.raises(InvalidCheckpoint, match=words):
            load_checkpoint(tmp_path, images=images)
        assert (inspect_checkpoint(tmp_path).images is None) == ("quant" in words)
    text = {name: each for name, each in tensors.items() if "vision" not in name}
    save_file(text, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert inspect_checkpoint(tmp_path).images is None


@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("lengths", [(40,), (11, 9, 20)])
def test_what_a_plan_counts_is_what_is_allocated(
    clipped: bool, lengths: tuple[int, ...], checkpoints: Callable[[str], Path]
) -> None:
    """Of weights and kept rows to the byte; of making rows at most, in the proportions of 31B's tower."""
    directory = checkpoints("E2B")
    model, images = model_that_sees(directory), images_of(directory)
    architecture = model.architecture.model_copy(update={"dtype": "float32"})
    assert model.parameter_bytes() - load_checkpoint(directory).parameter_bytes() == embedder_bytes(
        images, architecture, segments=False
    )
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 64}
    slots = embedded_rows.SlotEmbeddings(model, device=torch.device("cpu"), most=embedded_rows.MostRows(70), **limits)
    assert slots.kept_bytes == kept_rows_bytes(ImageInput(1, 70, images), architecture, max_num_seqs=3) > 0
    assert images.tower is not None
    tower = images.tower.model_copy(
        update={"hidden_size": 288, "intermediate_size": 1076, "heads": 4, "head_dim": 72, "clipped": clipped}
    )
    images = images.model_copy(update={"tower": tower, "embed_size": 288})
    wide = ImageTower(images, 64, model.placement)
    torch.manual_seed(1)
    for each in wide.parameters():
        each.copy_(torch.randn(each.shape) * 0.1)
    pictures = [random_image(1, length, seed=length) for length in lengths]
    rows_of(pictures, wide)  # bounds are read
    with AllocatedBytes() as allocated:
        made = rows_of(pictures, wide)
    total = sum(lengths)
    counted = image_rows_bytes(ImageInput(1, total, images), architecture, max_num_batched_tokens=total)
    assert 0.9 * counted <= allocated.most + made.nbytes <= counted, "the rows are once more in the step"


def test_which_towers_are_refused(checkpoints: Callable[[str], Path]) -> None:
    config = json.loads((checkpoints("31B") / "config.json").read_text())
    vision = config["vision_config"]
    problem = images_of(checkpoints("31B")).problem(max_soft_tokens=280, max_num_batched_tokens=512)
    assert problem is not None
    assert "positions for 170" in problem, "512 small patches"
    for changes, kind, words in (
        ({"num_key_value_heads": 1}, UnsupportedModel, r"num_key_value_heads 1: encoders of Gemma 4 have 2; .* text"),
        ({"hidden_activation": "relu"}, UnsupportedModel, "hidden_activation 'relu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, UnsupportedModel, "rope_type 'yarn'"),
        ({"attention_bias": True}, UnsupportedModel, "attention_bias True"),
        ({"head_dim": 18}, InvalidInput, "head_dim"),
        ({"num_hidden_layers": None}, InvalidInput, "vision_config"),
        ({"rope_parameters": "axial"}, InvalidInput, "vision_config"),
        ({"pooling_kernel_size": 0}, InvalidInput, "vision_config"),
    ):
        with pytest.raises(kind, match=words):
            ImageArchitecture.from_config(config | {"vision_config": vision | changes})
