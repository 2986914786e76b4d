"""Making rows of images is charged to the steps that do: how many of them a step makes, and who never waits."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from scheduled import Driver, Step
from stamped_device import StampedModel

from modelserve.model.architecture import LayerKind
from modelserve.planning.speed.encoding_cost import FREE, NO_ENCODING, EncodingCost, SpanCost
from modelserve.planning.speed.step_time import layer_parameters
from modelserve.published import published_model
from modelserve.sizing.media.audio_input import AudioInput
from modelserve.sizing.media.image_input import ImageInput
from modelserve_worker.embedded_spans import KEY_BYTES, AudioFrames, EmbeddedSpan, ImagePatches
from modelserve_worker.request import Request, SamplingParams
from modelserve_worker.scheduling.admission import SchedulerLimits
from modelserve_worker.scheduling.scheduler import Scheduler

GEOMETRY = StampedModel((LayerKind.SLIDING, LayerKind.GLOBAL)).geometry(
    window=16, global_tokens=8, sliding_tokens=4, global_row=2, sliding_row=3
)
COST = SpanCost(each=0.5, squared=0.125, most_soft_tokens=8)  # 8 soft tokens cost 12 rows beside their own


def image(start: int, rows: int, *, mutual: bool = True) -> EmbeddedSpan:
    key = start.to_bytes(KEY_BYTES, "little")
    return EmbeddedSpan(start, ImagePatches(np.zeros((rows, 3), np.uint8), rows), key, mutual)


def sound(start: int, rows: int) -> EmbeddedSpan:
    frames = AudioFrames(np.zeros((rows, 3), np.float32), rows)
    return EmbeddedSpan(start, frames, start.to_bytes(KEY_BYTES, "little"), mutual=False)


def album(name: str, count: int, rows: int, *, mutual: bool = True) -> Request:
    """So many images with a token before each and one behind all."""
    spans = [image(1 + number * (rows + 1), rows, mutual=mutual) for number in range(count)]
    return request(name, spans[-1].end + 1, *spans)


def request(name: str, prompt: int, *spans: EmbeddedSpan, answer: int = 400) -> Request:
    return Request(name, [3] * prompt, SamplingParams(seed=0, max_tokens=answer, ignore_eos=True), spans=spans)


def driver(most: int, *, mixed: int = 64, seqs: int = 8, cost: SpanCost = COST, audio: SpanCost = FREE) -> Driver:
    limits = SchedulerLimits(
        most, seqs, 8192, (), max_num_mixed_tokens=mixed, encoding_cost=EncodingCost(images=cost, audio=audio)
    )
    return Driver(Scheduler(limits, GEOMETRY, 1 << 22))


def made_in(step: Step, requests: dict[str, Request], known: set[tuple[str, int]]) -> list[int]:
    """Soft tokens of each image of which a step has the first row that any step has; `known` are those of others."""
    sizes = []
    for name, share in step.shares.items():
        for number, span in enumerate(requests[name].spans):
            inside = max(span.start, share.start) < min(span.end, share.end)
            if inside and (name, number) not in known:
                known.add((name, number))
                sizes.append(len(span))
    return sizes


@pytest.mark.parametrize("mutual", [True, False])
@pytest.mark.parametrize(("rows", "together"), [(8, 1), (4, 2), (3, 2), (1, 8)])
def test_who_decodes_waits_for_one_image_at_most(rows: int, together: int, mutual: bool) -> None:
    """Beside twenty of them, and as many as are no larger together; every step has the decode."""
    scheduled = driver(1024, mixed=256)
    decode, images = request("decode", 4), album("images", 20, rows, mutual=mutual)
    requests, known = {"decode": decode, "images": images}, set[tuple[str, int]]()
    scheduled.add(decode)
    scheduled.answer(scheduled.schedule())
    scheduled.add(images)
    counts = []
    while len(known) < 20:
        step = scheduled.schedule()
        assert "decode" in step.shares
        counts.append(len(made_in(step, requests, known)))
        scheduled.answer(step)
    assert max(counts) == together
    assert counts == [together] * (20 // together) + [20 % together] * (20 % together > 0), "and none sooner"


def test_without_decodes_images_and_rows_together_cost_a_step() -> None:
    """Twenty images of 8 rows and 12 more each: a step of 100 rows holds four of them, 21 rows each with what is
    before it, and ends before the fifth."""
    scheduled = driver(100)
    scheduled.add(album("images", 20, 8))
    first = scheduled.schedule()
    assert (first["images"].start, first["images"].end) == (0, 4 * 9 + 1)
    scheduled.answer(first)
    second = scheduled.schedule()
    assert len(made_in(second, {"images": album("images", 20, 8)}, set())) == 4
    free = driver(100, cost=FREE)
    free.add(album("images", 20, 8))
    assert free.schedule()["images"].end == 100, "what costs nothing is not charged"


def test_younger_prompts_have_what_is_left_and_an_image_dearer_than_a_step_is_made() -> None:
    scheduled = driver(64)
    scheduled.add(album("images", 3, 8), request("text", 40), request("more", 200))
    step = scheduled.schedule()
    assert step["images"].end == 10, "half of the step is others', and the second image the next one's"
    assert step["text"].end == 36
    assert step.batch.num_tokens == 10 + 36, "of 64, 12 of which are the image's"
    dear = driver(32, mixed=16)
    dear.add(album("images", 2, 30), request("text", 8))
    ends = []
    for _ in range(4):
        step = dear.schedule()
        if "images" in step.shares:
            ends.append(step["images"].end)
        dear.answer(step)
    assert ends == [1, 31, 32, 62]


def test_an_image_that_an_earlier_chunk_began_with_costs_no_more() -> None:
    """Its rows are kept between chunks."""
    scheduled = driver(64)
    scheduled.add(request("a", 200, image(1, 150, mutual=False)))
    ends = []
    for _ in range(4):
        step = scheduled.schedule()
        ends.append(step["a"].end)
        scheduled.answer(step)
    assert ends == [64, 128, 192, 200], "the dear one is the first of its step, and then it is there"


@pytest.mark.parametrize("seed", range(12))
def test_any_traffic_ends_within_its_bounds(seed: int) -> None:
    random = Random(seed)
    most = random.choice([16, 40, 128])
    scheduled = driver(most, mixed=random.choice([16, 32]), seqs=random.choice([2, 8]))
    requests: dict[str, Request] = {}
    for number in range(12):
        spans, at = [], random.randrange(6)
        for _ in range(random.randrange(6)):
            spans.append(image(at, random.randint(1, 8), mutual=random.random() < 0.6))
            at = spans[-1].end + random.randrange(5)
        name = f"r{number}"
        requests[name] = request(name, at + random.randint(1, 40), *spans, answer=random.randint(1, 30))
    waiting, known, steps = list(requests.values()), set[tuple[str, int]](), 0
    while waiting or scheduled.scheduler.has_requests:
        if waiting and random.random() < 0.5:
            scheduled.add(waiting.pop())
        step = scheduled.poll()
        if step is None:
            continue
        made = made_in(step, requests, known)
        decoding = any(share.output_count for share in step.shares.values())
        assert not decoding or len(made) <= 1 or sum(made) <= COST.most_soft_tokens
        assert len(made) <= 1 or step.batch.num_tokens + sum(map(COST.rows, made)) <= most
        for name, share in step.shares.items():
            assert not any(each.mutual and each.start < share.end < each.end for each in requests[name].spans)
        scheduled.answer(step)
        steps += 1
        assert steps < 3000, "somebody waits for ever"
    assert len(known) == sum(len(each.spans) for each in requests.values())


@pytest.mark.parametrize(("variant", "at_280", "at_1120"), [
    ("31B", 4.5e-3, 29.9e-3), ("26B-A4B", 4.5e-3, 29.9e-3), ("E2B", 1.4e-3, 10.2e-3), ("E4B", 1.4e-3, 10.2e-3),
])  # fmt: skip
def test_costs_are_products_of_the_towers(variant: str, at_280: float, at_1120: float) -> None:
    """As seconds of 790 TFLOP/s, whose floors are known; two ranks share rows of text and not the tower's."""
    facts = published_model(f"hf://google/gemma-4-{variant}-it")
    assert facts is not None
    images = ImageInput(4, 280, facts.images)
    cost = EncodingCost.of(images, None, facts.architecture, tensor_parallel=1).images
    row_s = 2 * layer_parameters(facts.architecture) / 790e12
    assert cost.rows(280) * row_s == pytest.approx(at_280, rel=0.03)
    assert cost.rows(1120) * row_s == pytest.approx(at_1120, rel=0.03)
    assert cost.most_soft_tokens == 280
    two = EncodingCost.of(images, None, facts.architecture, tensor_parallel=2).images
    assert two.rows(280) == pytest.approx(2 * cost.rows(280))


def test_what_has_no_tower_costs_nothing() -> None:
    facts = published_model("hf://google/gemma-4-12B-it")
    assert facts is not None
    assert facts.audio is not None
    images, audio = ImageInput(4, 280, facts.images), AudioInput(1, 30, facts.audio)
    assert EncodingCost.of(images, audio, facts.architecture, tensor_parallel=1) == NO_ENCODING
    assert EncodingCost.of(None, None, facts.architecture, tensor_parallel=1) == NO_ENCODING


@pytest.mark.parametrize("variant", ["E2B", "E4B"])
def test_costs_are_products_of_the_conformer(variant: str) -> None:
    """30 s are 0.446 TFLOP, 0.56 ms; a row costs the same in every sound."""
    facts = published_model(f"hf://google/gemma-4-{variant}-it")
    assert facts is not None
    assert facts.audio is not None
    cost = EncodingCost.of(None, AudioInput(4, 30, facts.audio), facts.architecture, tensor_parallel=1).audio
    row_s = 2 * layer_parameters(facts.architecture) / 790e12
    assert cost.rows(750) * row_s == pytest.approx(0.446e12 / 790e12, rel=0.05)
    assert (cost.squared, cost.most_soft_tokens) == (0, 750)


def test_sounds_are_charged_as_images_are() -> None:
    """Without decodes a step of 100 rows holds four of 8 rows that cost 12 more; beside one, one at a time. Images, and
    what makes them, cost what they did."""
    cost = SpanCost(each=1.5, most_soft_tokens=8)
    spans = [sound(1 + 9 * number, 8) for number in range(20)]
    scheduled = driver(100, cost=FREE, audio=cost)
    scheduled.add(request("sounds", spans[-1].end + 1, *spans))
    assert scheduled.schedule()["sounds"].end == 4 * 9 + 1
    unlike = driver(100, cost=cost, audio=FREE)
    unlike.add(request("sounds", spans[-1].end + 1, *spans))
    assert unlike.schedule()["sounds"].end == 100
    mixed = driver(1024, mixed=256, cost=FREE, audio=cost)
    decode = request("decode", 4)
    mixed.add(decode)
    mixed.answer(mixed.schedule())
    sounds = request("sounds", spans[-1].end + 1, *spans)
    mixed.add(sounds)
    assert len(made_in(mixed.schedule(), {"decode": decode, "sounds": sounds}, set())) == 1
