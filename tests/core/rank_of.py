"""Settings of a rank, of which a test states what it is about."""

from __future__ import annotations

from typing import Any

from modelserve.model.architecture import ModelArchitecture
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve.sizing.rank_settings import RankSettings


def rank_of(architecture: ModelArchitecture, **stated: Any) -> RankSettings:
    """One GPU with a cache in bfloat16, V alone where the model allows it; 64 requests, steps of 8,192 tokens."""
    layout = KVCacheLayout.least(architecture)
    usual = {
        "tensor_parallel_size": 1, "max_num_batched_tokens": 8192, "max_num_seqs": 64,
        "kv_dtype": KVCacheDtype.BFLOAT16, "kv_layout": layout,
    }  # fmt: skip
    return RankSettings(**(usual | stated))
