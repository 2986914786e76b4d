"""Prompts with images of the unified model say what transformers says of the same pixels, however they are computed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from model_checkpoints import IMAGE_TOKEN, load_checkpoint, make_unified, random_tokens, rewrite
from paged_logits import Forced, Traffic, geometry_of, replay
from safetensors.torch import load_file, save_file
from torch import Tensor
from unified_reference import BEGIN, END, image_span, random_image, reference_rows, seen_logits, seen_prompt

from modelserve.errors import InvalidInput, UnsupportedModel
from modelserve.model.images import ImageArchitecture
from modelserve.sizing.media.embedder import embedder_shapes
from modelserve_worker.embedded_spans import EmbeddedSpan
from modelserve_worker.kernels.operations import PLAIN_EXACT
from modelserve_worker.models.gemma4 import Gemma4ForCausalLM
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.prompt_spans import check_spans
from modelserve_worker.step.image_rows import rows_of
from modelserve_worker.weights.files import InvalidCheckpoint

TOLERANCE = 2e-4
LENGTH = 100


@pytest.fixture(scope="session")
def unified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unified")
    make_unified(directory, seed=3)
    return directory


def images_of(directory: Path) -> ImageArchitecture:
    return ImageArchitecture.from_config(json.loads((directory / "config.json").read_text()))


@cache
def model_that_sees(directory: Path) -> Gemma4ForCausalLM:
    return load_checkpoint(directory, images=images_of(directory))


@cache
def spans() -> tuple[EmbeddedSpan, ...]:
    """Less than a window; two neighbours with their marks alone between them, one of more than three windows; and one
    patch."""
    pictures = ((4, 2, 3), (14, 5, 6), (46, 3, 4), (70, 1, 1))
    return tuple(image_span(at, random_image(high, wide, seed=at), seed=at) for at, high, wide in pictures)


@cache
def expected(directory: Path) -> tuple[tuple[int, ...], Tensor]:
    tokens = seen_prompt(LENGTH, spans(), seed=5)
    return tokens, seen_logits(directory, tokens, spans()).log_softmax(-1)[: LENGTH - 1]


def seen(directory: Path, **changes: int) -> Forced:
    return replace(Forced(expected(directory)[0], LENGTH - 4, spans=spans()), **changes)


def differs(logits: Tensor, wanted: Tensor) -> float:
    return float((logits.log_softmax(-1) - wanted).abs().max())


def test_rows_of_patches(unified: Path) -> None:
    """Of images of different shapes; a place of its own is in each row."""
    embedder = model_that_sees(unified).image_embedder
    assert embedder is not None
    pictures = [random_image(3, 5, seed=1), random_image(7, 2, seed=2), random_image(1, 90, seed=3)]
    for patches, wanted in zip(pictures, reference_rows(unified, pictures), strict=True):
        assert float((rows_of([patches], embedder) - wanted).abs().max()) <= 2e-5
        turned = rows_of([replace(patches, columns=patches.columns + 1)], embedder)
        assert len(patches) == patches.columns or float((turned - wanted).abs().max()) > 0.1


@pytest.mark.drawn
@pytest.mark.parametrize("chunk", [30, 37, 512])
def test_one_prompt_in_chunks(unified: Path, chunk: int) -> None:
    """The longest image fills the shortest chunk."""
    done = replay(model_that_sees(unified), Traffic((seen(unified),), chunk=chunk))
    assert differs(done.logits[0], expected(unified)[1]) <= TOLERANCE


def test_beside_others_and_two_steps_in_flight(unified: Path) -> None:
    others = tuple(
        Forced(tuple(random_tokens(length, seed=length)), length // 2, arrives=i) for i, length in enumerate((40, 7))
    )
    traffic = Traffic((*others, seen(unified, arrives=1), seen(unified, arrives=3)), chunk=48, steps_in_flight=2)
    done = replay(model_that_sees(unified), traffic)
    for logits in done.logits[2:]:
        assert differs(logits, expected(unified)[1]) <= TOLERANCE


def test_the_comparison_notices_what_it_must(unified: Path) -> None:
    """A causal image, neighbours that see each other, other pixels, a picture of another shape: not one is close."""
    tokens, wanted = expected(unified)
    first, long, after, one = spans()
    joined = replace(long, embeddings=random_image(4, 11, seed=1))
    assert joined.end == after.end
    marks = tuple(IMAGE_TOKEN if long.start <= at < after.end else token for at, token in enumerate(tokens))
    assert marks != tokens
    faults = {
        "causal": (first, replace(long, mutual=False), after, one),
        "other pixels": (first, long, replace(after, embeddings=random_image(3, 4, seed=99)), one),
        "another shape": (first, replace(long, embeddings=replace(long.embeddings, columns=5)), after, one),
        "neighbours are one": (first, joined, one),
    }
    for name, held in faults.items():
        ids = marks if name == "neighbours are one" else tokens
        done = replay(model_that_sees(unified), Traffic((Forced(ids, LENGTH - 4, spans=held),)))
        assert differs(done.logits[0], wanted) > 100 * TOLERANCE, name


def test_neighbours_stay_apart(unified: Path) -> None:
    """What the second of two shows changes no row before it, in any layer; and changes those behind."""
    model = model_that_sees(unified)
    first, long, after, one = spans()
    tokens, _ = expected(unified)
    assert tokens[long.end : after.start] == (END, BEGIN)
    held = [replay(model, Traffic((Forced(tokens, LENGTH - 4, spans=s),))).logits[0] for s in (
        spans(), (first, long, replace(after, embeddings=random_image(3, 4, seed=99)), one),
    )]  # fmt: skip
    assert torch.equal(held[0][: after.start], held[1][: after.start])
    assert float((held[0][after.start :] - held[1][after.start :]).abs().max()) > 0.01


def test_known_rows_are_read_again_and_others_never(unified: Path) -> None:
    """With a hit in an image too, behind which its last rows are embedded alone; and preemption computes them again."""
    model = model_that_sees(unified)
    picture = image_span(60, random_image(4, 10, seed=1), seed=1)
    tokens = seen_prompt(180, (picture,), seed=8)
    other = replace(picture, embeddings=random_image(4, 10, seed=2), key=b"other" + bytes(11))
    asked = [(picture,), (picture,), (other,)]
    requests = tuple(Forced(tokens, 176, arrives=20 * i, spans=s) for i, s in enumerate(asked))
    done = replay(model, Traffic(requests, chunk=64, prefix_caching=True))
    assert min(done.positions[1]) > picture.end
    assert min(done.positions[2]) <= picture.start
    for positions, logits, held in zip(done.positions, done.logits, asked, strict=True):
        wanted = seen_logits(unified, tokens, held).log_softmax(-1)[positions]
        assert differs(logits, wanted) <= TOLERANCE


def test_preempted_and_embedded_again(unified: Path) -> None:
    model = model_that_sees(unified)
    old = Forced(tuple(random_tokens(140, seed=1)), 60)
    young = Forced(seen_prompt(140, spans()[:2], seed=6), 52, arrives=1, spans=spans()[:2])
    geometry = geometry_of(model)
    pool = 2 * (geometry.held_bytes(140) - geometry.global_page.page_bytes)
    done = replay(model, Traffic((old, young), chunk=40, pool_bytes=pool), audited=False)
    assert done.preemptions > 0
    wanted = seen_logits(unified, young.token_ids, young.spans).log_softmax(-1)[:139]
    assert differs(done.logits[1], wanted) <= TOLERANCE


def test_exact_rows_do_not_know_their_chunks(unified: Path) -> None:
    model = load_checkpoint(unified, operations=PLAIN_EXACT, images=images_of(unified))
    alone, cut = (replay(model, Traffic((seen(unified),), chunk=chunk)).logits[0] for chunk in (512, 30))
    assert torch.equal(alone, cut)
    assert differs(alone, expected(unified)[1]) <= TOLERANCE


def test_tensors_are_read_where_images_are_planned_alone(unified: Path, tmp_path: Path) -> None:
    """Without them the model is text's, to the byte, and tensors that are broken harm nobody."""
    text, sees = load_checkpoint(unified), model_that_sees(unified)
    shapes = embedder_shapes(images_of(unified), 64)
    assert sees.image_embedder is not None
    assert sorted(tuple(each.shape) for each in sees.image_embedder.parameters()) == sorted(shapes)
    assert text.image_embedder is None
    assert {name for name, _ in sees.named_parameters() if "image_embedder" not in name} == {
        name for name, _ in text.named_parameters()
    }
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in unified.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    rewrite(copy, add={"model.vision_embedder.patch_dense.weight": torch.ones(40, 300)})
    load_checkpoint(copy)
    with pytest.raises(InvalidCheckpoint, match=r"patch_dense\.weight.* has shape \[40, 300\], expected \[40, 6912\]"):
        load_checkpoint(copy, images=images_of(copy))
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.vision_embedder.patch_dense.weight"]
    tensors["model.vision_embedder.patch_dense.weight_packed"] = torch.ones(40, 864, dtype=torch.int32)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InvalidCheckpoint,
        match=r"vision_embedder\.patch_dense\.weight_packed' in .*\(I32\) is quantised, .* text alone",
    ):
        load_checkpoint(copy, images=images_of(copy))


def test_which_configs_are_refused(unified: Path) -> None:
    config = json.loads((unified / "config.json").read_text())
    vision = config["vision_config"]
    for changed, kind, words in (
        (config | {"model_type": "gemma3"}, UnsupportedModel, "'gemma3': images are taken with gemma4 and gemma4_unif"),
        (config | {"vision_config": None}, UnsupportedModel, "no vision_config"),
        (
            config | {"vision_config": vision | {"output_proj_dims": 64}},
            UnsupportedModel,
            "output_proj_dims 64 differs",
        ),
        (config | {"vision_config": vision | {"patch_size": "x"}}, InvalidInput, "vision_config"),
        (config | {"vision_config": {}}, InvalidInput, "lacks 'vision_config.mm_embed_dim'"),
    ):
        with pytest.raises(kind, match=words):
            ImageArchitecture.from_config(changed)


@pytest.mark.parametrize(
    ("patch_values", "columns", "words"),
    [(0, 3, "the model takes none"), (300, 3, r"must be \[rows, 300\]"), (6912, 0, "in 0 columns")],
)
def test_an_engine_refuses_patches_that_it_cannot_embed(patch_values: int, columns: int, words: str) -> None:
    patches = replace(random_image(2, 3, seed=1), columns=columns)
    span = image_span(5, patches, seed=1)
    request = Request("r", [7] * 40, SamplingParams(seed=0, max_tokens=1), spans=(span,))
    with pytest.raises(InvalidInput, match=words):
        check_spans(request, 512, hidden_size=64, patch_values=patch_values, frame_values=0)
