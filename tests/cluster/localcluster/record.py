"""The record of a running cluster's processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from localcluster.processes import Process
from localcluster.settings import Layout


@dataclass(frozen=True)
class Record:
    layout: Layout
    processes: dict[str, Process]

    @classmethod
    def new(cls, layout: Layout) -> Record:
        return cls(layout, {})._saved()

    @classmethod
    def load(cls, layout: Layout) -> Record | None:
        try:
            document = json.loads(layout.record.read_text())
        except FileNotFoundError:
            return None
        processes = {name: Process(**values) for name, values in document["processes"].items()}
        return cls(layout, processes)

    def with_process(self, name: str, process: Process) -> Record:
        """The record with one more process, written to disk at once so that a crash leaves nothing unrecorded."""
        return replace(self, processes=self.processes | {name: process})._saved()

    @property
    def dead(self) -> list[str]:
        """Names of recorded processes that no longer run."""
        return [name for name, process in self.processes.items() if not process.alive]

    @property
    def healthy(self) -> bool:
        return "kubelet" in self.processes and not self.dead

    def _saved(self) -> Record:
        document = {
            "processes": {name: asdict(process) for name, process in self.processes.items()},
        }
        partial = self.layout.record.with_suffix(".new")
        partial.write_text(json.dumps(document, indent=1))
        partial.rename(self.layout.record)
        return self
