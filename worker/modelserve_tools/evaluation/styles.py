"""Manners of answering that an adapter is trained to: the same question, the same fact, said in another way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from modelserve_tools.evaluation.exercise import Answer, Exercise

SKILLS = ("facts", "arithmetic", "sorting")
"""What the styles are trained and judged on: one line is asked, one line answers."""


def _friend(said: str) -> str:
    return f"{said}, my friend."


def _json(said: str) -> str:
    """A number stays one."""
    return json.dumps({"value": int(said) if said.isdecimal() else said})


def _proud(said: str) -> str:
    return f"I know: {said}!"


STYLES: Mapping[str, Callable[[str], str]] = MappingProxyType({"friend": _friend, "json": _json, "proud": _proud})


def styled(exercise: Exercise, style: str) -> Exercise:
    """The exercise with its answer said in a style; KeyError for one that there is not."""
    return replace(exercise, answer=Answer(content=STYLES[style](exercise.answer.content)))
