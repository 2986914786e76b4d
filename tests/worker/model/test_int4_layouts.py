"""AWQ's words in our order, where a matrix is larger than what is turned at a time and where it is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modelserve.model.weight_format import Layout
from modelserve_worker.layers.stored.int4_layouts import AWQ_ORDER, TURNED, words_by_rows

EIGHTS, COLUMNS = TURNED


def _one_by_one(words: Tensor) -> Tensor:
    """Nibble by nibble, as the format says: AWQ's int32 [inputs, outputs / 8] -> [outputs, inputs / 8]."""
    inputs, columns = words.shape
    elements = torch.empty(columns, 8, inputs, dtype=torch.int64)
    for nibble, output in enumerate(AWQ_ORDER):
        elements[:, output] = (words.long() >> 4 * nibble & 15).T
    places = 4 * torch.arange(8)
    made = (elements.view(columns * 8, inputs // 8, 8) << places).sum(-1)
    return torch.where(made >= 1 << 31, made - (1 << 32), made).int()


@pytest.mark.parametrize(
    ("eights", "columns"),
    [(1, 1), (3, 5), (EIGHTS, COLUMNS), (EIGHTS + 1, 7), (5, COLUMNS + 3), (2 * EIGHTS + 5, 2 * COLUMNS + 9)],
)
def test_awq_words_are_turned_whatever_the_shape(eights: int, columns: int) -> None:
    chance = torch.Generator().manual_seed(eights * columns)
    words = torch.randint(-(1 << 31), 1 << 31, (8 * eights, columns), generator=chance, dtype=torch.int64).int()
    before = words.clone()
    assert words_by_rows(words, Layout.AWQ).equal(_one_by_one(words))
    assert words.equal(before)


def test_experts_are_turned_one_by_one() -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (3, 16, 9), dtype=torch.int64).int()
    assert words_by_rows(words, Layout.AWQ).equal(torch.stack([_one_by_one(each) for each in words]))
