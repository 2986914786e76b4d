"""/openapi.json is complete and true: what it allows is mostly accepted, never a 5xx, and answers are as it says."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from client_environments import python_of
from client_table import HERE
from scripted_server import scripted_server

from modelserve_worker.server.openapi import ROUTES

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "20"))  # of each operation with a body; more find more


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scripted_server(tmp_path_factory.mktemp("text"), max_model_len=4096) as url:
        yield url


def test_every_route_is_in_the_document_and_answers(server_url: str) -> None:
    paths = httpx.get(f"{server_url}/openapi.json").json()["paths"]
    assert set(paths) == {route.path for route in ROUTES}
    for path, operations in paths.items():
        for method in operations:
            body = {} if method == "post" else None
            answer = httpx.request(method, server_url + path.replace("{model}", "tiny"), json=body)
            assert answer.status_code == (400 if method == "post" else 200), path
        other = "post" if "get" in operations else "get"
        assert httpx.request(other, server_url + path).status_code == 405, path


def test_schemathesis(server_url: str) -> None:
    done = subprocess.run(
        [str(python_of("openai3")), str(HERE / "python" / "schemathesis_run.py"), str(EXAMPLES)],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"SERVER_URL": server_url},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"operation"')]
    tried = {line["operation"].split()[1] for line in lines}
    assert tried == {route.path for route in ROUTES} - {"/openapi.json"}, done.stderr[-3000:]
    assert [(line["operation"], line["faults"]) for line in lines if line["faults"]] == []
    with_body: Counter[bool] = Counter()
    for line in lines:
        accepted = line["statuses"].get("200", 0)
        if line["operation"].startswith("POST"):
            with_body[True] += accepted
            with_body[False] += sum(line["statuses"].values()) - accepted
        else:
            assert accepted == sum(line["statuses"].values()), line
    assert sum(with_body.values()) >= 5 * EXAMPLES
    assert with_body[True] >= with_body[False], [
        (line["operation"], line["statuses"], line["refusals"]) for line in lines
    ]
