"""What crosses between the front end and the engine's process, and how it is framed. Torch-free.

The two ends of one socket pair are inherited and nobody else can write to it, so messages are pickles (protocol 5)
behind a length of 4 bytes: nothing to install, and plain columns pickle and unpickle in C. What is hot is one
StepReport a step. Nearly all that a step produces is tokens for a request that goes on: those are columns, of ids and
of tokens (0.4 us a row to put together and pickle), and only what says more travels as a RequestOutput
(1.1 us).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelserve.termination import TerminationReason
from modelserve_worker.request import AdapterStrength, Request, RequestOutput
from modelserve_worker.scheduling.stats import EngineStats, StepEvents

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody waits for this request any more. Unknown and finished ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class HoldingBack:
    """So many prompt tokens are held back in the front end, of requests that have a place in the engine as soon as
    their turn comes; of each at most a step's. The latest number holds."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """Have the adapter of this digest in host memory; an AdapterRead answers."""

    digest: str
    directory: str


@dataclass(frozen=True, slots=True)
class RemoveAdapter:
    """No request asks for it any more, and none that did is open."""

    digest: str


@dataclass(frozen=True, slots=True)
class PinAdapters:
    """The adapters of these digests, and no others, keep their slots."""

    digests: frozenset[str]


@dataclass(frozen=True, slots=True)
class TellStrengths:
    """How large the terms of an adapter are, as far as a step has measured it; AdapterStrengths answer."""

    digest: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End after the current step."""


Command = Request | Abort | HoldingBack | ReadAdapter | RemoveAdapter | PinAdapters | TellStrengths | Stop
"""What the front end sends; a Request is to be added."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How many bytes of the weights are there."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests. `cache_config` becomes the labels of vllm:cache_config_info.

    A step that takes longer than `step_deadline_s` seconds means that the device or a rank hangs.
    """

    max_model_len: int
    step_deadline_s: float
    plan_report: Mapping[str, Any]
    cache_config: Mapping[str, str]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine never came up. `reason` is set when no restart can help; the last two are TerminalError's."""

    text: str
    reason: TerminationReason | None = None
    shortfall_bytes: int | None = None
    measured: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that could never run: InvalidInput with its text and field, for this request alone."""

    request_id: str
    text: str
    field: str | None


class StepReport(NamedTuple):
    """What came of one step, or of commands between two steps; `steps_done` counts the steps that have ended.

    Request i of `request_ids` got the next `counts[i]` of `token_ids` from a step that verified `drafts[i]`, and goes
    on; `outputs` have more to say.
    """

    steps_done: int
    stats: EngineStats
    request_ids: list[str]
    counts: list[int]
    drafts: list[int]
    token_ids: list[int]
    outputs: list[RequestOutput]
    refusals: list[Refusal]
    events: StepEvents

    @classmethod
    def of(
        cls,
        steps_done: int,
        stats: EngineStats,
        outputs: Iterable[RequestOutput],
        refusals: list[Refusal],
        events: StepEvents,
    ) -> StepReport:
        report = cls(steps_done, stats, [], [], [], [], [], refusals, events)
        for output in outputs:
            scored = output.logprobs or output.prompt_logprobs
            if output.finish_reason is None and output.token_ids and not scored:
                report.request_ids.append(output.request_id)
                report.counts.append(len(output.token_ids))
                report.drafts.append(output.drafts)
                report.token_ids.extend(output.token_ids)
            else:
                report.outputs.append(output)
        return report

    def all_outputs(self) -> Iterable[RequestOutput]:
        end = 0
        for request_id, count, drafts in zip(self.request_ids, self.counts, self.drafts, strict=True):
            first, end = end, end + count
            yield RequestOutput(request_id, tuple(self.token_ids[first:end]), drafts=drafts)
        yield from self.outputs


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """Requests may ask for an adapter, or why they may not."""

    digest: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class AdapterStrengths:
    """Of an adapter; none where no step has measured it."""

    digest: str
    strengths: tuple[AdapterStrength, ...]


AdapterAnswer = AdapterRead | AdapterStrengths


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The engine's process runs."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The engine has ended and the text says why; nothing follows."""

    text: str


def encode(message: Any) -> bytes:
    """One frame: the length of the pickle in bytes (uint32, little-endian), then the pickle."""
    body = pickle.dumps(message, protocol=5)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Puts messages together from the pieces in which a socket hands out its bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Messages that are complete with `data`, in order."""
        buffer = self._buffer
        buffer += data
        messages = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(buffer, start)[0]
            if len(buffer) < end:
                break
            messages.append(pickle.loads(bytes(buffer[begin:end])))  # noqa: S301 - written by our own other half
            start = end
        del buffer[:start]
        return messages
