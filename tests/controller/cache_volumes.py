"""Volumes, and Jobs of ModelCaches that fill and free them as the real ones do, beside the in-memory cluster."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from modelserve.caches.reports import FilledCache, UnfilledCache
from modelserve_operator import labels
from modelserve_operator.cluster.kinds import CLAIM, JOB, MODEL_CACHE

Body = dict[str, Any]
FIRST, SECOND = "a1" * 20, "b2" * 20
URI = "hf://team/model"
BYTES = 19_300_000_000


@dataclass
class CacheVolumes:
    """`held`: commits that are complete, by claim and folder. `commits`: what revisions of the Hub stand for.

    `broken`: why Jobs end badly, by name of the cache; "" is an end without a reason.
    """

    world: Any
    held: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    commits: dict[str, str] = field(default_factory=lambda: {"main": FIRST})
    broken: dict[str, str] = field(default_factory=dict)
    fetched: list[tuple[str, str]] = field(default_factory=list)  # (folder, commit) that came over the network
    verified: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)  # of Jobs that were run to their end

    def running(self) -> list[Body]:
        """Jobs that have not ended."""
        found = (job for job in self.world.cluster.of(JOB) if labels.label_of(job, labels.CACHE))
        return [job for job in found if not (job.get("status") or {}).get("conditions")]

    def run(self) -> None:
        """Every Job that runs comes to its end."""
        for job in self.running():
            self._run(job)

    def commits_of(self, cache: str, claim: str = "weights") -> set[str]:
        return self.held.get((claim, f"/models/modelserve-caches/{cache}"), set())

    def _run(self, job: Body) -> None:
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        (volume,) = (each for each in pod["volumes"] if each["name"] == "weights")
        claim = volume["persistentVolumeClaim"]["claimName"]
        assert ("ml", claim) in {(each["metadata"]["namespace"], each["metadata"]["name"])
                                 for each in self.world.cluster.of(CLAIM)}  # fmt: skip
        _, program, task, *arguments = container["command"]
        options = [(key, value) for key, value in pairwise(arguments) if key.startswith("--")]
        one = dict(options)
        assert program == "cache"
        name = labels.label_of(job, labels.CACHE)
        self.tasks.append(task)
        folder = (claim, one["--root"])
        if name in self.broken:
            reason = self.broken[name]
            end = UnfilledCache(reason=reason, message=f"{reason} happened.") if reason else None
            self._end(job, end, exit_code=78 if reason else 1)
            return
        if task == "free":
            self.held.pop(folder, None)
            self._end(job, None, exit_code=0)
            return
        commit = self.commits[one["--revision"]]
        keep = {value for key, value in options if key == "--keep"}
        fresh = commit not in self.held[folder]
        self.held[folder] = {commit} | (self.held[folder] & keep)
        if fresh:
            self.fetched.append((one["--root"], commit))
        if "--verify" in arguments:
            self.verified.append(commit)
        end = FilledCache(
            commit=commit, bytes=BYTES, fetched_bytes=BYTES * fresh, held=tuple(sorted(self.held[folder]))
        )
        self._end(job, end, exit_code=0)

    def _end(self, job: Body, end: FilledCache | UnfilledCache | None, *, exit_code: int) -> None:
        cluster = self.world.cluster
        (pod,) = cluster.pods_of(job)
        message = end.model_dump_json(by_alias=True) if end is not None else ""
        ended = {"terminated": {"exitCode": exit_code, "message": message}}
        phase = "Failed" if exit_code else "Succeeded"
        cluster.set_pod(pod, phase=phase, containerStatuses=[{"name": "fetch", "state": ended}])
        condition = {"type": "Failed" if exit_code else "Complete", "status": "True", "message": "it ended"}
        condition["lastTransitionTime"] = cluster.clock().isoformat(timespec="seconds")
        cluster.change(JOB, job["metadata"]["name"], lambda body: body.update(status={"conditions": [condition]}))


def cache(world: Any, name: str, **spec: Any) -> None:
    """Create a ModelCache on the claim `weights`, as kubectl would."""
    body = {
        "apiVersion": "serving.modelserve.dev/v1alpha1",
        "kind": "ModelCache",
        "metadata": {"name": name, "namespace": "ml"},
        "spec": {"uri": URI, "storage": {"persistentVolumeClaim": {"name": "weights"}}, **spec},
    }
    world.cluster.put(MODEL_CACHE, body)


def edit(world: Any, name: str, **fields: Any) -> None:
    def change(body: Body) -> None:
        body["spec"] = {key: value for key, value in {**body["spec"], **fields}.items() if value is not None}

    world.cluster.change(MODEL_CACHE, name, change)


def look_again(world: Any, name: str, value: str = "now") -> None:
    """As kubectl annotate --overwrite would."""
    world.cluster.change(MODEL_CACHE, name, lambda body: body["metadata"].update(annotations={labels.RETRY: value}))


def shown(world: Any, name: str) -> Body:
    status: Body = world.cluster.objects[MODEL_CACHE, "ml", name]["status"]
    return status


def condition(world: Any, name: str, kind: str = "Ready") -> tuple[str, str] | None:
    found = {each["type"]: (each["status"], each["reason"]) for each in shown(world, name)["conditions"]}
    return found.get(kind)


def message(world: Any, name: str) -> str:
    return str(next(each["message"] for each in shown(world, name)["conditions"] if each["type"] == "Ready"))


def wait(world: Any, volumes: CacheVolumes, seconds: float = 4.0, times: int = 4) -> None:
    """Until what is on its way has arrived, Jobs included."""
    for _ in range(times):
        world.settle()
        volumes.run()
        world.settle()
        world.pass_time(seconds)
