"""Pages of a few tokens and bytes, so that small numbers of them are many, and the token that ends an answer."""

from __future__ import annotations

from modelserve.model.architecture import LayerKind
from modelserve.sizing.pages import CacheGeometry, KVCacheDtype, KVCacheLayout, PageSpec

EOS = 1
GEOMETRY = CacheGeometry(
    global_page=PageSpec(LayerKind.GLOBAL, 4, (1,), (), 16),
    sliding_page=PageSpec(LayerKind.SLIDING, 2, (0,), (), 8),
    window=5,
    dtype=KVCacheDtype.BFLOAT16,
    layout=KVCacheLayout.KV,
)
