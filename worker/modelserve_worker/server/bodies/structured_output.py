"""What a request says its answer must look like: the fields, and the grammar they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from llguidance import StructTag
from pydantic import Field, PlainValidator, ValidationError, field_validator, model_validator

from modelserve.errors import InvalidInput
from modelserve_worker.grammar.answer import (
    AnswerGrammar,
    CalledTool,
    Thought,
    choice_part,
    grammar_part,
    regex_part,
    structural_tag_part,
)
from modelserve_worker.grammar.check import check_grammar
from modelserve_worker.grammar.schema import bounded_schema, document_part, json_grammar
from modelserve_worker.server.bodies.request_model import RequestModel
from modelserve_worker.server.bodies.tools import MAX_TOOLS, FunctionName, Tool
from modelserve_worker.server.errors.errors import FieldError, from_validation
from modelserve_worker.server.json_text import read_json
from modelserve_worker.text.markers import Markers

MAX_CHOICE_TEXTS = 1_024
MAX_TEXT_LENGTH = 64 * 1024  # of a regular expression, a grammar, or a text to choose
MAX_TAGS = 64

GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_LENGTH)]
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class TagStructure(RequestModel):
    """Behind `begin` comes JSON of `schema`, and behind that `end`."""

    begin: GrammarText
    schema_: dict[str, Any] = Field(alias="schema")
    end: str = Field(max_length=MAX_TEXT_LENGTH)


class StructuralTag(RequestModel):
    """Free text in which each structure follows its trigger, with which its `begin` begins."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: list[TagStructure] = Field(min_length=1, max_length=MAX_TAGS)
    triggers: list[GrammarText] = Field(min_length=1, max_length=MAX_TAGS)

    def part(self, field: str) -> dict[str, Any]:
        return structural_tag_part([self._tag(each, field) for each in self.structures])

    def _tag(self, structure: TagStructure, field: str) -> StructTag:
        trigger = next((each for each in self.triggers if structure.begin.startswith(each)), None)
        if trigger is None:
            raise InvalidInput(f"{field}: begin {structure.begin!r:.80} starts with none of the triggers", field=field)
        grammar = document_part(structure.schema_, field=f"{field}.structures.schema")["json_schema"]
        return StructTag(trigger=trigger, begin=structure.begin, grammar=grammar, end=structure.end)


class JsonSchemaFormat(RequestModel):
    """OpenAI's: the answer is constrained to `schema` whether or not it is `strict`."""

    name: str = Field(max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default=True, alias="schema")
    strict: bool = True


class ResponseFormat(RequestModel):
    """OpenAI's `response_format`, and vLLM's structural tags under the same name."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[TagStructure] | None = None
    triggers: list[GrammarText] | None = None

    @model_validator(mode="after")
    def _fields_of_type(self) -> ResponseFormat:
        of_type = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers")}.get(self.type, ())
        for name in ("json_schema", "structures", "triggers"):
            if (getattr(self, name) is not None) != (name in of_type):
                raise ValueError(
                    f"{name} {'is required' if name in of_type else 'does not go'} with type {self.type!r}"
                )
        return self

    def part(self) -> dict[str, Any] | None:
        if self.type == "text":
            return None
        if self.json_schema is not None:
            return document_part(self.json_schema.schema_, field="response_format.json_schema.schema")
        if self.structures and self.triggers:
            tag = StructuralTag.model_construct(structures=self.structures, triggers=self.triggers)
            return tag.part("response_format")
        return document_part(_ANY_OBJECT, field="response_format")


class StructuredOutputs(RequestModel):
    """vLLM's `structured_outputs`: one of its fields."""

    json_: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: GrammarText | None = None
    choice: list[GrammarText] | None = Field(default=None, min_length=1, max_length=MAX_CHOICE_TEXTS)
    grammar: GrammarText | None = None
    structural_tag: str | StructuralTag | None = None

    @field_validator("json_", mode="after")
    @classmethod
    def _schema_as_text(cls, value: str | dict[str, Any] | bool) -> Any:
        return read_json(value) if isinstance(value, str) else value

    @field_validator("structural_tag", mode="after")
    @classmethod
    def _tag_as_text(cls, value: str | StructuralTag) -> StructuralTag:
        return StructuralTag.model_validate(read_json(value)) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        given = [name for name in ("json_", "regex", "choice", "grammar", "structural_tag") if self._given(name)]
        if len(given) + self.json_object != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice, grammar and structural_tag")
        return self

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None

    @property
    def field(self) -> str:
        """Which of them is given, as it is sent."""
        names = ("json_", "regex", "choice", "grammar", "structural_tag")
        return f"structured_outputs.{next((name.rstrip('_') for name in names if self._given(name)), 'json_object')}"

    def part(self) -> dict[str, Any]:
        if self.regex is not None:
            return regex_part(self.regex)
        if self.choice is not None:
            return choice_part(self.choice)
        if self.grammar is not None:
            return grammar_part(self.grammar, field="structured_outputs.grammar")
        if isinstance(self.structural_tag, StructuralTag):
            return self.structural_tag.part("structured_outputs.structural_tag")
        schema = _ANY_OBJECT if self.json_object else self.json_
        return document_part(schema, field="structured_outputs.json")


@dataclass(frozen=True)
class NamedToolChoice:
    """OpenAI's {"type": "function", "function": {"name": ...}}: this function is called, once."""

    name: str


@dataclass(frozen=True)
class AllowedTools:
    """OpenAI's {"type": "allowed_tools", ...}: of the tools, the model knows these; one is called if `required`."""

    names: tuple[str, ...]
    required: bool


def _tool_choice(value: Any) -> Any:
    if value in ("auto", "none", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        try:
            allowed = AllowedToolsChoice.model_validate(value).allowed_tools
        except ValidationError as error:
            fault = from_validation(error)
            raise FieldError(fault.param or "", fault.message) from error
        return AllowedTools(tuple(each.function.name for each in allowed.tools), allowed.mode == "required")
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return NamedToolChoice(function["name"])
    raise ValueError(
        "tool_choice is 'auto', 'none', 'required', {'type': 'function', 'function': {'name': NAME}}, or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}, "
        f"not {value!r:.80}"
    )


class _NamedFunction(RequestModel):
    """As it is documented; `_tool_choice` reads it."""

    name: FunctionName


class _ChosenFunction(RequestModel):
    type: Literal["function"]
    function: _NamedFunction


class _AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: list[_ChosenFunction] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(RequestModel):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | NamedToolChoice | AllowedTools,
    PlainValidator(
        _tool_choice, json_schema_input_type=Literal["auto", "none", "required"] | _ChosenFunction | AllowedToolsChoice
    ),
]


def offered_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """Those that the model may call. Raises ValueError for a choice of what is not there."""
    if choice == "none":
        return []
    if not isinstance(choice, NamedToolChoice | AllowedTools):
        return list(tools)
    names = (choice.name,) if isinstance(choice, NamedToolChoice) else choice.names
    known = {tool.function.name for tool in tools}
    if missing := [name for name in names if name not in known]:
        raise FieldError("tool_choice", f"tool_choice names {missing[0]!r:.80}, which is none of the tools")
    return list(tools) if isinstance(choice, NamedToolChoice) else [t for t in tools if t.function.name in names]


def forced_tools(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    """Those of which one must be called; none where the model may choose. Raises ValueError."""
    if choice in ("auto", "none"):
        return ()
    if not tools:
        raise FieldError("tool_choice", "tool_choice forces a call, and there are no tools; send tools")
    offered = offered_tools(tools, choice)
    if isinstance(choice, NamedToolChoice):
        return [tool for tool in offered if tool.function.name == choice.name]
    return offered if choice == "required" or (isinstance(choice, AllowedTools) and choice.required) else ()


def answer_grammar(
    *,
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    tools: Sequence[Tool] = (),
    tool_choice: ToolChoice = "auto",
    parallel_tool_calls: bool = True,
) -> AnswerGrammar | None:
    """What the fields ask for; None when nothing constrains the answer. Raises InvalidInput.

    A forced call takes the place of `response_format`; where the model may choose, an answer is either that or calls.
    Where there is a grammar, functions that are not strict are held to their schema as far as it can be followed.
    """
    wanted, field = None if response_format is None else response_format.part(), "response_format"
    if structured_outputs is not None:
        if wanted is not None:
            raise InvalidInput(
                "structured_outputs and response_format exclude each other; send one", field="response_format"
            )
        wanted, field = structured_outputs.part(), structured_outputs.field
    offered = offered_tools(tools, tool_choice)
    forced = forced_tools(tools, tool_choice)
    if forced:
        if structured_outputs is not None:
            raise InvalidInput("a forced call and structured_outputs exclude each other; send one", field="tool_choice")
        return AnswerGrammar(
            tools=_called(tools, forced),
            several_calls=parallel_tool_calls and not isinstance(tool_choice, NamedToolChoice),
        )
    if wanted is not None:
        return AnswerGrammar(part=wanted, tools=_called(tools, offered), several_calls=parallel_tool_calls, field=field)
    if any(tool.function.strict for tool in offered):
        return AnswerGrammar(tools=_called(tools, offered), several_calls=parallel_tool_calls, text=True)
    return None


@dataclass(frozen=True)
class AskedGrammar:
    """What an answer must match, and the field of the request that asks for it."""

    source: str
    field: str


def grammar_source(answer: AnswerGrammar, markers: Markers, thought: Thought) -> str:
    """The grammar for the engine, known to compile. Raises InvalidInput. Not on the loop: see `check_grammar`."""
    for index, tool in enumerate(answer.tools):
        if tool.strict and tool.parameters:  # what is no valid schema is told in terms of the schema
            check_grammar(_document(tool), field=tool.field or f"tools.{index}")
    source = answer.source(markers, thought)
    check_grammar(source, field=answer.field)
    return source


def _document(tool: CalledTool) -> str:
    return AnswerGrammar(part=json_grammar(dict(tool.parameters or {}))).source(Markers.of({}), Thought.NONE)


def _called(tools: Sequence[Tool], some: Sequence[Tool]) -> list[CalledTool]:
    called = []
    for index, tool in enumerate(tools):
        if tool in some:
            function, field = tool.function, f"tools.{index}.function.parameters"
            schema = bounded_schema(function.parameters or {}, field=field)
            assert isinstance(schema, dict)
            called.append(CalledTool(function.name, schema or None, function.strict, field))
    return called
