"""Exact match by teacher forcing in this process, without a server: through transformers, or through our engine.

    python tests/bench eval_through_transformers --checkpoint DIR --n 1000 --skills all --distances 1000,16000 \
        --n-at 16000=1000 --dtype bfloat16 --device cuda --json transformers.json [--logits-of engine]

Exercises, flags (--skills, --distances, --n, --n-at, --seed, --at-least) and report are those of modelserve-eval, so
that `modelserve-eval --compare` pairs the results with those of a server. An answer is right when every token of it is
what greedy decoding says; that is stricter than modelserve-eval, which looks at no thought and at no spelling of JSON.
With several checkpoints the name of each is put into the file's name.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from rendering import Rendered, Renderer
from teacher_forcing import (
    DTYPES,
    AnswerLogits,
    EngineLogits,
    TransformersLogits,
    checkpoint_renderer,
    exercise_flags,
    is_exact,
    render_cell,
)

from modelserve.sizing.pages import KVCacheDtype, KVCacheLayout
from modelserve_tools.evaluation import flags as eval_flags
from modelserve_tools.evaluation.cells import Cell, fingerprint
from modelserve_tools.evaluation.report import RIGHT, WRONG, CellResult, Report, report_table
from modelserve_tools.evaluation.skills import exercise


class DistanceTooFarError(ValueError):
    """The skill has no exercise at this distance; the text says why."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--checkpoint", type=Path, action="append", required=True, help="a directory; may be repeated")
    made.add_argument("--logits-of", choices=("transformers", "engine"), default="transformers")
    made.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    made.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    made.add_argument("--json", type=Path, help="write the report there")
    made.add_argument("--attention", choices=("sdpa", "eager", "block_local"), default="sdpa", help="transformers only")
    made.add_argument("--kv-cache-dtype", type=KVCacheDtype, choices=[*KVCacheDtype], help="engine only")
    made.add_argument("--kv-cache-layout", type=KVCacheLayout, choices=[*KVCacheLayout], help="engine only")
    made.add_argument("--chunk", type=int, default=2048, help="engine only: tokens of a step")
    made.add_argument("--max-num-seqs", type=int, default=16, help="engine only: conversations at a time")
    made.add_argument("--group", type=int, default=64, help="exercises whose logits are held at a time")
    return made


def open_logits(directory: Path, options: argparse.Namespace) -> tuple[AnswerLogits, str]:
    """What says the answers, and the words for it."""
    dtype = DTYPES[options.dtype]
    if options.logits_of == "transformers":
        logits = TransformersLogits(directory, dtype=dtype, device=options.device, attention=options.attention)
        return (
            logits,
            f"transformers {transformers.__version__}, {options.attention}, {options.dtype}, {options.device}",
        )
    engine = EngineLogits(
        directory,
        dtype=dtype,
        device=options.device,
        kv_dtype=options.kv_cache_dtype,
        layout=options.kv_cache_layout,
        chunk=options.chunk,
        max_num_seqs=options.max_num_seqs,
    )
    kept = options.kv_cache_dtype.value if options.kv_cache_dtype else options.dtype
    return engine, f"the engine's paged path, {options.dtype}, {kept} rows, {options.device}"


def groups(renderer: Renderer, cell: Cell, *, seed: int, group: int) -> Iterator[list[Rendered]]:
    """The cell's exercises in order, `group` at a time; the next group is rendered while the caller is busy.

    Raises DistanceTooFarError.
    """
    starts = range(0, cell.n, group)

    def render(start: int) -> list[Rendered]:
        try:
            return render_cell(renderer, replace(cell, n=min(group, cell.n - start)), seed=seed, first=start)
        except ValueError as error:
            raise DistanceTooFarError(str(error)) from error

    with ThreadPoolExecutor(max_workers=1) as ahead:
        following = ahead.submit(render, 0)
        for start in starts:
            ready = following.result()
            if start + group < cell.n:
                following = ahead.submit(render, start + group)
            yield ready


def measure(logits: AnswerLogits, renderer: Renderer, cell: Cell, *, seed: int, group: int) -> CellResult:
    """Every exercise of the cell. A cell whose distance no exercise can bridge is skipped, as modelserve-eval does."""
    began = time.monotonic()
    outcomes = ""
    try:
        for asked in groups(renderer, cell, seed=seed, group=group):
            rights = (is_exact(rendered, rows) for rendered, rows in zip(asked, logits(asked), strict=True))
            outcomes += "".join(RIGHT if right else WRONG for right in rights)
    except DistanceTooFarError as error:
        return _result(cell, seed=seed, skipped=str(error))
    first = exercise(cell.skill, seed=seed, index=0, distance=cell.distance)
    result = _result(cell, seed=seed, outcomes=outcomes, fingerprint=fingerprint(first))
    print(f"{result.name}: {result.exact_match:.1f} %, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return result


def _result(
    cell: Cell, *, seed: int, outcomes: str = "", fingerprint: str | None = None, skipped: str | None = None
) -> CellResult:
    return CellResult(
        skill=cell.skill,
        distance=cell.distance,
        seed=seed,
        fingerprint=fingerprint,
        outcomes=outcomes,
        median_ms=None,
        skipped=skipped,
    )


def report_path(named: Path, directory: Path, *, alone: bool) -> Path:
    """FILE, or FILE with the checkpoint's name before its suffix."""
    return named if alone else named.with_name(f"{named.stem}-{directory.name}{named.suffix}")


Source = Callable[[Path, argparse.Namespace], tuple[AnswerLogits, str]]


def main(argv: Sequence[str] | None = None, source: Source = open_logits) -> int:
    """Print a table per checkpoint; 1 when a cell is below --at-least."""
    options, rest = parser().parse_known_args(argv)
    flags = exercise_flags(rest)
    below = False
    for directory in options.checkpoint:
        logits, how = source(directory, options)
        renderer = checkpoint_renderer(directory)
        measured = tuple(
            measure(logits, renderer, cell, seed=flags.seed, group=options.group) for cell in eval_flags.cells(flags)
        )
        report = Report(base_url=how, model=directory.name, complete=True, cells=measured)
        print(report_table(report), end="\n\n", flush=True)
        if options.json:
            path = report_path(options.json, directory, alone=len(options.checkpoint) == 1)
            path.write_text(report.model_dump_json(indent=2) + "\n")
        below |= flags.at_least is not None and bool(report.below(flags.at_least))
    return 1 if below else 0
