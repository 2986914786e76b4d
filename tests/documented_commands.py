"""The commands that the docs show, and whether their programs take them.

As a program it reads pages' commands as JSON from standard input and starts each program, in this one process, as far
as it parses its words. Its parser then writes its help and parses all commands of its own; nothing is done.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelserve_tools.evaluation.flags import parser as evaluation_parser
from modelserve_worker.server.flags import FlagParser, add_engine_flags, add_server_flags
from modelserve_worker.terminal_error import TerminalError

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = {
    "modelserve": "modelserve.cli.__main__",
    "kubectl": "modelserve.cli.kubectl_plugin",
    "modelserve-bench": "modelserve_tools.bench.__main__",
    "modelserve-eval": "modelserve_tools.evaluation.__main__",
    "modelserve-worker": "modelserve_worker.__main__",
}
OTHER_PARSERS = (("modelserve-worker", "fetch"), ("modelserve-worker", "kernels"))
RUNNER = "tests/bench"
"""`python tests/bench NAME` runs a tool of that folder."""
_BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```|(?:^\n)((?:(?: {4}|\t)[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_SETTING = re.compile(r"[A-Z_]+=\S*")
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_BETWEEN = ("&&", "|", ";", "||", "&", ">")


@dataclass(frozen=True)
class Command:
    """One command of a page: its words without settings of the environment and without the interpreter."""

    page: str
    words: tuple[str, ...]
    whole: bool
    """Whether it stands in a block of code: in a sentence what it needs may be left out."""

    @property
    def flags(self) -> list[str]:
        """Long flags, without their values."""
        return [found[0] for word in self.words if (found := _FLAG.match(word))]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def commands_of(page: Path) -> Iterator[Command]:
    """Every command of a page that begins with a program of ours, a script of ours or make.

    In a sentence a program without flags is a name, not a command.
    """
    text, name = page.read_text(), str(page.relative_to(ROOT))
    for block in _BLOCK.finditer(text):
        lines = (block[1] or block[2]).replace("\\\n", " ").splitlines()
        yield from (Command(name, words, whole=True) for line in lines for words in _parts(line))
    for code in _INLINE.finditer(_BLOCK.sub("\n", text)):
        flagged = (
            words
            for words in _parts(code[1])
            if words[0] == "make" or any(word[0] == "-" for word in words[1:] if word)
        )
        yield from (Command(name, words, whole=False) for words in flagged)


def script_of(word: str) -> Path | None:
    """The script that a word names, by its path or, where one has it, by its name alone; None if none or several do."""
    if "/" in word:
        return ROOT / word if (ROOT / word).exists() else None
    named = list((ROOT / "tests").rglob(word))
    return named[0] if len(named) == 1 else None


def _parts(line: str) -> Iterator[tuple[str, ...]]:
    try:
        line = line.replace("$(", "; ").replace(")", " ") if "$(" in line else line
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
    except ValueError:  # prose, YAML or JSON with a quotation mark of its own
        return
    part: list[str] = []
    for word in [*words, ";"]:
        if word not in _BETWEEN:
            part.append(word)
        elif part:
            yield from _of_ours(part)
            part = []


def _of_ours(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    while words and (_SETTING.fullmatch(words[0]) or words[0] == "export"):
        words = words[1:]
    if words and re.fullmatch(r"(\.venv/bin/)?python3?", words[0]):
        words = words[1:]
    if not words:
        return
    first = words[0].removeprefix(".venv/bin/")
    subcommand = len(words) == 1 or re.fullmatch(r"-.*|[a-z]+", words[1])
    if (
        (first in PROGRAMS and subcommand and (first != "kubectl" or words[1:2] == ["modelserve"]))
        or first == "make"
        or re.fullmatch(r"(tests/[\w./]+/)?\w+\.(py|sh)|" + RUNNER, first)
    ):
        yield (first, *words[1:])


class _Parsed(BaseException):
    """The words are parsed: what would follow is not done."""


def _faults(words: Sequence[str], commands: Sequence[Command]) -> dict[str, str]:
    """Start a program as far as it parses its words, and have its parser parse all its commands; faults by command."""
    faults: dict[str, str] = {}
    parse, parse_all = argparse.ArgumentParser.parse_known_args, argparse.ArgumentParser.parse_args
    every_word = []

    def whole(parser: argparse.ArgumentParser, *given: object) -> None:
        every_word.append(parser)  # and none is left for another program
        stop(parser)

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        restore()
        known = _options(parser)
        for command in commands:
            if fault := _fault(parser, known if every_word else known | _handed_on(), command):
                faults[str(command)] = fault
        raise _Parsed

    def restore() -> None:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
        argparse.ArgumentParser.parse_args = parse_all  # type: ignore[method-assign]

    argparse.ArgumentParser.parse_known_args = stop  # type: ignore[method-assign,assignment]
    argparse.ArgumentParser.parse_args = whole  # type: ignore[method-assign,assignment]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _start(words)
        return {str(command): "parses nothing" for command in commands}
    except _Parsed:
        return faults
    except Exception as error:  # such as a module that is not there any more
        return {str(command): f"{type(error).__name__}: {error}" for command in commands}
    finally:
        restore()


def _handed_on() -> set[str]:
    """The flags that a tool leaves to what it starts: a worker, or an evaluation."""
    parser = FlagParser()
    add_engine_flags(parser)
    add_server_flags(parser)
    return _options(parser) | _options(evaluation_parser())


def _fault(parser: argparse.ArgumentParser, known: set[str], command: Command) -> str:
    """What a parser says against a command; of one with words left out, which of its flags are none."""
    if not command.whole or any(re.search(r"\.\.\.|…|^\[|\]$", word) for word in command.words):
        return " ".join(flag for flag in command.flags if flag not in known)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            _, left = parser.parse_known_args(command.words[len(program_of(command)) :])
    except SystemExit as ended:
        return said.getvalue().strip().rpartition("\n")[2] if ended.code else ""
    except TerminalError as refused:  # a worker's way to say what is wrong with its flags
        return str(refused)
    return " ".join(word for word in left if word[0] == "-" and word.partition("=")[0] not in known)


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """All flags of a parser and of its subcommands, whose help is written on the way: a wrong `%` is found there."""
    parser.format_help()
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*(_options(each) for each in action.choices.values()))
    return found


def program_of(command: Command) -> tuple[str, ...]:
    """The words that name a command's program: with what chooses another parser, where it has several."""
    several = command.words[0] in ("kubectl", RUNNER) or command.words[:2] in OTHER_PARSERS
    return command.words[: 2 if several else 1]


def parses(words: Sequence[str]) -> bool:
    """Whether a program has a parser: a script without one takes no flags."""
    if words[0] in (*PROGRAMS, RUNNER):
        return True
    script = script_of(words[0])
    assert script is not None, words
    program = script.with_suffix(".py")  # a shell script hands its words to its namesake, where it has one
    return program.exists() and "argparse" in program.read_text()


def _start(words: Sequence[str]) -> None:
    if words[0] in PROGRAMS:
        sys.argv = list(words)
        importlib.import_module(PROGRAMS[words[0]]).main(words[1:] if tuple(words) in OTHER_PARSERS else [])
        return
    script = script_of(words[0])
    assert script is not None
    script = script if script.is_dir() else script.with_suffix(".py")
    sys.argv = [str(script), *words[1:]]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def main() -> None:
    """Read commands, write faults by command."""
    commands = [Command(page, tuple(words), whole) for page, words, whole in json.load(sys.stdin)]
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    sys.path[:0] = [str(path) for path in sorted(folders)]
    faults: dict[str, str] = {}
    for words in sorted({program_of(command) for command in commands}):
        of_program = [command for command in commands if program_of(command) == words]
        if parses(words):
            faults |= _faults(words, of_program)
        else:
            faults |= {str(command): "no parser" for command in of_program if command.flags}
    json.dump(faults, sys.stdout)


if __name__ == "__main__":
    main()
