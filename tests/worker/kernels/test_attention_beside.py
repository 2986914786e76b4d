"""Decodes' attention that runs beside the chunks' attention of its layer: no bit depends on it, whatever comes next."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Chunk, chunk_step, decode_step, frequencies, hopper_kernels, layout, pages_of, rotation
from hopper import ON_HOPPER, check_captured_bits
from paged_case import PagedCase, relative_error
from torch import Tensor

from modelserve.sizing.backends.table import Operation
from modelserve_worker.kernels.attention import triton_launches as launches
from modelserve_worker.kernels.attention.arguments import HeadNorms, Rotary, StepRows, element_dtype
from modelserve_worker.kernels.elementwise.elementwise_triton import TritonElementwise
from modelserve_worker.kernels.products.row_blocks import plain_product
from modelserve_worker.kernels.step import Step

EPS, LAYERS, REPLAYS, PAIRS = 1e-6, 6, 100, 64

pytestmark = list(ON_HOPPER)


def joined(case: PagedCase, decodes: list[int], chunks: list[Chunk], *, group: int, block_rows: int) -> Step:
    """A step of rows that decode, then chunks; two more rows of decodes are padding of the arrays, not of the step."""
    first, then = decode_step(case, decodes), chunk_step(case, chunks, group=group, block_rows=block_rows)
    padded = decode_step(case, [*decodes, -1, -1]).decode
    assert then.chunks is not None
    then.chunks.rows.add_(len(decodes))
    kept = torch.cat((torch.full_like(first.positions, -1), then.commit_slots))
    waiting = torch.cat((first.sliding_slots, torch.full_like(then.sliding_slots, -1)))
    slots, positions = (torch.cat(both) for both in zip(
        (first.global_slots, first.positions), (then.global_slots, then.positions), strict=True
    ))  # fmt: skip
    count = then.num_rows + len(decodes)
    return Step(positions, count, slots, waiting, kept, padded, then.chunks, then.passes)


class Layers:
    """Layers of projection, `prepare`, both attentions and a norm, all of which store rows in the same places."""

    def __init__(
        self, kind: str, heads: int, group: int, window: int, contexts: list[int], chunks: list[Chunk], fmt: str,
        *, v_only: bool = False,
    ) -> None:  # fmt: skip
        width = 256 if kind == "sliding" else 512
        held = [*contexts, *(chunk.start + (0 if window else chunk.length) for chunk in chunks)]
        self.case = case = PagedCase(kind, heads, width, fmt, v_only, held, window, device="cuda", pairs=PAIRS)
        for place, chunk in enumerate(chunks):
            chunk.slot = len(contexts) + place
        self.rows = layout(case)
        self.kernels = hopper_kernels(self.rows, Operation.CHUNK_ATTENTION, query_heads=heads * group)
        self.step = joined(case, [*range(len(contexts))], chunks, group=group, block_rows=self.kernels.chunk_rows)
        tokens, columns = len(self.step.positions), heads * group * width
        self.shape = tokens, heads * group, width
        projected = columns + (1 if v_only else 2) * heads * width
        self.x = case.random(tokens, columns)
        self.weights = [case.random(projected, columns, scale=columns**-0.5) for _ in range(LAYERS)]
        self.q_weight, self.k_weight = (case.random(width).abs() + 0.5 for _ in range(2))
        angles = torch.rand(tokens, width // 2, device="cuda")
        self.turned = angles.cos(), angles.sin()
        self.turns = rotation(case, self.kernels.decode_keys, PAIRS) if v_only else None
        keys = sum(-(-n // 64) * 64 for n in held[len(contexts) :]) + 256 + tokens + window * len(chunks)
        words = keys * max(launches.scratch_per_key(self.rows, pairs=PAIRS), 2 * heads * width if fmt != "none" else 0)
        self.scratch = torch.empty(words, dtype=torch.bfloat16, device="cuda") if words else None
        self.workspace = torch.empty(
            (len(contexts) + 2) * launches.decode_workspace(self.rows, query_heads=heads * group), device="cuda"
        )
        self.norms = TritonElementwise()

    def run(self) -> list[Tensor]:
        x, outputs = self.x, []
        pages = pages_of(self.case)
        for weight in self.weights:
            q = torch.empty(self.shape, dtype=torch.bfloat16, device="cuda")
            fresh = None
            if self.rows.entries:
                buffer = (self.shape[0], self.rows.heads, self.rows.width)
                element = element_dtype(self.rows)
                fresh = StepRows(
                    *(torch.empty(buffer, dtype=element, device="cuda") for _ in range(2)),
                    *(torch.empty(buffer[:2], dtype=torch.float16, device="cuda") for _ in range(2)),
                )
            launches.prepare(
                plain_product(x, weight), q, self.step, pages=pages,
                norms=HeadNorms(self.q_weight, self.k_weight, EPS), rotary=Rotary(*self.turned), fresh=fresh,
                pairs=PAIRS if self.turns else 0,
            )  # fmt: skip
            output = torch.empty_like(q)
            beside = self.kernels.chunk(
                q, output, self.step, pages=pages, fresh=fresh, key_weight=self.k_weight, scratch=self.scratch,
                inverse_frequencies=frequencies(self.case), pairs=PAIRS if self.turns else 0,
            )  # fmt: skip
            assert beside
            self.kernels.decode(
                q, output, self.step, pages=pages, workspace=self.workspace, key_weight=self.k_weight,
                turns=self.turns, beside=beside,
            )  # fmt: skip
            # It starts early and waits for the kernel ahead alone, whose decodes must not end before the chunks.
            x = self.norms.rms_norm(output.flatten(1), torch.ones_like(self.x[0]), eps=EPS)
            outputs.append(x)
        return outputs


CASES = {
    "31B": ("sliding", 16, 2, 1024, [8192 + i for i in range(32)], [Chunk(0, 2000, 160)], "none"),
    "31B, few decodes": ("sliding", 16, 2, 1024, [70, 3000], [Chunk(0, 700, 480), Chunk(0, 0, 33)], "none"),
    "31B, many blocks": ("sliding", 16, 2, 1024, [1500] * 20, [Chunk(0, 5000, 2000)], "none"),
    "31B int8": ("sliding", 16, 2, 1024, [1100 + 7 * i for i in range(24)], [Chunk(0, 2000, 300)], "int8"),
    "31B global": ("global", 4, 8, 0, [100 + 90 * i for i in range(30)], [Chunk(0, 300, 224)], "none"),
    "31B global int8": ("global", 4, 8, 0, [100 + 90 * i for i in range(30)], [Chunk(0, 300, 224)], "int8"),
    "E4B": ("sliding", 2, 4, 512, [900 + i for i in range(40)], [Chunk(0, 4000, 1000)], "none"),
    "E4B global": ("global", 2, 4, 0, [900 + i for i in range(33)], [Chunk(0, 2000, 1000)], "none"),
}


@pytest.mark.parametrize("name", CASES)
def test_captured_layers_have_the_bits_of_kernels_that_run_one_after_the_other(name: str) -> None:
    layers = Layers(*CASES[name], v_only="31B global" in name)
    check_captured_bits(layers.run, replays=REPLAYS)


def test_chunks_beside_few_and_many_decodes_equal_float64_attention() -> None:
    """Fewer thread blocks multiply where many decode: every block of queries is still computed, and once."""
    for decodes in (0, 3, 40):
        chunk = Chunk(0, 700, 1500)
        layers = Layers("sliding", 8, 2, 1024, [1500] * max(decodes, 1), [chunk], "none")
        case, step, tokens = layers.case, layers.step, layers.shape[0]
        assert step.decode is not None
        assert step.chunks is not None
        if not decodes:  # arrays of a captured step in which nobody decodes
            step = replace(step, decode=replace(step.decode, starts=torch.full_like(step.decode.starts, -1)))
        first = tokens - chunk.length
        q, output = case.random(*layers.shape, scale=2.0), torch.full(layers.shape, torch.nan, device="cuda").bfloat16()
        k, v = (case.random(tokens, 8, 256, scale=size) for size in (1 / 16, 1.0))
        layers.kernels.chunk(q, output, step, pages=pages_of(case), fresh=StepRows(k, v, k, v), scratch=None)
        old_k, old_v = case.k[chunk.slot], case.v[chunk.slot]
        case.k[chunk.slot] = torch.cat((old_k, k[first:].double()))
        case.v[chunk.slot] = torch.cat((old_v, v[first:].double()))
        at = torch.arange(chunk.start, chunk.start + chunk.length, device="cuda")
        assert relative_error(output[first:], case.attention(q[first:], chunk.slot, at)) < 1e-2
        assert output[:first].isnan().all()
