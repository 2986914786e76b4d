"""Events of the prefix cache, read by a real subscriber that knows nothing else: its map is what the cache has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from prefix_sessions import Sessions, text

from modelserve.engine_args import EngineArgs
from modelserve_worker.embedded_spans import AudioFrames, EmbeddedSpan
from modelserve_worker.engine.event_publisher import EventPublisher, event_publisher
from modelserve_worker.scheduling.cache_events import CacheEvents
from modelserve_worker.scheduling.prefix.token_chain import TokenChain
from modelserve_worker.terminal_error import TerminalError

TOPIC = "kv@10.0.0.7:8000@m"


class Router:
    """A subscriber with a map from hash to (hash before it, tokens, extra keys), as an indexer keeps."""

    def __init__(self, publisher: EventPublisher) -> None:
        self._publisher = publisher
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(publisher._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._socket.subscribe("kv@")
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], tuple[str, ...]]] = {}
        self.seen: set[str] = set()
        self._next: int | None = None
        while not self._socket.poll(10):
            publisher.publish([])  # a subscriber hears what is sent after it has joined

    def catch_up(self) -> None:
        self._publisher.publish([{"type": "mark"}])
        while True:
            topic, number, payload = self._socket.recv_multipart()
            assert topic == TOPIC.encode()
            at = int.from_bytes(number, "big")
            assert self._next in (None, at), "a message is missing"
            self._next = at + 1
            seconds, events, rank = msgspec.msgpack.decode(payload)
            assert seconds > 1.7e9
            assert rank == 0
            for event in events:
                self.seen.add(event["type"])
                if event["type"] == "mark":
                    return
                getattr(self, event["type"])(event)

    def BlockStored(self, event: dict[str, Any]) -> None:
        assert (event["group_idx"], event["kv_cache_spec_kind"], event["medium"]) == (0, "full_attention", "GPU")
        size, before = event["block_size"], event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"]) == size * len(event["extra_keys"])
        assert before is None or before in self.blocks, "a block's parent is known before it"
        for index, block in enumerate(event["block_hashes"]):
            tokens = tuple(event["token_ids"][index * size : (index + 1) * size])
            assert block not in self.blocks
            self.blocks[block] = (before, tokens, tuple(event["extra_keys"][index] or ()))
            before = block

    def BlockRemoved(self, event: dict[str, Any]) -> None:
        for block in event["block_hashes"]:
            del self.blocks[block]

    def AllBlocksCleared(self, event: dict[str, Any]) -> None:
        self.blocks.clear()

    def texts(self) -> set[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Every known prefix in whole blocks, with whose it is."""
        found = set()
        for block in self.blocks:
            tokens: tuple[int, ...] = ()
            before: int | None = block
            while before is not None:
                before, own, keys = self.blocks[before]
                tokens = own + tokens
            found.add((keys, tokens))
        return found

    def close(self) -> None:
        self._socket.close(0)


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    made = EventPublisher("tcp://127.0.0.1:*", TOPIC)
    yield made
    made.close()


@pytest.fixture
def router(publisher: EventPublisher) -> Iterator[Router]:
    made = Router(publisher)
    made.catch_up()
    yield made
    made.close()


def _told(publisher: EventPublisher, **settings: Any) -> Sessions:
    return Sessions(stamped=False, events=CacheEvents(64, publisher.publish), **settings)


def _cached(sessions: Sessions, asked: dict[str, tuple[str, ...]]) -> set[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The texts of live prefixes, by what the requests that left them had said."""
    found = set()
    cache = sessions.reuse.cache
    for prefix in cache.prefixes:
        for name, said in sessions.texts.items():
            tokens = tuple(said[: prefix.end])
            if tuple(prefix.tokens.tolist()) == tokens[prefix.first :] and _is_on(prefix, name, sessions):
                found |= {(asked[name], tokens[:end]) for end in range(64, prefix.block.depth * 64 + 1, 64)}
    return found


def _is_on(prefix: Any, name: str, sessions: Sessions) -> bool:
    chain = TokenChain(sessions.requests[name].cache_namespace, sessions.texts[name], 64)
    return len(chain) >= prefix.end and chain.digest(prefix.block.depth) == prefix.block.digest


def test_a_router_that_only_listens_knows_what_is_cached(publisher: EventPublisher, router: Router) -> None:
    """Through evictions, salts, tenants and a failed step, after which nothing is believed."""
    rng = random.Random(1)
    sessions = _told(publisher, pool_bytes=24_000, longest=4_000)
    asked: dict[str, tuple[str, ...]] = {}
    compared = 0
    for number in range(50):
        prompt = text(rng.randrange(4), rng.choice([300, 900, 2_000])) + text(10 + number, rng.choice([5, 200]))
        fields = rng.choice([{}, {}, {"cache_salt": "mine"}, {"tenant": "key"}, {"tenant": "key", "cache_salt": "s"}])
        request = sessions.add(prompt, text(100 + number, 8), **fields)
        asked[request.request_id] = tuple(fields[key] for key in ("tenant", "cache_salt") if key in fields)
        while sessions.scheduler.has_requests:
            sessions.step()
        if number == 30:
            sessions.reuse.clear()
        sessions.reuse.tell()
        router.catch_up()
        expected = _cached(sessions, asked)
        assert router.texts() == expected
        compared += len(expected)
    assert sessions.reuse.cache.evictions > 20
    assert compared > 200
    assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} <= router.seen


def test_blocks_with_rows_of_a_sound_name_it(publisher: EventPublisher, router: Router) -> None:
    """By its key, as of images; placeholders alone are alike in all of them."""
    sessions = _told(publisher)
    prompt = text(1, 300)
    for key in (b"a" * 16, b"b" * 16):
        sound = EmbeddedSpan(70, AudioFrames(np.zeros((400, 128), dtype=np.float32), 100), key, mutual=False)
        sessions.add(prompt, text(2, 8), spans=(sound,))
        while sessions.scheduler.has_requests:
            sessions.step()
    sessions.reuse.tell()
    router.catch_up()
    told = {keys for _, _, keys in router.blocks.values()}
    assert told == {(), ((b"a" * 16).hex(),), ((b"b" * 16).hex(),)}
    for key in ("a", "b"):
        of_key = [tokens for _, tokens, keys in router.blocks.values() if keys == ((key.encode() * 16).hex(),)]
        assert sorted(of_key) == sorted([tuple(prompt[64:128]), tuple(prompt[128:192])])


def test_what_a_router_knows_is_found(publisher: EventPublisher, router: Router) -> None:
    sessions = _told(publisher)
    sessions.ask(text(1, 3_000), text(2, 100))
    sessions.reuse.tell()
    router.catch_up()
    longest = max((tokens for _, tokens in router.texts()), key=len)
    assert len(longest) == 3_099 // 64 * 64
    assert sessions.ask([*longest, *text(3, 50)]) == len(longest)


def test_a_listener_that_is_gone_and_one_that_never_came_cost_nobody_an_answer(publisher: EventPublisher) -> None:
    router = Router(publisher)
    router.close()
    sessions = _told(publisher)
    for seed in range(4):
        sessions.ask(text(seed, 500))
        sessions.reuse.tell()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_events_endpoint": "tcp://nowhere.invalid.:x"}, "kvEventsEndpoint"),
        ({"kv_events_endpoint": "tcp://*:5557", "prefix_caching": False}, "prefixCaching is false"),
    ],
)
def test_an_endpoint_that_cannot_be_had_ends_the_start_with_its_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(TerminalError, match=says):
        event_publisher(EngineArgs(model="/m", **settings), {})


def test_nobody_listens_unless_asked_and_a_topic_names_pod_and_model() -> None:
    assert event_publisher(EngineArgs(model="/m"), {}) is None
    args = EngineArgs(model="/models/x", served_model_name="big", kv_events_endpoint="tcp://127.0.0.1:*")
    made = event_publisher(args, {"POD_IP": "10.1.2.3"})
    assert made is not None
    assert made._topic == b"kv@10.1.2.3:8000@big"
    made.close()
