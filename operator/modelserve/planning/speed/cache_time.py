"""How long decodes take to read a token of the cache, over all layers of a kind, by the kernels that the table chooses.

Kernels of Hopper's are for one row of a request in bfloat16; several rows, 8-bit rows and other GPUs are Triton's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from modelserve.hardware import Accelerator
from modelserve.model.architecture import LayerKind, ModelArchitecture
from modelserve.planning.speed.engine_rates import Capability, EngineRates
from modelserve.sizing.backends.attention import AttentionShape
from modelserve.sizing.backends.attention_kernels import Attended, attention_choices
from modelserve.sizing.backends.generations import nearest_known
from modelserve.sizing.backends.table import Operation
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
    """Which read for many requests of one row each, or of several. Where a GPU has no kernels, and on a CPU, those of
    the nearest below it that has some, or of the oldest, stand for PyTorch's."""
    operation = Operation.VERIFY_ATTENTION if several_rows else Operation.DECODE_ATTENTION
    gpu = 10 * capability[0] + capability[1]
    found = {}
    for kind in LayerKind:
        shape = AttentionShape.of(architecture, kind, dtype=dtype, v_only=layout is KVCacheLayout.V_ONLY, ranks=ranks)
        *_, choice = attention_choices(operation, Attended(shape, nearest_known(gpu), profile))
        found[kind] = choice.kernels[0]
    return found
