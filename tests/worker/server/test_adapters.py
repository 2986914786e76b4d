"""Adapters come and go beside serving: sets by key, states, drains, and who is answered meanwhile."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_server import ARCHITECTURE, KEY, AdapterEngine, Operator, desired, version, write_adapter
from live_server import LiveServer

from modelserve.sizing.adapters import AdapterLimits
from modelserve_worker.metrics import WorkerMetrics
from modelserve_worker.scheduling.stats import AdapterDrafts, EngineStats
from modelserve_worker.server.adapters.routes import read_set
from modelserve_worker.server.adapters.service import AdapterService
from modelserve_worker.server.settings import ServerSettings
from modelserve_worker.server.state import ServedModel, ServerState

LIMITS = AdapterLimits(2, 4, 16)


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """The directory that the operator's ConfigMap is mounted at."""
    directory = tmp_path / "told"
    directory.mkdir()
    (directory / "management-keys").write_text(f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    return directory


@pytest.fixture
def serve_adapters(serve_with: Any, served_model: ServedModel, tmp_path: Path) -> Any:
    def serve(settings: ServerSettings, engine: AdapterEngine) -> Any:
        state = ServerState(served_model)
        service = AdapterService(
            LIMITS, ARCHITECTURE, served_model.names, directory=settings.adapter_directory, first_pause_s=0.05
        )
        if settings.adapter_set_directory and (mounted := read_set(settings.adapter_set_directory)) is not None:
            service.take(mounted)
        return serve_with(state, engine, settings, adapters=service)

    return serve


@pytest.fixture
def engine() -> AdapterEngine:
    return AdapterEngine()


@pytest.fixture
def server(serve_adapters: Any, engine: AdapterEngine, told: Path) -> Iterator[LiveServer]:
    with serve_adapters(ServerSettings(adapter_set_directory=told), engine) as live:
        yield live


@pytest.fixture
def operator(server: LiveServer) -> Operator:
    return Operator(server.url)


def ask(server: LiveServer, model: str, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    body = {"model": model, "prompt": "hi", "max_tokens": 2, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def metrics(server: LiveServer) -> str:
    return httpx.get(f"{server.url}/metrics").text


def test_a_set_is_served_by_name_on_every_route(
    server: LiveServer, engine: AdapterEngine, operator: Operator, tmp_path: Path
) -> None:
    one, two = (write_adapter(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two")))
    answer = operator.put(desired(legal=version(one), sql=version(two, "abcdefabcd")))
    assert answer.status_code == 200
    assert {each["name"] for each in answer.json()["adapters"]} == {"legal", "sql"}
    found = operator.settled()
    assert {name: each["state"] for name, each in found.items()} == {"legal": "Ready", "sql": "Ready"}
    assert (found["legal"]["rank"], found["legal"]["uri"], found["legal"]["requests"]) == (4, str(one), 0)
    assert found["legal"]["bytes"] == (one / "adapter_model.safetensors").stat().st_size
    assert operator.document()["limits"] == {
        "max": 4, "rank": 16, "slots": 2, "targets": [each.value for each in LIMITS.targets],
    }  # fmt: skip
    assert operator.document()["versionNames"] is True
    digests = {name: each["digest"] for name, each in found.items()}
    assert digests["legal"] != digests["sql"]
    message = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi", "max_tokens": 2},
        "/v1/chat/completions": {"messages": message, "max_tokens": 2},
        "/v1/responses": {"input": "hi", "max_output_tokens": 2},
        "/v1/messages": {"messages": message, "max_tokens": 2},
    }
    names = {"legal": digests["legal"], "sql@abcdefabcd": digests["sql"], "tiny": ""}
    for path, body in bodies.items():
        for name, digest in names.items():
            answered = httpx.post(server.url + path, json={"model": name, **body})
            assert (answered.status_code, answered.json()["model"]) == (200, name), path
            assert engine.requests[-1].adapter == digest
    for path, body in {"/tokenize": {"prompt": "hi"}, "/v1/messages/count_tokens": {"messages": message}}.items():
        assert httpx.post(server.url + path, json={"model": "legal", **body}).status_code == 200, path
    cards = {each["id"]: each for each in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert (cards["legal"]["parent"], cards["legal"]["root"]) == ("tiny", str(one))
    assert "parent" not in cards["tiny"]
    assert httpx.get(f"{server.url}/v1/models/legal").json() == cards["legal"]
    for unknown in ("nobody", "legal@nothing", "legal@", "tiny@0123456789"):
        refused = ask(server, unknown)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "'legal'" in refused.json()["error"]["message"]
    assert all(each["requests"] == 0 for each in operator.document()["adapters"])
    assert f'modelserve_adapter_requests_total{{adapter="legal",model_name="tiny",version="0123456789"}} {4.0}' in (
        metrics(server)
    )


def test_acceptance_of_drafts_is_told_by_adapter(server: LiveServer, operator: Operator, tmp_path: Path) -> None:
    assert operator.put(desired(legal=version(write_adapter(tmp_path / "one")))).status_code == 200
    digest = operator.settled()["legal"]["digest"]
    assert "modelserve_adapter_draft_tokens_total{" not in metrics(server), "of none there is nothing to tell"
    server.app.state.adapters.stats = lambda: EngineStats(adapter_drafts=(AdapterDrafts(digest, 8, 3),))
    labels, told = 'adapter="legal",model_name="tiny",version="0123456789"', metrics(server)
    assert f"modelserve_adapter_draft_tokens_total{{{labels}}} 8.0" in told
    assert f"modelserve_adapter_accepted_draft_tokens_total{{{labels}}} 3.0" in told


def test_a_replay_changes_nothing_and_a_smaller_set_lets_go(
    server: LiveServer, engine: AdapterEngine, operator: Operator, tmp_path: Path
) -> None:
    body = desired(one=version(write_adapter(tmp_path / "1", seed=1)), two=version(write_adapter(tmp_path / "2")))
    for _ in range(3):
        assert operator.put(body).status_code == 200
    before = operator.settled()
    assert operator.put(body).json()["adapters"] == list(before.values())
    operator.put({"adapters": body["adapters"][1:]})
    operator.until(lambda states: set(states) == {"two"})
    server.eventually(lambda: engine.removed == [before["one"]["digest"]])
    assert sorted(engine.read_digests) == sorted(each["digest"] for each in before.values())
    assert ask(server, "one").status_code == 404
    assert ask(server, "two").status_code == 200
    operator.put(body)  # and it comes again
    assert operator.settled()["one"] == before["one"]


def test_one_content_under_two_names_is_one_adapter(
    server: LiveServer, engine: AdapterEngine, operator: Operator, tmp_path: Path
) -> None:
    first, second = (write_adapter(tmp_path / name, seed=3) for name in ("first", "second"))
    operator.put(desired(a=version(first), b=version(second)))
    found = operator.settled()
    assert found["a"]["digest"] == found["b"]["digest"]
    assert len(engine.read_digests) == 1
    operator.put(desired(b=version(second)))
    operator.until(lambda states: set(states) == {"b"})
    assert ask(server, "b").status_code == 200
    assert engine.removed == []
    operator.put(desired())
    server.eventually(lambda: engine.removed == [found["b"]["digest"]])


def test_what_goes_drains_and_everybody_else_is_answered_meanwhile(
    server: LiveServer, engine: AdapterEngine, operator: Operator, tmp_path: Path
) -> None:
    stays = version(write_adapter(tmp_path / "2"))
    operator.put(desired(goes=version(write_adapter(tmp_path / "1", seed=1)), stays=stays))
    digest = operator.settled()["goes"]["digest"]
    engine.step_seconds = 0.1
    body = {"model": "goes", "prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as streamed:
        lines = streamed.iter_lines()
        next(lines)
        info = metrics(server)
        assert 'running_lora_adapters="goes",waiting_lora_adapters=""' in info
        assert 'max_lora="2"' in info
        operator.put(desired(stays=stays))
        found = operator.until(lambda states: states.get("goes") == "Draining")
        assert found["goes"]["requests"] == 1
        assert ask(server, "goes").status_code == 404
        assert ask(server, "stays", max_tokens=1).status_code == ask(server, "tiny", max_tokens=1).status_code == 200
        assert engine.removed == []
        assert next(each for each in lines if each)
    operator.until(lambda states: set(states) == {"stays"})
    server.eventually(lambda: engine.removed == [digest])


def test_what_loads_or_fails_keeps_nobody_waiting(
    server: LiveServer, engine: AdapterEngine, operator: Operator, tmp_path: Path
) -> None:
    operator.put(desired(good=version(write_adapter(tmp_path / "good"))))
    operator.settled()
    engine.open = False
    broken = write_adapter(tmp_path / "broken", seed=9)
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x04")
    (pickled / "adapter_config.json").write_text("{}")
    body = desired(
        good=version(tmp_path / "good"), slow=version(write_adapter(tmp_path / "slow", seed=5)),
        broken=version(broken), bucket=version("s3://models/adapters/legal"),
    )  # fmt: skip
    operator.put(body)
    found = operator.until(lambda states: list(states.values()).count("Failed") == 2)
    assert found["slow"]["state"] == "Loading"
    assert (found["bucket"]["reason"], found["broken"]["reason"]) == ("UnsupportedSource", "InvalidFiles")
    assert "no client for s3://" in found["bucket"]["message"]
    assert ask(server, "good").status_code == ask(server, "tiny").status_code == 200
    waits = ask(server, "slow")
    assert (waits.status_code, waits.headers["retry-after"]) == (503, "2")
    refused = ask(server, "broken")
    assert refused.status_code == 503
    assert "is Failed here" in refused.json()["error"]["message"]
    engine.open = True
    assert operator.settled()["slow"]["state"] == "Ready"
    engine.refused[str(write_adapter(tmp_path / "wide", seed=6))] = "its rank is 64; this worker's slots have 16"
    operator.put(desired(good=version(tmp_path / "good"), wide=version(tmp_path / "wide"), pickled=version(pickled)))
    found = operator.settled()
    assert (found["wide"]["state"], found["wide"]["reason"]) == ("Failed", "NotServable")
    assert "its rank is 64" in found["wide"]["message"]
    assert "it may run code" in found["pickled"]["message"]
    assert found["good"]["state"] == "Ready"


@pytest.mark.parametrize("b", [0.0, -0.0])
def test_an_untrained_adapter_says_that_it_does_nothing(operator: Operator, tmp_path: Path, b: float) -> None:
    operator.put(desired(idle=version(write_adapter(tmp_path / "idle", b=b))))
    found = operator.settled()["idle"]
    assert (found["state"], found["reason"]) == ("NoEffect", "FactorsAreZero")
    assert "B of every module is zero" in found["message"]


def test_what_was_not_there_is_served_once_it_is(operator: Operator, tmp_path: Path) -> None:
    operator.put(desired(late=version(tmp_path / "late")))
    assert operator.settled()["late"]["reason"] == "NotFound"
    write_adapter(tmp_path / "coming").rename(tmp_path / "late")
    operator.until(lambda states: states["late"] == "Ready")


def test_two_versions_share_by_weight_and_sessions_stay(
    server: LiveServer, engine: AdapterEngine, operator: Operator, tmp_path: Path
) -> None:
    old, new = (write_adapter(tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new")))

    def shares(weight: int) -> list[dict[str, Any]]:
        return [version(old, "aaaaaaaaaa", 100 - weight), version(new, "bbbbbbbbbb", weight)]

    operator.put(desired(it=shares(0)))
    operator.until(lambda _: set(operator.states().values()) == {"Ready"})
    by_id = {each["id"]: each["digest"] for each in operator.document()["adapters"]}

    def chosen(**fields: Any) -> str:
        assert ask(server, "it", **fields).status_code == 200
        return engine.requests[-1].adapter

    assert {chosen() for _ in range(10)} == {by_id["aaaaaaaaaa"]}
    before: dict[str, str] = {}
    for weight in (30, 70, 100):
        operator.put(desired(it=shares(weight)))
        now = {f"user-{number}": chosen(user=f"user-{number}") for number in range(30)}
        assert now == {name: chosen(prompt_cache_key=name) for name in now}, "it is the same session"
        assert now == {name: chosen(headers={"x-session-id": name}) for name in now}
        assert all(now[name] == by_id["bbbbbbbbbb"] for name, was in before.items() if was == by_id["bbbbbbbbbb"])
        share = Counter(now.values())[by_id["bbbbbbbbbb"]] / len(now)
        assert abs(share - weight / 100) < 0.3
        before = now
    assert chosen() == by_id["bbbbbbbbbb"]
    assert ask(server, "it@aaaaaaaaaa").status_code == 200
    assert engine.requests[-1].adapter == by_id["aaaaaaaaaa"]


def test_a_version_that_is_not_ready_has_no_share(
    server: LiveServer, engine: AdapterEngine, operator: Operator, tmp_path: Path
) -> None:
    old = version(write_adapter(tmp_path / "old"), "aaaaaaaaaa", 0)
    operator.put(desired(it=[old, version(tmp_path / "missing", "bbbbbbbbbb", 100)]))
    operator.until(lambda _: operator.states() == {("it", "aaaaaaaaaa"): "Ready", ("it", "bbbbbbbbbb"): "Failed"})
    assert [ask(server, "it").status_code for _ in range(5)] == [200] * 5
    assert ask(server, "it@bbbbbbbbbb").status_code == 503


def test_sets_that_cannot_be_are_refused_and_change_nothing(operator: Operator, tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good")
    operator.put(desired(good=version(good)))
    before = operator.settled()
    wrong: dict[str, dict[str, Any]] = {
        "there is room for 4": desired(it=[version(good, f"{number:010}") for number in range(5)]),
        "the name 'tiny' is served already": desired(tiny=version(good)),
        "two versions of 'it' have one id": desired(it=[version(good), version(good)]),
        "should match pattern": desired(it=version("http://somewhere/else")),
        "no '..' in it": desired(it=version("/models/../../etc")),
        "name": {"adapters": [{"name": "no@sign", "versions": [version(good)]}]},
        "'adapters' is required": {},
    }
    for text, body in wrong.items():
        refused = operator.put(body)
        assert refused.status_code == 400, text
        assert text in refused.json()["error"]["message"]
        assert refused.json()["error"]["type"] == "invalid_request_error"
    assert operator.settled() == before
    later = desired(good=version(good, laterField=1)) | {"laterField": 2}
    assert operator.put(later).status_code == 200


def test_only_the_operators_key_tells_and_it_may_change(
    server: LiveServer, operator: Operator, told: Path, tmp_path: Path
) -> None:
    body = desired(one=version(write_adapter(tmp_path / "one")))
    for other in ("", "another"):
        assert Operator(server.url, other).put(body).status_code == 401
    assert httpx.get(f"{server.url}/v1/adapters", headers={"authorization": f"Bearer {KEY}"}).status_code == 401
    assert operator.put(body).status_code == 200
    for path in ("load", "unload"):
        assert httpx.post(f"{server.url}/v1/{path}_lora_adapter", json={"lora_name": "x"}).status_code == 404
    (told / "new").write_text(f"# another\nsha256:{hashlib.sha256(b'new').hexdigest()}\n")
    (told / "new").replace(told / "management-keys")
    server.eventually(lambda: Operator(server.url, "new").put(body).status_code == 200)
    assert operator.put(body).status_code == 401
    (told / "management-keys").write_text("sha256:nonsense\n")
    assert Operator(server.url, "new").put(body).status_code == 200


def test_the_operators_key_opens_nothing_else(serve_adapters: Any, engine: AdapterEngine, told: Path) -> None:
    settings = ServerSettings(adapter_set_directory=told, api_keys=("client",))
    with serve_adapters(settings, engine) as live:
        assert Operator(live.url).put(desired()).status_code == 200
        assert Operator(live.url, "client").put(desired()).status_code == 401
        assert ask(live, "tiny", headers={"x-api-key": KEY}).status_code == 401
        assert ask(live, "tiny", headers={"x-api-key": "client"}).status_code == 200


def test_without_settings_there_is_no_such_route(serve_adapters: Any, engine: AdapterEngine) -> None:
    with serve_adapters(ServerSettings(), engine) as live:
        assert Operator(live.url).put(desired()).status_code == 404
        assert httpx.get(f"{live.url}/v1/adapters").status_code == 404


def test_a_worker_that_starts_serves_the_mounted_set(
    serve_adapters: Any, engine: AdapterEngine, told: Path, tmp_path: Path
) -> None:
    (told / "adapters.json").write_text(json.dumps(desired(legal=version(write_adapter(tmp_path / "legal")))))
    for each in (engine, AdapterEngine()):  # and again after a restart
        with serve_adapters(ServerSettings(adapter_set_directory=told), each) as live:
            assert Operator(live.url).settled()["legal"]["state"] == "Ready"
            assert ask(live, "legal").status_code == 200


def test_adapters_are_loaded_by_hand_as_vllm_has_it(serve_adapters: Any, engine: AdapterEngine, tmp_path: Path) -> None:
    there = tmp_path / "there"
    write_adapter(there / "sql")
    write_adapter(tmp_path / "outside", seed=4)
    (there / "link").symlink_to(tmp_path / "outside")
    with serve_adapters(ServerSettings(adapter_endpoints=True, adapter_directory=there), engine) as live:

        def call(what: str, **body: str) -> httpx.Response:
            return httpx.post(f"{live.url}/v1/{what}_lora_adapter", json=body, timeout=60)

        loaded = call("load", lora_name="sql", lora_path=str(there / "sql"))
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert ask(live, "sql").status_code == 200
        for path in ("../outside", str(tmp_path / "outside"), "link", "/etc"):
            refused = call("load", lora_name="other", lora_path=path)
            assert refused.status_code == 400
            assert "does not lie below" in refused.json()["error"]["message"]
        assert "is served already" in call("load", lora_name="sql", lora_path="sql").json()["error"]["message"]
        missing = call("load", lora_name="missing", lora_path="missing")
        assert missing.status_code == 400
        assert "there is no directory" in missing.json()["error"]["message"]
        assert [each["name"] for each in httpx.get(f"{live.url}/v1/adapters").json()["adapters"]] == ["sql"]
        assert "the name 'sql' is served already" in Operator(live.url).put(
            desired(sql=version(there / "sql"))
        ).json()["error"]["message"]  # fmt: skip
        assert call("unload", lora_name="sql").status_code == 200
        assert ask(live, "sql").status_code == call("unload", lora_name="sql").status_code == 404
        live.eventually(lambda: len(engine.removed) == 1)


def test_room_in_the_engine_is_waited_for(
    server: LiveServer, engine: AdapterEngine, operator: Operator, tmp_path: Path
) -> None:
    """What drains is held until it has drained; what comes in its place is loaded then, and no sooner."""
    olds = {f"old-{number}": version(write_adapter(tmp_path / f"old-{number}", seed=number)) for number in range(4)}
    operator.put(desired(**olds))
    operator.settled()
    engine.step_seconds = 0.05
    leave = threading.Event()

    def stream(name: str) -> None:
        body = {"model": name, "prompt": "hi", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as streamed:
            for _ in streamed.iter_lines():
                if leave.is_set():
                    return

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, name) for name in olds]
        server.eventually(lambda: len(engine.running) == 4)
        operator.put(desired(new=version(write_adapter(tmp_path / "new", seed=11))))
        operator.until(lambda states: list(states.values()).count("Draining") == 4)
        assert len(engine.directories) == 4
        assert operator.states()["new", "0123456789"] == "Loading"
        leave.set()
        for each in streams:
            each.result()
    assert operator.settled()["new"]["state"] == "Ready"
    server.eventually(lambda: len(engine.directories) == 1)


def test_metrics_without_adapters_have_none_of_theirs(served_model: ServedModel) -> None:
    assert "lora" not in "".join(each.name for each in WorkerMetrics(served_model.name).registry.collect())


def test_pinned_adapters_leave_a_slot_for_others(
    server: LiveServer, engine: AdapterEngine, operator: Operator, tmp_path: Path
) -> None:
    """Of two slots one: the first of the set that asks for it, and the next one when that goes or asks no more."""

    def told(*pinned: str) -> dict[str, Any]:
        return desired(**{
            name: version(directories[name], pin=name in pinned) for name in ("a", "b", "c")
        })  # fmt: skip

    directories = {name: write_adapter(tmp_path / name, seed=seed) for seed, name in enumerate("abc")}
    operator.put(told("b", "c"))
    found = operator.settled()
    server.eventually(lambda: engine.pinned == {found["b"]["digest"]})
    assert {name: each["pinned"] for name, each in operator.settled().items()} == {"a": False, "b": True, "c": False}
    operator.put(told("c"))
    server.eventually(lambda: engine.pinned == {found["c"]["digest"]})
    operator.put(told())
    server.eventually(lambda: not engine.pinned)
    operator.put(told("a", "b"))
    server.eventually(lambda: engine.pinned == {found["a"]["digest"]})
    operator.put({"adapters": told("b")["adapters"][1:]})
    server.eventually(lambda: engine.pinned == {found["b"]["digest"]})
