"""The grammar of a whole answer: the thought before it if there may be one, then what was asked for.

A grammar is the library's JSON: named parts, the first of which is the whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.call_syntax import ArgumentRules, literal
from modelserve_worker.grammar.endless_grammar import endless_rules
from modelserve_worker.grammar.limits import CLIENT_PART, MAX_GRAMMAR_CHARACTERS
from modelserve_worker.text.markers import Markers

_ANY_TEXT = r"/(.|\n)*/"


class Thought(Enum):
    """Whether a thought stands before the answer."""

    NONE = auto()
    POSSIBLE = auto()  # the model was told to think, and may
    OPEN = auto()  # the prompt began one


@dataclass(frozen=True)
class CalledTool:
    """A function that may be called. `parameters`: its JSON schema, bounded; None: it takes no arguments."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool
    field: str  # where the schema stands in the request


def regex_part(expression: str) -> dict[str, Any]:
    """Text that matches a regular expression from end to end."""
    (part,) = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"]
    return {"lark_grammar": part["lark_grammar"]}


def choice_part(choices: Sequence[str]) -> dict[str, Any]:
    """One of several texts."""
    return {"lark_grammar": "start: " + " | ".join(map(literal, choices))}


def grammar_part(source: str, *, field: str) -> dict[str, Any]:
    """A grammar in Lark's syntax, or in GBNF. Raises InvalidInput, also where no answer could be whole under it."""
    try:
        rules = any_to_lark(source)
    except Exception as error:  # the library raises what its parser meets
        raise InvalidInput(f"{field}: not a grammar in Lark's syntax or GBNF: {error}", field=field) from error
    if fault := endless_rules(rules):
        raise InvalidInput(f"{field}: {fault}", field=field)
    return {"name": CLIENT_PART, "lark_grammar": rules}


def structural_tag_part(tags: Sequence[StructTag]) -> dict[str, Any]:
    """Free text, and between its tags what each of them asks for."""
    return {"lark_grammar": StructTag.to_grammar(list(tags), assume_special=False)}


@dataclass(frozen=True)
class AnswerGrammar:
    """What an answer may be: `part`, calls, or either; with `text` any text may stand before the calls, or alone."""

    part: Mapping[str, Any] | None = None
    tools: Sequence[CalledTool] = ()
    several_calls: bool = False
    text: bool = False
    field: str = "tools"  # of the request, to name in a refusal

    def source(self, markers: Markers, thought: Thought) -> str:
        """The library's JSON. Raises InvalidInput that names the field at fault."""
        rules: dict[str, str] = {}
        options = []
        if self.part is not None:
            options.append(f"@{self.part.get('name', 'answer')}")
        if self.tools:
            rules = self._calls(markers)
            least, most = int(not self.text), "" if self.several_calls else 1
            options.append(f"{'TEXT ' if self.text else ''}call{{{least},{most}}}")
        answer = f"answer: {' | '.join(options)}"
        start = {
            Thought.NONE: "start: answer",
            Thought.POSSIBLE: f"start: (<[{markers.thought_open}]> TEXT <[{markers.thought_close}]>)? answer",
            Thought.OPEN: f"start: TEXT <[{markers.thought_close}]> answer",
        }[thought]
        lines = ["%llguidance {}", start, answer, f"TEXT: {_ANY_TEXT}"]
        lines += [f"{name}: {body}" for name, body in rules.items()]
        parts: list[dict[str, Any]] = [{"name": "top", "lark_grammar": "\n".join(lines)}]
        if self.part is not None:
            parts.append({"name": "answer", **self.part})
        source = json.dumps({"grammars": parts}, ensure_ascii=False)
        if len(source) > MAX_GRAMMAR_CHARACTERS:
            raise InvalidInput(
                f"{self.field}: as a grammar it has {len(source)} characters; the limit is {MAX_GRAMMAR_CHARACTERS}. "
                "Send fewer texts, or fewer and smaller schemas",
                field=self.field,
            )
        return source

    def _calls(self, markers: Markers) -> dict[str, str]:
        """The rule `call` and those it needs."""
        if markers.call_open is None or markers.quote is None:
            raise InvalidInput("this model's vocabulary has no tokens for calls", field="tools")
        argument_rules = ArgumentRules(quote=f"<[{markers.quote}]>")
        functions = [
            f"{literal(tool.name)} {argument_rules.arguments(tool.parameters, field=tool.field, strict=tool.strict)}"
            if tool.parameters
            else f'{literal(tool.name)} "{{" "}}"'
            for tool in self.tools
        ]
        call = f'<[{markers.call_open}]> "call:" ({" | ".join(functions)}) <[{markers.call_close}]>'
        return {"call": call, **argument_rules.rules}
