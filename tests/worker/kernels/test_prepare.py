"""Queries, cache rows and their late commit, against float64 norms and rotations and against `row_codec`."""

from __future__ import annotations

import pytest
import torch
from attention_cases import ints, layout, pages_of
from paged_case import PagedCase, rope
from torch import Tensor

from modelserve_worker.kernels.adapters.terms import RowTerm, SlotFactors
from modelserve_worker.kernels.attention import triton_launches as launches
from modelserve_worker.kernels.attention.arguments import HeadNorms, Rotary, StepRows
from modelserve_worker.kernels.attention.row_codec import StoredRows, decode_rows, encode_rows, v_only_columns
from modelserve_worker.kernels.step import Step

pytestmark = pytest.mark.drawn

FORMATS = ["none", "int8", "fp8_e4m3", "fp8_e5m2"]
LAYOUTS = [("global", False), ("global", True), ("sliding", False)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPUTE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LIMIT = 2e-2 if DEVICE == "cuda" else 1e-5
EPS, THETA, PAIRS, GROUP = 1e-6, 1e4, 16, 2
# (slot, position) of each token; slot -1 is padding. In sliding layers the tokens of slot 1 wait in step buffers.
TOKENS = [(0, 39), (2, 4), *((1, p) for p in range(64, 70)), (-1, 0)]
CHUNK = range(2, 8)


class Prepared:
    """One launch of `prepare` over a fresh cache; the same projections whatever the format.

    `broken`: a token with a NaN in its last head of K and in that of V. `adapted`: terms of adapters are added, too, of
    two of three tokens.
    """

    def __init__(
        self,
        kind: str,
        *,
        v_only: bool,
        fmt: str,
        shared: bool = False,
        broken: int | None = None,
        adapted: bool = False,
    ) -> None:
        width = 128 if v_only else 64
        self.case = case = PagedCase(
            kind,
            2,
            width,
            fmt,
            v_only,
            [40, 70, 5],
            window=0 if kind == "global" else 70,
            compute=COMPUTE,
            device=DEVICE,
        )
        generator = torch.Generator(DEVICE).manual_seed(7)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(COMPUTE)

        tokens, heads = len(TOKENS), case.heads
        projected_heads = heads * GROUP + (0 if shared else heads if v_only else 2 * heads)
        self.projected = random(tokens, projected_heads, width)
        if broken is not None:
            self.projected[broken, [heads * GROUP + heads - 1, projected_heads - 1], 5] = torch.nan
        self.q_weight, self.k_weight = random(width).abs() + 0.5, random(width).abs() + 0.5
        self.positions = torch.tensor([p for _, p in TOKENS], device=DEVICE)
        self.pairs = PAIRS if v_only else width // 2
        frequencies = torch.zeros(width // 2, dtype=torch.float64, device=DEVICE)
        steps = torch.arange(0, 2 * self.pairs, 2, dtype=torch.float64, device=DEVICE)
        frequencies[: self.pairs] = THETA ** (-steps / width)
        angles = self.positions.double()[:, None] * frequencies
        slots = ints([s for s, _ in TOKENS], DEVICE)
        own = slots.clone()
        own[CHUNK.start : CHUNK.stop] = -1
        kept = torch.full_like(slots, -1)
        kept[CHUNK.start + 3 : CHUNK.stop] = 1
        self.step = Step(self.positions.int(), ints([len(TOKENS)], DEVICE), slots, own, kept, None, None)
        self.q = torch.full((tokens, heads * GROUP, width), torch.nan, dtype=COMPUTE, device=DEVICE)
        self.before = case.arena.clone()
        element = {"none": COMPUTE, "int8": torch.int8}.get(fmt, torch.uint8)
        buffers = [torch.full((tokens, heads, width), 77, dtype=element, device=DEVICE) for _ in range(2)]
        scales = [torch.full((tokens, heads), 77, dtype=torch.float16, device=DEVICE) for _ in range(2)]
        self.fresh = StepRows(*buffers, *scales) if kind == "sliding" else None
        term = None
        if adapted:
            parts = [each * width for each in (heads * GROUP, heads, heads)[: 1 if shared else 2 if v_only else 3]]
            b, sums = random(2, sum(parts), 8), random(3, tokens, len(parts) * 8).float()
            scales_of_parts = random(2, len(parts)).float()
            of_rows = ints([token % 3 - 1 for token in range(tokens)], DEVICE)
            term = RowTerm(sums, SlotFactors(b[..., :1], b, scales_of_parts, tuple(parts)), of_rows)
        launches.prepare(
            self.projected.flatten(1), self.q, self.step, pages=pages_of(case),
            norms=HeadNorms(self.q_weight, self.k_weight, EPS),
            rotary=Rotary(angles.cos().float(), angles.sin().float()), fresh=self.fresh,
            pairs=PAIRS if v_only else 0, term=term,
        )  # fmt: skip
        if term is not None:
            self.projected = (self.projected.flatten(1).float() + term.dense()).to(COMPUTE).view(self.projected.shape)

    def commit(self) -> None:
        assert self.fresh is not None
        launches.commit(self.fresh, self.step, pages=pages_of(self.case))

    def plane(self, name: str, token: int) -> tuple[Tensor, Tensor | None]:
        """A token's stored row [H, D] as bytes or numbers of the storage dtype, and its scales [H], from its page."""
        slot, position = TOKENS[token]
        rows, scales = self.case.page(slot, position // self.case.page_tokens, name)
        at = position % self.case.page_tokens
        return rows[:, at], None if scales is None else scales[:, at]

    def forget(self, tokens: list[int]) -> None:
        """Put what was in the pages of these tokens before back, so that the rest can be compared."""
        after, self.case.arena = self.case.arena, self.before.clone()
        old = [
            (name, t, *(None if x is None else x.clone() for x in self.plane(name, t)))
            for t in tokens
            for name in ("k", "v")
            if name in self.case.offsets
        ]
        self.case.arena = after
        for name, token, rows, scales in old:
            at, scale_at = self.plane(name, token)
            at.copy_(rows)
            if scale_at is not None:
                scale_at.copy_(scales)


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    x = x.double()
    x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x if weight is None else x * weight.double()


def close(found: Tensor, expected: Tensor) -> bool:
    return float((found.double() - expected).abs().max()) < LIMIT * float(expected.abs().max())


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("kind", "v_only"), LAYOUTS)
def test_queries_and_rows_equal_float64_norms_and_rotations(kind: str, v_only: bool, adapted: bool) -> None:
    done = Prepared(kind, v_only=v_only, fmt="none", adapted=adapted)
    heads, width = done.case.heads, done.case.width
    turned = rope(
        normed(done.projected[:, : heads * GROUP], done.q_weight), done.positions, pairs=done.pairs, theta=THETA
    )
    keys = rope(
        normed(done.projected[:, heads * GROUP :][:, :heads], done.k_weight),
        done.positions,
        pairs=done.pairs,
        theta=THETA,
    )
    values = normed(done.projected[:, -heads:], None)
    if v_only:
        fold = done.k_weight.double()
        fold[:PAIRS] = fold[width // 2 : width // 2 + PAIRS] = 1
        order = v_only_columns(width, pairs=PAIRS, device=turned.device)
        turned, values = (turned * fold)[..., order], values[..., order]
    assert close(done.q, turned)
    in_pages = [t for t in range(len(TOKENS)) if TOKENS[t][0] >= 0 and not (kind == "sliding" and t in CHUNK)]
    for token in in_pages:
        assert close(done.plane("v", token)[0], values[token])
        if not v_only:
            assert close(done.plane("k", token)[0], keys[token])
    if done.fresh is not None:
        assert close(done.fresh[0][CHUNK.start : CHUNK.stop], keys[CHUNK.start : CHUNK.stop])
        assert close(done.fresh[1][CHUNK.start : CHUNK.stop], values[CHUNK.start : CHUNK.stop])
        assert bool((done.fresh[0][: CHUNK.start] == 77).all()), "rows with a page leave the step buffers alone"
    done.forget(in_pages)
    assert torch.equal(done.case.arena, done.before), "padding and waiting rows wrote to no page"


@pytest.mark.parametrize("fmt", FORMATS[1:])
@pytest.mark.parametrize(("kind", "v_only"), LAYOUTS)
def test_stored_rows_are_those_of_the_row_codec_bit_for_bit(kind: str, v_only: bool, fmt: str) -> None:
    plain, done = Prepared(kind, v_only=v_only, fmt="none"), Prepared(kind, v_only=v_only, fmt=fmt)
    assert torch.equal(done.q, plain.q)
    dtype = layout(done.case).dtype
    for number, name in enumerate(["k", "v"]):
        if name not in done.case.offsets:
            continue
        for token, (slot, _) in enumerate(TOKENS):
            if slot < 0:
                continue
            waiting = done.fresh is not None and token in CHUNK
            if waiting:
                rows, found, scales = (
                    plain.fresh[number][token],
                    done.fresh[number][token],
                    done.fresh[number + 2][token],
                )
            else:
                rows = plain.plane(name, token)[0]
                found, scales = done.plane(name, token)
            stored = encode_rows(rows, dtype)
            assert torch.equal(found.view(torch.uint8), stored.values.view(torch.uint8))
            if fmt == "int8":
                assert torch.equal(scales, stored.scale[..., 0])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("kind", "v_only"), LAYOUTS)
def test_a_broken_row_is_read_as_nan_and_its_neighbours_are_not(kind: str, v_only: bool, fmt: str) -> None:
    """A finite number in its place would be a wrong answer that nobody notices."""
    broken = 1
    sound, done = Prepared(kind, v_only=v_only, fmt=fmt), Prepared(kind, v_only=v_only, fmt=fmt, broken=broken)
    dtype = layout(done.case).dtype

    def decoded(prepared: Prepared, name: str, token: int) -> Tensor:
        values, scales = prepared.plane(name, token)
        return decode_rows(StoredRows(values, None if scales is None else scales[..., None]), dtype, torch.float32)

    for name in (name for name in ("k", "v") if name in done.case.offsets):
        rows = decoded(done, name, broken)
        assert rows[-1].isnan().all()
        assert torch.equal(rows[:-1], decoded(sound, name, broken)[:-1])
        assert torch.equal(decoded(done, name, 0), decoded(sound, name, 0))


@pytest.mark.parametrize("fmt", ["none", "int8"])
def test_commit_copies_what_outlives_the_step_and_nothing_else(fmt: str) -> None:
    done = Prepared("sliding", v_only=False, fmt=fmt)
    prepared = done.case.arena.clone()
    done.commit()
    committed = list(range(CHUNK.start + 3, CHUNK.stop))
    for number, name in enumerate(["k", "v"]):
        for token in committed:
            rows, scales = done.plane(name, token)
            assert torch.equal(rows, done.fresh[number][token])
            if fmt == "int8":
                assert torch.equal(scales, done.fresh[number + 2][token])
    done.before = prepared
    done.forget(committed)
    assert torch.equal(done.case.arena, prepared)


@pytest.mark.parametrize("kind", ["global", "sliding"])
def test_a_layer_that_shares_a_cache_prepares_queries_alone(kind: str) -> None:
    own, shared = Prepared(kind, v_only=False, fmt="none"), Prepared(kind, v_only=False, fmt="none", shared=True)
    heads = own.case.heads * GROUP
    expected = rope(
        normed(shared.projected[:, :heads], shared.q_weight), shared.positions, pairs=shared.pairs, theta=THETA
    )
    assert close(shared.q, expected)
    assert torch.equal(shared.case.arena, shared.before)
    if shared.fresh is not None:
        assert all(bool((buffer == 77).all()) for buffer in shared.fresh)
    assert not torch.equal(own.case.arena, own.before), "the layer that owns the cache does write"
