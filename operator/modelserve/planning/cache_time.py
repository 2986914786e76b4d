"""How long decodes take to read a token of the cache, over all layers of a kind, by the kernels that the table chooses.

Kernels of Hopper's are for one row of a request in bfloat16; several rows, 8-bit rows and other GPUs are Triton's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from modelserve.architecture import LayerKind, ModelArchitecture
from modelserve.hardware import Accelerator
from modelserve.planning.engine_rates import Capability, EngineRates
from modelserve.sizing.backends.attention import AttentionShape, decode_choices
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout
from modelserve.sizing.rank_settings import Profile


def token_seconds(
    device: Accelerator,
    rates: EngineRates,
    geometry: CacheGeometry,
    kernels: Mapping[LayerKind, str],
    *,
    readers: Mapping[LayerKind, int],
) -> tuple[float, float]:
    """Of global layers and of sliding ones, of which `readers` read a cache, their own or another's, by `kernels`."""
    shares = {
        "decode_stream": rates.streamed_read,
        "global_decode": rates.v_only_read,
        "split_decode_v_only_packed": rates.turned_8_bit_read,
    }

    def seconds(kind: LayerKind) -> float:
        page, share = geometry.page(kind), shares.get(kernels[kind], rates.cache_read)
        return page.layer_bytes * readers[kind] / page.page_tokens / (device.bandwidth * share)

    return seconds(LayerKind.GLOBAL), seconds(LayerKind.SLIDING)


@lru_cache(maxsize=256)
def decode_kernels(
    architecture: ModelArchitecture,
    dtype: KVCacheDtype,
    layout: KVCacheLayout,
    capability: Capability,
    *,
    ranks: int,
    several_rows: bool,
    profile: Profile,
) -> Mapping[LayerKind, str]:
    """Which read for many requests of one row each, or of several: those have the kernels of profile exact."""
    found = {}
    for kind in LayerKind:
        shape = AttentionShape.of(architecture, kind, dtype=dtype, v_only=layout is KVCacheLayout.V_ONLY, ranks=ranks)
        major, minor = capability
        *_, choice = decode_choices(shape, 10 * major + minor, "exact" if several_rows else profile)
        found[kind] = choice.kernels[0]
    return found
