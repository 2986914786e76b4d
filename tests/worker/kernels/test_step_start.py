"""A step's tokens and rotations by kernel, against the plain references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from modelserve_worker.kernels.step import Draws
from modelserve_worker.kernels.step_start import PlainStep
from modelserve_worker.kernels.step_start_triton import TritonStep


@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize("rows", [1, 3, 128, 300])
def test_tokens_in_flight_come_from_the_slots_and_others_stay(rows: int, columns: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rows)
    known = torch.randint(0, 262_144, (400, columns), generator=generator, dtype=torch.int32).to(device)
    slots = torch.randperm(400, generator=generator)[:rows].int().to(device)
    ids = torch.randint(0, 262_144, (rows,), generator=generator, dtype=torch.int32).to(device)
    ids[::2] = -1 - torch.arange(rows, device=device)[::2].int() // 2 % columns
    slots[-1] = -1  # padding
    expected = [
        int(known[max(slot, 0), -1 - one]) if one < 0 else one
        for slot, one in zip(slots.tolist(), ids.tolist(), strict=True)
    ]
    buffer = torch.cat((ids.new_zeros(1), ids))  # as part of a buffer, not aligned to 16 bytes
    before = known.clone()
    for backend, given in ((TritonStep(), buffer[1:]), (PlainStep(), ids)):
        assert backend.tokens(given, slots, known).data_ptr() == given.data_ptr(), "in place"
        assert given.tolist() == expected
    assert buffer[0] == 0
    assert torch.equal(known, before)


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("segments", [1, 5, 200])
def test_tokens_count_while_the_drafts_before_them_are_right(segments: int, columns: int, device: torch.device) -> None:
    """Of few different tokens, so that drafts are right now and then."""
    random = np.random.default_rng(segments + columns)
    slots = random.permutation(256)[:segments]
    lengths = random.integers(1, columns + 1, segments)
    rows = np.cumsum(lengths + 2) - lengths  # each behind two rows that get none
    sampled, fed = random.integers(0, 2, lengths.sum()), random.integers(0, 2, rows[-1] + columns)
    sampled[0] = -1  # the logits held a NaN
    firsts = np.cumsum(lengths) - lengths
    expected, last = [], {}
    for slot, first, length, row in zip(slots, firsts, lengths, rows, strict=True):
        count = 1
        while count < length and sampled[first + count - 1] == fed[row + count]:
            count += 1
        expected.append(count)
        last[slot] = max(0, sampled[first + count - 1])
    draws = Draws(*(torch.from_numpy(each.astype(np.int32)).to(device) for each in (slots, firsts, lengths, rows)))
    for backend in (TritonStep(), PlainStep()):
        known = torch.full((256, columns), 1000, dtype=torch.int32, device=device)
        at, positions = torch.full((256,), -5, dtype=torch.int32, device=device), 3 * torch.arange(len(fed)).int()
        counts = backend.accept(
            torch.from_numpy(sampled).to(device), torch.from_numpy(fed.astype(np.int32)).to(device),
            positions.to(device), draws, known, at,
        )  # fmt: skip
        assert counts.tolist() == expected
        reached = dict(zip(slots.tolist(), (3 * (rows + expected - 1) + 1).tolist(), strict=True))
        assert at.tolist() == [reached.get(slot, -5) if columns > 1 else -5 for slot in range(256)]
        assert known[:, 0].tolist() == [last.get(slot, 1000) for slot in range(256)]
        assert (known[:, 1:] == 1000).all(), "the drafter's own"


@pytest.mark.parametrize("arrays", [1, 4])
def test_what_was_placed_where_all_drafts_are_right_goes_to_where_they_were(arrays: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(arrays)
    at = torch.randint(0, 900, (64,), generator=generator, dtype=torch.int32)
    assumed = torch.where(torch.arange(64) % 3 > 0, at + torch.arange(64).int() % 5, -1)  # a third is known
    moved = torch.where(assumed >= 0, at - assumed, 0)
    placed = []
    for rows in (1, 300, 64, 7)[:arrays]:
        slots = torch.randint(-1, 64, (rows,), generator=generator, dtype=torch.int32)
        placed.append((torch.randint(0, 1000, (rows,), generator=generator, dtype=torch.int32), slots))
    expected = [
        [v + int(moved[s]) if s >= 0 else v for v, s in zip(values.tolist(), slots.tolist(), strict=True)]
        for values, slots in placed
    ]
    for backend in (TritonStep(), PlainStep()):
        given = [(values.clone().to(device), slots.to(device)) for values, slots in placed]
        backend.settle(given, assumed.int().to(device), at.to(device))
        assert [values.tolist() for values, _ in given] == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pairs", [(128, 256), (8, 24)])
def test_rotations_equal_the_plain_reference(pairs: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    positions = torch.tensor([0, 1, -1, 511, 32_767, 131_071], dtype=dtype, device=device)
    tables = [(1e4 ** -(torch.arange(count) / count)).to(device) for count in pairs]
    tables[1][pairs[1] // 4 :] = 0.0  # pairs that do not turn
    actual, plain = (backend.rotations(positions, *tables) for backend in (TritonStep(), PlainStep()))
    for (cos, sin), (plain_cos, plain_sin), count in zip(actual, plain, pairs, strict=True):
        assert cos.shape == sin.shape == (6, count)
        torch.testing.assert_close(cos, plain_cos, rtol=0, atol=1e-6)
        torch.testing.assert_close(sin, plain_sin, rtol=0, atol=1e-6)
    assert (actual[1][0][:, pairs[1] // 4 :] == 1).all()
    assert (actual[1][1][:, pairs[1] // 4 :] == 0).all()
