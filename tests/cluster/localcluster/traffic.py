"""Requests to a ModelServe's Service that go on while a test does something to it."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

from localcluster.deployment import Deployed
from localcluster.service_access import service_url


@dataclass
class Traffic:
    """A client that keeps its connections and asks again and again; every failure is kept."""

    url: str
    model: str
    answered: int = 0
    errors: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        while not self.stopped.is_set():
            try:
                answer = client.completions.create(model=self.model, prompt="page", max_tokens=4, temperature=0)
                assert answer.usage is not None
                self.answered += 1
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            time.sleep(0.05)


def models_at(url: str) -> list[dict[str, Any]]:
    """What /v1/models lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        models: list[dict[str, Any]] = json.load(answer)["data"]
    return models


@contextmanager
def traffic_to(served: Deployed) -> Iterator[Traffic]:
    """A client of the Service while the context lasts."""
    namespace = served.kubectl.namespace
    assert namespace is not None
    with service_url(served.target, namespace, served.name) as url:
        traffic = Traffic(url, models_at(url)[0]["id"])
        thread = threading.Thread(target=traffic.run)
        thread.start()
        try:
            yield traffic
        finally:
            traffic.stopped.set()
            thread.join()
