"""Splits an answer into its parts while tokens arrive: what the model thought, what it says, the functions it calls.

Thoughts, content and the arguments of calls come out token by token. Nothing emitted is taken back, and the parts do
not depend on how the tokens were grouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby
from typing import Any, NamedTuple

from modelserve_worker.text.detokenizer import IncrementalDetokenizer
from modelserve_worker.text.markers import Markers
from modelserve_worker.text.stop_strings import StopStringFilter
from modelserve_worker.text.tool_calls import QUOTE, CallReader, ToolCall
from modelserve_worker.text.vocabulary import Vocabulary

_THOUGHT_LABEL = "thought\n"  # the name of the channel, which the model writes before the thought itself


class Channel(Enum):
    """Where a text belongs."""

    CONTENT = auto()
    REASONING = auto()


class Text(NamedTuple):
    channel: Channel
    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call whose first value has begun. Pieces of its arguments follow, then the ToolCall itself if it is one.

    Any other part, or the end of the answer, shows that it was none: it is cut or malformed, its arguments no JSON.
    """

    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the JSON of the arguments of the call that has begun."""

    json: str


Part = Text | CallBegun | CallArguments | ToolCall


def join_parts(parts: Sequence[Part]) -> Sequence[Part]:
    """Neighbouring texts of one channel put together, and neighbouring pieces of one call's arguments."""
    if len(parts) < 2:
        return parts
    joined: list[Part] = []
    for kind, group in groupby(parts, key=_kind):
        if isinstance(kind, Channel):
            joined.append(Text(kind, "".join([part.text for part in group if isinstance(part, Text)])))
        elif kind is CallArguments:
            joined.append(CallArguments("".join([part.json for part in group if isinstance(part, CallArguments)])))
        else:
            joined += group
    return joined


def _kind(part: Part) -> Any:
    return part.channel if isinstance(part, Text) else type(part)


@dataclass(frozen=True)
class ReplyFormat:
    """How an answer is read. `markers` None: everything is content.

    `tool_calls` False leaves calls in the content, as the text between their markers; `one_call` ends the answer behind
    the first call. `prompt_tail` is what the prompt wrote into a thought that it left open, None when none is.
    """

    markers: Markers | None = None
    tool_calls: bool = False
    one_call: bool = False
    prompt_tail: Sequence[int] | None = None


PLAIN_TEXT = ReplyFormat()


class _State(Enum):
    CONTENT = auto()
    LABEL = auto()  # in a thought, before the end of its label
    THOUGHT = auto()
    CALL = auto()


class ReplyParser:
    """Reads one answer. Push no further token once `ended` is true.

    Stop strings are searched from token number `min_tokens` on, in each run of reasoning or content by itself, and not
    in calls. A malformed call is content: the text of its tokens without the markers. One that the end of the answer
    cuts is neither content nor a ToolCall.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        reply_format: ReplyFormat = PLAIN_TEXT,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._format = reply_format
        self._markers = reply_format.markers
        self._detokenizer = IncrementalDetokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
        self._changes_state = frozenset(() if self._markers is None else self._markers.around_parts())
        self._stop = StopStringFilter(stop, include_stop=include_stop)
        self._searches = bool(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.num_calls = 0  # that are complete
        self.ended = False  # the answer is over, by a stop string or by the only call it may hold
        self._label = ""  # what may be the beginning of the label
        self._call: list[int] = []  # tokens of the call that is open
        self._call_text = IncrementalDetokenizer(vocabulary)
        self._call_reader: CallReader | None = None  # None: what is open is malformed, or no call is open
        self._call_begun = False
        tail = reply_format.prompt_tail
        self._state = _State.CONTENT if tail is None else _State.THOUGHT if tail else _State.LABEL
        self.reasoning_tokens = 0  # tokens inside thoughts, their markers not counted

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stop.matched

    def push(self, token_id: int) -> list[Part]:
        """Parts that this token made certain; often none."""
        self._num_tokens += 1
        if token_id in self._changes_state and (parts := self._change_state(token_id)) is not None:
            return parts
        if self._state is _State.CALL:
            self._call.append(token_id)
            is_quote = self._markers is not None and token_id == self._markers.quote
            return self._read_call(self._quote() if is_quote else self._call_text.push(token_id))
        if self._state is not _State.CONTENT:
            self.reasoning_tokens += 1
        return self._said(self._detokenizer.push(token_id))

    def finish(self) -> list[Part]:
        """The rest, when the answer ended otherwise than by `ended`. A label or a call that it cuts is no text."""
        self._label = ""
        return [] if self._state is _State.CALL else self._leave()

    def _change_state(self, token_id: int) -> list[Part] | None:
        """What the marker `token_id` makes certain; None where it changes nothing."""
        assert self._markers is not None
        entered = self._entered(token_id, self._markers)
        if entered is None:
            return None
        complete = self._state is _State.CALL and token_id == self._markers.call_close
        parts = self._close_call() if complete else self._leave()
        self._state = entered
        if entered is _State.CALL:
            self._call_reader, self._call_begun = CallReader(), False
        return parts

    def _entered(self, token_id: int, markers: Markers) -> _State | None:
        """The state behind the marker `token_id`; None for every token that changes nothing."""
        if token_id == markers.thought_open:
            return _State.LABEL
        if token_id == markers.call_open:
            return _State.CALL if self._format.tool_calls else _State.CONTENT
        if token_id == markers.thought_close:
            return None if self._state is _State.CALL else _State.CONTENT
        if token_id == markers.call_close or token_id == markers.response_open:
            return _State.CONTENT if self._state is _State.CALL else None
        return None

    def _read_call(self, source: str) -> list[Part]:
        """Parts of the open call that `source` made certain."""
        if self._call_reader is None:
            return []
        try:
            return self._arguments(self._call_reader, self._call_reader.push(source))
        except ValueError:
            self._call_reader = None
            return []

    def _close_call(self) -> list[Part]:
        parts = self._read_call(self._call_text.finish())
        if self._call_reader is not None:
            try:
                rest, call = self._call_reader.close()
            except ValueError:
                return [*parts, *self._leave()]
            self._call = []
            self.num_calls += 1
            self.ended = self.ended or self._format.one_call
            return [*parts, *self._arguments(self._call_reader, rest), call]
        return [*parts, *self._leave()]

    def _arguments(self, reader: CallReader, json_text: str) -> list[Part]:
        if not json_text:
            return []
        assert reader.name is not None
        begun: list[Part] = [] if self._call_begun else [CallBegun(reader.name)]
        self._call_begun = True
        return [*begun, CallArguments(json_text)]

    def _quote(self) -> str:
        """The end of one text and the beginning of another; half a character is not completed behind it."""
        return self._call_text.finish() + QUOTE

    def _leave(self) -> list[Part]:
        """What the present state still holds back; a call that is no call is said as text."""
        raw = "".join([*map(self._detokenizer.push, self._call), self._detokenizer.finish()])
        self._call_text.finish()
        self._call = []
        parts = self._said(raw)
        if self._state is _State.LABEL and self._label:
            held, self._label = self._label, ""
            self._state = _State.THOUGHT
            parts += self._said("" if held == _THOUGHT_LABEL.rstrip() else held)
        rest = "" if self.stop_string is not None else self._stop.flush()
        return [*parts, Text(self._channel, rest)] if rest else parts

    @property
    def _channel(self) -> Channel:
        return Channel.REASONING if self._state in (_State.LABEL, _State.THOUGHT) else Channel.CONTENT

    def _said(self, text: str) -> list[Part]:
        """Text of the present channel, less the label, up to a stop string."""
        if self._state is _State.LABEL:
            self._label += text
            if len(self._label) < len(_THOUGHT_LABEL) and _THOUGHT_LABEL.startswith(self._label):
                return []
            text, self._label = self._label.removeprefix(_THOUGHT_LABEL), ""
            self._state = _State.THOUGHT
        if self._searches and self._num_tokens >= self._min_tokens:
            text = self._stop.push(text)
            self.ended = self.ended or self._stop.matched is not None
        return [Text(self._channel, text)] if text else []
