"""Settings that memory decides, in words: how many places a step has, and what other settings would hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from modelserve.model.architecture import ModelArchitecture
from modelserve.planning.evaluation import FEW_SEQUENCES, LEAST_POOL_LEFT, SHORT_REQUEST, Fit, evaluate
from modelserve.planning.wishes import Wishes
from modelserve.sizing.pages import KVCacheDtype

SHORT_CHUNK = 512  # tokens of a step
PLENTY = 8  # requests of the longest context: who has room for so many looks for no more


def other_settings(fit: Fit, architecture: ModelArchitecture, wishes: Wishes) -> str:
    """Tokens of requests of maxModelLen, as planned and with fewer places, an 8-bit cache or shorter steps, each alone.

    Empty on the CPU, and where the pool holds plenty of such requests.
    """
    if fit.accelerator.is_cpu or fit.geometry.requests(fit.memory.kv_pool_bytes, fit.max_model_len) >= PLENTY:
        return ""
    length = fit.max_model_len
    planned = replace(wishes, max_model_len=length, min_model_len=None, kv_dtype=fit.geometry.dtype,
                      max_num_seqs=fit.sequences)  # fmt: skip
    texts = []
    for name, other in _others(fit, planned):
        found = evaluate(other, architecture, fit.accelerator, gpus=fit.gpus)
        if isinstance(found, Fit) and found.max_model_len == length and tokens(found) > tokens(fit):
            texts.append(f"with {name}: {tokens(found):,}")
    if not texts:
        return ""
    return f"requests of {length:,} tokens have {tokens(fit):,} in all; {', '.join(texts)}"


def places(fit: Fit, wishes: Wishes) -> str:
    """Why a step has more requests than it has by default, or fewer."""
    usual = wishes.sequences(fit.accelerator)
    if fit.sequences == usual:
        return ""
    short = int(fit.geometry.requests(fit.memory.kv_pool_bytes, SHORT_REQUEST))
    if fit.sequences < usual:
        return (
            f"a step has {fit.sequences} of them at most, and not {usual}: memory for more places is the pool's, which "
            f"holds {short:,} of {SHORT_REQUEST} tokens"
        )
    return (
        f"a step has up to {fit.sequences} of them: the pool holds {short:,} of {SHORT_REQUEST} tokens, and gives "
        f"less than {1 - LEAST_POOL_LEFT:.0%} of itself for more than {usual}"
    )


def tokens(fit: Fit) -> int:
    """Tokens of as many requests of maxModelLen as the pool holds, a fraction of one included."""
    return fit.memory.kv_pool_bytes * fit.max_model_len // fit.geometry.held_bytes(fit.max_model_len)


def _others(fit: Fit, planned: Wishes) -> Iterator[tuple[str, Wishes]]:
    if fit.sequences > FEW_SEQUENCES:
        yield f"maxNumSeqs {FEW_SEQUENCES}", replace(planned, max_num_seqs=FEW_SEQUENCES)
    if fit.geometry.dtype is KVCacheDtype.BFLOAT16:
        yield "an int8 cache", replace(planned, kv_dtype=KVCacheDtype.INT8)
    if planned.chunk(fit.accelerator) > SHORT_CHUNK:
        yield f"maxNumBatchedTokens {SHORT_CHUNK}", replace(planned, max_num_batched_tokens=SHORT_CHUNK)
