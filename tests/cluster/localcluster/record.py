"""The record of a running cluster: its processes, and kernel settings as they were before it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from localcluster.node_namespaces import Process
from localcluster.settings import StateFolder


@dataclass(frozen=True)
class Record:
    state: StateFolder
    processes: dict[str, Process]
    settings: dict[str, str]
    created_folders: tuple[str, ...] = ()  # mount points that had to be made outside the state folder

    @classmethod
    def new(cls, state: StateFolder, *, settings: dict[str, str], created_folders: tuple[str, ...]) -> Record:
        return cls(state, {}, settings, created_folders)._saved()

    @classmethod
    def load(cls, state: StateFolder) -> Record | None:
        try:
            document = json.loads(state.record.read_text())
        except FileNotFoundError:
            return None
        processes = {name: Process(**values) for name, values in document["processes"].items()}
        return cls(state, processes, document["settings"], tuple(document["created_folders"]))

    def with_process(self, name: str, process: Process) -> Record:
        """The record with one more process, written to disk at once so that a crash leaves nothing unrecorded."""
        return replace(self, processes=self.processes | {name: process})._saved()

    @property
    def dead(self) -> list[str]:
        """Names of recorded processes that no longer run."""
        return [name for name, process in self.processes.items() if not process.alive]

    @property
    def healthy(self) -> bool:
        return "kube-proxy" in self.processes and not self.dead

    def _saved(self) -> Record:
        document = {
            "processes": {name: asdict(process) for name, process in self.processes.items()},
            "settings": self.settings,
            "created_folders": self.created_folders,
        }
        partial = self.state.record.with_suffix(".new")
        partial.write_text(json.dumps(document, indent=1))
        partial.rename(self.state.record)
        return self
