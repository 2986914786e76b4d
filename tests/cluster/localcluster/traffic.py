"""Requests to a ModelServe's Service that go on while a test does something to it."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import openai

from localcluster.deployment import Deployed
from localcluster.kubectl import wait_for
from localcluster.service_access import service_url

# A packet to a pod that has gone is answered by nobody, where a Service's rules do not yet say so.
TIMEOUT = openai.Timeout(60, connect=5)
NOT_CONNECTED = {"ConnectError", "ConnectTimeout"}  # of whichever HTTP library the client has


class Failure(NamedTuple):
    began: float  # monotonic, of the request
    error: str
    accepted: bool  # somebody had been reached


@dataclass
class Traffic:
    """Clients that keep their connections and ask again and again, without retries; every failure is kept."""

    url: str
    model: str
    answered: int = 0
    failures: list[Failure] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def errors(self) -> list[str]:
        return [failure.error for failure in self.failures]

    @property
    def errors_of_accepted(self) -> list[str]:
        """Errors of requests for which somebody had been reached."""
        return [failure.error for failure in self.failures if failure.accepted]

    def errors_since(self, moment: float) -> list[str]:
        """Errors of requests that began at `moment` (monotonic) or later."""
        return [f"{each.began - moment:+.1f} s: {each.error}" for each in self.failures if each.began >= moment]

    def wait_for_answers(self, count: int = 10) -> None:
        """Wait until so many more requests have been answered."""
        before = self.answered
        wait_for(f"{count} answers more", lambda: self.answered >= before + count)

    def run(self, *, keep: bool = True) -> None:
        """Ask until stopped. `keep`: over one connection as long as it lasts, else over a new one each time."""
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
            while not self.stopped.is_set():
                began = time.monotonic()
                try:
                    self._ask(client, stream=self.answered % 2 == 1, headers={} if keep else {"Connection": "close"})
                    self.answered += 1
                except Exception as error:
                    took_s = time.monotonic() - began
                    text = f"{type(error).__name__} ({error.__cause__!r}) after {took_s:.1f} s: {error}"
                    accepted = type(error.__cause__).__name__ not in NOT_CONNECTED
                    self.failures.append(Failure(began, text, accepted))
                time.sleep(0.05)

    def _ask(self, client: openai.OpenAI, *, stream: bool, headers: dict[str, str]) -> None:
        asked = partial(client.completions.create, model=self.model, prompt="page", max_tokens=4, extra_headers=headers)
        if stream:
            chunks: list[Any] = list(asked(stream=True))
            assert chunks[-1].choices[0].finish_reason is not None
        else:
            assert asked().usage is not None


def models_at(url: str) -> list[dict[str, Any]]:
    """What /v1/models lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        models: list[dict[str, Any]] = json.load(answer)["data"]
    return models


@contextmanager
def traffic_to(
    served: Deployed, *, clients: int = 1, newcomers: int = 0, model: str | None = None
) -> Iterator[Traffic]:
    """Clients of the Service while the context lasts, each with a pool of its own; `newcomers` keep no connection.
    `model`: what they ask, the first that /v1/models lists unless another is given."""
    namespace = served.kubectl.namespace
    assert namespace is not None
    with service_url(served.target, namespace, served.name) as url:
        traffic = Traffic(url, model or models_at(url)[0]["id"])
        kept = [True] * clients + [False] * newcomers
        threads = [threading.Thread(target=traffic.run, kwargs={"keep": each}) for each in kept]
        for thread in threads:
            thread.start()
        try:
            yield traffic
        finally:
            traffic.stopped.set()
            for thread in threads:
                thread.join()
