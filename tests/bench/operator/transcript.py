"""What a run shows: stages with their times, commands with their output, on the terminal and in a Markdown file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from localcluster.kubectl import Kubectl


class Transcript:
    """Every line goes to standard output and to `path` at once, so that a run that is cut off leaves its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def line(self, text: str) -> None:
        print(text, flush=True)
        with self._path.open("a") as file:
            file.write(f"{text}\n")

    def stage(self, name: str) -> None:
        self.line(f"\n## {name} (at {self.seconds:.0f} s)\n")

    def progress(self, text: str) -> None:
        self.line(f"    [{self.seconds:5.1f} s] {text}")

    def block(self, text: str) -> None:
        """Preformatted text."""
        self.line("\n".join(f"    {line}".rstrip() for line in text.rstrip().splitlines()))

    def kubectl(self, kubectl: Kubectl, *arguments: str, document: str | None = None) -> str:
        """Show a kubectl command as a user would type it, and its output; return the output."""
        shown = " ".join(f"'{a}'" if set(a) & set(" {}()|*'") else a for a in arguments)
        self.block(f"$ kubectl {shown}")
        if document is not None:
            self.block("\n".join(f"< {line}" for line in document.splitlines()))
        output = kubectl.run(*arguments, document=document)
        self.block(output)
        return output

    def condition(self, shown: dict[str, tuple[str, str]], resource: dict[str, Any]) -> None:
        """Show every condition that is not as in `shown`, and note it there."""
        for entry in (resource.get("status") or {}).get("conditions") or ():
            now = (entry["status"], entry["reason"])
            if shown.get(entry["type"]) != now:
                shown[entry["type"]] = now
                self.progress(f"{entry['type']:18} {entry['status']:8} {entry['reason']:22} {entry['message']}")
