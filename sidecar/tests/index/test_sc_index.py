"""Every index keeps the contract, and Redis also when it is slow, away, full or empty."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sc_nodes import INDEX_PORT, Process, fresh_address, wait_for

from kvpool.errors import ConfigError, RetryableError
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.index import redis_server as embedded
from kvpool_sidecar.index.base import IndexFullError, NodeInfo
from kvpool_sidecar.index.credentials import IndexCredentials, Passwords
from kvpool_sidecar.index.memory import MemoryIndex
from kvpool_sidecar.index.record import Record, entry_name, pack, unpack, unpack_all
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.resilience.bulkhead import Bulkhead
from kvpool_testing.index import A, B, IndexContract, key

PASSWORD = "index password"


def plain(address, **user):
    """A client that does not try again."""
    return redis.Redis(host=address, port=INDEX_PORT, protocol=2, retry=Retry(NoBackoff(), 0), **user)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("index")
    (directory / "index-password").write_text(PASSWORD)
    address = fresh_address()
    process = Process(
        directory / "log",
        [
            "index-server",
            f"--bind={address}",
            f"--port={INDEX_PORT}",
            f"--dir={directory}",
            f"--secret-dir={directory}",
        ],
    ).start()
    process.address, process.directory = address, directory

    def answers():
        client = plain(address, username="kvpool", password=PASSWORD)
        try:
            return client.ping()
        except redis.ConnectionError:
            return False
        finally:
            client.close()

    wait_for(answers, "the index answers")
    yield process
    process.kill()


@pytest.fixture
def empty(server):
    return lambda: embedded.flush_index(str(server.directory))


def connect(server, *, username="kvpool", password=PASSWORD, **kw):
    credentials = IndexCredentials(username, Passwords.fixed(password))
    url = f"redis://{server.address}:{INDEX_PORT}/0"
    return RedisIndex(url, credentials=credentials, **{"lease_s": 30, "timeout_s": 5.0, **kw})


class TestRedis(IndexContract):
    @pytest.fixture
    def index(self, server, empty):
        empty()
        index = connect(server)
        yield index
        index.close()
        empty()

    def test_an_entry_that_an_earlier_release_let_grow_is_read_and_cut(self, index):
        name = entry_name(key(0))
        grown = b"".join(pack(Record(node, 1000, 7)) for _ in range(2) for node in range(1, 101))
        index._topology.execute([(b"SET", name, grown)])
        assert len(index.locate([key(0)])[0]) == 32
        index.withdraw(1, [key(0)])
        (value,) = index._topology.execute([(b"GET", name)])
        assert {r.node for r in unpack_all(value)} == set(range(2, 101))
        index.announce([(key(0), Record(4711, 1000, 7))])
        (value,) = index._topology.execute([(b"GET", name)])
        assert [r.node for r in unpack(value)] == [*range(70, 101), 4711]
        assert len(value) == 32 * 12

    @pytest.fixture
    def forgetting(self, server, empty):
        empty()
        index = connect(server, lease_s=0.5, forget_s=1)
        yield index
        index.close()
        empty()


class TestMemory(IndexContract):
    @pytest.fixture
    def index(self):
        return MemoryIndex(lease_s=30)

    @pytest.fixture
    def forgetting(self):
        return MemoryIndex(lease_s=0.5, forget_s=1)

    @pytest.fixture
    def empty(self, index):
        return index.flush


def test_a_record_has_twelve_bytes_and_what_cannot_be_read_is_left_out():
    record = Record(513, 33_554_432, 0xDEADBEEF)
    assert len(pack(record)) == 12
    assert unpack(pack(record) * 2 + b"torn") == (record, record)
    assert unpack(b"\1\0\1\7" + bytes(8)) == ()  # a version of the future
    assert unpack(None) == unpack(b"") == ()
    assert len(unpack(pack(record) * 1000)) == 32
    assert entry_name(bytes(range(32))) == b"b" + bytes(range(16))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"node": "a"}', b'{"node":1,"host":"h","port":1,"generation":1}'])
def test_what_no_node_would_write_is_no_node(text):
    assert NodeInfo.loads(text) is None
    assert NodeInfo.loads(A.dumps()) == A


def test_a_lease_ends_by_itself_and_the_number_is_kept_for_its_node(server, empty):
    empty()
    short, long = connect(server, lease_s=0.1), connect(server)
    a, b = short.join(A), long.join(B)
    wait_for(lambda: long.nodes([a, b]) == {b: B}, "the lease has ended")
    assert short.join(A) == a
    assert short.renew(a, A)
    for index in (short, long):
        index.close()


def test_a_number_whose_holder_is_another_node_is_not_taken(server, empty):
    empty()
    index = connect(server)
    a = index.join(A)
    index._topology.execute([("SET", f"n:{a}", B.dumps())])  # as after an index that came back with older data
    assert index.renew(a, A) is None
    assert index.join(A) != a
    index.close()


@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",), ("KEYS", "*"), ("EVAL", "return 1", 0), ("CONFIG", "GET", "*"), ("SET", "other", "1"),
        ("GET", "other"), ("SUBSCRIBE", "x"), ("DEBUG", "SLEEP", "0"), ("SHUTDOWN",), ("ACL", "LIST"),
        ("SCRIPT", "LOAD", "return 1"), ("REPLICAOF", "localhost", "1"), ("MODULE", "LIST"), ("CLIENT", "LIST"),
    ],
)  # fmt: skip
def test_the_sidecars_user_may_do_nothing_else(server, command):
    client = plain(server.address, username="kvpool", password=PASSWORD)
    # the server refuses DEBUG to everybody, before it looks at rights
    with pytest.raises(redis.ResponseError, match=r"(?i)no permissions|command not allowed"):
        client.execute_command(*command)
    client.close()


@pytest.mark.parametrize("user", [{}, {"username": "kvpool", "password": "wrong"}, {"password": PASSWORD}])
def test_nobody_gets_in_without_the_password(server, user):
    client = plain(server.address, **user)
    with pytest.raises((redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError)):
        client.ping()
    client.close()
    for file in ("admin-password", "users.acl"):
        assert (server.directory / file).stat().st_mode & 0o077 == 0
    assert PASSWORD not in (server.directory / "users.acl").read_text()


def test_an_index_that_stands_still_costs_the_timeout_and_its_late_answers_are_never_mixed_up(server, empty):
    empty()
    index, patient = connect(server, timeout_s=0.1), connect(server)
    for n in range(50):
        patient.announce([(key(n), Record(1, 1000 + n, 7))])
    assert index.locate([key(1)]) == [(Record(1, 1001, 7),)]
    server.send(signal.SIGSTOP)
    try:
        for n in range(5):
            started = time.monotonic()
            with pytest.raises(RetryableError):
                index.locate([key(n)])
            assert time.monotonic() - started < 1
    finally:
        server.send(signal.SIGCONT)
    wait_for(lambda: patient.locate([key(0)]), "the index goes on")
    for n in range(50):
        assert index.locate([key(n)]) == [(Record(1, 1000 + n, 7),)]
    index.close()
    patient.close()


def test_a_warm_index_makes_no_connection_for_a_lookup(server, empty, monkeypatch):
    empty()
    index = connect(server)
    index.warm(4)

    def refused(*_args, **_kw):
        raise AssertionError("a lookup pays for a connection")

    monkeypatch.setattr(redis.connection.Connection, "_connect", refused)
    assert index.locate([key(0)]) == [()]
    assert index.nodes([1]) == {}
    with pytest.raises(AssertionError):
        index.warm(5)
    monkeypatch.undo()
    index.close()


def test_an_answer_that_comes_late_leaves_the_connection_whole(server, empty, monkeypatch):
    """Else a busy moment would cost a new connection for each lookup, which makes it busier."""
    empty()
    index = connect(server, timeout_s=30)
    index.warm(1)
    monkeypatch.setattr(redis.connection.Connection, "_connect", lambda self: pytest.fail("connected anew"))
    guard = Bulkhead("index", 1, 8, CircuitBreaker(100, 1, time.monotonic))
    server.send(signal.SIGSTOP)
    try:
        with pytest.raises(RetryableError):
            guard.run(lambda: index.locate([key(0)]), 0.05)
    finally:
        server.send(signal.SIGCONT)
    assert guard.run(lambda: index.locate([key(0)]), 30) == [()]
    guard.close()
    monkeypatch.undo()
    index.close()


def test_an_address_where_nothing_answers_is_retryable():
    index = RedisIndex(f"redis://{fresh_address()}:{INDEX_PORT}/0", timeout_s=0.2)
    with pytest.raises(RetryableError):
        index.locate([key(0)])
    with pytest.raises(RetryableError):
        index.join(A)
    index.close()


def test_a_url_of_another_kind_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"index\.url"):
        RedisIndex("http://somewhere")


def test_the_embedded_server_is_found_without_importing_its_package():
    assert embedded.server_binary().endswith("valkey-server")
    password_file = embedded.acl([b"pw"], "admin")
    assert "user default off" in password_file
    assert "pw" not in password_file.replace("nopass", "")


def test_the_server_keeps_its_memory_in_huge_pages(server):
    environment = Path(f"/proc/{server.process.pid}/environ").read_bytes().split(b"\0")
    assert b"GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in environment


def test_a_full_index_refuses_news_and_still_answers(tmp_path):
    address = fresh_address()
    process = Process(
        tmp_path / "log",
        ["index-server", f"--bind={address}", f"--port={INDEX_PORT}", f"--dir={tmp_path}", "--max-memory=6291456"],
    ).start()
    process.address = address
    index = connect(process, username="", password="")
    try:
        wait_for(lambda: _answers(index), "the index answers")
        index.announce([(key(0), Record(1, 1000, 7))])
        with pytest.raises(IndexFullError, match="nearly full"):
            _fill(index)
        assert index.locate([key(0)]) == [(Record(1, 1000, 7),)]
        # what is left is for the nodes themselves: one that starts now is known to the others
        a, b = index.join(A), index.join(B)
        assert index.renew(a, A) == index.renew(b, B)
        assert index.live_nodes().nodes == {a: A, b: B}
        index.withdraw(1, [key(0)])
        assert index.locate([key(0)]) == [()]
    finally:
        index.close()
        process.kill()


def _fill(index) -> None:
    for start in range(0, 200_000, 256):
        index.announce([(key(n), Record(1, 1000, 7)) for n in range(start, start + 256)])


def _answers(index) -> bool:
    try:
        index.locate([key(0)])
    except RetryableError:
        return False
    return True
