"""How vLLM 0.19 to 0.33 counts the cache of Gemma 4, so that its figures can be laid beside ours.

Rules, from its sources, threads and running servers:
- A page is 16 tokens of one layer; 64 with an fp8 cache in the newer releases (measured in 0.33 on an H200).
- Bytes of one token, layer and head, K and V together: 4 d in bfloat16, 2 d in fp8, 2 d + 8 in int8 with scales.
- Pages of full and sliding layers are made equal: the smaller one takes a whole number of times the tokens. Where the
  sizes are no multiple of each other, releases up to 0.21 refuse to start and later ones pad the smaller page.
- Layers are dealt into groups of the smaller kind's number; a block is one page in each layer of a group.
- A request is charged ceil(max_model_len / tokens) blocks of the full group, and of every sliding group
  ceil(min(window - 1 + c chunk, max_model_len) / tokens) + 1, where c = 2 from 0.26 on: two batches are in flight.
- "GPU KV cache size" in its log: floor(blocks / groups) x the smaller page's tokens up to 0.20, then
  concurrency x max_model_len.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from modelserve.errors import InvalidInput
from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype


class VllmVersion(NamedTuple):
    """A release line; compares by number."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


OLDEST, NEWEST = VllmVersion(0, 19), VllmVersion(0, 33)
LOG_BY_CONCURRENCY = VllmVersion(0, 21)  # first release whose log line is concurrency x max_model_len
PADDED_PAGES = VllmVersion(0, 22)  # first release taken to pad instead of refusing; read in 0.33
TWO_IN_FLIGHT = VllmVersion(0, 26)  # first release that reserves two chunks
TURNING_POINTS = (OLDEST, LOG_BY_CONCURRENCY, TWO_IN_FLIGHT, NEWEST)
"""Releases between which every figure here stays the same, but for padding."""

_PAGE_TOKENS, _PAGE_TOKENS_FP8 = 16, 64
_FP8 = (KVCacheDtype.FP8_E4M3, KVCacheDtype.FP8_E5M2)


@dataclass(frozen=True)
class VllmCache:
    """vLLM's plan of a pool. `page_bytes` is of one layer; tokens are per page of a kind."""

    version: VllmVersion
    page_bytes: int
    full_page_tokens: int
    sliding_page_tokens: int
    padded_bytes: int  # of one page of the padded kind; 0 where both divide
    group_layers: int
    full_groups: int
    sliding_groups: int
    full_blocks: int  # of one request and full group
    sliding_blocks: int  # of one request and sliding group
    max_model_len: int

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.group_layers

    @property
    def blocks_per_request(self) -> int:
        return self.full_groups * self.full_blocks + self.sliding_groups * self.sliding_blocks

    @property
    def request_bytes(self) -> int:
        """Pool that one request of max_model_len is charged: less than this, and vLLM does not start."""
        return self.blocks_per_request * self.block_bytes

    def blocks(self, pool_bytes: int) -> int:
        return pool_bytes // self.block_bytes

    def concurrency(self, pool_bytes: int) -> Decimal:
        """Requests of max_model_len at once, to two decimals as its log shows them."""
        exact = Decimal(self.blocks(pool_bytes)) / self.blocks_per_request
        return exact.quantize(Decimal("0.01"))

    def logged_tokens(self, pool_bytes: int) -> int:
        """The "GPU KV cache size" of its log."""
        blocks = self.blocks(pool_bytes)
        if self.version < LOG_BY_CONCURRENCY:
            groups = self.full_groups + self.sliding_groups
            return blocks // groups * min(self.full_page_tokens, self.sliding_page_tokens)
        return blocks * self.max_model_len // self.blocks_per_request


def parse_version(text: str) -> VllmVersion:
    """`0.21` or `0.21.0`. Raises InvalidInput outside of 0.19 to 0.33."""
    parts = text.split(".")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and len(part) < 5 for part in parts):
        raise InvalidInput(f"vLLM version {text[:32]!r} is not MAJOR.MINOR; known are {OLDEST} to {NEWEST}")
    version = VllmVersion(int(parts[0]), int(parts[1]))
    if not OLDEST <= version <= NEWEST:
        raise InvalidInput(f"the arithmetic of vLLM {version} is not known; known are {OLDEST} to {NEWEST}")
    return version


def vllm_cache(
    architecture: ModelArchitecture,
    *,
    version: VllmVersion,
    dtype: KVCacheDtype,
    tensor_parallel_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> VllmCache:
    """vLLM's arithmetic for one model. Raises InvalidInput where that release refuses to start."""
    page_tokens = _PAGE_TOKENS_FP8 if dtype in _FP8 and version >= PADDED_PAGES else _PAGE_TOKENS
    layers = {kind: len(architecture.owning_layers(kind)) for kind in LayerKind}
    if not all(layers.values()):
        raise InvalidInput("vLLM's rules are known for models that have both full and sliding layers with a cache")
    per_token = {kind: _token_bytes(architecture, kind, dtype, tensor_parallel_size) for kind in LayerKind}
    small, large = sorted(LayerKind, key=lambda kind: per_token[kind])
    page_bytes = per_token[large] * page_tokens
    factor, rest = divmod(per_token[large], per_token[small])
    if rest and version < PADDED_PAGES:
        raise InvalidInput(
            f"vLLM {version} refuses to start: pages of {per_token[large] * page_tokens:,} and "
            f"{per_token[small] * page_tokens:,} bytes are no multiple of each other"
        )
    tokens = {large: page_tokens, small: page_tokens * (1 if rest else factor)}
    group = min(layers.values())
    in_flight = (2 if version >= TWO_IN_FLIGHT else 1) * max_num_batched_tokens
    window = min(architecture.sliding_window - 1 + in_flight, max_model_len)
    return VllmCache(
        version=version,
        page_bytes=page_bytes,
        full_page_tokens=tokens[LayerKind.GLOBAL],
        sliding_page_tokens=tokens[LayerKind.SLIDING],
        padded_bytes=page_bytes - per_token[small] * page_tokens if rest else 0,
        group_layers=group,
        full_groups=-(-layers[LayerKind.GLOBAL] // group),
        sliding_groups=-(-layers[LayerKind.SLIDING] // group),
        full_blocks=-(-max_model_len // tokens[LayerKind.GLOBAL]),
        sliding_blocks=-(-window // tokens[LayerKind.SLIDING]) + 1,
        max_model_len=max_model_len,
    )


def resident_bytes(geometry: CacheGeometry, length: int) -> int:
    """What a request of `length` tokens needs when only its rows are charged: no page rounding, no chunk."""
    page, sliding = geometry.global_page, geometry.sliding_page
    rows = page.page_bytes * length // page.page_tokens
    return rows + sliding.page_bytes * min(length, geometry.window) // sliding.page_tokens


def _token_bytes(architecture: ModelArchitecture, kind: LayerKind, dtype: KVCacheDtype, tp: int) -> int:
    """Bytes of one token in one layer; K and V are both stored, also where one follows from the other."""
    width = architecture.global_head_dim if kind is LayerKind.GLOBAL else architecture.head_dim
    scales = 8 if dtype is KVCacheDtype.INT8 else 0  # a float32 for K and one for V
    return architecture.kv_heads_per_rank(kind, tp) * (2 * width * dtype.element_bytes + scales)
