"""Sessions that come back, through HTTP, on a real GPU: published geometry, random weights, one worker for all parts.

    python tests/bench sessions_over_http \
        --variant 31B --gpu-memory-utilization 0.607 --host-cache-bytes 51539607552
    ... --variant E4B --tokens 32000 --parts session,chats --host-cache-bytes 4294967296

Half of the sessions are token ids (/v1/completions), half are chats of text. Parts, in this order:
  session  one of each: --tokens, then twice --turn more: from the pool. Waits first until host memory is pinned.
  twelve   twelve sessions, those two among them, one request at a time: the ten others' first turns, then two turns of
           each. The pool is to hold fewer than twelve, so that all of these come from host memory.
  four     four sessions of token ids at once, five turns each; and their fifth turn with a salt of its own, which reads
           nothing that is cached: five such turns are what they would take without a cache.
  chats    100 chats at --chat-rate a second, 64 tokens answered, alone and behind a system message of --system tokens.
31B takes about five minutes, E4B half of one. Flags that are not listed by --help go to the worker. A table comes last,
also where --deadline or SIGTERM ends it before; the worker ends with the tool in every case. Exit status 124 where time
was up, 1 when a request failed, a turn was not cached, or twelve sessions were not served from the host.
On the CPU: --variant tiny --tokens 600 --turn 40 --system 300 --device cpu --cpu-memory-bytes 1073741824
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.deadline import add_deadline, within
from bench.engine.host_memory import write_tokenizer
from bench.http.serve_and_bench import WorkerProcess
from bench.random_checkpoint import read_config, write_model
from modelserve_tools.bench.endpoint import Endpoint, open_session
from modelserve_tools.bench.prompts import Lengths, PromptSource
from modelserve_tools.bench.record import Record
from modelserve_tools.bench.workload import Ask

GIB = 1 << 30
ANSWER = 16
MARGIN = 4096  # tokens of context for turns and answers


@dataclass
class Client:
    """Asks the worker at `url`."""

    url: str
    ids: Endpoint
    text: Endpoint
    vocab_size: int
    words_per_token: float = 1.0
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    bad: list[str] = field(default_factory=list)

    async def ask(self, said: list[int] | list[dict[str, str]], *, output: int = ANSWER, salt: str = "") -> Record:
        """Of exactly `output` tokens, drawn: the likeliest token of random weights comes again and again, and where it
        has no text nothing is seen of the answer before its end. `said`: token ids, or a chat's messages."""
        chat = isinstance(said[0], dict)
        body: dict[str, Any] = {
            "model": "m", "messages" if chat else "prompt": said, "max_tokens": output, "temperature": 1,
            "seed": 1, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        body |= {"cache_salt": salt} if salt else {}
        number = next(self.numbers)
        ask = Ask(number, len(said), output, exact=True, body=json.dumps(body).encode(), follow=_keep_the_answer)
        record = await (self.text if chat else self.ids).send(ask, began=0.0)
        if record.error or record.wrong_length:
            self.bad.append(f"request {number}: {record.error or record.wrong_length}")
        elif len(record.event_s) < output // 2:
            self.bad.append(f"request {number}: {output} tokens came in {len(record.event_s)} events: what is TTFT?")
        return record

    def new_ids(self, seed: object, count: int) -> list[int]:
        return random.Random(f"ids {seed}").choices(range(min(1000, self.vocab_size // 2), self.vocab_size), k=count)

    def new_text(self, seed: object, tokens: int) -> str:
        """Of about so many tokens."""
        words = max(1, round(tokens * self.words_per_token))
        return str(PromptSource(hash_of(seed), Lengths(words, words), None).prompt(0).content)

    def metric(self, name: str) -> float:
        """The sum of its series."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as response:
            text = response.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}\S* (\S+)$", text, re.MULTILINE))

    @property
    def from_host(self) -> float:
        """Prompt tokens so far."""
        return self.metric("vllm:prompt_tokens_by_source_total[^\\n]*external_kv_transfer")


def _keep_the_answer(answer: str) -> Ask:
    raise NotImplementedError("the next turn is made elsewhere")


def hash_of(seed: object) -> int:
    return random.Random(f"text {seed}").getrandbits(40)


@dataclass
class Session:
    """One history. Turns of token ids go on behind the prompt: the API does not tell the ids of an answer."""

    client: Client
    name: str
    chat: bool
    said: list[Any] = field(default_factory=list)
    answer: str = ""
    turns: int = 0

    async def turn(self, tokens: int, **options: Any) -> Record:
        """So many new ones."""
        seed = f"{self.name} {self.turns}"
        if self.chat:
            self.said += [{"role": "assistant", "content": self.answer}] if self.turns else []
            self.said.append({"role": "user", "content": self.client.new_text(seed, tokens)})
        else:
            self.said += self.client.new_ids(seed, tokens)
        self.turns += 1
        record = await self.client.ask(self.said, **options)
        self.answer = record.answer
        return record


@dataclass
class Run:
    options: argparse.Namespace
    rows: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    client: Client = field(init=False)
    sessions: list[Session] = field(default_factory=list)

    def say(self, part: str, text: str) -> None:
        self.rows.append(f"{self.options.variant:4} {part:8} {text}")
        print(self.rows[-1], flush=True)

    def say_turns(self, part: str, what: str, records: list[Record], *, cached: bool = True) -> None:
        ttft = [ms(record) for record in records]
        found = [record.cached_tokens or 0 for record in records]
        new = [(record.prompt_tokens or 0) - count for record, count in zip(records, found, strict=True)]
        self.say(
            part,
            f"{what:26} TTFT mean {statistics.fmean(ttft):8.1f} p50 {statistics.median(ttft):8.1f} max {max(ttft):8.1f}"
            f" ms; prompts {statistics.fmean(record.prompt_tokens or 0 for record in records):.0f} tokens, computed "
            f"{statistics.fmean(new):.0f}",
        )
        if cached and min(found) < 0.95 * self.options.tokens:  # a text has only about as many
            self.client.bad.append(f"{part}: {what}: only {min(found)} tokens were cached")


def ms(record: Record) -> float:
    return 1e3 * (record.ttft_s or 0.0)


async def session(run: Run) -> None:
    run.sessions = [Session(run.client, f"s{number}", chat=number % 2 == 1) for number in range(2)]
    for one in run.sessions:
        run.say_turns("session", f"cold, {kind(one)}", [await one.turn(run.options.tokens)], cached=False)
    await pinned(run)
    for one in run.sessions:
        records = [await one.turn(run.options.turn) for _ in range(run.options.turns)]
        run.say_turns("session", f"pool, {kind(one)}, {len(records)} turns", records)


async def pinned(run: Run) -> None:
    """Until host memory does not grow any more."""
    before = -1.0
    while (now := run.client.metric("modelserve_host_cache_capacity_bytes")) != before:
        before = now
        await asyncio.sleep(1.0)
    run.say("session", f"{now / GIB:.2f} GiB of host memory are pinned")


async def twelve(run: Run) -> None:
    others = [Session(run.client, f"s{number}", chat=number % 2 == 1) for number in range(len(run.sessions), 12)]
    colds = [await one.turn(run.options.tokens) for one in others]
    run.say_turns("twelve", "cold", colds, cached=False)
    everyone = [*run.sessions, *others]
    for number in (1, 2):
        before = run.client.from_host
        records = [await one.turn(run.options.turn) for one in everyone]
        for chat in (False, True):
            mine = [record for one, record in zip(everyone, records, strict=True) if one.chat is chat]
            run.say_turns("twelve", f"round {number}, {'text' if chat else 'ids'}", mine)
        came = run.client.from_host - before
        run.say("twelve", f"round {number}: {came:.0f} tokens from host memory")
        if came < 6 * run.options.tokens:
            run.client.bad.append(f"twelve: {came:.0f} tokens of round {number} came from host memory")


async def four(run: Run) -> None:
    began, records = time.perf_counter(), [[] for _ in range(5)]
    sessions = [Session(run.client, f"f{number}", chat=False) for number in range(4)]

    async def all_turns(one: Session) -> None:
        for turn in range(5):
            records[turn].append(await one.turn(run.options.turn if turn else run.options.tokens))

    await asyncio.gather(*(all_turns(one) for one in sessions))
    took = time.perf_counter() - began
    for turn, of_turn in enumerate(records, 1):
        run.say_turns("four", f"at once, turn {turn}", of_turn, cached=turn > 1)
    began = time.perf_counter()
    alone = await asyncio.gather(*(run.client.ask(one.said, salt=f"nobody else {one.name}") for one in sessions))
    computed = 5 * (time.perf_counter() - began)
    run.say_turns("four", "turn 5 without a cache", alone, cached=False)
    run.say("four", f"4 x 5 turns {took:.2f} s; five uncached turns {computed:.2f} s; {took / computed:.3f} of it")


async def chats(run: Run) -> None:
    system = {"role": "system", "content": run.client.new_text("system", run.options.system)}
    dice = random.Random(5)
    rests = [
        run.client.new_text(f"rest {i}", dice.randrange(run.options.turn // 2, run.options.turn)) for i in range(100)
    ]
    p50 = []
    for before in ([], [system]):
        if before:
            await run.client.ask([system, {"role": "user", "content": "Who is the first to ask?"}])

        async def arriving(number: int, before: list[dict[str, str]] = before) -> Record:
            await asyncio.sleep(number / run.options.chat_rate)
            return await run.client.ask([*before, {"role": "user", "content": rests[number]}], output=64)

        records = await asyncio.gather(*(arriving(number) for number in range(100)))
        run.say_turns("chats", "behind the system message" if before else "alone", records, cached=False)
        p50.append(statistics.median(ms(record) for record in records))
        if before and min(record.cached_tokens or 0 for record in records) < run.options.system // 2:
            run.client.bad.append("chats: the system message was computed again")
    run.say("chats", f"{p50[1] / p50[0]:.2f} of their rest alone (p50)")


def kind(one: Session) -> str:
    return "text" if one.chat else "ids"


PARTS: dict[str, Callable[[Run], Awaitable[None]]] = {
    "session": session,
    "twelve": twelve,
    "four": four,
    "chats": chats,
}


async def measure(url: str, run: Run, *, vocab_size: int) -> None:
    async with open_session(api_key=None, timeout_s=600.0) as http:
        ids, text = (Endpoint(http, f"{url}/v1", chat=chat) for chat in (False, True))
        run.client = client = Client(url, ids, text, vocab_size, bad=run.bad)
        counted = await client.ask([{"role": "user", "content": client.new_text("count", 400)}], output=1)
        client.words_per_token = 400 / (counted.prompt_tokens or 400)
        for part in PARTS:
            if part in run.options.parts.split(","):
                began = time.monotonic()
                await PARTS[part](run)
                run.say(part, f"took {time.monotonic() - began:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--variant", required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tokens", type=int, default=65_000, help="of a session's first prompt (default 65,000)")
    parser.add_argument("--turn", type=int, default=512, help="new tokens of a turn (default 512)")
    parser.add_argument("--turns", type=int, default=2, help="of a session from the pool (default 2)")
    parser.add_argument("--system", type=int, default=3000, help="tokens that chats share (default 3,000)")
    parser.add_argument("--chat-rate", type=float, default=10.0, help="chats a second (default 10)")
    parser.add_argument("--ready-seconds", type=float, default=300.0, help="most seconds to ready (default 300)")
    add_deadline(parser)
    options, worker_flags = parser.parse_known_args()
    if unknown := {*options.parts.split(",")} - {*PARTS}:
        parser.error(f"--parts {','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    config = read_config(options.variant)
    run = Run(options)
    with within(options.deadline) as time_left, tempfile.TemporaryDirectory() as made:
        directory = Path(made) / f"gemma-4-{options.variant}"
        architecture = write_model(directory, config)
        write_tokenizer(directory, vocab_size=architecture.vocab_size)  # whose pieces can all be reached
        longest = str(options.tokens + (6 + options.turns) * options.turn + MARGIN)
        flags = ["--served-model-name", "m", "--max-model-len", longest, *worker_flags]
        with WorkerProcess(directory, flags, log=Path(made) / "worker.log") as worker:
            ready = worker.wait_until_ready(options.ready_seconds)
            with urllib.request.urlopen(f"{worker.url}/v1/plan", timeout=5) as response:
                pool = json.load(response)["allocated"]["kvPoolBytes"]
            run.say("start", f"ready after {ready:.1f} s, pool {pool / GIB:.2f} GiB")
            asyncio.run(measure(worker.url, run, vocab_size=architecture.vocab_size))
            fault = worker.end()
        run.bad += [fault] if fault else []
    print("\n".join(["", " ".join(worker_flags), *run.rows, *(run.bad or ["no faults"])]))
    return time_left.code(run.bad)
