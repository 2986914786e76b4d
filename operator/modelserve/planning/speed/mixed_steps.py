"""How steps with decodes follow what waits: the fewest rows while few prompts do, and from when on a crowd does.

A step reads the weights once, and the first rows beside its decodes are multiplied while that lasts. 31B on an H200
takes 61 us for each of 225 rows of a prompt beside 31 decodes, and 76 for each of 481, so where a prompt is all that
waits, its steps have half of `max_num_mixed_tokens`: whoever decodes waits half as long for a token, and the prompt's
rows take a fifth less of the device. Models whose steps gain nothing from that keep the whole: E4B, whose chunks cost a
fixed time a layer, and 26B-A4B, whose step reads all experts for few rows as for many.

A crowd is PREFILLS_AHEAD prompts or more, of more tokens than steps of `max_num_mixed_tokens` compute in CROWD_SECONDS:
fewer are soon served, and end as close together as they began, where long steps let them. Whose steps are shorter than
PATIENT_SECONDS, as objective Latency has them, is more patient, by the square of that: short gaps were chosen there.
Plans count steps of `max_num_mixed_tokens`: where a crowd waits all the time, a request waits before its first token or
between its tokens, and is answered as soon either way. On the CPU, whose rates are not known, the worker measures what
its steps take, and gives them what EngineArgs.mixed_step_milliseconds compute.
"""

from __future__ import annotations

import math

from modelserve.planning.speed.step_time import PromptRows, RankSpeed

CROWD_SECONDS = 1.4
PATIENT_SECONDS = 0.05
_DECODES = 32  # beside which rows are counted; what these take by themselves cancels out
_FEWEST = 128  # rows of a step
_WORTH = 0.9  # of what a row takes in steps of twice as many


def min_mixed_tokens(rank: RankSpeed, max_num_mixed_tokens: int) -> int:
    """Half of `max_num_mixed_tokens` where rows of a prompt are a tenth cheaper in such steps, else all of them."""
    half = max_num_mixed_tokens // 2
    if half < _FEWEST or math.isinf(rank.doubling_context):
        return max_num_mixed_tokens
    if _row_seconds(rank, half) > _WORTH * _row_seconds(rank, max_num_mixed_tokens):
        return max_num_mixed_tokens
    return half


def crowd_tokens(rank: RankSpeed, max_num_mixed_tokens: int) -> float:
    """More prompt tokens than this are a crowd where steps have so many rows."""
    if math.isinf(rank.doubling_context):
        return math.inf
    seconds = _step_seconds(rank, max_num_mixed_tokens)
    return CROWD_SECONDS * max_num_mixed_tokens / seconds * max(1.0, PATIENT_SECONDS / seconds) ** 2


def _row_seconds(rank: RankSpeed, tokens: int) -> float:
    """What each row of a prompt adds to a step of decodes that has so many tokens with it."""
    return (_step_seconds(rank, tokens) - rank.step(decodes=_DECODES).seconds) / (tokens - _DECODES)


def _step_seconds(rank: RankSpeed, tokens: int) -> float:
    """Of so many tokens, decodes without context among them."""
    prompt = PromptRows.chunk(0, max(1, tokens - _DECODES), window=rank.window, ends=False)
    return rank.step(decodes=_DECODES, prompts=prompt).seconds
