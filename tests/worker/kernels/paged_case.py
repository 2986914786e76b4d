"""A random paged cache for kernel tests: tables in random order, rows of some requests, and attention in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelserve_worker.kernels.attention.row_codec import v_only_columns

PAGE = {"global": 64, "sliding": 32}
ELEMENT = {
    "none": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def rope(x: Tensor, positions: Tensor, *, pairs: int, theta: float) -> Tensor:
    """Rotate [N, H, D] in float64: pairs (i, i + D/2) for i < pairs."""
    width = x.shape[-1]
    frequencies = torch.zeros(width // 2, dtype=torch.float64, device=x.device)
    steps = torch.arange(0, 2 * pairs, 2, dtype=torch.float64, device=x.device)
    frequencies[:pairs] = theta ** (-steps / width)
    angles = (positions.double()[:, None] * frequencies)[:, None]
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


@dataclass
class PagedCase:
    """One layer's pages in an arena of bytes, as the product lays them out.

    `fmt`: "none" (the compute dtype), "int8", "fp8_e4m3", "fp8_e5m2". `window` 0: a global layer. `v_only`: no K plane.
    """

    kind: str
    heads: int
    width: int
    fmt: str
    v_only: bool
    contexts: list[int]  # tokens in the cache of each slot
    window: int = 0
    compute: torch.dtype = torch.bfloat16
    device: str = "cpu"
    seed: int = 0
    older: int = 0  # rows before the window that are there too: what a segment's first row reads
    spare_pages: int = 3
    pairs: int = 16  # rotated, in V-only rows
    k: list[Tensor] = field(default_factory=list)  # decoded rows [n, H, D], float64: what any reader must see
    v: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.page_tokens = PAGE[self.kind]
        self.element = self.compute if self.fmt == "none" else ELEMENT[self.fmt]
        self.entries = -(-(self.window - 1) // self.page_tokens) + 1 if self.window else 0
        size, tokens = self.element.itemsize, self.page_tokens
        plane, scale_plane = self.heads * tokens * self.width * size, self.heads * tokens * 2
        names = ["v"] if self.v_only else ["k", "v"]
        self.offsets = {name: i * plane for i, name in enumerate(names)}
        at = len(names) * plane
        if self.fmt == "int8":
            for name in names:
                self.offsets[name + "_scale"] = at
                at += scale_plane
        layer = -(-at // 128) * 128
        self.layer_offset = layer  # a layer before this one in the page
        self.page_bytes = 2 * layer
        held = [self.pages_of(n) for n in self.contexts]
        count = sum(held) + self.spare_pages
        self.arena = torch.full((count * self.page_bytes,), 0xFF, dtype=torch.uint8, device=self.device)  # NaN rows
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed)).tolist()
        width = self.entries or max(held)
        self.table = torch.full((len(self.contexts), width), -7, dtype=torch.int32)
        for slot, pages in enumerate(held):
            for index in range(pages):
                self.table[slot, index] = order.pop()
        self.table = self.table.to(self.device)
        if self.kind == "global":
            self.origin, self.stride = (count - 1) * self.page_bytes, -self.page_bytes
        else:
            self.origin, self.stride = 0, self.page_bytes
        for slot, n in enumerate(self.contexts):
            self.fill(slot, n)

    def pages_of(self, n: int) -> int:
        pages = -(-n // self.page_tokens)
        return min(pages, self.entries) if self.entries else pages

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator, device=self.device) * scale).to(self.compute)

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.fmt == "int8":
            scale = (rows.float().abs().amax(-1) / 127).half()
            values = (rows.float() / scale.float().clamp(min=1e-12)[..., None]).round().clamp(-127, 127).to(torch.int8)
            return values, scale
        if self.fmt == "none":
            return rows, None
        limit = torch.finfo(self.element).max
        return rows.float().clamp(-limit, limit).to(self.element), None

    @staticmethod
    def decode(values: Tensor, scale: Tensor | None) -> Tensor:
        decoded = values.double()
        return decoded if scale is None else decoded * scale.double()[..., None]

    def fill(self, slot: int, n: int) -> None:
        """Write random rows for positions [0, n) (the window's only, where there is one)."""
        k = self.random(n, self.heads, self.width, scale=self.width**-0.5)
        v = self.random(n, self.heads, self.width)
        decoded = {}
        for name, rows in (("k", k), ("v", v)):
            values, scale = self.encode(rows)
            decoded[name] = self.decode(values, scale)
            if self.v_only:
                values = values[..., v_only_columns(self.width, pairs=self.pairs, device=values.device)]
            if name in self.offsets:
                self.write(slot, name, range(n), values, scale)
        self.k.append(decoded["k"])
        self.v.append(decoded["v"])

    def write(self, slot: int, name: str, positions: range, values: Tensor, scale: Tensor | None) -> None:
        low = max(positions.start, positions.stop - self.window - self.older) if self.window else positions.start
        for first in range(low - low % self.page_tokens, positions.stop, self.page_tokens):
            begin, end = max(first, low), min(first + self.page_tokens, positions.stop)
            rows, scales = self.page(slot, first // self.page_tokens, name)
            span = slice(begin - positions.start, end - positions.start)
            inside = slice(begin - first, end - first)
            rows[:, inside] = values[span].transpose(0, 1)
            if scale is not None:
                scales[:, inside] = scale[span].transpose(0, 1)

    def page(self, slot: int, logical: int, name: str) -> tuple[Tensor, Tensor | None]:
        """Views [H, page_tokens, D] and [H, page_tokens] of a logical page."""
        number = int(self.table[slot, logical % self.entries if self.entries else logical])
        base = self.origin + number * self.stride + self.layer_offset
        count = self.heads * self.page_tokens
        at = base + self.offsets[name]
        rows = self.arena[at : at + count * self.width * self.element.itemsize].view(self.element)
        scales = None
        if self.fmt == "int8":
            at = base + self.offsets[name + "_scale"]
            scales = self.arena[at : at + count * 2].view(torch.float16).view(self.heads, self.page_tokens)
        return rows.view(self.heads, self.page_tokens, self.width), scales

    def attention(
        self, q: Tensor, slot: int, positions: Tensor, keys: Tensor | None = None, last: Tensor | None = None
    ) -> Tensor:
        """float64 attention of q [N, Hq, D] at `positions` over the slot's rows, up to position `last` [N] of each, its
        own where that is None; `keys` replaces K."""
        k = self.k[slot] if keys is None else keys
        group = q.shape[1] // self.heads
        distance = positions[:, None] - torch.arange(k.shape[0], device=q.device)
        mask = distance >= 0 if last is None else torch.arange(k.shape[0], device=q.device) <= last[:, None]
        if self.window:
            mask &= distance < self.window
        out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
        for head in range(q.shape[1]):
            scores = q[:, head].double() @ k[:, head // group].T
            out[:, head] = scores.masked_fill(~mask, -math.inf).softmax(-1) @ self.v[slot][:, head // group]
        return out


def relative_error(out: Tensor, expected: Tensor) -> float:
    assert not out.isnan().any()
    return float((out.double() - expected).norm() / expected.norm())
