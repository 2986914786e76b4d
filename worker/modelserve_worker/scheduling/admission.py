"""What may enter: the limits of an engine, the refusal of what can never run, and the bytes an admission commits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelserve.engine_args import DEFAULT_MAX_NUM_MIXED_TOKENS
from modelserve.errors import InvalidInput
from modelserve.planning.speed.encoding_cost import NO_ENCODING, EncodingCost
from modelserve.planning.speed.prompt_rows import PREFILLS_AHEAD, PromptCost, rows_alone, rows_beside_decodes
from modelserve.sizing.pages import CacheGeometry
from modelserve_worker.batch import Int32Array, ScheduledBatch
from modelserve_worker.request import Request
from modelserve_worker.scheduling.prompt_spans import check_spans


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Token and request limits of one engine, and what its steps cost.

    `eos_token_ids` end a request unless it ignores them. At a context of `doubling_context` tokens a row of a prompt
    takes twice what it takes at the beginning. Beside decodes a step has at most `max_num_mixed_tokens`, and while few
    prompts wait `min_num_mixed_tokens` (0: no fewer); it grows where a crowd waits, PREFILLS_AHEAD prompts or more of
    more than `crowd_tokens`. Steps with prompts are captured for so many `captured_rows`, rising.
    `exact`: rows of prompts and rows behind them are computed apart, in the same way each time. `hidden_size`: of the
    model, which embeddings have; 0: any. `patch_values`: of a patch of an image; 0: none is taken; None: any.
    `frame_values`: the same of a frame of a sound. `encoding_cost`: of making rows of both, in rows of prompts.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    max_num_mixed_tokens: int = DEFAULT_MAX_NUM_MIXED_TOKENS
    doubling_context: float = math.inf
    captured_rows: tuple[int, ...] = ()
    exact: bool = False
    hidden_size: int = 0
    patch_values: int | None = None
    frame_values: int | None = None
    min_num_mixed_tokens: int = 0
    crowd_tokens: float = math.inf
    encoding_cost: EncodingCost = NO_ENCODING

    @property
    def max_running(self) -> int:
        """Requests that run at once. Never more than a step has tokens: see the fairness argument of the scheduler."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def prompt_cost(self) -> PromptCost:
        """What rows of prompts cost, by their place."""
        return PromptCost.of_steps(self.doubling_context, self.max_num_batched_tokens)

    def prefill_tokens(self, decodes: int, remaining: Int32Array, longest: int, *, held_back: int = 0) -> int:
        """Prompt tokens that a step takes beside `decodes` requests that decode in it. Prompts have so many `remaining`
        [P], the oldest first, and none has more than `longest` in all; others that could run have `held_back`,
        and are held back where PREFILLS_AHEAD wait already.

        Alone, prefills fill the step, or the steps of a long prompt. Beside decodes they fill a mixed step, a shorter
        one where few wait or a longer one where many do, and have half of one however many decode.
        """
        most = self.max_num_batched_tokens
        if not decodes:
            return rows_alone(longest, max_num_batched_tokens=most, max_num_mixed_tokens=self.max_num_mixed_tokens)
        oldest, *others = np.minimum(remaining, most).tolist() or [0]
        crowded = held_back > 0 or len(remaining) >= PREFILLS_AHEAD
        rows = rows_beside_decodes(
            oldest, sum(others) + held_back, decodes=decodes, max_num_batched_tokens=most,
            max_num_mixed_tokens=self.max_num_mixed_tokens,
            min_num_mixed_tokens=self.min_num_mixed_tokens or self.max_num_mixed_tokens,
            crowd_tokens=self.crowd_tokens if crowded else math.inf,
        )  # fmt: skip
        return min(most - decodes, max(rows - decodes, rows // 2))

    def answers_first(self, batch: ScheduledBatch) -> bool:
        """Whether a step is so long that the next one is scheduled only after it: who comes meanwhile is in the next
        one then and waits for no other, and first tokens are told at once. The device idles about a millisecond."""
        return int(batch.lengths[batch.lengths > 1].sum()) > self.max_num_mixed_tokens

    def most_cached_tokens(self, request: Request) -> int:
        """Most positions of a request that are ever computed: all but the last token, whose row nobody reads."""
        return min(len(request.prompt_token_ids) + request.sampling.max_tokens, self.max_model_len) - 1

    def stop_token_ids(self, request: Request) -> frozenset[int]:
        """Tokens that end a request once it has more than `min_tokens`: its own, and EOS unless it ignores them."""
        sampling = request.sampling
        return frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else self.eos_token_ids))


class Admission:
    """Decides over one pool of `pool_bytes` bytes per rank."""

    def __init__(self, limits: SchedulerLimits, geometry: CacheGeometry, pool_bytes: int) -> None:
        self._limits = limits
        self._geometry = geometry
        self._pool_bytes = pool_bytes

    def validate(self, request: Request) -> None:
        """Raise InvalidInput if the request could never run, even alone. Callable from any thread."""
        limits = self._limits
        prompt, limit = len(request.prompt_token_ids), limits.max_model_len
        if not prompt:
            raise InvalidInput("the prompt has no tokens; send at least 1", field="prompt")
        if request.sampling.max_tokens < 1:
            raise InvalidInput(
                f"max_tokens is {request.sampling.max_tokens}; it must be at least 1", field="max_tokens"
            )
        if prompt >= limit:
            raise InvalidInput(
                f"the prompt has {prompt} tokens and needs room for at least 1 more, but the model's context is "
                f"{limit} tokens; shorten the prompt by {prompt - limit + 1}",
                field="prompt",
            )
        check_spans(
            request,
            limits.max_num_batched_tokens,
            hidden_size=limits.hidden_size,
            patch_values=limits.patch_values,
            frame_values=limits.frame_values,
        )
        tokens = self._limits.most_cached_tokens(request)
        need = self._geometry.held_bytes(tokens)
        if need > self._pool_bytes:
            geometry = self._geometry
            raise InvalidInput(
                f"{prompt} prompt tokens and up to {request.sampling.max_tokens} new ones hold {need} bytes of cache "
                f"({geometry.global_pages(tokens) + geometry.draft_ring_pages(tokens)} global pages of "
                f"{geometry.global_page.page_bytes} bytes and "
                f"{geometry.sliding_pages(tokens)} sliding pages of {geometry.sliding_page.page_bytes}), but the pool "
                f"has {self._pool_bytes}; keep prompt and max_tokens within "
                f"{geometry.longest_request(self._pool_bytes) + 1} tokens together",
                field="max_tokens",
            )

    def committed_bytes(self, request: Request) -> int:
        """Bytes kept for a request of its known tokens: what they hold, and as watermark one global page's growth.

        The watermark ends where the request does, so requests of known length are charged their final size and no more:
        n of them run together without preemption exactly when n <= geometry.requests(pool, length).
        """
        most = self._limits.most_cached_tokens(request)
        return self._geometry.held_bytes(min(request.num_tokens + self._geometry.global_page.page_tokens, most))

    def growth_bytes(self, known: Int32Array, most_cached: Int32Array, held_bytes: NDArray[np.int64]) -> int:
        """Bytes that running requests are yet to take of what is committed to them; each argument [N].

        `known` are tokens, those in flight included, `most_cached` and `held_bytes` as in SlotCounters.
        """
        geometry = self._geometry
        tokens = np.minimum(known + geometry.global_page.page_tokens, most_cached).astype(np.int64)
        pages = -(-tokens // geometry.global_page.page_tokens)
        if geometry.draft is not None and geometry.draft.ring_entries:
            pages += np.minimum(-(-tokens // geometry.draft.page_tokens), geometry.draft.ring_entries)
        committed = pages * geometry.global_page.page_bytes
        sliding = np.minimum(-(-tokens // geometry.sliding_page.page_tokens), geometry.sliding_table_entries)
        committed += sliding * geometry.sliding_page.page_bytes
        return int(np.maximum(committed - held_bytes, 0).sum())
