"""Checks a drafter that the model can be served without, before anything is loaded, and leaves it out where it would
fail. All ranks are started with what this decides."""

from __future__ import annotations

import logging
from pathlib import Path

from modelserve.engine_args import EngineArgs
from modelserve.errors import InvalidInput
from modelserve.inspection import read_drafter
from modelserve.model.architecture import ModelArchitecture
from modelserve.model.checkpoint_files import DOWNLOAD_LOCK, DOWNLOAD_MARKER, read_header, weight_files
from modelserve.model.drafters.reading import drafter_pair_problem
from modelserve.sizing.weights.drafter import drafter_ranks_problem

logger = logging.getLogger(__name__)


def without_missing_drafter(args: EngineArgs, architecture: ModelArchitecture) -> tuple[EngineArgs, str | None]:
    """`args` without their drafter where that is optional and would not start, and why."""
    if args.drafter is None or not args.drafter_optional:
        return args, None
    problem = _problem(Path(args.drafter), args, architecture)
    if problem is None:
        return args, None
    logger.warning("served without the drafter %s, so slower and as well: %s", args.drafter, problem)
    return args.model_copy(update={"drafter": None}), problem


def _problem(directory: Path, args: EngineArgs, architecture: ModelArchitecture) -> str | None:
    if (directory / DOWNLOAD_LOCK).exists() and not (directory / DOWNLOAD_MARKER).exists():
        return f"{directory} is not downloaded in full"
    try:
        drafter = read_drafter(directory)
        if args.load_format == "auto":
            for file in weight_files(directory):
                read_header(file)
    except (InvalidInput, OSError) as error:
        return str(error)
    return drafter_pair_problem(architecture, drafter) or drafter_ranks_problem(drafter, args.tensor_parallel_size)
