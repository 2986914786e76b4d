"""A step's tokens and rotations by kernel, against the plain twins."""

from __future__ import annotations

import pytest
import torch

from modelserve_worker.kernels.step_start import PlainStep
from modelserve_worker.kernels.step_start_triton import TritonStep


@pytest.mark.parametrize("rows", [1, 3, 128, 300])
def test_tokens_in_flight_come_from_the_slots_and_others_stay(rows: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rows)
    last = torch.randint(0, 262_144, (400,), generator=generator, dtype=torch.int32).to(device)
    slots = torch.randperm(400, generator=generator)[:rows].int().to(device)
    ids = torch.randint(0, 262_144, (rows,), generator=generator, dtype=torch.int32).to(device)
    ids[::2] = -1
    slots[-1] = -1  # padding
    buffer = torch.cat((ids.new_zeros(1), ids))  # as part of a buffer, not aligned to 16 bytes
    before = last.clone()
    tokens = TritonStep().tokens(buffer[1:], slots, last)
    assert tokens.dtype == torch.int32
    assert torch.equal(tokens, PlainStep().tokens(ids, slots, last))
    assert torch.equal(tokens[1::2], ids[1::2])
    assert torch.equal(last, before)


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_sampled_tokens_go_to_their_slots_and_no_others(rows: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rows)
    slots = torch.randperm(256, generator=generator)[:rows].int().to(device)
    sampled = torch.randint(0, 262_144, (rows,), generator=generator).to(device)
    sampled[0] = -1  # the logits held a NaN
    kept, plain = (torch.arange(1000, 1256, dtype=torch.int32, device=device) for _ in range(2))
    TritonStep().keep_tokens(sampled, slots, kept)
    PlainStep().keep_tokens(sampled, slots, plain)
    assert torch.equal(kept, plain)
    assert kept[slots[0]] == 0
    others = torch.ones(256, dtype=torch.bool, device=device)
    others[slots.long()] = False
    assert torch.equal(kept[others], torch.arange(1000, 1256, dtype=torch.int32, device=device)[others])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pairs", [(128, 256), (8, 24)])
def test_rotations_equal_the_plain_twin(pairs: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    positions = torch.tensor([0, 1, -1, 511, 32_767, 131_071], dtype=dtype, device=device)
    tables = [(1e4 ** -(torch.arange(count) / count)).to(device) for count in pairs]
    tables[1][pairs[1] // 4 :] = 0.0  # pairs that do not turn
    actual, plain = (doors.rotations(positions, *tables) for doors in (TritonStep(), PlainStep()))
    for (cos, sin), (plain_cos, plain_sin), count in zip(actual, plain, pairs, strict=True):
        assert cos.shape == sin.shape == (6, count)
        torch.testing.assert_close(cos, plain_cos, rtol=0, atol=1e-6)
        torch.testing.assert_close(sin, plain_sin, rtol=0, atol=1e-6)
    assert (actual[1][0][:, pairs[1] // 4 :] == 1).all()
    assert (actual[1][1][:, pairs[1] // 4 :] == 0).all()
