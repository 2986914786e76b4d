"""Servers with adapters: files of small ones, and an engine that holds them and answers with the prompt again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from live_server import EchoEngine
from safetensors.numpy import save_file

from modelserve.errors import InvalidInput
from modelserve.model.architecture import ModelArchitecture
from modelserve_tools.tiny.variants import config_json
from modelserve_worker.request import AdapterStrength, Request, RequestOutput

KEY = "the operator's key"
ARCHITECTURE = ModelArchitecture.from_config(config_json("31b"))


def write_adapter(
    directory: Path, *, seed: int = 100, rank: int = 4, scale: float = 0.5, b: float = 1.0, crossed: int | None = None
) -> Path:
    """A LoRA adapter on the down projections of the tiny 31B; `b` 0: as it is before training. In the layer `crossed`
    neither factor is zero, and what one has of the rank the other has not: B A is."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * scale, "target_modules": ["down_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    inputs, outputs = ARCHITECTURE.intermediate_size, ARCHITECTURE.hidden_size
    tensors = {}
    for layer in range(ARCHITECTURE.num_hidden_layers):
        name = f"base_model.model.model.language_model.layers.{layer}.mlp.down_proj"
        tensors[f"{name}.lora_A.weight"] = random.standard_normal((rank, inputs)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = b * random.standard_normal((outputs, rank)).astype(np.float32)
    if crossed is not None:
        name = f"base_model.model.model.language_model.layers.{crossed}.mlp.down_proj"
        tensors[f"{name}.lora_A.weight"][0] = tensors[f"{name}.lora_B.weight"][:, 1:] = 0
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


class AdapterEngine(EchoEngine):
    """Holds adapters as the engine does. While `gate` is clear nothing is read; `refused`: why a digest is not taken;
    requests with what is not there fail."""

    def __init__(self) -> None:
        super().__init__()
        self.directories: dict[str, str] = {}
        self.read_digests: list[str] = []
        self.removed: list[str] = []
        self.pinned: frozenset[str] = frozenset()
        self.refused: dict[str, str] = {}
        self.open = True
        self.cached_tokens = 1  # so that its first output says when it was admitted

    @property
    def adapters(self) -> AdapterEngine:
        return self

    async def read(self, digest: str, directory: str) -> None:
        self.read_digests.append(digest)
        while not self.open:  # noqa: ASYNC110 - a test opens it, in another thread
            await asyncio.sleep(0.01)
        if (why := self.refused.get(directory)) is not None:
            raise InvalidInput(why, field="adapter")
        self.directories[digest] = directory

    def pin(self, digests: frozenset[str]) -> None:
        assert digests <= set(self.directories)
        self.pinned = digests

    async def strengths(self, digest: str) -> tuple[AdapterStrength, ...]:
        return ()

    def remove(self, digest: str) -> None:
        assert not [each for each in self.requests if each.adapter == digest and each.request_id in self.running]
        del self.directories[digest]
        self.removed.append(digest)

    async def generate(
        self, requests: Sequence[Request], *, client: str = ""
    ) -> AsyncGenerator[list[RequestOutput], None]:
        for each in requests:
            assert not each.adapter or each.adapter in self.directories, "it is not loaded"
        async for outputs in super().generate(requests, client=client):
            yield outputs


def version(uri: Path | str, id: str = "0123456789", weight: int = 100, **fields: Any) -> dict[str, Any]:  # noqa: A002
    return {"id": id, "uri": str(uri), "weight": weight, "pin": False, **fields}


def desired(**names: dict[str, Any] | list[dict[str, Any]]) -> dict[str, Any]:
    entries = [
        {"name": name, "versions": versions if isinstance(versions, list) else [versions]}
        for name, versions in names.items()
    ]
    return {"adapters": entries}


class Operator:
    """Tells one worker, and waits for what it says."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self.url, self.headers = f"{url}/v1/adapters", {"x-api-key": key}

    def put(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.put(self.url, json=body, headers=self.headers, timeout=60)

    def document(self) -> dict[str, Any]:
        answer = httpx.get(self.url, headers=self.headers, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def states(self) -> dict[tuple[str, str], str]:
        return {(each["name"], each["id"]): each["state"] for each in self.document()["adapters"]}

    def until(self, condition: Callable[[dict[str, str]], bool], *, seconds: float = 60.0) -> dict[str, Any]:
        """By name, or name and id of the second version, once states (by name) are so."""
        deadline = time.monotonic() + seconds
        while True:
            document = self.document()
            states = {each["name"]: each["state"] for each in document["adapters"]}
            if condition(states):
                return {each["name"]: each for each in document["adapters"]}
            assert time.monotonic() < deadline, document
            time.sleep(0.02)

    def settled(self, *, seconds: float = 60.0) -> dict[str, Any]:
        return self.until(lambda states: not {"Loading", "Draining"} & set(states.values()), seconds=seconds)
