"""`modelserve plan --compare vllm`: vLLM's own arithmetic for a pool, beside ours for the same pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from modelserve.api import ModelServeSpec, PlanStatus
from modelserve.errors import InvalidInput
from modelserve.model.architecture import ModelArchitecture
from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout, cache_geometry
from modelserve.sizing.vllm import TURNING_POINTS, VllmVersion, parse_version, resident_bytes, vllm_cache
from modelserve.units import GIB

PEER = "vllm"


PeerCurve = tuple[str, tuple[tuple[int, float], ...]]
"""A name, and (tokens of each request, requests at once)."""


@dataclass(frozen=True)
class ComparedPool:
    """The pool of one rank and the settings both sides are asked about."""

    pool_bytes: int
    tensor_parallel: int
    max_model_len: int
    max_num_batched_tokens: int
    dtype: KVCacheDtype


def compared_versions(text: str) -> tuple[VllmVersion, ...]:
    """`vllm` is every release in which a figure changed, `vllm:VERSION` that one. Raises InvalidInput."""
    peer, separator, version = text.partition(":")
    if peer != PEER:
        raise InvalidInput(f"--compare {text[:64]!r}: only vllm or vllm:VERSION can be compared with")
    return (parse_version(version),) if separator else TURNING_POINTS


def compared_pool(
    spec: ModelServeSpec, plan: PlanStatus, architecture: ModelArchitecture, *, pool_bytes: int | None
) -> ComparedPool | None:
    """The pool and settings of the plan, or the given pool in place of it; None where there is neither."""
    cache, engine, context = plan.kv_cache, plan.engine, spec.context
    planned = plan.per_gpu.kv_pool_bytes if plan.per_gpu else None
    pool = pool_bytes if pool_bytes is not None else planned
    if pool is None:
        return None
    asked = spec.engine.max_num_batched_tokens if spec.engine else None
    return ComparedPool(
        pool_bytes=pool,
        tensor_parallel=plan.tensor_parallel or (spec.parallelism.tensor if spec.parallelism else None) or 1,
        max_model_len=(context.max_model_len if context else None)
        or plan.max_model_len
        or architecture.max_position_embeddings,
        max_num_batched_tokens=asked or (engine.max_num_batched_tokens if engine else 2048),
        dtype=cache.dtype
        if cache
        else KVCacheDtype(spec.kv_cache.dtype)
        if spec.kv_cache and spec.kv_cache.dtype
        else KVCacheDtype.BFLOAT16,
    )


def compare(
    architecture: ModelArchitecture, pool: ComparedPool, versions: tuple[VllmVersion, ...]
) -> list[dict[str, Any]]:
    """One row per release of the peer, then ours in each layout the model allows; figures as JSON has them."""
    rows = [_peer_row(architecture, pool, version) for version in versions]
    layouts = [KVCacheLayout.KV, *([KVCacheLayout.V_ONLY] if architecture.attention_k_eq_v else [])]
    dtypes = dict.fromkeys((pool.dtype, KVCacheDtype.INT8))
    rows.extend(_own_row(architecture, pool, layout, dtype) for dtype in dtypes for layout in layouts)
    return rows


def peer_curves(
    architecture: ModelArchitecture, pool: ComparedPool, versions: tuple[VllmVersion, ...]
) -> tuple[PeerCurve, ...]:
    """What each release says of requests of 1,024 tokens to maxModelLen, each length as its --max-model-len."""
    lengths = [1024 << power for power in range(9) if 1024 << power < pool.max_model_len]
    curves = []
    for version in versions:
        points = []
        for length in (*lengths, pool.max_model_len):
            row = _peer_row(architecture, replace(pool, max_model_len=length), version)
            if float(row.get("concurrency", 0)) > 0:
                points.append((length, float(row["concurrency"])))
        if points:
            curves.append((f"{PEER} {version}, {pool.dtype}, on the chosen pool", tuple(points)))
    return tuple(curves)


def comparison_text(pool: ComparedPool, rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    head = (
        f"{pool.pool_bytes / GIB:.2f} GiB of pool per GPU, TP {pool.tensor_parallel}, requests of "
        f"{pool.max_model_len:,} tokens, chunk {pool.max_num_batched_tokens:,}"
    )
    cells = [("ENGINE", "KV", "REQUEST", "AT ONCE", "ROWS", "HOW")]
    for row in rows:
        request = f"{row['requestBytes'] / GIB:.2f} GiB" if "requestBytes" in row else "-"
        cells.append(
            (row["engine"], row["kv"], request, row.get("concurrency", "-"), row.get("resident", "-"), _how(row))
        )
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]) for row in cells
    ]
    return "\n".join([head, *(f"  {line}" for line in lines)])


def _how(row: dict[str, Any]) -> str:
    if "refused" in row:
        return str(row["refused"])
    if "blocks" in row:
        padded = f", {row['paddedPercent']} % of the smaller page is padding" if row["paddedPercent"] != "0" else ""
        return f"{row['blocks']:,} blocks / {row['blocksPerRequest']:,}; logs {row['loggedTokens']:,} tokens{padded}"
    return "a chunk costs the pool nothing"


def _peer_row(architecture: ModelArchitecture, pool: ComparedPool, version: VllmVersion) -> dict[str, Any]:
    row: dict[str, Any] = {"engine": f"{PEER} {version}", "kv": f"{pool.dtype}/kv"}
    try:
        cache = vllm_cache(
            architecture,
            version=version,
            dtype=pool.dtype,
            tensor_parallel_size=pool.tensor_parallel,
            max_model_len=pool.max_model_len,
            max_num_batched_tokens=pool.max_num_batched_tokens,
        )
    except InvalidInput as error:
        return row | {"refused": str(error)}
    return row | {
        "requestBytes": cache.request_bytes,
        "concurrency": f"{cache.concurrency(pool.pool_bytes):f}",
        "blocks": cache.blocks(pool.pool_bytes),
        "blocksPerRequest": cache.blocks_per_request,
        "loggedTokens": cache.logged_tokens(pool.pool_bytes),
        "paddedPercent": f"{100 * cache.padded_bytes / cache.page_bytes:.0f}",
    }


def _own_row(
    architecture: ModelArchitecture, pool: ComparedPool, layout: KVCacheLayout, dtype: KVCacheDtype
) -> dict[str, Any]:
    geometry = cache_geometry(architecture, dtype=dtype, layout=layout, tensor_parallel_size=pool.tensor_parallel)
    rows_alone = Decimal(pool.pool_bytes) / resident_bytes(geometry, pool.max_model_len)
    return {
        "engine": "modelserve",
        "kv": f"{dtype}/{layout}",
        "requestBytes": geometry.held_bytes(pool.max_model_len),
        "concurrency": f"{geometry.concurrency(pool.pool_bytes, pool.max_model_len):f}",
        "resident": f"{rows_alone:.2f}",
    }
