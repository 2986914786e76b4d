"""The flags of modelserve-eval. A wrong one ends with exit code 2 and a line that says the value and the remedy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from modelserve_tools.evaluation.cells import Cell, plan_cells
from modelserve_tools.evaluation.flag_values import http_address, number, reference_address, whole_number
from modelserve_tools.evaluation.long_skills import LONG_SKILLS
from modelserve_tools.evaluation.short_skills import SHORT_SKILLS

DEFAULT_DISTANCES = (10, 100, 1000, 2000, 4000, 8000, 16000)
SCORED_DISTANCES = (*DEFAULT_DISTANCES, 32000)
"""What is asked where endpoints are compared: rounding of a cache shows at length, if anywhere."""
MAX_CONCURRENCY = 1024
_GROUPS = {"all": (*SHORT_SKILLS, *LONG_SKILLS), "short": (*SHORT_SKILLS,), "long": (*LONG_SKILLS,)}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="modelserve-eval",
        description="Measure the skills of a model behind an OpenAI-compatible endpoint, alone or beside a reference, "
        "or compare two measurements.",
        epilog="Exit codes: 0 done, 1 below --at-least or above --kl-at-most, 2 wrong flags, 3 the endpoint "
        "failed, 130 interrupted.",
    )
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--base-url", type=http_address, metavar="URL", help="the endpoint, such as http://127.0.0.1:8000/v1"
    )
    what.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="compare two files that --json wrote")
    made.add_argument("--model", metavar="NAME", help="which model of the endpoint; default: the only one it serves")
    made.add_argument("--api-key-env", metavar="VAR", help="the environment variable that holds the API key")
    made.add_argument(
        "--skills",
        type=_skills,
        default="all",
        metavar="A,B",
        help=f"all, short, long, or names: {', '.join(_GROUPS['all'])} (default all)",
    )
    made.add_argument(
        "--distances",
        type=_distances,
        metavar="D,...",
        help="words and marks between a fact and its question, for the long skills "
        f"(default {_joined(DEFAULT_DISTANCES)}, and with --against or --record {SCORED_DISTANCES[-1]})",
    )
    made.add_argument("--n", type=whole_number(1), default=50, metavar="N", help="exercises of each cell (default 50)")
    made.add_argument(
        "--n-at", type=_counts, default={}, metavar="D=N,...", help="other counts at some distances, such as 16000=10"
    )
    made.add_argument(
        "--seed", type=whole_number(0), default=0, help="the same seed asks the same exercises (default 0)"
    )
    made.add_argument(
        "--concurrency",
        type=whole_number(1, MAX_CONCURRENCY),
        default=16,
        metavar="N",
        help="requests at a time (default 16)",
    )
    made.add_argument(
        "--timeout", type=number(0.001, 86400), default=600.0, metavar="SECONDS", help="of one reply (default 600)"
    )
    made.add_argument(
        "--thinking-tokens",
        type=whole_number(0),
        default=1024,
        metavar="N",
        help="room for a thought that is longer than the exercise's own (default 1024)",
    )
    made.add_argument("--json", metavar="FILE", help="write the results there; - writes them to standard output")
    made.add_argument("--failures", type=Path, metavar="FILE", help="write every wrong answer there, as JSON lines")
    made.add_argument(
        "--at-least", type=number(0, 100), metavar="PERCENT", help="exit 1 when the exact match of any cell is below"
    )
    _add_reference_flags(made.add_argument_group("beside a reference"))
    return made


def _add_reference_flags(made: argparse._ArgumentGroup) -> None:
    made.add_argument(
        "--against",
        type=reference_address,
        metavar="URL_OR_FILE",
        help="an endpoint of the same model, such as one in bfloat16, or a file that --record wrote of it: prints KL "
        "divergence, top-1 agreement and the exercises of both",
    )
    made.add_argument("--against-model", metavar="NAME", help="which model of that endpoint")
    made.add_argument("--against-api-key-env", metavar="VAR", help="the environment variable that holds its API key")
    made.add_argument(
        "--record", type=Path, metavar="FILE", help="write what --against needs of this endpoint there, compressed"
    )
    made.add_argument(
        "--score-n", type=whole_number(1), default=5, metavar="N",
        help="exercises of each cell whose tokens are scored (default 5)",
    )  # fmt: skip
    made.add_argument(
        "--kl-at-most", type=number(0, 1000), metavar="NATS",
        help="exit 1 when the mean divergence of the answers' tokens is above",
    )  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked one by one and together. Ends the process with exit code 2 when one is wrong."""
    made = parser()
    flags = made.parse_args(argv)
    if flags.distances is None:
        flags.distances = SCORED_DISTANCES if flags.against or flags.record else DEFAULT_DISTANCES
    strangers = sorted(set(flags.n_at) - set(flags.distances))
    if strangers:
        made.error(f"--n-at: distance {strangers[0]} is not measured; --distances has {_joined(flags.distances)}")
    if flags.compare and (flags.at_least is not None or flags.failures):
        made.error("--compare asks no questions: leave out --at-least and --failures")
    if flags.compare and (flags.against or flags.record):
        made.error("--compare asks no questions: leave out --against and --record")
    if flags.against and flags.record:
        made.error("--record is of a reference, --against compares with one: run them one after the other")
    if flags.kl_at_most is not None and not flags.against:
        made.error("--kl-at-most needs --against: a divergence is from a reference")
    if (flags.against_model or flags.against_api_key_env) and not isinstance(flags.against, str):
        made.error("--against-model and --against-api-key-env belong to the address of an endpoint in --against")
    return flags


def cells(flags: argparse.Namespace) -> list[Cell]:
    return plan_cells(
        short=[skill for skill in flags.skills if skill in SHORT_SKILLS],
        long=[skill for skill in flags.skills if skill in LONG_SKILLS],
        distances=flags.distances,
        n=flags.n,
        n_at=flags.n_at,
    )


def _skills(text: str) -> tuple[str, ...]:
    named: list[str] = []
    for name in text.split(","):
        if name not in _GROUPS and name not in _GROUPS["all"]:
            raise argparse.ArgumentTypeError(f"no skill {name!r}; there are {_joined([*_GROUPS, *_GROUPS['all']])}")
        named += _GROUPS.get(name, (name,))
    return tuple(dict.fromkeys(named))


def _distances(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(whole_number(1)(part) for part in text.split(",")))


def _counts(text: str) -> dict[int, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    return {whole_number(1)(distance): whole_number(1)(count) for distance, _, count in pairs}


def _joined(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
