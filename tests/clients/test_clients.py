"""Every client of docs/clients.md does what the table says, and fails for no other reason than the one it gives."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_environments import node_directory, python_of
from client_table import BEGIN, CLIENTS, COLUMNS, END, FAILURES, HERE, PAGE, Client, render, requirements
from scripted_server import scripted_server

_QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_server(tmp_path_factory.mktemp("text")) as url:
        yield url


def _command(client: Client) -> list[str]:
    if client.environment == "node":
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        return ["node", str(node_directory() / f"{client.script}.mjs")]
    return [str(python_of(client.environment)), str(HERE / "python" / f"{client.script}.py"), *client.arguments]


def _results(client: Client, server_url: str) -> dict[str, str]:
    # Their packages, in a folder of their own, are compiled by the first script that imports them.
    left_out = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
    environment = {k: v for k, v in os.environ.items() if k not in left_out} | {"SERVER_URL": server_url} | _QUIET
    done = subprocess.run(
        _command(client), env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    assert lines, f"exit {done.returncode}: {done.stderr[-3000:]}"
    return {line["feature"]: line["result"] for line in lines}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_gets_what_the_table_says(client: Client, server_url: str) -> None:
    results = _results(client, server_url)
    assert set(results) == set(client.features)
    failures = FAILURES.get(client.name, {})
    for feature, result in results.items():
        if feature not in failures:
            assert result == "ok", feature
        else:
            assert result != "ok", f"{feature} works now: take it out of FAILURES, and write the table again"
            assert re.search(failures[feature].error, result), f"{feature} fails for another reason: {result}"


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == render().strip(), (
        "python tests/clients/client_table.py"
    )


def test_the_table_names_clients_and_features_that_are_there() -> None:
    names = {client.name: client for client in CLIENTS}
    assert len(names) == len(CLIENTS)
    assert {feature for client in CLIENTS for feature in client.features} == set(COLUMNS)
    for name, cells in FAILURES.items():
        assert set(cells) <= set(names[name].features)


def test_what_is_installed_is_pinned_by_hash_and_names_no_host() -> None:
    for environment in {client.environment for client in CLIENTS} - {"node"}:
        text = requirements(environment).read_text()
        assert "://" not in text
        blocks = [block for block in text.replace("\\\n", " ").splitlines() if block.strip()]
        assert all("==" in block and "--hash=sha256:" in block for block in blocks)
    lock = json.loads(Path(HERE / "node" / "package-lock.json").read_text())["packages"]
    assert all("resolved" not in package for package in lock.values())
    assert all("integrity" in package for name, package in lock.items() if name)
