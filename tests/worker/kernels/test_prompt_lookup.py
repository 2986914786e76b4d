"""What followed the same tokens earlier: by kernel and in plain PyTorch, against loops over lists."""

from __future__ import annotations

from random import Random

import pytest
import torch

from modelserve_worker.kernels.sampling.prompt_lookup import LONGEST_MATCH, SHORTEST_MATCH, LookupBackend, PlainLookup
from modelserve_worker.kernels.sampling.prompt_lookup_triton import TritonLookup

pytestmark = pytest.mark.drawn

SLOTS, LENGTH = 6, 70
BACKENDS = [PlainLookup(), TritonLookup()]


def expected(known: list[int], prompt: int, predicted: list[int], room: int, k: int) -> list[int]:
    """Proposal behind `known`, of which `prompt` are the prompt's, in a row of `room` tokens."""
    kept = {room - len(predicted) + i: token for i, token in enumerate(predicted)}
    left = {at: token for at, token in kept.items() if at >= len(known)}
    said, best = len(known) - prompt, (0, 0, 0.0, 0)
    as_long = room - len(predicted) + said - 1  # the place that such an answer would have come to
    for place in range(len(known) - 1):
        matched = 0
        while matched < LONGEST_MATCH and matched <= place and known[place - matched] == known[-1 - matched]:
            matched += 1
        best = max(best, (matched, 0, 0.0, place))
    for place in left:
        matched = 0
        while matched < LONGEST_MATCH:
            if place - matched < room - len(predicted):
                matched = LONGEST_MATCH if said <= matched else matched
                break
            if left.get(place - matched) != known[-1 - matched] if matched < len(known) else True:
                break
            matched += 1
        if place < room - 1:
            nearness = -abs(place - as_long) + 0.5 * (place < as_long)
            best = max(best, (matched, 1, nearness, place))
    matched, source, _, place = best
    if matched < SHORTEST_MATCH:
        return []
    if source:
        return [left[at] for at in range(place + 1, min(room, place + 1 + k))]
    return [known[place + 1 + i % (len(known) - 1 - place)] for i in range(k)]


@pytest.mark.parametrize("backend", BACKENDS, ids=["plain", "kernel"])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_proposals_are_what_followed_the_longest_match(backend: LookupBackend, k: int, device: torch.device) -> None:
    """Of texts of two to five words, with predictions that answers begin, go on with, leave, or grow over."""
    rng, proposed, from_predictions = Random(k), 0, 0
    for _ in range(60):
        words = range(10, 10 + rng.randint(2, 5))
        texts, prompts, predictions = [], [], []
        for _ in range(SLOTS):
            prompt = rng.randint(1, 30)
            text = [rng.choice(words) for _ in range(rng.randint(prompt + 1, LENGTH - 1))]
            length = rng.randint(0, LENGTH - prompt) if rng.random() < 0.6 else 0
            predicted = [rng.choice(words) for _ in range(length)]
            if predicted and rng.random() < 0.5:  # the answer begins like it
                count = rng.randint(0, min(len(text) - prompt, len(predicted)))
                text[prompt : prompt + count] = predicted[:count]
                text = text[: max(prompt + 1, prompt + count + rng.randint(0, 2))]
            texts.append(text)
            prompts.append(prompt)
            predictions.append(predicted)
        history = torch.full((SLOTS, LENGTH), 99, dtype=torch.int32)
        for row, text, predicted in zip(history, texts, predictions, strict=True):
            row[LENGTH - len(predicted) :] = torch.tensor(predicted, dtype=torch.int32)
            row[: len(text)] = torch.tensor(text, dtype=torch.int32)
        slots = rng.sample(range(SLOTS), k=rng.randint(1, SLOTS))
        arrays = [
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in (slots, [len(texts[slot]) - 1 for slot in slots], prompts, [len(p) for p in predictions])
        ]
        tokens, counts = backend.look_up(history.to(device), *arrays, k)
        assert tokens.dtype == counts.dtype == torch.int32
        for slot, said, count in zip(slots, tokens.tolist(), counts.tolist(), strict=True):
            wanted = expected(texts[slot], prompts[slot], predictions[slot], LENGTH, k)
            assert said == wanted + [0] * (k - len(wanted))
            assert count == len(wanted)
            proposed += bool(wanted)
            from_predictions += wanted != expected(texts[slot], prompts[slot], [], LENGTH, k)
    assert proposed > 80
    assert from_predictions > 20


@pytest.mark.parametrize("backend", BACKENDS, ids=["plain", "kernel"])
def test_the_tokens_that_count_are_remembered_where_they_belong(backend: LookupBackend, device: torch.device) -> None:
    history = torch.zeros(3, 12, dtype=torch.int32, device=device)
    sampled = torch.tensor([5, 6, 7, -1, 9, 8], device=device)
    slots, firsts, counts, positions = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in ([2, 0], [0, 3], [2, 1], [9, 4])
    )
    backend.remember(history, slots, sampled, firsts, counts, positions)
    assert history.tolist() == [[0] * 12, [0] * 12, [0] * 8 + [5, 6, 0, 0]], "a row that is not a number leaves 0"
