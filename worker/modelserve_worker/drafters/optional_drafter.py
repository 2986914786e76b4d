"""Checks drafters that the model can be served without, before anything is loaded, and leaves those out that would
fail. All ranks are started with what this decides."""

from __future__ import annotations

import logging
from pathlib import Path

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.inspection import read_drafter
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.checkpoint_files import DOWNLOAD_LOCK, DOWNLOAD_MARKER, read_header, weight_files
from modelserve.model.drafters.reading import DrafterArchitecture, drafter_pair_problem, drafters_problem
from modelserve.sizing.weights.drafter import drafter_ranks_problem

logger = logging.getLogger(__name__)


def without_missing_drafter(args: EngineArgs, architecture: ModelArchitecture) -> tuple[EngineArgs, str | None]:
    """`args` without those of their drafters that would not start, where they are optional, and why."""
    if not args.drafters or not args.drafter_optional:
        return args, None
    kept, problems = list[tuple[str, DrafterArchitecture]](), list[str]()
    for directory in args.drafters:
        found = _checked(Path(directory), args, architecture)
        problem = found if isinstance(found, str) else drafters_problem([*kept, (directory, found)])
        if problem is not None:
            logger.warning("served without the drafter %s, so slower and as well: %s", directory, problem)
            problems.append(problem if len(args.drafters) == 1 else f"{directory}: {problem}")
        elif not isinstance(found, str):
            kept.append((directory, found))
    if not problems:
        return args, None
    return args.model_copy(update={"drafter": kept[0][0] if kept else None}), "; ".join(problems)


def _checked(directory: Path, args: EngineArgs, architecture: ModelArchitecture) -> DrafterArchitecture | str:
    """What a directory holds, or what is wrong with it."""
    if (directory / DOWNLOAD_LOCK).exists() and not (directory / DOWNLOAD_MARKER).exists():
        return f"{directory} is not downloaded in full"
    try:
        drafter = read_drafter(directory)
        if args.load_format == "auto":
            for file in weight_files(directory):
                read_header(file)
    except (InvalidInput, OSError) as error:
        return str(error)
    problem = drafter_pair_problem(architecture, drafter) or drafter_ranks_problem(drafter, args.tensor_parallel_size)
    return problem or drafter
