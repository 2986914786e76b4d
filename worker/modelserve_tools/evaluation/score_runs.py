"""Runs that score texts: a reference is recorded, or a served endpoint is compared with one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from modelserve_tools.evaluation.client import ChatEndpoint, open_http
from modelserve_tools.evaluation.flags import cells
from modelserve_tools.evaluation.progress import Progress
from modelserve_tools.evaluation.publishing import BadInput
from modelserve_tools.evaluation.reference import Recording, RecordingWriter, ReferenceText
from modelserve_tools.evaluation.replies import ModelCard
from modelserve_tools.evaluation.runs import Target, exercises_of
from modelserve_tools.evaluation.scores import ScoringEndpoint
from modelserve_tools.evaluation.scoring import (
    CellScores,
    Comparer,
    Job,
    ReferenceSpeaker,
    Take,
    asked,
    for_each_text,
    recorded,
)


def open_recording(path: Path, *, seed: int) -> Recording:
    """Raises ReportError, and BadInput where there is no such file, or it was made of other exercises."""
    if path.is_dir():
        raise BadInput(
            f"--against {path} is a directory; serve the checkpoint (modelserve-worker serve --model {path}) and give "
            "its address, such as http://127.0.0.1:8000/v1"
        )
    if not path.is_file():
        raise BadInput(
            f"--against {path} is no file and no HTTP address; write http://HOST:PORT/v1, or a file that --record wrote"
        )
    recording = Recording(path)
    if recording.head.seed != seed:
        raise BadInput(f"--seed {seed}: {path} was recorded with seed {recording.head.seed}; ask the same exercises")
    return recording


async def record(
    writer: RecordingWriter, target: Target, model: ModelCard, flags: argparse.Namespace
) -> list[CellScores]:
    """Write all texts with their scores. Raises EndpointError's kinds that hold for every text."""
    scored = _cells(flags)
    async with AsyncExitStack() as stack:
        speaker = _speaker(await _endpoint(stack, target, model, flags), flags)

        async def take(text: ReferenceText, scores: CellScores) -> None:
            writer.text(text)
            scores.texts += 1

        await _run(asked(scored, speaker), take, flags, total=_total(scored))
    return scored


async def compare_texts(
    served: Target,
    served_model: ModelCard,
    reference: tuple[Target, ModelCard] | Recording,
    flags: argparse.Namespace,
) -> list[CellScores]:
    """Score the reference's texts by both. Raises EndpointError's kinds that hold for every text, and
    TokenizersDiffer."""
    async with AsyncExitStack() as stack:
        comparer = Comparer(await _endpoint(stack, served, served_model, flags), exercise_of=exercises_of(flags.seed))
        if isinstance(reference, Recording):
            scored: list[CellScores] = []
            jobs, total = recorded(reference.texts(), scored), reference.count
        else:
            scored = _cells(flags)
            speaker = _speaker(await _endpoint(stack, *reference, flags), flags)
            jobs, total = asked(scored, speaker), _total(scored)
        await _run(jobs, comparer.compare, flags, total=total)
    return scored


async def _run(jobs: Iterator[Job], take: Take, flags: argparse.Namespace, *, total: int) -> None:
    progress = Progress(sys.stderr)
    try:
        await for_each_text(
            jobs, take, concurrency=flags.concurrency, on_progress=lambda done: progress.show(done, total)
        )
    finally:
        progress.clear()


async def _endpoint(
    stack: AsyncExitStack, target: Target, model: ModelCard, flags: argparse.Namespace
) -> ScoringEndpoint:
    http = await stack.enter_async_context(
        open_http(target.base_url, api_key=target.api_key, timeout_s=flags.timeout, connections=flags.concurrency)
    )
    return ScoringEndpoint(ChatEndpoint(http), model=model.id, name=target.base_url)


def _speaker(endpoint: ScoringEndpoint, flags: argparse.Namespace) -> ReferenceSpeaker:
    return ReferenceSpeaker(endpoint, exercise_of=exercises_of(flags.seed), thinking_tokens=flags.thinking_tokens)


def _cells(flags: argparse.Namespace) -> list[CellScores]:
    """The first exercises of each cell."""
    return [CellScores(replace(cell, n=min(cell.n, flags.score_n))) for cell in cells(flags)]


def _total(scored: list[CellScores]) -> int:
    return sum(scores.cell.n for scores in scored)
