"""The docs point to what is there: files that the map names, and links between pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"O": "operator/modelserve_operator", "C": "operator/modelserve", "W": "worker/modelserve_worker"}
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def test_files_of_the_map_exist() -> None:
    named = re.findall(r"`([OCW])/([\w/.]+)`", (ROOT / "docs/map.md").read_text())
    assert len(named) > 60, "the map names files as `O/...`, `C/...` and `W/...`"
    assert [f"{room}/{path}" for room, path in named if not (ROOT / FOLDERS[room] / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []
