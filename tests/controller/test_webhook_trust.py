"""The webhook's certificate: shared by replicas, trusted before it is shown, renewed in time, whoever interferes."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from modelserve_operator.cluster.kinds import SECRET, WEBHOOK_CONFIGURATION
from modelserve_operator.cluster.kube import KubeError
from modelserve_operator.webhook.certificates import LIFETIME, RENEWED_BEFORE, Pair, bundle_with, new_pair, trusts
from modelserve_operator.webhook.trust import BUNDLE, CERTIFICATE, Trust

HOSTS = ("hook.system.svc", "127.0.0.1")
START = datetime(2026, 1, 1, tzinfo=UTC)


class Replica:
    """One process: what it shows, and its clock."""

    def __init__(self, cluster: Any) -> None:
        self.shown: list[Pair] = []
        self.now = START
        self.trust = Trust(
            cluster,
            namespace="system",
            secret="hook",
            configuration="hook",
            hosts=HOSTS,
            serve=self.shown.append,
            clock=lambda: self.now,
        )


@pytest.fixture
def cluster(world):
    """As the chart leaves it: an empty Secret, and a configuration that trusts nobody."""
    world.cluster.put(SECRET, {"metadata": {"name": "hook", "namespace": "system"}})
    hook = {"name": "preview", "clientConfig": {"service": {"name": "hook"}}}
    world.cluster.put(WEBHOOK_CONFIGURATION, {"metadata": {"name": "hook"}, "webhooks": [hook]})
    return world.cluster


def _bundle(cluster: Any) -> bytes:
    (hook,) = cluster.objects[WEBHOOK_CONFIGURATION, "", "hook"]["webhooks"]
    return base64.b64decode(hook["clientConfig"].get("caBundle", ""))


def _kept(cluster: Any, key: str) -> bytes:
    return base64.b64decode(cluster.objects[SECRET, "system", "hook"]["data"][key])


def test_two_replicas_that_start_together_show_one_certificate(cluster) -> None:
    """Both find the Secret empty; the write of the slower one is refused, and it takes over what is there."""
    replicas = (Replica(cluster), Replica(cluster))
    get = cluster.get

    async def slow(*arguments: Any, **named: Any) -> Any:
        found = await get(*arguments, **named)
        await asyncio.sleep(0)
        return found

    cluster.get = slow

    async def together() -> None:
        await asyncio.gather(*(each.trust.round() for each in replicas))

    asyncio.run(together())
    (first,), (second,) = (each.shown for each in replicas)
    assert first == second
    assert _bundle(cluster) == _kept(cluster, BUNDLE) == first.certificate
    cluster.writes.clear()
    assert asyncio.run(replicas[0].trust.round()) is True
    assert cluster.writes == [], "nothing is written at rest"


def test_a_new_certificate_is_trusted_before_it_is_shown_and_the_old_one_meanwhile(cluster) -> None:
    quick, slow = Replica(cluster), Replica(cluster)
    for each in (quick, slow):
        asyncio.run(each.trust.round())
    (old,) = quick.shown
    quick.now = slow.now = START + LIFETIME - RENEWED_BEFORE + timedelta(hours=1)
    assert asyncio.run(quick.trust.round()) is False, "looked at again soon"
    assert quick.shown == [old], "it is not shown in the round that has it trusted"
    new = _kept(cluster, CERTIFICATE)
    assert new != old.certificate
    assert trusts(_bundle(cluster), new)
    assert trusts(_bundle(cluster), old.certificate), "the other replica still shows it"
    assert asyncio.run(quick.trust.round()) is True
    assert quick.shown[-1].certificate == new
    asyncio.run(slow.trust.round())
    assert slow.shown[-1] == quick.shown[-1]


def test_a_bundle_that_somebody_takes_away_comes_back_with_the_same_certificate(cluster) -> None:
    replica = Replica(cluster)
    asyncio.run(replica.trust.round())
    cluster.change(WEBHOOK_CONFIGURATION, "hook", lambda body: body["webhooks"][0]["clientConfig"].pop("caBundle"))
    asyncio.run(replica.trust.round())
    assert len(replica.shown) == 1
    assert _bundle(cluster) == replica.shown[0].certificate


@pytest.mark.parametrize(
    "data", [{"tls.crt": "%%", "tls.key": ""}, {"tls.crt": "bm90", "tls.key": "bm90"}, {"x": "eQ=="}]
)
def test_a_secret_that_holds_something_else_is_made_anew(cluster, data: dict[str, str]) -> None:
    cluster.change(SECRET, "hook", lambda body: body.update(data=data), namespace="system")
    replica = Replica(cluster)
    asyncio.run(replica.trust.round())
    assert replica.shown[0].serves(HOSTS, START)


def test_other_hosts_need_another_certificate() -> None:
    pair = new_pair(HOSTS, START)
    assert pair.serves(HOSTS, START)
    assert not pair.serves(("hook.other.svc",), START)
    assert not pair.serves(HOSTS, START - timedelta(days=1))
    assert not pair.serves(HOSTS, START + LIFETIME - RENEWED_BEFORE)
    assert not Pair(pair.certificate, new_pair(HOSTS, START).key).serves(HOSTS, START)


def test_a_bundle_forgets_what_has_ended_and_does_not_grow() -> None:
    bundle, pairs = b"", [new_pair(HOSTS, START + timedelta(days=number)) for number in range(7)]
    for pair in pairs:
        bundle = bundle_with(pair.certificate, bundle, START + timedelta(days=7))
    assert [trusts(bundle, pair.certificate) for pair in pairs] == [False] * 3 + [True] * 4
    later = bundle_with(pairs[-1].certificate, bundle, START + LIFETIME + timedelta(days=5, hours=1))
    assert later == pairs[-1].certificate


def test_what_the_chart_makes_is_named_where_it_is_missing(world) -> None:
    replica = Replica(world.cluster)
    with pytest.raises(KubeError, match="no Secret system/hook: the chart makes it"):
        asyncio.run(replica.trust.round())
