"""Times the preview webhook beside thousands of ModelServes.

    python tests/bench webhook_previews

A real API server and etcd, the webhook as a process with its certificate and its rights, 2,000 nodes of 12 products and
5,000 ModelServes, each with the ControllerRevision of its committed plan. Dry runs are sent at a fixed rate, half of
them new objects and half edits of one that has a revision. Measured: what the webhook takes for a review (its own
histogram, from the body to the answer, its reading of revisions included), what the API server waits for it (its
metric, connection and TLS included), whole dry runs with the webhook and without it, and where it is blackholed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from bench.operator import scale_fleet as fleet
from bench.operator.operator_scale import MERGE, NODES, SERVES, Api, quantile
from bench.operator.scale_operator import cpu_seconds
from localcluster.control_plane import ControlPlane, control_plane
from localcluster.preview_webhook import PreviewWebhook, at_url, chart_objects, preview_webhook
from modelserve_operator.inventory.pools import Inventory
from modelserve_operator.inventory.supply import Supply
from modelserve_operator.manifests.revision_objects import controller_revision
from modelserve_operator.observed.snapshot import Observed
from modelserve_operator.planning.plan import decide
from modelserve_operator.settings import Settings

LIMIT_S = 0.1
REVISIONS = f"/apis/apps/v1/namespaces/{fleet.NAMESPACE}/controllerrevisions"
PLAIN = "application/json"
OWN = "modelserve_webhook_review_seconds"
SERVERS = "apiserver_admission_webhook_admission_duration_seconds"


def revisions(serves: list[dict[str, Any]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What the operator would commit for each."""
    inventory = Inventory()
    for node in fleet.nodes(options.nodes):
        inventory.hear(node, deleted=False)
    supply = Supply(pools=inventory.pools(), nodes_of=inventory.nodes_of(), hosts=inventory.hosts())
    for body in serves:
        decision = decide(Observed(body, supply=supply, now=datetime.now(UTC)), Settings())
        if decision.target is not None:
            document = controller_revision(body, decision.target)
            yield {"apiVersion": "apps/v1", "kind": "ControllerRevision", **document}


async def fill(api: Api, options: argparse.Namespace) -> None:
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": fleet.NAMESPACE}}
    await api.send("POST", "/api/v1/namespaces", space)
    await api.each(("POST", NODES, body, PLAIN) for body in fleet.nodes(options.nodes))
    bodies = list(fleet.model_serves(options.model_serves, seed=options.seed))
    for body in bodies:
        del body["spec"]["plan"]
    await api.each(("POST", SERVES, body, PLAIN) for body in bodies)
    items = (await api.send("GET", SERVES))["items"]
    await api.each(("POST", REVISIONS, body, PLAIN) for body in revisions(items, options))


async def dry_runs(api: Api, options: argparse.Namespace, *, count: int, seed: int) -> list[float]:
    """Seconds of each, at `rate` a second, whatever the one before takes."""
    rng, taken, running = random.Random(seed), [], []
    query = "?dryRun=All&fieldManager=benchmark"

    async def one(number: int) -> None:
        started = time.perf_counter()
        if number % 2:
            (body,) = fleet.model_serves(1, seed=rng.randrange(1 << 30))
            body["metadata"]["name"] = f"new-{number}"
            del body["spec"]["plan"]
            await api.send("POST", SERVES + query, body)
        else:
            name = f"serve-{rng.randrange(options.model_serves):05d}"
            await api.send("PATCH", f"{SERVES}/{name}{query}", fleet.edit(rng), content=MERGE)
        taken.append(time.perf_counter() - started)

    for number in range(count):
        running.append(asyncio.create_task(one(number)))
        await asyncio.sleep(1 / options.rate)
    await asyncio.gather(*running)
    return taken


def buckets(text: str, name: str) -> list[tuple[float, float]]:
    """(bound in seconds, observations at or below) of a histogram of the webhook."""
    found: dict[float, float] = {}
    for line in text.splitlines():
        if line.startswith(f"{name}_bucket{{") and ("preview" in line or "webhook_review" in line):
            bound = line.split('le="')[1].split('"')[0]
            found[float(bound.replace("+Inf", "inf"))] = found.get(float(bound.replace("+Inf", "inf")), 0.0) + float(
                line.rsplit(" ", 1)[1]
            )
    return sorted(found.items())


def between(before: list[tuple[float, float]], after: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The observations of a histogram that came since."""
    known = dict(before)
    return [(bound, seen - known.get(bound, 0.0)) for bound, seen in after]


def below(counts: list[tuple[float, float]], bound: float) -> float:
    """Share of observations at or below a bound, in percent."""
    total = counts[-1][1]
    return 100 * max(seen for edge, seen in counts if edge <= bound) / total


def bound_of(counts: list[tuple[float, float]], share: float) -> float:
    """The bound that this share of the observations is at or below, in seconds."""
    return next(edge for edge, seen in counts if seen >= share * counts[-1][1])


def metrics(plane: ControlPlane, webhook: PreviewWebhook) -> tuple[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{webhook.metrics}/metrics", timeout=10) as answer:
        return answer.read().decode(), plane.kubectl.run("get", "--raw", "/metrics")


async def measure(options: argparse.Namespace) -> bool:
    rows: list[tuple[str, float, float | None]] = []
    with control_plane() as plane:
        async with Api.of(plane) as api:
            await fill(api, options)
            without = await dry_runs(api, options, count=options.count // 4, seed=2)
            with preview_webhook(plane) as webhook:
                await dry_runs(api, options, count=20, seed=3)  # the API server takes the configuration over
                earlier, before = metrics(plane, webhook), cpu_seconds(webhook.process)
                had = webhook.counted("previewed")
                during = await dry_runs(api, options, count=options.count, seed=4)
                cpu = cpu_seconds(webhook.process) - before
                own, servers = metrics(plane, webhook)
                answered = webhook.counted("previewed") - had
                lost = await blackholed(plane, api, options)
    mine = between(buckets(earlier[0], OWN), buckets(own, OWN))
    seen = between(buckets(earlier[1], SERVERS), buckets(servers, SERVERS))
    within = below(mine, LIMIT_S)
    rows += [
        ("load of the machine", os.getloadavg()[0], None),
        ("reviews that had a preview", answered, options.count),
        ("webhook: % of reviews within 100 ms", within, 99.0),
        ("webhook: p99 is at most, ms", 1e3 * bound_of(mine, 0.99), 1e3 * LIMIT_S),
        ("webhook: CPU ms a review", 1e3 * cpu / options.count, None),
        ("API server: % of its waits within 100 ms", below(seen, 0.1), None),
        ("API server: p99 of its waits is at most, ms", 1e3 * bound_of(seen, 0.99), None),
        ("dry run without the webhook, median ms", 1e3 * quantile(without, 0.5), None),
        ("dry run without the webhook, p99 ms", 1e3 * quantile(without, 0.99), None),
        ("dry run with it, median ms", 1e3 * quantile(during, 0.5), None),
        ("dry run with it, p99 ms", 1e3 * quantile(during, 0.99), None),
        ("dry run with it blackholed, median ms", 1e3 * quantile(lost, 0.5), None),
        ("dry run with it blackholed, longest ms", 1e3 * max(lost), None),
    ]
    for what, value, limit in rows:
        print(f"{what:48} {value:10.2f} {'' if limit is None else limit:>8}")
    return within >= 99.0 and answered >= options.count


async def blackholed(plane: ControlPlane, api: Api, options: argparse.Namespace) -> list[float]:
    """Dry runs where the webhook's address takes connections and never answers."""
    (body,) = (each for each in chart_objects() if each["kind"] == "ValidatingWebhookConfiguration")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        plane.kubectl.apply(json.loads(json.dumps(at_url(body, silent.getsockname()[1], waits_s=1))))
        await asyncio.sleep(3)
        return await dry_runs(api, options, count=20, seed=5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--model-serves", type=int, default=5000)
    parser.add_argument("--count", type=int, default=1000, help="dry runs")
    parser.add_argument("--rate", type=float, default=10.0, help="dry runs a second")
    parser.add_argument("--seed", type=int, default=1)
    return 0 if asyncio.run(measure(parser.parse_args())) else 1
