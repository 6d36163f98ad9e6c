"""Orders of the operator: who may give them, what they look like, how many run."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time

import pytest
from sc_nodes import fresh_address, wait_for
from sc_operator import UID, Operator, ca, context

from kvpool.errors import BusyError, KVPoolError, PoolUnavailableError, ProtocolError, RefusedError
from kvpool.protocol.certificate_names import node_name, operator_name
from kvpool_sidecar.admin.operations import MAX_KEPT, MAX_RUNNING, Operations
from kvpool_sidecar.admin.server import MAX_BODY, AdminServer
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.index.base import NodeInfo
from kvpool_sidecar.peers import ca as authority
from kvpool_sidecar.peers.certificate import NodeIdentity
from kvpool_sidecar.peers.security import PeerSecurity

TOLD = (ssl.SSLError, ConnectionError, http.client.HTTPException, TimeoutError)


class Kind:
    """Goes on until it is released or cancelled."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.runs: list[dict] = []

    def __call__(self, params, context):
        self.runs.append(dict(params))
        context.set_progress(1, 2, "blocks")
        context.count("blocks", 3)
        while not self.release.wait(0.01):
            context.check()
        if "error" in params:
            raise PoolUnavailableError(params["error"])
        return {"bytes": 7}


@pytest.fixture
def kind():
    made = Kind()
    yield made
    made.release.set()


@pytest.fixture
def operations(kind):
    made = Operations({"wait": kind}, Stats())
    yield made
    made.stop()


@pytest.fixture
def server(operations):
    identity = NodeIdentity(lambda: authority.TrustBundle(ca()), UID, "a")
    made = AdminServer(fresh_address(), 0, identity, operations, operations._stats)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def operator(server):
    return Operator(server.server_address[0], "a", server.port)


def ended(operations, name: str) -> dict:
    return wait_for(lambda: (r := operations.get(name)) and r["state"] != "Running" and r, f"{name} ends")


# -- what runs


def test_an_operation_runs_once_however_often_it_is_ordered(operations, kind):
    first = operations.start("a-1", "wait", {"n": 1})
    assert first["state"] == "Running"
    assert operations.start("a-1", "wait", {"n": 1})["id"] == "a-1"
    kind.release.set()
    done = ended(operations, "a-1")
    assert (done["state"], done["counts"]) == ("Succeeded", {"blocks": 3, "bytes": 7})
    assert done["progress"] == {"done": 1, "total": 2, "unit": "blocks"}
    assert operations.start("a-1", "wait", {"n": 1}) == done
    assert kind.runs == [{"n": 1}]


def test_an_id_means_one_thing(operations):
    operations.start("a-1", "wait", {"n": 1})
    with pytest.raises(RefusedError):
        operations.start("a-1", "wait", {"n": 2})


def test_two_run_and_the_third_is_told_to_come_again(operations, kind):
    for n in range(MAX_RUNNING):
        operations.start(f"a-{n}", "wait", {})
    with pytest.raises(BusyError):
        operations.start("a-9", "wait", {})
    kind.release.set()
    ended(operations, "a-0")
    ended(operations, "a-1")
    operations.start("a-9", "wait", {})
    assert ended(operations, "a-9")["state"] == "Succeeded"


def test_a_cancelled_one_ends_and_makes_room(operations):
    operations.start("a-1", "wait", {})
    operations.cancel("a-1")
    done = ended(operations, "a-1")
    assert (done["state"], done["message"]) == ("Failed", "cancelled")
    assert operations.cancel("unknown") is None


def test_one_that_fails_says_why(operations, kind):
    kind.release.set()
    operations.start("a-1", "wait", {"error": "no such thing"})
    done = ended(operations, "a-1")
    assert (done["state"], done["message"]) == ("Failed", "no such thing")
    assert done["counts"] == {"blocks": 3}


def test_what_is_remembered_is_bounded_and_what_runs_is_not_forgotten():
    gate = Kind()
    done = Operations({"wait": gate, "quick": lambda _params, _context: None}, Stats())
    done.start("slow", "wait", {})
    for n in range(MAX_KEPT + 20):
        done.start(f"q-{n}", "quick", {})
        ended(done, f"q-{n}")
    assert len(done._known) == MAX_KEPT
    assert done.get("slow")["state"] == "Running"
    assert done.get("q-0") is None
    done.stop()
    assert done.get("slow")["state"] == "Failed"


@pytest.mark.parametrize(
    ("name", "kind_name", "params"),
    [
        ("", "wait", {}),
        ("../etc", "wait", {}),
        ("x" * 97, "wait", {}),
        (7, "wait", {}),
        ("a", "other", {}),
        ("a", ["wait"], {}),
        ("a", "wait", []),
        ("a", "wait", {str(n): n for n in range(65)}),
    ],
)
def test_an_order_that_makes_no_sense_starts_nothing(operations, kind, name, kind_name, params):
    with pytest.raises(ProtocolError):
        operations.start(name, kind_name, params)
    assert kind.runs == []


# -- who may order


def test_the_operator_starts_asks_and_cancels(operator, kind):
    status, report = operator.start("a-1", "wait", n=1)
    assert (status, report["state"]) == (200, "Running")
    assert operator.poll("a-1")["counts"] == {"blocks": 3}
    assert operator.call("DELETE", "/v1/operations/a-1")[0] == 200
    wait_for(lambda: operator.poll("a-1")["state"] == "Failed", "it ends")
    assert operator.call("GET", "/v1/operations/b-1")[0] == 404
    assert operator.call("DELETE", "/v1/operations/b-1")[0] == 404
    assert operator.call("GET", "/v1/other")[0] == 404
    assert operator.call("POST", "/v1/other", b"{}")[0] == 404
    assert operator.start("a-2", "unknown")[0] == 400
    assert operator.start("a-1", "wait", n=2)[0] == 409
    operator.start("a-3", "wait")
    operator.start("a-4", "wait")
    assert operator.start("a-5", "wait")[0] == 429
    kind.release.set()


def stranger() -> authority.CertificateAuthority:
    return authority.derived(b"somebody else's secret")


@pytest.mark.parametrize(
    "tls",
    [
        lambda: context(node_name(UID, "b")),
        lambda: context(node_name(UID, "operator")),
        lambda: context(operator_name("another-pool")),
        lambda: context(operator_name(UID), stranger()),
        lambda: anonymous(),
    ],
    ids=["a peer", "a node of that name", "another pool's operator", "another authority", "no certificate"],
)
def test_nobody_else_is_let_in(server, kind, tls):
    with pytest.raises(TOLD):
        Operator(server.server_address[0], "a", server.port, tls()).start("a-1", "wait")
    assert kind.runs == []
    wait_for(lambda: server.stats.whole("refused").get("admin-certificate"), "it is counted")


def anonymous() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.load_verify_locations(cadata=ca().pem)
    return made


def test_the_operator_insists_on_the_node_it_means(server):
    with pytest.raises(ssl.SSLCertVerificationError):
        Operator(server.server_address[0], "b", server.port).start("a-1", "wait")


# -- hostile bytes


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"7", b"{", b"\xff\xfe", b'{"id": "a"}', b'{"id": "a", "kind": "wait", "params": 1}', b"[" * 60_000],
    ids=["empty", "list", "number", "torn", "no text", "no kind", "no params", "deep"],
)
def test_a_body_that_is_no_order_is_answered_and_starts_nothing(operator, kind, body):
    status, reported = operator.call("POST", "/v1/operations", body)
    assert status in (400, 413)
    assert reported["error"]
    assert kind.runs == []


@pytest.mark.parametrize("length", [str(MAX_BODY + 1), "-1", "x", "9" * 30, "1e3", ""])
def test_no_more_is_read_than_is_allowed(operator, kind, length):
    status, _ = operator.call("POST", "/v1/operations", b"", {"Content-Length": length})
    assert status == 413
    assert kind.runs == []


def test_bytes_that_are_no_tls_end_their_connection_alone(server, operator):
    address = server.server_address[:2]
    socks = []
    for data in (b"GET / HTTP/1.0\r\n\r\n", bytes(1000), b"\x16\x03\x01\xff\xff" + bytes(100), b""):
        sock = socket.create_connection(address, timeout=30)
        sock.sendall(data)
        socks.append(sock)
    assert operator.start("a-1", "wait")[0] == 200
    with contextlib.suppress(ConnectionError):
        while socks[0].recv(4096):  # the server's alert, and then the end
            pass
    for sock in socks:
        sock.close()
    assert operator.poll("a-1")["state"] == "Running"


def test_silent_connections_do_not_keep_the_operator_out(server, operator):
    address = server.server_address[:2]
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(socket.create_connection(address, timeout=10))
        wait_for(lambda: len(server._open) >= 8, "all places are taken")

        def let_in() -> bool:
            with contextlib.suppress(*TOLD):
                return operator.start("a-1", "wait")[0] == 200
            return False

        wait_for(let_in, "the operator is let in")


def test_a_sidecar_takes_orders_where_it_is_told_to(cluster):
    c = cluster(index=False)
    a = c.node("a", admin_port=17423)
    b = c.node("b")
    operator = Operator.of(a)
    assert operator.start("x-1", "purge", all=True, tier="Local")[0] == 200
    wait_for(lambda: operator.poll("x-1")["state"] == "Succeeded", "it is done")
    looked = operator.run("x-2", "preflight", measure=False)  # from where it stands, at its own drive that it uses
    assert (looked["state"], looked["counts"]["failed"]) == ("Succeeded", 0), looked
    assert looked["counts"]["checks"] >= 3
    with pytest.raises(ConnectionRefusedError):
        Operator(b.address, "b", 17423).start("x-1", "purge")
    assert "purge-succeeded" in a.get("/metrics").decode()
    assert json.loads(a.get("/status"))["ready"]


def test_the_operators_certificate_opens_nothing_at_the_port_for_peers(cluster):
    class AsOperator(NodeIdentity):
        def __init__(self) -> None:
            super().__init__(lambda: authority.TrustBundle(ca()), UID, "a")
            self._name = operator_name(UID)
            self._leaf = None
            self.refresh()

    c = cluster(index=False)
    a = c.node("a")
    peer = NodeInfo("a", a.address, a.pool.peer.port, 1)
    as_peer = PeerSecurity(NodeIdentity(lambda: authority.TrustBundle(ca()), UID, "b"))
    assert is_answered(as_peer, peer)
    as_peer.close()
    for encryption in ("ControlOnly", "Always"):
        as_operator = PeerSecurity(AsOperator(), encryption)
        assert not is_answered(as_operator, peer)
        as_operator.close()
    assert 'kvpool_sidecar_refused_total{reason="peer-proof"}' in a.get("/metrics").decode()


def is_answered(security: PeerSecurity, peer: NodeInfo) -> bool:
    """Does the peer say anything about a block, if only that it has it not?"""
    try:
        link = security.dial(peer, 10)
    except KVPoolError:
        return False
    try:
        link.request([bytes(32)])
        link.response_size(time.monotonic() + 10)
    except KVPoolError:
        return False
    finally:
        link.close()
    return True
