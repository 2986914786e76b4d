"""Reads the rules of a grammar that a client wrote, as far as they say how long a text is.

This is the part of Lark's language that the library has; what else it has is unreadable here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_MOST_DEPTH = 100  # of parentheses inside each other
_TOKEN = re.compile(  # one way to read each text, so that reading takes time in its length
    r"""(?P<space>(?:[ \t\r]|//[^\n]*|\#[^\n]*)+)
    |(?P<line>\n)
    |(?P<range>"(?:\\.|[^"\\\n])+"\s*+\.\.\s*+"(?:\\.|[^"\\\n])+")
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<special><[^<>\n]*>)
    |(?P<name>[!?]?[A-Za-z_][A-Za-z0-9_]*)
    |(?P<times>~\s*+\d{1,9}(?:\s*+\.\.\s*+\d{1,9})?|\{\s*+(?:\d{1,9}\s*+)?(?:,\s*+(?:\d{1,9}\s*+)?)?\}|[?*+])
    |(?P<directive>%(?:ignore|import|llguidance)\b[^\n]*)
    |(?P<mark>[:|()\[\]])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u\{[0-9a-fA-F]*\}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)")


class UnreadableRulesError(Exception):
    """The rules have something that is not understood here."""


@dataclass(eq=False)
class Part:
    """A rule's body, or a piece of one.

    `kind`: "text" of `length` characters; "unknown", a regular expression or a token; "rule", which `name` names;
    "sequence" and "choice" of `parts`; "repeat" of its one part, `least` to `most` times (None: without bound).
    """

    kind: str
    parts: list[Part] = field(default_factory=list)
    name: str = ""
    length: int = 0
    least: int = 0
    most: int | None = None


def read_rules(source: str) -> dict[str, Part]:
    """The body of each rule and terminal by name. Raises UnreadableRulesError."""
    return _Reader(source).rules()


class _Reader:
    def __init__(self, source: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(source):
            found = _TOKEN.match(source, position)
            if found is None or found.lastgroup is None:
                raise UnreadableRulesError(source[position : position + 20])
            if found.lastgroup not in ("space", "line", "directive"):
                self._tokens.append((found.lastgroup, found[0]))
            position = found.end()
        self._tokens += [("end", ""), ("end", "")]
        self._at = 0

    def rules(self) -> dict[str, Part]:
        rules: dict[str, Part] = {}
        while self._kind != "end":
            name = self._take("name").lstrip("!?")
            self._take("mark", ":")
            if name in rules:
                raise UnreadableRulesError(name)
            rules[name] = self._choice(0)
        return rules

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def _text(self) -> str:
        return self._tokens[self._at][1]

    def _take(self, kind: str, text: str | None = None) -> str:
        found = self._tokens[self._at]
        if found[0] != kind or (text is not None and found[1] != text):
            raise UnreadableRulesError(found[1])
        self._at += 1
        return found[1]

    def _choice(self, depth: int) -> Part:
        if depth > _MOST_DEPTH:
            raise UnreadableRulesError("nested too deep")
        options = [self._sequence(depth)]
        while self._text == "|" and self._kind == "mark":
            self._at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Part("choice", options)

    def _sequence(self, depth: int) -> Part:
        parts = []
        while self._kind not in ("end", "mark") or self._text in ("(", "["):
            if self._kind == "name" and self._tokens[self._at + 1][1] == ":":
                break  # the next rule
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Part("sequence", parts)

    def _atom(self, depth: int) -> Part:
        kind, text = self._kind, self._text
        self._at += 1
        if kind == "mark":
            inner = self._choice(depth + 1)
            self._take("mark", ")" if text == "(" else "]")
            return inner if text == "(" else Part("repeat", [inner], least=0, most=1)
        if kind == "name":
            return Part("rule", name=text.lstrip("!?"))
        if kind == "text":
            return Part("text", length=len(_ESCAPE.sub("_", text[1 : text.rindex('"')])))
        if kind in ("regex", "special", "range"):
            return Part("unknown")
        raise UnreadableRulesError(text)

    def _repeated(self, part: Part) -> Part:
        while self._kind == "times":
            least, most = _times(self._take("times"))
            part = Part("repeat", [part], least=least, most=most)
        return part


def _times(text: str) -> tuple[int, int | None]:
    if text in "?*+":
        return {"?": (0, 1), "*": (0, None), "+": (1, None)}[text]
    numbers = re.findall(r"\d+", text)
    if text[0] == "~" or "," not in text:
        if not numbers:
            raise UnreadableRulesError(text)
        return int(numbers[0]), int(numbers[-1])
    low, _, high = text.strip("{}").partition(",")
    return int(low or 0), int(high) if high.strip() else None
