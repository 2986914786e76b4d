"""The docs point to what is there: files that the map names, links, and commands that their programs take."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from documented_commands import PROGRAMS, Command, commands_of, script_of

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"O": "operator/modelserve_operator", "C": "operator/modelserve", "W": "worker/modelserve_worker"}
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
CURRENT = [page for page in PAGES if page.parent.name != "history"] + sorted((ROOT / "tests").rglob("README.md"))


@cache
def _commands() -> tuple[Command, ...]:
    return tuple(command for page in CURRENT for command in commands_of(page))


def _anchors(page: Path) -> set[str]:
    """The anchors that headings have on a page, as they are made of headings' words."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_of_the_map_exist() -> None:
    named = re.findall(r"`([OCW])/([\w/.]+)`", (ROOT / "docs/map.md").read_text())
    assert len(named) > 60, "the map names files as `O/...`, `C/...` and `W/...`"
    assert [f"{room}/{path}" for room, path in named if not (ROOT / FOLDERS[room] / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in (each for each in links if "://" not in each and not each.startswith("mailto:")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in _anchors(target), link


def test_make_has_the_targets_that_are_named() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for each in _commands() if each.words[0] == "make" for word in each.words[1:] if "=" not in word}
    assert len(named) > 5
    assert named - targets == set()


def test_scripts_that_are_named_exist() -> None:
    scripts = {each.words[0] for each in _commands() if each.words[0] not in (*PROGRAMS, "make")}
    assert len(scripts) > 10
    assert {script for script in scripts if script_of(script) is None} == set()


def test_commands_that_are_shown_are_taken() -> None:
    """Every program parses every command of it that a page shows; a script without a parser is shown without flags."""
    shown = {(command.page, command.words, command.whole) for command in _commands() if command.words[0] != "make"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "documented_commands.py")],
        input=json.dumps(sorted(shown)), capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
