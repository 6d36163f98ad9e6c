"""Session hints from a client to real sidecars: a session that ended frees room first, here and on other nodes."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any

import pytest
from cl_fake_sidecar import FakeSidecar
from cl_nodes import Cluster, Node, until

from kvpool.client import Client
from kvpool.config import ClientConfig
from kvpool.protocol import keys, wire
from kvpool.protocol.hint import HintKind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FP = b"f" * 32
SIZE = 10_000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("hints"), ("a", "b"), tenants=("team", "other"))
    yield cluster
    cluster.close()


def connect(path: str) -> Client:
    client = Client(ClientConfig(socket=path, connect_retry_ms=50), fingerprint=FP)
    assert client.wait_connected(10)
    return client


def prompt(client: Client, name: str, count: int = 5) -> list[bytes]:
    block_ids = [keys.block_id(FP, f"{name}-{n}".encode()) for n in range(count)]
    client.lookup(block_ids)
    assert all(one.ok for one in client.put_from(block_ids, [b"x" * SIZE] * count))
    return block_ids


def results(node: Node) -> dict[str, int]:
    return node.status()["hints"]["results"]


def post(node: Node, cluster: Cluster, body: Any, token: str | None = None) -> tuple[int, dict[str, Any]]:
    secret = (cluster.secret / "pool-secret").read_bytes().strip()
    token = keys.hints_token(secret, node.pool.uid, 0) if token is None else token
    connection = http.client.HTTPConnection("127.0.0.1", node.http, timeout=5)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", "/hints", data, {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if answer.status in (202, 400, 404, 429) else {}
    finally:
        connection.close()


def test_each_kind_of_hint_is_applied_and_counted(pair: Cluster):
    client = connect(pair["a"].socket)
    try:
        assert client.wants_hints
        prompt(client, "others", 40)
        block_ids = prompt(client, "kinds")
        for kind in HintKind:
            assert client.hint(kind, "run-1", 30, block_ids)
        names = {f"{kind.label}-accepted" for kind in HintKind}
        assert until(lambda: results(pair["a"]).keys() >= names), results(pair["a"])
    finally:
        client.close()


def test_a_session_is_named_without_its_blocks_once_they_are_known(pair: Cluster):
    client = connect(pair["a"].socket)
    try:
        before = results(pair["a"]).get("ended-unknown-session", 0)
        client.hint(HintKind.ENDED, "never-seen")
        assert until(lambda: results(pair["a"]).get("ended-unknown-session", 0) == before + 1)
        client.hint(HintKind.TURN, "seen", 0, prompt(client, "seen"))
        before = results(pair["a"]).get("ended-accepted", 0)
        client.hint(HintKind.ENDED, "seen")
        assert until(lambda: results(pair["a"]).get("ended-accepted", 0) == before + 1)
    finally:
        client.close()


def test_a_session_of_another_tenant_is_unknown(pair: Cluster):
    team, other = connect(pair["a"].sockets["team"]), connect(pair["a"].sockets["other"])
    try:
        block_ids = prompt(team, "mine")
        team.hint(HintKind.TURN, "shared-name", 0, block_ids)
        before = results(pair["a"])
        other.hint(HintKind.ENDED, "shared-name")
        other.hint(HintKind.ENDED, "shared-name", 0, block_ids)
        wanted = ("ended-unknown-session", "ended-no-blocks")
        assert until(lambda: all(results(pair["a"]).get(n, 0) == before.get(n, 0) + 1 for n in wanted))
    finally:
        team.close()
        other.close()


def test_a_hint_reaches_the_other_node_that_has_the_session(pair: Cluster):
    a, b = connect(pair["a"].socket), connect(pair["b"].socket)
    try:
        block_ids = prompt(b, "moved")
        b.hint(HintKind.TURN, "moved", 0, block_ids)
        assert until(lambda: all(a.lookup(block_ids)))
        before = results(pair["b"]).get("ended-accepted", 0)
        a.hint(HintKind.ENDED, "moved", 0, block_ids)
        assert until(lambda: results(pair["b"]).get("ended-accepted", 0) == before + 1), results(pair["b"])
    finally:
        a.close()
        b.close()


def test_a_session_that_continues_on_another_node_has_its_blocks_there(pair: Cluster):
    a, b = connect(pair["a"].socket), connect(pair["b"].socket)
    try:
        block_ids = prompt(b, "resumed")
        assert until(lambda: all(a.lookup(block_ids)))
        a.hint(HintKind.RESUME, "resumed", 10, block_ids)
        assert until(lambda: a.lookup(block_ids) == [wire.Tier.LOCAL] * len(block_ids))
    finally:
        a.close()
        b.close()


def test_a_gateway_releases_a_session_by_its_name_or_its_hashes(pair: Cluster):
    client, node = connect(pair["a"].socket), pair["a"]
    try:
        client.hint(HintKind.TURN, "by-name", 0, prompt(client, "by-name"))
        assert until(
            lambda: post(node, pair, {"tenant": "team", "session": "by-name", "action": "release"})[1]["blocks"]
        )
        hashes = [f"hash-{n}".encode() for n in range(4)]
        block_ids = [keys.block_id(FP, one, bytes(4)) for one in hashes]
        assert all(one.ok for one in client.put_from(block_ids, [b"x" * SIZE] * 4))
        body = {"tenant": "team", "fingerprint": FP.hex(), "hashes": [one.hex() for one in hashes]}
        assert post(node, pair, {**body, "action": "retain", "seconds": 60})[0] == 202
        assert post(node, pair, {**body, "action": "release"}) == (202, {"blocks": 4, "outcome": "accepted"})
        assert post(node, pair, {**body, "tenant": "other", "action": "release"})[1]["outcome"] == "no-blocks"
        unknown = {"tenant": "team", "session": "unknown", "action": "prefetch"}
        assert post(node, pair, unknown) == (202, {"blocks": 0, "outcome": "unknown-session"})
    finally:
        client.close()


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b"[]",
        {"tenant": "team", "action": "release"},
        {"tenant": "Team!", "session": "s", "action": "release"},
        {"tenant": "team", "session": "s", "action": "purge"},
        {"tenant": "team", "session": "s" * 257, "action": "release"},
        {"tenant": "team", "session": "s", "action": "retain", "seconds": -1},
        {"tenant": "team", "session": "s", "action": "retain", "seconds": True},
        {"tenant": "team", "hashes": ["00"], "action": "release"},
        {"tenant": "team", "hashes": ["zz"], "fingerprint": FP.hex(), "action": "release"},
        {"tenant": "team", "hashes": ["00"] * 4097, "fingerprint": FP.hex(), "action": "release"},
    ],
)
def test_a_malformed_request_is_refused(pair: Cluster, body: Any):
    assert post(pair["a"], pair, body)[0] == 400


def test_only_the_token_for_hints_is_accepted(pair: Cluster):
    secret = (pair.secret / "pool-secret").read_bytes().strip()
    body = {"tenant": "team", "session": "s", "action": "release"}
    for token in ("", "wrong", keys.events_token(secret, pair["a"].pool.uid, 0)):
        assert post(pair["a"], pair, body, token)[0] == 401


def test_a_tenant_that_hints_too_fast_is_limited(pair: Cluster):
    client = connect(pair["a"].sockets["other"])
    try:
        for _ in range(600):
            client.hint(HintKind.ENDED, "flood")
        assert until(lambda: results(pair["a"]).get("ended-limited", 0) > 0)
        assert all(one.ok for one in client.put_from([keys.block_id(FP, b"after")], [b"x" * SIZE]))
    finally:
        client.close()


def test_an_older_sidecar_is_sent_no_hint(tmp_path: Path):
    fake = FakeSidecar(tmp_path)
    fake.start()
    client = connect(fake.path)
    try:
        assert not client.wants_hints
        assert not client.hint(HintKind.ENDED, "run", 0, [bytes(32)])
        assert wire.Op.HINT not in fake.requests
    finally:
        client.close()
        fake.stop()
