"""Sizes, soft tokens and patches of images are those of transformers' processors, whatever the file."""

from __future__ import annotations

import ast
import io
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from modelserve.model.images import BUDGETS, ImageArchitecture, resized, soft_tokens
from modelserve.sizing.media.image_input import ImageInput
from modelserve_worker.embedded_spans import ImagePatches
from modelserve_worker.media.decode_pool import DecodePool
from modelserve_worker.media.image_decoder import on_white
from modelserve_worker.media.image_header import read_image_header
from modelserve_worker.media.image_reader import ImageReader
from modelserve_worker.models.image_tower import small_patches, small_places

SIDE = 48
UNIFIED = ImageArchitecture(patch_side=SIDE, embed_size=64, positions=1120, mutual=True)


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    reader = ImageReader(ImageInput(4, 1120, UNIFIED), DecodePool(1), known_bytes=0)
    yield reader
    reader.close()


def image_of(mode: str, height: int, width: int, *, seed: int) -> Image.Image:
    """Noise, and shapes under it."""
    generator = np.random.default_rng(seed)
    bands = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "P": 3, "CMYK": 4, "1": 1}[mode]
    rough = generator.integers(0, 256, (max(1, height // 7), max(1, width // 7), bands))
    values = np.kron(rough, np.ones((8, 8, 1)))[:height, :width]
    values = np.pad(values, [(0, height - values.shape[0]), (0, width - values.shape[1]), (0, 0)], mode="edge")
    values = np.clip(values + generator.normal(0, 12, values.shape), 0, 255).astype(np.uint8)
    if mode in ("L", "1"):
        return Image.fromarray(values[..., 0]).convert(mode)
    if mode == "P":
        return Image.fromarray(values).quantize(64)
    return Image.frombytes(mode, (width, height), values.tobytes())


def files(seed: int) -> bytes:
    """A file of a random format, mode, size and orientation."""
    draw = random.Random(seed)
    high, wide = (int(math.exp(draw.uniform(0, math.log(700)))) for _ in range(2))
    kind, mode = draw.choice(
        [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "P"),
         ("PNG", "1"), ("WEBP", "RGB"), ("WEBP", "RGBA"), ("GIF", "P"), ("GIF", "RGB")]
    )  # fmt: skip
    image = image_of(mode, high, wide, seed=seed)
    options: dict[str, Any] = {}
    if kind != "GIF" and draw.random() < 0.6:
        exif = Image.Exif()
        exif[0x0112] = draw.randint(1, 8)
        options["exif"] = exif
    if kind == "JPEG":
        options |= {"quality": draw.randint(40, 98), "progressive": draw.random() < 0.5}
    if kind == "WEBP":
        options["lossless"] = draw.random() < 0.5
    if mode == "P" and draw.random() < 0.5:
        options["transparency"] = 3
    if kind == "GIF" and draw.random() < 0.5:
        options |= {"save_all": True, "append_images": [image_of("RGB", high, wide, seed=seed + 1)]}
    held = io.BytesIO()
    image.save(held, kind, **options)
    return held.getvalue()


def merged(values: torch.Tensor, positions: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By the reference's own function, whose module wants torchvision to be imported."""
    import transformers.models.gemma4_unified as package

    source = (Path(package.__path__[0]) / "image_processing_gemma4_unified.py").read_text()
    function = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "patches_merge")
    names: dict[str, Any] = {"torch": torch, "math": math}
    exec(compile(ast.Module([function], []), "reference", "exec"), names)
    return names["patches_merge"](values[None], positions[None], count)  # type: ignore[no-any-return]


def expected(data: bytes, budget: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Merged patches in float32 and their positions."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    made = Gemma4ImageProcessorPil(max_soft_tokens=budget)(upright, return_tensors="pt")
    count = int(made["num_soft_tokens_per_image"][0])
    values, positions = (made[name][0][: 9 * count] for name in ("pixel_values", "image_position_ids"))
    patches, places = merged(values, positions, count)
    return patches[0].numpy(), places[0].numpy()


def same(patches: ImagePatches, data: bytes, budget: int) -> None:
    values, places = expected(data, budget)
    assert np.array_equal(patches.positions(), places)
    assert np.array_equal(patches.values.astype(np.float32) / np.float32(255), values)


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(24))
def test_patches_of_random_files(seed: int, reader: ImageReader) -> None:
    """Through the process that decodes; the number of soft tokens is known before."""
    data = files(seed)
    budget = (70, 140, 280)[seed % 3]
    image = reader.look(data, budget)
    patches = reader.patches(image, "")
    assert len(patches) == image.soft_tokens
    same(patches, data, budget)


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(40, 48))
def test_small_patches_of_random_files(seed: int, reader: ImageReader) -> None:
    """Those of a tower, each where the reference has it, bit by bit."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    data, budget = files(seed), (70, 140, 280)[seed % 3]
    patches = reader.patches(reader.look(data, budget), "")
    values = small_patches(torch.from_numpy(patches.values.copy()), pooled=3, side=16)
    places = torch.from_numpy(small_places(patches, 3))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    made = Gemma4ImageProcessorPil(max_soft_tokens=budget)(upright, return_tensors="pt")
    assert len(values) == 9 * int(made["num_soft_tokens_per_image"][0])
    numbers = places[:, 1] * 3 * patches.columns + places[:, 0]
    assert torch.equal(numbers.sort().values, torch.arange(len(values))), "each once"
    assert torch.equal(made["image_position_ids"][0][numbers], places)
    assert torch.equal(made["pixel_values"][0][numbers], values.float() / 255)


def test_headers_of_many_files_say_what_pillow_does() -> None:
    for seed in range(100, 160):
        data = files(seed)
        header = read_image_header(data)
        opened = Image.open(io.BytesIO(data))
        assert (header.format, header.width, header.height) == (opened.format, *opened.size), seed
        upright = ImageOps.exif_transpose(opened)
        assert header.turned == (upright.height, upright.width), seed
        assert header.orientation == opened.getexif().get(0x0112, 1), seed


def test_an_image_larger_than_a_strip_lies_on_white_as_a_whole_one_does() -> None:
    image = image_of("RGBA", 90, 61, seed=3)
    assert on_white(image, strip_pixels=700).tobytes() == on_white(image).tobytes()


def test_sizes_and_soft_tokens_are_the_references() -> None:
    """Thousands of random ones, and the extremes; every result is within its budget."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size as reference

    draw = random.Random(1)
    sizes = [(1, 1), (1, 100_000), (100_000, 1), (3, 900), (900, 3), (47, 49), (8000, 8000), (1000, 1500), (3000, 4000)]
    sizes += [(draw.randint(1, 9000), draw.randint(1, 9000)) for _ in range(7000)]
    sizes += [(draw.randint(1, 60), draw.randint(1, 100_000)) for _ in range(3000)]
    for number, (high, wide) in enumerate(sizes):
        for budget in BUDGETS if number < 9 else (BUDGETS[number % 5],):
            asked = {"patch_size": 16, "max_patches": 9 * budget, "pooling_kernel_size": 3}
            made = resized(high, wide, budget=budget, patch_side=SIDE)
            assert made == reference(high, wide, **asked), (high, wide, budget)
            assert 1 <= soft_tokens(high, wide, budget=budget, patch_side=SIDE) <= budget
    known = {(1, 1): 256, (1000, 1500): 260, (3000, 4000): 266, (1080, 1920): 264, (3, 900): 280}
    assert {size: soft_tokens(*size, budget=280, patch_side=SIDE) for size in known} == known
    assert soft_tokens(3, 900, budget=1120, patch_side=SIDE) == 579
