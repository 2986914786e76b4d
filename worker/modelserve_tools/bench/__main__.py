"""`modelserve-bench`: put load on an OpenAI-compatible endpoint and measure its streamed answers."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from modelserve_tools.bench.discovery import NothingTaken, Taken, find, fitting
from modelserve_tools.bench.driver import Load, run_load
from modelserve_tools.bench.endpoint import Endpoint, NoEndpoint, api_url, open_session
from modelserve_tools.bench.figures import figures
from modelserve_tools.bench.flags import CHAT, TEXT, lengths, parse, prefix_fault, requests_and_warmup
from modelserve_tools.bench.prompts import PromptSource
from modelserve_tools.bench.report import Report, report_table
from modelserve_tools.bench.workload import AskOptions, arrivals, asks
from modelserve_tools.evaluation.progress import Progress
from modelserve_tools.evaluation.publishing import STDOUT, BadInput, publish, read_api_key, require_writable

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_ENDPOINT, EXIT_INTERRUPTED = 1, 2, 3, 130


class Run:
    """All loads of one command, one after the other. It may be interrupted; `report` then has what is done."""

    def __init__(self, flags: argparse.Namespace, *, command: list[str]) -> None:
        self._flags = flags
        self._command = command
        self._started = datetime.now(UTC)
        self._url = api_url(flags.base_url)
        self._loads: list[Load] = []
        self._model = str(flags.model)
        self._models: Any = None
        self._version: Any = None
        self._found: tuple[str, ...] = ()
        self._planned = [self._load(c, None) for c in flags.concurrency or ()]
        self._planned += [self._load(None, rate) for rate in flags.rate or ()]
        self._total = sum(load.requests + warmup for load, warmup in self._planned)
        self._done = 0

    def _load(self, concurrency: int | None, rate: float | None) -> tuple[Load, int]:
        requests, warmup = requests_and_warmup(self._flags, concurrency)
        return Load(concurrency, rate, requests * self._flags.turns, self._flags.think_time), warmup

    async def run(self, progress: Progress, *, api_key: str | None) -> None:
        """Raises BadInput and NoEndpoint."""

        def on_done() -> None:
            self._done += 1
            progress.show(self._done, self._total)

        flags = self._flags
        async with open_session(api_key=api_key, timeout_s=flags.timeout) as session:
            endpoint = Endpoint(session, self._url, chat=False)
            self._models, self._version = await endpoint.models(), await endpoint.version()
            cards = {card["id"]: card.get("max_model_len") for card in self._models["data"]}
            self._model = chosen_model(list(cards), flags.model, self._url)
            taken, prompts, output_tokens = await self._fitting(endpoint, cards[self._model])
            chat = taken.api == CHAT
            endpoint = replace(endpoint, chat=chat)
            options = AskOptions(
                model=self._model,
                chat=chat,
                output_tokens=output_tokens,
                temperature=flags.temperature,
                ignore_eos=taken.ignore_eos,
                min_tokens=flags.min_tokens,
                turns=flags.turns,
                turn_tokens=flags.turn_tokens,
            )
            first = 0
            for load, warmup in self._planned:
                # Numbers run on from load to load: no prompt comes twice, so that no cache of prefixes can help.
                made = asks(prompts, options, first=first, count=warmup + load.requests // flags.turns)
                first += len(made)
                self._loads.append(load)
                planned = arrivals(load.rate, seed=flags.seed) if load.rate is not None else ()
                await run_load(
                    load, endpoint.send, made[warmup:], warmup=made[:warmup], arrivals=planned, on_done=on_done
                )

    async def _fitting(self, endpoint: Endpoint, max_model_len: int | None) -> tuple[Taken, PromptSource, int]:
        """What the endpoint takes, prompts of it, and the length of answers. Raises BadInput and NoEndpoint."""
        flags = self._flags
        always = {"model": self._model, "max_tokens": 1, "temperature": flags.temperature}
        try:
            taken, self._found = await find(flags, lambda api, fields: endpoint.probe(api, always | fields))
        except NothingTaken as error:
            raise NoEndpoint(f"{self._url}: {error}") from error
        text = taken.prompt == TEXT
        asked = flags.input_range[1] if flags.input_range else flags.input_tokens
        input_tokens, output_tokens, found = fitting(asked, flags.output_tokens, max_model_len, text=text)
        self._found += found
        drawn = lengths(flags, input_tokens)
        if wrong := prefix_fault(flags.shared_prefix_tokens, drawn.low):
            raise BadInput(wrong)
        ids = None if text else range(taken.first_token_id, taken.vocab_size)
        return taken, PromptSource(flags.seed, drawn, ids, flags.shared_prefix_tokens), output_tokens

    def report(self, *, complete: bool) -> Report:
        return Report(
            command=self._command,
            started=self._started.isoformat(timespec="seconds"),
            base_url=self._url,
            model=self._model,
            seed=self._flags.seed,
            complete=complete,
            models=self._models,
            version=self._version,
            found=self._found,
            loads=tuple(
                figures(load, with_records=self._flags.records, goals=self._flags.goodput) for load in self._loads
            ),
        )


def chosen_model(served: Sequence[str], named: str | None, url: str) -> str:
    """The model that --model names, or the only one. Raises BadInput."""
    names = ", ".join(served) or "none"
    if named is not None and named not in served:
        raise BadInput(f"--model {named}: {url} serves {names}; name one of them")
    if named is None and len(served) != 1:
        raise BadInput(f"{url} serves {names}; choose one with --model")
    return named or served[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = parse(arguments)
    try:
        return _measure(flags, ["modelserve-bench", *arguments])
    except BadInput as error:
        return _complain(error, EXIT_BAD_INPUT)
    except NoEndpoint as error:
        return _complain(error, EXIT_ENDPOINT)
    except BrokenPipeError:  # the reader went away; nothing is left to say, and the exit must not try to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _measure(flags: argparse.Namespace, command: list[str]) -> int:
    api_key = read_api_key(flags.api_key_env, os.environ)
    if flags.json not in (None, STDOUT):
        require_writable(Path(flags.json))
    run = Run(flags, command=command)
    progress = Progress(sys.stderr)
    interrupted = False
    try:
        asyncio.run(run.run(progress, api_key=api_key))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        progress.clear()
    report = run.report(complete=not interrupted)
    if not report.loads:
        return _complain("interrupted before the first request", EXIT_INTERRUPTED)
    publish(flags.json, report, table=report_table(report))
    if interrupted:
        return _complain("interrupted; the figures are of what was answered until then", EXIT_INTERRUPTED)
    if not all(load.sound for load in report.loads):
        bad = sum(load.failed + load.wrong_length for load in report.loads)
        asked = sum(load.requests for load in report.loads)
        what = f"{bad} of {asked} requests failed or had not the asked length"
        return _complain(f"{what}; the lines above the table say why", EXIT_FAILED)
    return 0


def _complain(what: object, code: int) -> int:
    print(f"modelserve-bench: {what}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
