"""Lists of modules by name, as tools write them: exact names, regular expressions, wildcards, or parts of names.

A module is named without its prefix, since a text model has it with one of two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate

from modelserve.model.quantization.refusal import unknown

PREFIXES = ("model.language_model.", "model.")  # of text modules: in the multimodal wrapper, and in a bare text model
HEAD = "lm_head"
EVERY_LINEAR = "Linear"  # the class, which stands for all modules
_OF_EXPRESSIONS = frozenset(r"*+?^$()[]{}|\\")

Matches = Callable[[str], bool]


def spelled(name: str) -> tuple[str, ...]:
    """The names that a module may have in a checkpoint."""
    return (name,) if name == HEAD else tuple(prefix + name for prefix in PREFIXES)


def listed(patterns: object) -> list[str]:
    """The list as texts; nothing where there is none. Raises UnsupportedModel for what is no list."""
    if patterns is None:
        return []
    if not isinstance(patterns, Sequence) or isinstance(patterns, str):
        raise unknown(f"a list of modules that is {type(patterns).__name__}")
    return [str(pattern) for pattern in patterns]


def expression(text: str) -> re.Pattern[str]:
    """Raises UnsupportedModel for what is no regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise unknown(f"a pattern that is no regular expression ({error})") from error


def named(texts: Sequence[str]) -> Matches:
    """compressed-tensors' exact names."""
    exact = {text for text in texts if not text.startswith("re:")}
    return lambda name: any(each in exact for each in spelled(name))


def expressed(texts: Sequence[str]) -> Matches:
    """compressed-tensors' "re:" and a regular expression that matches from the start."""
    expressions = [expression(text.removeprefix("re:")) for text in texts if text.startswith("re:")]
    return lambda name: any(found.match(each) for each in spelled(name) for found in expressions)


def wildcards(texts: Sequence[str]) -> Matches:
    """ModelOpt's: names with "*" for any text; a module's name stands for what is below it, too."""
    any_of = re.compile("|".join(translate(each) for text in texts for each in (text, f"{text}.*")) or "(?!)")
    return lambda name: any(any_of.match(each) for each in spelled(name))


def parts(texts: Sequence[str]) -> Matches:
    """transformers' `modules_to_not_convert`: any part of a name."""
    return lambda name: any(text in each for each in spelled(name) for text in texts)


def is_expression(text: str) -> bool:
    """Whether AutoRound takes a name for a regular expression."""
    return any(character in _OF_EXPRESSIONS for character in text)
