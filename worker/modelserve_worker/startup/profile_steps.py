"""The heaviest steps that a rank may be given, which its start runs for their memory and their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from modelserve.engine_args import EngineArgs
from modelserve.model.audio import RATE, AudioArchitecture
from modelserve.model.images import ImageArchitecture
from modelserve.sizing.activation import PROMPT_SCORE_ROWS
from modelserve.sizing.memory import KEYS_PER_PASS
from modelserve.sizing.speculation import STEP_DRAFTS
from modelserve_worker.batch import (
    NO_UPDATES,
    NOTHING_ASKED,
    AdmittedRequest,
    Asked,
    AskedDrafter,
    Int32Array,
    ScheduledBatch,
)
from modelserve_worker.embedded_spans import (
    KEY_BYTES,
    AudioFrames,
    EmbeddedSpan,
    ImagePatches,
    SpanRows,
    span_pieces,
)
from modelserve_worker.request import SamplingParams

_CPU_TOKENS = 64  # nothing is measured on the CPU: the steps show that the model runs

# Every filter and penalty on, so that the profile step holds every temporary of sampling.
_PROFILE_SAMPLING = SamplingParams(
    seed=0, max_tokens=1, top_p=0.5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.1,
    frequency_penalty=0.1, logprobs=20, prompt_logprobs=20,
)  # fmt: skip
# And one that few candidates decide. No request is to wait for the compilation of its kernels.
_KERNELS_SAMPLING = SamplingParams(seed=0, max_tokens=1, top_k=64, top_p=0.95)


def heaviest_steps(
    args: EngineArgs, *, longest: int, on_gpu: bool, draft_tokens: int = 0, asked: Sequence[AskedDrafter] = ()
) -> tuple[ScheduledBatch, ...]:
    """Steps that a runner made for `args` takes, over a model of `longest` positions: the largest that there are on a
    GPU, and small ones on the CPU. None has more tokens than a step may have. `draft_tokens` may follow a decode."""
    tokens, few = min(args.max_num_batched_tokens, longest), min(1 + draft_tokens, longest)
    if not on_gpu:
        return profile_batches(start=0, tokens=min(tokens, _CPU_TOKENS), rows=1, few=few, asked=asked)
    start = min(KEYS_PER_PASS, longest - max(tokens, few))
    return profile_batches(start=start, tokens=tokens, rows=args.max_num_seqs, few=few, asked=asked)


def profile_batches(
    *, start: int, tokens: int, rows: int, few: int = 1, asked: Sequence[AskedDrafter] = ()
) -> tuple[ScheduledBatch, ...]:
    """Two prefill chunks of positions [start, start + tokens), then `rows` decodes of `few` rows each, as far as a
    step has drafts, then those that kernels draw. Behind the first decodes the first of the drafters that are `asked`
    makes as many as it may, behind the others the last.

    A block of the first chunk is scored, for which a model that narrows its steps computes all rows in all layers.
    Every table entry names page 0.
    """
    heavy, drawn = (
        tuple(AdmittedRequest(slot, f"profile-{slot}", sampling, (0,), ()) for slot in range(rows))
        for sampling in (_PROFILE_SAMPLING, _KERNELS_SAMPLING)
    )
    chunk, one = np.full(1, tokens, dtype=np.int32), np.ones(1, dtype=np.int32)
    chunks = (
        _profile_batch(step, start=start, lengths=chunk, drawn=one, admitted=heavy[:1], given=given)
        for step, given in enumerate((min(tokens - 1, PROMPT_SCORE_ROWS), 0))
    )
    drafts = few - 1
    most = [Asked(drafter.most, number) for number, drafter in enumerate(asked)] or [NOTHING_ASKED]
    each = 1 + np.clip(STEP_DRAFTS - drafts * np.arange(rows), 0, drafts).astype(np.int32)
    decodes = (
        replace(_profile_batch(step, start=start, lengths=each, drawn=each, admitted=admitted), asked=of)
        for step, (admitted, of) in enumerate(((heavy, most[0]), (drawn, most[-1])), start=2)
    )
    return *chunks, *decodes


def image_steps(
    args: EngineArgs, images: ImageArchitecture, *, longest: int, on_gpu: bool
) -> tuple[ScheduledBatch, ...]:
    """A step all of whose rows but the last are images', each as large as may be: what such a step holds, and its
    kernels."""
    tokens = min(args.max_num_batched_tokens, longest, *(() if on_gpu else (_CPU_TOKENS,)))
    spans, at = [], 0
    while at < tokens - 1:
        rows = min(args.max_soft_tokens, tokens - 1 - at)
        patches = ImagePatches(np.zeros((rows, images.patch_values), dtype=np.uint8), rows)
        spans.append(EmbeddedSpan(at, patches, bytes(KEY_BYTES), images.mutual))
        at += rows
    return _media_step("images", spans, tokens)


def audio_steps(
    args: EngineArgs, audio: AudioArchitecture, *, longest: int, on_gpu: bool
) -> tuple[ScheduledBatch, ...]:
    """The same of sounds."""
    tokens = min(args.max_num_batched_tokens, longest, *(() if on_gpu else (_CPU_TOKENS,)))
    most, spans, at = audio.soft_tokens(args.audio_seconds * RATE), [], 0
    while at < tokens - 1:
        rows = min(most, tokens - 1 - at)
        frames = np.zeros((rows * audio.frames_per_row, audio.frame_values), dtype=np.float32)
        spans.append(EmbeddedSpan(at, AudioFrames(frames, rows), bytes(KEY_BYTES), mutual=False))
        at += rows
    return _media_step("sounds", spans, tokens)


def _media_step(name: str, spans: Sequence[EmbeddedSpan], tokens: int) -> tuple[ScheduledBatch, ...]:
    if not spans:
        return ()
    admitted = AdmittedRequest(0, name, _KERNELS_SAMPLING, (0,), (), spans=tuple(spans))
    lengths, one = np.full(1, tokens, dtype=np.int32), np.ones(1, dtype=np.int32)
    batch = _profile_batch(0, start=0, lengths=lengths, drawn=one, admitted=(admitted,))
    return (replace(batch, spans=SpanRows.parts(list(span_pieces(spans, 0, 0, tokens)))),)


def timed_batch(*, start: int, tokens: int) -> ScheduledBatch:
    """A chunk of positions [start, start + tokens) which ends in a token that is drawn, as those of answers are."""
    admitted = AdmittedRequest(0, "timed", _KERNELS_SAMPLING, (0,), ())
    lengths, one = np.full(1, tokens, dtype=np.int32), np.ones(1, dtype=np.int32)
    return _profile_batch(0, start=start, lengths=lengths, drawn=one, admitted=(admitted,))


def _profile_batch(
    step: int,
    *,
    start: int,
    lengths: Int32Array,
    drawn: Int32Array,
    admitted: tuple[AdmittedRequest, ...],
    given: int = 0,
) -> ScheduledBatch:
    slots = len(lengths)
    return ScheduledBatch(
        step=step,
        slots=np.arange(slots, dtype=np.int32),
        starts=np.full(slots, start, dtype=np.int32),
        lengths=lengths,
        sampled=drawn + given,
        given=np.full(slots if given else 0, given, dtype=np.int32),
        targets=np.zeros(slots * given, dtype=np.int32),
        output_counts=np.zeros(slots, dtype=np.int32),
        token_ids=np.zeros(lengths.sum(), dtype=np.int32),
        admitted=admitted,
        page_moves=(),
        global_updates=NO_UPDATES,
        sliding_updates=NO_UPDATES,
    )
