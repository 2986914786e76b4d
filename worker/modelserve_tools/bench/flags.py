"""The flags of modelserve-bench. A wrong one ends with exit code 2 and a line that says the value and the remedy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from modelserve_tools.bench.goodput import goals
from modelserve_tools.bench.prompts import LOG_UNIFORM, UNIFORM, Lengths
from modelserve_tools.evaluation.flag_values import http_address, number, whole_number

T = TypeVar("T")

MAX_CONCURRENCY = 4096
MAX_TOKENS = 1 << 24
TOKEN_IDS, TEXT = "token-ids", "text"
COMPLETIONS, CHAT = "completions", "chat"
_OPEN_LOOP_REQUESTS = 100


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="modelserve-bench",
        description="Put load on an OpenAI-compatible endpoint and measure rates and times of its streamed answers.",
        epilog="Exit codes: 0 done, 1 a request failed or its answer had not the asked length, 2 wrong flags, "
        "3 no endpoint, 130 interrupted.",
    )
    made.add_argument(
        "--base-url",
        type=http_address,
        required=True,
        metavar="URL",
        help="the endpoint, such as http://127.0.0.1:8000/v1; without a path, /v1 is added",
    )
    made.add_argument("--model", metavar="NAME", help="which model of the endpoint; default: the only one it serves")
    made.add_argument("--api-key-env", metavar="VAR", help="the environment variable that holds the API key")
    made.add_argument(
        "--api", choices=(COMPLETIONS, CHAT), help="default completions, and chat where the endpoint has no other"
    )
    _add_load(made.add_argument_group("load"))
    _add_requests(made.add_argument_group("requests"))
    made.add_argument(
        "--goodput",
        type=goals,
        metavar="ttft:MS,tpot:MS",
        help="tell which share of requests had a TTFT and a TPOT of at most these",
    )
    made.add_argument("--json", metavar="FILE", help="write all figures there; - writes them to standard output")
    made.add_argument("--records", action="store_true", help="with --json: every request's own times, too")
    return made


def _add_load(group: argparse._ArgumentGroup) -> None:
    loop = group.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency",
        type=_listed(whole_number(1, MAX_CONCURRENCY)),
        metavar="N,...",
        help="requests at a time, each sent when one before it ends; one load after the other (default 1)",
    )
    loop.add_argument(
        "--rate",
        type=_listed(number(0.0001, 100000)),
        metavar="R,...",
        help="requests a second that arrive whatever is still running (Poisson); one load after the other",
    )
    group.add_argument(
        "--num-requests",
        type=whole_number(1, 10_000_000),
        metavar="N",
        help=f"of each load (default 4 times the concurrency, {_OPEN_LOOP_REQUESTS} with --rate)",
    )
    group.add_argument(
        "--warmup-requests",
        type=whole_number(0, 1_000_000),
        metavar="N",
        help="before each load, not in its figures (default the concurrency, 1 with --rate)",
    )
    group.add_argument(
        "--turns",
        type=whole_number(1, 1000),
        default=1,
        metavar="N",
        help="requests of a session, each of which begins with the one before (default 1); --num-requests, "
        "--concurrency and --rate are then of sessions",
    )
    group.add_argument(
        "--think-time",
        type=number(0, 86400),
        default=0.0,
        metavar="SECONDS",
        help="between an answer and the next turn of its session (default 0)",
    )
    group.add_argument(
        "--timeout", type=number(0.001, 86400), default=3600.0, metavar="SECONDS", help="of one answer (default 3600)"
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--input-tokens", type=whole_number(1, MAX_TOKENS), metavar="N", help="default 1024, or what the context holds"
    )
    length.add_argument("--input-range", type=_range, metavar="LOW:HIGH", help="draw the prompts' lengths from these")
    group.add_argument(
        "--input-distribution",
        choices=(LOG_UNIFORM, UNIFORM),
        default=LOG_UNIFORM,
        help="of --input-range (default log-uniform)",
    )
    group.add_argument(
        "--output-tokens", type=whole_number(1, MAX_TOKENS), metavar="N", help="default 128, or what the context holds"
    )
    group.add_argument(
        "--turn-tokens",
        type=whole_number(1, MAX_TOKENS),
        default=512,
        metavar="N",
        help="new tokens of each turn behind the first (default 512)",
    )
    group.add_argument(
        "--prompt",
        choices=(TOKEN_IDS, TEXT),
        help="random token ids, or words of about a token each (default token-ids where the endpoint takes them)",
    )
    group.add_argument(
        "--shared-prefix-tokens",
        type=whole_number(0, MAX_TOKENS),
        default=0,
        metavar="N",
        help="tokens at the start of every prompt that are the same in all (default 0: all prompts differ)",
    )
    group.add_argument(
        "--first-token-id",
        type=whole_number(0, (1 << 31) - 1),
        metavar="ID",
        help="ids are drawn from here (default 1000: those below are marks in many vocabularies; less in a small one)",
    )
    group.add_argument(
        "--vocab-size",
        type=whole_number(1, 1 << 31),
        metavar="N",
        help="ids are below this (default 255000, of Gemma's 262144 those that stand for text; asked where it is less)",
    )
    group.add_argument("--seed", type=whole_number(0), default=0, help="the same seed sends the same (default 0)")
    group.add_argument("--temperature", type=number(0, 2), default=0.0, metavar="T", help="default 0")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="send ignore_eos, so that answers are as long as asked (default yes where the endpoint takes it)",
    )
    group.add_argument("--min-tokens", action="store_true", help="send min_tokens, for servers without ignore_eos")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, checked one by one and together. Ends the process with exit code 2 when one is wrong."""
    made = parser()
    flags = made.parse_args(argv)
    if flags.concurrency is None and flags.rate is None:
        flags.concurrency = (1,)
    if flags.api == CHAT and flags.prompt == TOKEN_IDS:
        made.error("--prompt token-ids: a chat has messages of text; leave it out, or use --api completions")
    if None not in (flags.first_token_id, flags.vocab_size) and flags.first_token_id >= flags.vocab_size:
        made.error(f"--first-token-id {flags.first_token_id}: must be below --vocab-size {flags.vocab_size}")
    shortest = flags.input_tokens if flags.input_range is None else flags.input_range[0]
    if shortest is not None and (wrong := prefix_fault(flags.shared_prefix_tokens, shortest)):
        made.error(wrong)
    if flags.think_time and flags.turns == 1:
        made.error("--think-time: a session of one turn has no next one; add --turns N")
    if flags.records and flags.json is None:
        made.error("--records: there is no file to write them to; add --json FILE")
    return flags


def prefix_fault(shared: int, shortest: int) -> str | None:
    """What is wrong with a prefix of `shared` tokens in prompts of `shortest` tokens at least."""
    if shared < shortest:
        return None
    return f"--shared-prefix-tokens {shared}: must be below the shortest prompt, {shortest}, so that prompts differ"


def lengths(flags: argparse.Namespace, input_tokens: int) -> Lengths:
    """Those of --input-range, or `input_tokens` each."""
    if flags.input_range is None:
        return Lengths(input_tokens, input_tokens)
    low, high = flags.input_range
    return Lengths(low, high, flags.input_distribution)


def requests_and_warmup(flags: argparse.Namespace, concurrency: int | None) -> tuple[int, int]:
    """How many of one load; `concurrency` is None for an open loop."""
    requests = 4 * concurrency if concurrency else _OPEN_LOOP_REQUESTS
    warmup = concurrency or 1
    return (
        requests if flags.num_requests is None else flags.num_requests,
        warmup if flags.warmup_requests is None else flags.warmup_requests,
    )


def _listed(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def read_all(text: str) -> tuple[T, ...]:
        return tuple(read(part) for part in text.split(","))

    return read_all


def _range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is no range; write it as LOW:HIGH, such as 100:8000")
    read = whole_number(1, MAX_TOKENS)
    if read(low) > read(high):
        raise argparse.ArgumentTypeError(f"{text!r} begins above its end; write it as LOW:HIGH, such as 100:8000")
    return read(low), read(high)
