"""Sidecars obtain their certificates from the operator's server. Reviews of tokens are replayed; the rest is real."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

import pytest
from op_samples import MemoryCluster

from kvpool.errors import ConfigError
from kvpool.protocol.certificate_names import node_name
from kvpool_operator.desired.labels import labels
from kvpool_operator.issuing.issuer import LeafIssuer
from kvpool_operator.issuing.server import IssuingServer, serve_issuer
from kvpool_operator.pki.authority_root import AuthorityRoot, PoolIdentity
from kvpool_operator.pki.certificates import CertPolicy, TrustBundle, new_authority
from kvpool_operator.pki.peer_ca import peer_files
from kvpool_operator.runtime.metrics import OperatorMetrics
from kvpool_sidecar.peers import ca
from kvpool_sidecar.peers.certificate import NodeIdentity
from kvpool_sidecar.peers.issued import IssuedLeaves, IssuerClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NS, POOL, ID = "team", "chat", "pool-id"
ROOT = AuthorityRoot.generate()
EXTRA = "authentication.kubernetes.io/"


class Cluster(MemoryCluster):
    """The token is the name of the node; "bad" is not authenticated."""

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        node = manifest["spec"]["token"]
        extra = {"pod-name": [f"pod-{node}"], "pod-uid": [f"uid-{node}"], "node-name": [node]}
        user = {
            "username": f"system:serviceaccount:{NS}:{POOL}-sidecar",
            "extra": {EXTRA + k: v for k, v in extra.items()},
        }
        audiences = manifest["spec"]["audiences"]
        return {"status": {"authenticated": node != "bad", "audiences": audiences, "user": user}}


class Operator:
    """The issuing server of an operator, in a thread."""

    def __init__(self, files: dict[str, str], root: AuthorityRoot = ROOT, port: int = 0) -> None:
        self._cluster = Cluster()
        data = {k: base64.b64encode(v.encode()).decode() for k, v in {"pool-id": ID, **files}.items()}
        metadata = {"name": f"{POOL}-secret", "namespace": NS, "labels": labels(POOL, "secret")}
        self._cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
        for node in ("a", "b"):
            pod = {
                "name": f"pod-{node}",
                "namespace": NS,
                "uid": f"uid-{node}",
                "labels": {"kvpool.dev/sockets": "agent"},
            }
            self._cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": {"nodeName": node}})
        self._root = root
        self._wanted_port = port
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    async def _run(self) -> None:
        server = IssuingServer(LeafIssuer(self._cluster, self._root), OperatorMetrics())
        async with serve_issuer("127.0.0.1", self._wanted_port, self._root, server) as self.port:
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def files() -> dict[str, str]:
    return dict(peer_files({}, ROOT, PoolIdentity(NS, POOL, ID), datetime.now(UTC)).published)


class Clock:
    def __init__(self) -> None:
        self.ahead = timedelta(0)

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Node:
    """A sidecar's identity; not started, so that a test decides when it looks."""

    def __init__(self, name: str, files: dict[str, str], port: int, tmp: Path, clock: Clock, token: str = "") -> None:
        self.name = name
        path = tmp / f"token-{name}"
        path.write_text(token or name)
        self.client = IssuerClient(f"https://127.0.0.1:{port}", str(path))
        source = lambda: IssuedLeaves(lambda file: files.get(file, "").encode(), self.client)  # noqa: E731
        self.identity = NodeIdentity(source, ID, name, clock=clock)

    def refresh(self) -> None:
        self.client._next_try = 0.0
        self.identity.refresh()


def shake_hands(asking: NodeIdentity, serving: NodeIdentity, name: str = "b") -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.settimeout(10)

        def serve() -> None:
            with contextlib.suppress(OSError), serving.server.wrap_socket(theirs, server_side=True) as tls:
                tls.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with asking.client.wrap_socket(ours, server_hostname=asking.name_of(name)) as tls:
                return tls.recv(1) == b"x"
        except (ssl.SSLError, OSError):
            return False
        finally:
            ours.close()
            thread.join()


@pytest.fixture
def operator(files: dict[str, str]) -> Iterator[Operator]:
    with Operator(files) as made:
        yield made


def test_two_nodes_obtain_leaves_and_verify_each_other(files, operator, tmp_path, clock):
    a, b = (Node(name, files, operator.port, tmp_path, clock) for name in "ab")
    assert not shake_hands(a.identity, b.identity)  # no leaf yet: a miss, no delay of the start
    a.refresh()
    b.refresh()
    assert shake_hands(a.identity, b.identity)
    assert not shake_hands(a.identity, b.identity, name="c")
    assert 2 * 86400 < a.identity.seconds_left <= 3 * 86400


def test_a_leaf_is_renewed_at_two_thirds_of_its_life_and_not_before(files, operator, tmp_path, clock):
    a = Node("a", files, operator.port, tmp_path, clock)
    a.refresh()
    first = a.identity._leaf
    clock.ahead = timedelta(hours=47)
    a.refresh()
    assert a.identity._leaf is first
    clock.ahead = timedelta(hours=49)
    a.refresh()
    assert a.identity._leaf is not first


def test_an_absent_operator_stops_no_peer_while_the_leaf_lives(files, tmp_path, clock):
    with Operator(files) as operator:
        a, b = (Node(name, files, operator.port, tmp_path, clock) for name in "ab")
        a.refresh()
        b.refresh()
    clock.ahead = timedelta(hours=71)  # a day beyond the renewal that was due
    for node in (a, b):
        node.refresh()
        assert "cannot be asked" in node.identity.problem
        assert not node.client.may_try()  # the next request comes after a pause
    assert shake_hands(a.identity, b.identity)
    with Operator(files, port=operator.port):
        before = a.identity._leaf
        a.client._next_try = time.monotonic() + 60
        a.identity.refresh()
        assert a.identity._leaf is before
        a.refresh()
    assert a.identity.problem == ""


def test_a_refused_token_leaves_the_node_without_a_leaf_and_says_why(files, operator, tmp_path, clock):
    a = Node("a", files, operator.port, tmp_path, clock, token="bad")
    a.refresh()
    assert "not valid for this audience" in a.identity.problem
    assert a.identity.expiry == 0


def test_a_token_of_another_node_buys_no_leaf_of_this_one(files, operator, tmp_path, clock):
    a = Node("a", files, operator.port, tmp_path, clock, token="b")
    a.refresh()
    assert "another name" in a.identity.problem
    assert a.identity._leaf is None


def test_an_impostor_of_the_operator_never_sees_the_token(files, tmp_path, clock):
    with Operator(files, AuthorityRoot.generate()) as impostor:
        a = Node("a", files, impostor.port, tmp_path, clock)
        a.refresh()
    assert "SSLCertVerificationError" in a.identity.problem
    assert a.identity._leaf is None


def test_a_leaf_of_a_ca_that_the_node_does_not_know_is_not_used(files, tmp_path, clock):
    others = dict(peer_files({}, ROOT, PoolIdentity(NS, POOL, ID), datetime.now(UTC) - timedelta(days=1)).published)
    with Operator(others) as operator:
        a = Node("a", files, operator.port, tmp_path, clock)
        a.refresh()
    assert "a CA that this node knows" in a.identity.problem
    assert a.identity._leaf is None


def test_during_an_upgrade_sidecars_that_sign_for_themselves_and_others_verify_each_other(tmp_path, clock):
    data = TrustBundle(new_authority("kvpool peers", ("kvpool",), datetime.now(UTC), CertPolicy())).to_secret()
    stored = {"peer-ca.crt": data["ca.crt"].decode(), "peer-ca.key": data["ca.key"].decode()}
    made = peer_files(stored, ROOT, PoolIdentity(NS, POOL, ID), datetime.now(UTC), is_rolled=False)
    files = dict(made.published)
    old = NodeIdentity(lambda: ca.read(lambda name: files.get(name, "").encode(), b""), ID, "b")
    with Operator(files) as operator:
        new = Node("a", files, operator.port, tmp_path, clock)
        new.refresh()
    assert shake_hands(new.identity, old)
    assert shake_hands(old, new.identity, name="a")


def test_files_and_urls_that_cannot_be_used_fail_the_start(files, tmp_path):
    with pytest.raises(ConfigError, match="issuer-url"):
        IssuerClient("http://operator:9444", "token")
    client = IssuerClient("https://operator:9444", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"peer-ca.crt"):
        IssuedLeaves(lambda name: b"nonsense", client)
    assert node_name(ID, "a") != node_name(ID, "b")
