"""KV events: real sidecars, a real ZeroMQ subscriber, an index as a router keeps it, and questions by HTTP."""

from __future__ import annotations

import hashlib
import http.client
import json
from dataclasses import replace
from pathlib import Path

import pytest
from sc_nodes import HTTP_PORT, MIB, Cluster, wait_for
from sc_raw import FINGERPRINT, SECRET, header, write_block
from sc_router import Curve, Indexer, Subscriber

from kvpool import config
from kvpool.client import Client
from kvpool.protocol import block, keys, wire

PUB, REPLAY = 15557, 15558
EVENTS = config.EventsConfig(enabled=True, port=PUB, replay_port=REPLAY, hashes="Bytes")
GROUP = bytes(4)
SIZE = 64 << 10


def hashes(prompt: str, count: int) -> list[bytes]:
    """The engine's hashes of a prompt's blocks."""
    return [hashlib.sha256(f"{prompt}/{n}".encode()).digest() for n in range(count)]


def named(chain: list[bytes]) -> list[block.EngineBlock]:
    return [block.EngineBlock(h, chain[n - 1] if n else b"", GROUP, 256) for n, h in enumerate(chain)]


def store(node, chain: list[bytes], tenant: str = "team-a", size: int = SIZE) -> None:
    """As an engine's plug-in does it."""
    client = Client(config.ClientConfig(socket=str(node.sockets[tenant])), fingerprint=FINGERPRINT)
    try:
        assert client.wait_connected(10)
        block_ids = [keys.block_id(FINGERPRINT, h, GROUP) for h in chain]
        results = client.put_from(block_ids, [h * (size // 32) for h in chain], engine_blocks=named(chain))
        assert all(r.ok for r in results), results
    finally:
        client.close()


def subscriber(node) -> Subscriber:
    revision = node.pool.events.token_revision
    curve = Curve.of(*keys.events_curve_keys(SECRET.strip(), node.pool.uid, revision))
    return Subscriber(node.address, PUB, REPLAY, curve=curve)


def all_events(node) -> list[dict]:
    """Everything this node has published, oldest first."""
    with subscriber(node) as s:
        return [event for message in s.replay() for event in message.events]


def holds(node, expected: set[bytes], locality: str = "LOCAL", tenant: str = "team-a") -> bool:
    """Do the events, taken in order, come to exactly this?"""
    there: set[bytes] = set()
    for event in all_events(node):
        if event["type"] == "AllBlocksCleared":
            there.clear()
        elif event["locality"] == locality and event["kvpool"]["tenant"] == tenant:
            change = there.update if event["type"] == "BlockStored" else there.difference_update
            change(event["block_hashes"])
    return there == expected


def ask(node, question: object, token: str | None = "", method: str = "POST") -> tuple[int, dict]:
    """POST /prefixes; `token` None: without one, empty: the right one."""
    right = keys.events_token(SECRET.strip(), node.pool.uid, node.pool.events.token_revision)
    headers = {} if token is None else {"Authorization": f"Bearer {token or right}"}
    connection = http.client.HTTPConnection(node.address, HTTP_PORT, timeout=5)
    try:
        body = question if isinstance(question, bytes) else json.dumps(question).encode()
        connection.request(method, "/prefixes", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if answer.status in (200, 400) else {}
    finally:
        connection.close()


def question(chain: list[bytes], tenant: str = "team-a", **more: object) -> dict:
    reported = {"tenant": tenant, "fingerprint": FINGERPRINT.hex(), "hashes": [h.hex() for h in chain]}
    return {**reported, **more}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("events")) as cluster:
        cluster.node("a", events=EVENTS)
        cluster.node("b", events=EVENTS)
        yield cluster


@pytest.fixture
def node(cluster):
    return cluster.nodes[0]


def test_a_stored_chain_is_one_event_in_vllms_words(node):
    chain = hashes("words", 3)
    with subscriber(node) as s:
        s.replay()  # by now it is subscribed, or what comes next is remembered
        store(node, chain)
        wait_for(lambda: holds(node, set(chain)) or None, "the chain is reported")
        first = s.replay()[0]
        assert (first.number, first.topic, first.rank) == (0, "kv@a@", None)
        assert first.events[0] == {"type": "AllBlocksCleared"}
        reported = [
            e for m in s.replay() for e in m.events if e["type"] == "BlockStored" and chain[0] in e["block_hashes"]
        ]
    (event,) = reported
    assert event["block_hashes"] == chain[: len(event["block_hashes"])]
    assert event == {
        "type": "BlockStored", "block_hashes": event["block_hashes"], "parent_block_hash": None, "token_ids": [],
        "block_size": 256, "lora_id": None, "medium": "STORAGE", "lora_name": None, "locality": "LOCAL",
        "kvpool": {"tenant": "team-a", "fingerprint": FINGERPRINT.hex()},
    }  # fmt: skip


def test_a_live_subscriber_hears_what_is_stored(node):
    chain = hashes("live", 8)
    with subscriber(node) as s:
        # a subscription takes a moment: store until one is heard
        for n in range(100):
            store(node, hashes(f"knock {n}", 1))
            if s.receive(0.1):
                break
        store(node, chain)
        heard: list[bytes] = []
        while not set(chain) <= set(heard):
            message = s.receive()
            assert message is not None
            heard += [h for event in message.events for h in event["block_hashes"]]
    numbers = [message.number for message in s.received]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_an_index_like_llm_ds_finds_the_longest_prefix(cluster):
    a, b = cluster.nodes
    chain = hashes("llm-d", 6)
    indexer = Indexer()
    indexer.engine_stores("10.0.0.9:8000", chain, first_key=1000)
    store(a, chain[:5])
    store(b, chain[:2])
    for node, count in ((a, 5), (b, 2)):
        wait_for(
            lambda node=node, count=count: (
                len([1 for e in all_events(node) for h in e.get("block_hashes", ()) if h in chain]) >= count
            ),
            "reported",
        )
        with subscriber(node) as s:
            for message in s.replay():
                indexer.hear(message, s)
    assert [indexer.longest_prefix(pod, 1000, 6) for pod in ("a", "b", "c")] == [5, 2, 0]
    assert indexer.unresolved > 0  # blocks of other tests, which no engine announced with tokens


def test_routers_ask_how_far_each_node_has_a_prompt(cluster):
    a, b = cluster.nodes
    chain = hashes("question", 300)
    store(a, chain[:200], size=4096)
    store(b, chain[:7] + chain[8:250], size=4096)
    a.wait_announced()
    b.wait_announced()
    for node in (a, b):
        status, reported = ask(node, question(chain))
        assert (status, reported) == (200, {"nodes": {"a": 200, "b": 7}, "shared": 0, "complete": True})
    assert ask(a, question(chain, tenant="team-b"))[1]["nodes"] == {}
    assert ask(a, question(chain, fingerprint="00" * 32))[1]["nodes"] == {}
    assert ask(a, question(chain, part="00000001"))[1]["nodes"] == {}
    assert ask(a, question(chain[10:20]))[1]["nodes"] == {"a": 10, "b": 10}


def test_a_node_that_publishes_has_the_libraries_for_it(node):
    libraries = Path(f"/proc/{node.process.pid}/maps").read_text()
    assert "libzmq" in libraries
    assert "msgspec" in libraries


def test_who_shows_no_token_is_told_nothing(node):
    chain = hashes("words", 1)
    assert [ask(node, question(chain), token)[0] for token in (None, "x", "0" * 64)] == [401] * 3
    assert ask(node, b"not even JSON", None)[0] == 401
    other = keys.events_token(SECRET.strip(), node.pool.uid, 1)
    assert ask(node, question(chain), other)[0] == 401


@pytest.mark.parametrize(
    "wrong",
    [
        b"{", b"[]", b"[" * 100_000, {}, {"tenant": "../x"}, {"tenant": 3}, {"fingerprint": "00"}, {"hashes": []},
        {"hashes": ["zz"]}, {"hashes": [""]}, {"hashes": ["00" * 33]}, {"hashes": "00"}, {"hashes": [1]},
        {"hashes": ["00"] * 4097}, {"part": "00" * 1025}, {"part": None},
    ],
)  # fmt: skip
def test_a_question_that_is_none_is_refused(node, wrong):
    body = {**question(hashes("words", 1)), **wrong} if isinstance(wrong, dict) and wrong else wrong
    status, reported = ask(node, body)
    assert status == 400
    assert set(reported) == {"error"}


def test_a_question_without_end_is_refused(node):
    for length in (str((512 << 10) + 1), "-1", "x", "9" * 40, ""):
        connection = http.client.HTTPConnection(node.address, HTTP_PORT, timeout=5)
        try:
            connection.putrequest("POST", "/prefixes")
            connection.putheader("Content-Length", length)
            connection.endheaders()
            assert connection.getresponse().status == 413
        finally:
            connection.close()


def test_two_tenants_with_one_prompt_are_told_apart(node):
    chain = hashes("both", 2)
    store(node, chain, "team-a")
    store(node, chain, "team-b")
    wait_for(lambda: holds(node, set(chain), tenant="team-b"), "told for team-b")
    reported = {e["kvpool"]["tenant"] for e in all_events(node) if chain[0] in e.get("block_hashes", ())}
    assert reported == {"team-a", "team-b"}
    assert [ask(node, question(chain, tenant))[1]["nodes"] for tenant in ("team-a", "team-b")] == [{"a": 2}] * 2


def test_a_name_that_is_not_the_blocks_is_not_told(node):
    chain = hashes("false", 1)
    other = hashes("true", 1)
    before = node.status()["stored"].get("blocks", 0)
    with node.connect() as raw:
        block_id = keys.block_id(FINGERPRINT, chain[0], GROUP)
        data = b"x" * 4096
        ((_, token, key, fd),) = raw.begin([(block_id, len(data))])
        made = replace(header(block_id, key, data, raw.server.tenant_tag), engine_block=named(other)[0])
        write_block(fd, made, data)
        assert raw.commit([token]) == [wire.CommitStatus.STORED]
    store(node, hashes("after", 1))
    wait_for(lambda: any(hashes("after", 1)[0] in e.get("block_hashes", ()) for e in all_events(node)), "reported")
    assert not any({chain[0], other[0]} & set(e.get("block_hashes", ())) for e in all_events(node))
    assert node.status()["stored"]["blocks"] == before + 2
    assert b'kvpool_events_lost_total{reason="false-name"} 1.0' in node.get("/metrics")


def test_after_a_restart_everything_is_told_again(cluster):
    node = cluster.nodes[1]
    chain = hashes("restart", 5)
    store(node, chain)
    wait_for(lambda: any(chain[-1] in e.get("block_hashes", ()) for e in all_events(node)), "reported")
    indexer = Indexer()
    indexer.engine_stores("engine", chain, first_key=0)
    with subscriber(node) as s:
        for message in s.replay():
            indexer.hear(message, s)
        assert indexer.blocks("b") == set(range(5))
        seen = indexer.next["b"]
        gone = node.files()
        node.stop()
        kept = keys.block_key(SECRET.strip(), "team-a", keys.block_id(FINGERPRINT, chain[4], GROUP)).hex()
        (lost,) = [f for f in gone if f.name == kept]
        lost.unlink()
        node.start()
        node.ready()
        wait_for(lambda: node.status()["scanned"], "scanned")
        wait_for(lambda: any(chain[0] in e.get("block_hashes", ()) for e in all_events(node)), "reported again")
        wait_for(lambda: node.status()["kv_events"]["waiting"] == 0, "all is reported")
        messages = s.replay()
        assert messages[0].number == 0 < seen
        assert messages[0].events[0]["type"] == "AllBlocksCleared"
        for message in messages:
            indexer.hear(message, s)
    assert indexer.blocks("b") == set(range(4))  # what went while the sidecar was away is not told of


def test_what_is_evicted_is_told(cluster):
    tier = config.LocalTier("nvme", str(cluster.directory / "small" / "nvme"), 4 * MIB, reserve_free_percent=0)
    node = cluster.node("small", events=EVENTS, local=(tier,))
    chains = [hashes(f"evicted {n}", 4) for n in range(16)]
    for chain in chains:
        store(node, chain, size=128 << 10)
    every = [h for chain in chains for h in chain]
    wait_for(lambda: node.status()["events"].get("evicted", 0) > 0, "evicted")

    def as_it_is() -> bool:
        with node.connect() as raw:
            tiers = raw.lookup([keys.block_id(FINGERPRINT, h, GROUP) for h in every], flags=wire.Flag.EXHAUSTIVE)
        there = {h for h, tier in zip(every, tiers, strict=True) if tier == wire.Tier.LOCAL}
        assert len(there) < len(every)
        return holds(node, there)

    wait_for(as_it_is, "what is reported is what is there")
    assert any(e["type"] == "BlockRemoved" and e["medium"] == "STORAGE" for e in all_events(node))


def test_copies_on_the_shared_tier_are_told_until_they_go(tmp_path):
    with Cluster(tmp_path, index=False, shared=True) as cluster:
        node = cluster.node("a", events=EVENTS)
        chain = hashes("shared", 3)
        store(node, chain)
        wait_for(lambda: holds(node, set(chain), "REMOTE"), "copies are reported")
        assert ask(node, question(chain))[1]["shared"] == 3
        block_ids = [keys.block_id(FINGERPRINT, h, GROUP) for h in chain]
        copies = {f.name: f for f in cluster.shared.rglob("*") if f.is_file() and len(f.name) == 64}
        for f in node.files():
            f.unlink()
        with node.connect() as raw:
            assert None not in raw.get(block_ids)  # from the shared tier: they are nowhere but there now
            wait_for(lambda: holds(node, set()) and holds(node, set(chain), "REMOTE"), "what vanished is reported")
            for block_id in block_ids[:2]:
                copies[keys.block_key(SECRET.strip(), "team-a", block_id).hex()].unlink()
            assert raw.get(block_ids[:1]) == [None]
        wait_for(lambda: holds(node, {chain[2]}, "REMOTE"), "missed blocks are reported, and blocks without a request")


def test_a_pool_without_events_asks_for_no_names(tmp_path):
    with Cluster(tmp_path, index=False) as cluster:
        node = cluster.node("a")
        with node.connect() as raw:
            assert raw.server.events is False
        store(node, hashes("off", 1))
        (file,) = node.files()
        assert block.decode_header(file.read_bytes()[: block.HEADER_BYTES]).engine_block is None
        assert ask(node, question(hashes("off", 1)))[0] == 404
        assert "kv_events" not in node.status()
        libraries = Path(f"/proc/{node.process.pid}/maps").read_text()
        assert "libzmq" not in libraries
        assert "msgspec" not in libraries
