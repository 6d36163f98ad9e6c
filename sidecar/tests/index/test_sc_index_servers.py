"""The index in all deployments of Redis: behind TLS, with Sentinels, as a Cluster; and what a lost server costs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import redis
from sc_nodes import fresh_address, wait_for
from sc_redis import PASSWORD, Cluster, Sentinels, Servers, TlsFront

from kvpool.errors import RetryableError
from kvpool.transport.circuit_breaker import CircuitBreaker
from kvpool_sidecar.index.base import IndexAnswer, IndexFullError
from kvpool_sidecar.index.credentials import IndexCredentials, Passwords
from kvpool_sidecar.index.record import Record, entry_name
from kvpool_sidecar.index.redis_index import RedisIndex
from kvpool_sidecar.index.redis_slots import SLOTS, key_slot
from kvpool_sidecar.index.resolver import BlockResolver
from kvpool_sidecar.resilience.bulkhead import Bulkhead
from kvpool_testing.index import A, B, IndexContract, key


def connect(url, *, username="", password="", ca="", cert="", key="", **kw):
    passwords = Passwords.fixed(password) if password else None
    credentials = IndexCredentials(username, passwords, ca, cert, key)
    return RedisIndex(url, credentials=credentials, **{"lease_s": 30, "timeout_s": 5.0, "slow_timeout_s": 5.0, **kw})


def works(call):
    """The call's value as soon as it has one that is not False."""

    def attempt():
        try:
            return call()
        except RetryableError:
            return None

    return attempt


def records(index, *numbers):
    return [bool(found) for found in index.locate([key(n) for n in numbers])]


def test_slots_are_reckoned_as_redis_does():
    assert key_slot(b"123456789") == 0x31C3  # the check value in the specification of Redis Cluster
    assert key_slot(b"{user1000}.following") == key_slot(b"user1000")
    assert key_slot(b"foo{}{bar}") == key_slot(b"foo{}{bar}"[:]) != key_slot(b"bar")
    assert key_slot(b"foo{{bar}}zap") == key_slot(b"{bar")
    for n in range(200):
        assert key_slot(entry_name(key(n))) == redis.crc.key_slot(entry_name(key(n)))


# -- TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    with Servers(directory) as servers:
        server = servers.make("server", "--requirepass", PASSWORD)
        front = TlsFront(directory, (server.address, server.port))
        front.files = {
            name: str(directory / f) for name, f in (("ca", "ca.crt"), ("cert", "client.crt"), ("key", "client.key"))
        }
        front.behind = server
        yield front
        front.close()


class TestTls(IndexContract):
    @pytest.fixture
    def empty(self, tls):
        client = redis.Redis(host=tls.behind.address, port=tls.behind.port, password=PASSWORD, protocol=2)
        yield client.flushall
        client.flushall()
        client.close()

    @pytest.fixture
    def index(self, tls, empty):
        empty()
        index = connect(f"rediss://{tls.endpoint}", password=PASSWORD, **tls.files)
        yield index
        index.close()

    @pytest.fixture
    def forgetting(self, tls, empty):
        empty()
        index = connect(f"rediss://{tls.endpoint}", password=PASSWORD, **tls.files, lease_s=0.5, forget_s=1)
        yield index
        index.close()
        empty()


@pytest.mark.parametrize("without", ["ca", "cert", "password"])
def test_without_the_right_papers_there_is_no_index_behind_tls(tls, without):
    papers = tls.files | {"password": PASSWORD}
    if without == "cert":
        papers |= {"cert": "", "key": ""}
    else:
        papers |= {without: ""}
    index = connect(f"rediss://{tls.endpoint}", **papers)
    with pytest.raises(RetryableError):
        index.join(A)
    index.close()


def test_a_server_whose_certificate_names_another_address_is_not_believed(tls, tmp_path):
    other = TlsFront(tmp_path, (tls.behind.address, tls.behind.port))
    other._context.load_cert_chain(
        tls.files["ca"].replace("ca.crt", "server.crt"), tls.files["ca"].replace("ca.crt", "server.key")
    )
    index = connect(f"rediss://{other.endpoint}", password=PASSWORD, **tls.files)
    with pytest.raises(RetryableError):
        index.join(A)
    index.close()
    other.close()


# -- Sentinel


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory):
    with Sentinels(tmp_path_factory.mktemp("sentinels")) as servers:
        yield servers


class TestSentinel(IndexContract):
    @pytest.fixture
    def empty(self, sentinels):
        return lambda: sentinels.master.client.flushall()

    @pytest.fixture
    def index(self, sentinels, empty):
        empty()
        index = connect(sentinels.url, password=PASSWORD)
        yield index
        index.close()
        empty()

    @pytest.fixture
    def forgetting(self, sentinels, empty):
        empty()
        index = connect(sentinels.url, password=PASSWORD, lease_s=0.5, forget_s=1)
        yield index
        index.close()
        empty()


def test_a_promoted_replica_is_found_and_the_epoch_tells(sentinels):
    index = connect(sentinels.url, password=PASSWORD, timeout_s=0.3, slow_timeout_s=0.3)
    number = index.join(A)
    epoch = index.renew(number, A)
    index.announce([(key(n), Record(number, 1000 + n, 7)) for n in range(100)])
    old = sentinels.master
    old.client.wait(1, 5000)
    old.send(signal.SIGSTOP)  # says nothing any more, and does not close its connections either
    try:
        started = time.monotonic()
        with pytest.raises(RetryableError):
            index.locate([key(0)])
        assert time.monotonic() - started < 3
        fresh = wait_for(works(lambda: index.renew(number, A)), "the new master is found", 60)
        assert fresh != epoch
        assert index.locate([key(n) for n in range(100)]) == [(Record(number, 1000 + n, 7),) for n in range(100)]
    finally:
        old.send(signal.SIGCONT)
    index.announce([(key(200), Record(number, 5, 7))])
    assert records(index, 200) == [True]
    index.close()


def test_a_sentinel_that_knows_no_such_master_is_retryable(sentinels):
    index = connect(sentinels.url.replace("/blocks/", "/other/"), password=PASSWORD)
    with pytest.raises(RetryableError, match="no master of that name"):
        index.join(A)
    index.close()


# -- Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


USER = {"username": "kvpool", "password": "secret"}


class TestCluster(IndexContract):
    @pytest.fixture
    def empty(self, cluster):
        return cluster.flush

    @pytest.fixture
    def index(self, cluster, empty):
        empty()
        index = connect(cluster.url, **USER)
        yield index
        index.close()
        empty()

    @pytest.fixture
    def forgetting(self, cluster, empty):
        empty()
        index = connect(cluster.url, **USER, lease_s=0.5, forget_s=1)
        yield index
        index.close()
        empty()


def test_a_question_is_one_round_trip_to_each_server_of_a_cluster(cluster):
    index = connect(cluster.url, **USER)
    index.announce([(key(n), Record(1, 1000 + n, 7)) for n in range(1250)])
    before = [server.client.info("stats")["total_reads_processed"] for server in cluster.masters]
    assert all(index.locate([key(n) for n in range(300)]))
    after = [server.client.info("stats")["total_reads_processed"] for server in cluster.masters]
    # one read for the question, one for INFO itself; a long question may be read in several pieces
    assert all(0 < b - a <= 4 for a, b in zip(before, after, strict=True))
    assert all(server.client.dbsize() > 200 for server in cluster.masters)
    index.close()


def test_one_emptied_server_of_a_cluster_changes_the_epoch(cluster):
    index = connect(cluster.url, **USER)
    number = index.join(A)
    epoch = index.renew(number, A)
    assert index.renew(number, A) == epoch
    cluster.masters[2].client.flushall()
    wait_for(works(lambda: index.renew(number, A) or index.join(A) * 0), "renewed")
    assert index.renew(number, A) not in (None, epoch)
    index.close()


def test_slots_that_moved_are_followed(cluster):
    index = connect(cluster.url, **USER)
    _, source, target = cluster.masters
    n = next(n for n in range(1000) if key_slot(entry_name(key(n))) // 5461 == 1)
    name = entry_name(key(n))
    index.announce([(key(n), Record(1, 1000, 7))])
    slot = key_slot(name)
    ids = {server: server.client.execute_command("CLUSTER", "MYID").decode() for server in (source, target)}
    target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    source.client.migrate(target.address, target.port, [name], 0, 5000)
    assert records(index, n) == [True]  # ASK: it is on its way
    for server in (target, source):
        server.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
    assert records(index, n) == [True]  # MOVED
    asked = target.client.info("commandstats")["cmdstat_get"]["calls"]
    refused = source.client.info("errorstats")["errorstat_MOVED"]["count"]
    assert records(index, n) == [True]
    assert target.client.info("commandstats")["cmdstat_get"]["calls"] == asked + 1
    assert source.client.info("errorstats")["errorstat_MOVED"]["count"] == refused  # no detour any more
    index.announce([(key(n), Record(2, 1000, 7))])
    index.withdraw(1, [key(n)])
    assert index.locate([key(n)]) == [(Record(2, 1000, 7),)]
    index.close()


def test_a_cluster_that_is_taken_for_a_single_server_is_told_apart(cluster):
    index = connect(f"redis://{cluster.masters[0].endpoint}/0", **USER)
    with pytest.raises(RetryableError, match="redis\\+cluster"):
        index.locate([key(n) for n in range(20)])  # of several slots; single writes are sent on and succeed
    index.close()


def test_a_master_that_stands_still_costs_its_part_until_its_replica_is_promoted(cluster):
    """Last of the Cluster's tests: the replica stays master."""
    cluster.flush()
    index = connect(cluster.url, **USER, timeout_s=0.3, slow_timeout_s=0.3)
    number = index.join(A)
    epoch = index.renew(number, A)
    everything = [(key(n), Record(number, 1000 + n, 7)) for n in range(300)]
    index.announce(everything[:250])
    victim = cluster.masters[0]
    victim.client.wait(1, 5000)
    index.warm(2)
    victim.send(signal.SIGSTOP)
    try:
        found = index.locate([key(n) for n in range(300)])  # waits for the one that says nothing, 0.3 s
        there = sum(map(bool, found))
        assert 80 < there < 250
        assert all(records in ((), (record,)) for records, (_, record) in zip(found, everything, strict=True))
        # from now on the others answer without it, and the breaker stays closed
        guard = Bulkhead("index", 2, 8, CircuitBreaker(3, 60, time.monotonic))
        directory = BlockResolver(index, guard, lambda: 0, lease_s=30, lookup_s=0.25)
        directory._cache.note_nodes([number], IndexAnswer([], {number: A._replace(generation=7)}))
        assert sum(f is not None for f in directory.locate([key(n) for n in range(300)], 10)) == there
        assert guard.available
        guard.close()
        index.announce(everything[250:])  # those whose server is there are told
        wait_for(works(lambda: index.renew(number, A) not in (None, epoch)), "its replica has been promoted", 60)
        index.announce(everything)
        assert index.locate([k for k, _ in everything]) == [(record,) for _, record in everything]
    finally:
        victim.send(signal.SIGCONT)
    index.close()


# -- what a server refuses


def test_leases_are_kept_in_an_index_that_is_full(tmp_path):
    with Servers(tmp_path) as servers:
        server = servers.make("server", "--maxmemory-policy", "noeviction")
        index = connect(f"redis://{server.endpoint}/0", lease_s=1)
        a = index.join(A)
        epoch = index.renew(a, A)
        index.announce([(key(n), Record(a, 1, 7)) for n in range(10)])
        index.announce([(key(0), Record(77, 1, 7))])
        server.client.config_set("maxmemory", 1)
        with pytest.raises(IndexFullError):
            index.announce([(key(100), Record(a, 1, 7))])
        with pytest.raises(IndexFullError):
            index.join(B)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:  # longer than a lease
            assert index.renew(a, A) == epoch
            time.sleep(0.1)
        assert index.nodes([a]) == {a: A}
        assert records(index, *range(10)) == [True] * 10
        index.withdraw(a, [key(n) for n in range(5)])
        assert records(index, *range(10)) == [False] * 5 + [True] * 5
        server.client.config_set("maxmemory", 0)
        index.announce([(key(100), Record(a, 1, 7))])
        assert index.join(B) != a
        index.close()


def test_a_replica_is_read_but_not_written_and_a_loading_server_is_retryable(tmp_path):
    with Servers(tmp_path) as servers:
        master = servers.make("master")
        replica = servers.make("replica", "--replicaof", master.address, str(master.port))
        index, at_replica = connect(f"redis://{master.endpoint}/0"), connect(f"redis://{replica.endpoint}/0")
        index.announce([(key(1), Record(1, 1000, 7))])
        wait_for(works(lambda: records(at_replica, 1) == [True]), "the replica follows")
        with pytest.raises(RetryableError, match="READONLY"):
            at_replica.announce([(key(2), Record(1, 1000, 7))])
        with pytest.raises(RetryableError, match="READONLY"):
            at_replica.join(A)
        assert records(at_replica, 1) == [True]
        # LOADING: a dump that takes long to load
        for n in range(32):
            master.client.set(f"filler{n}", os.urandom(1 << 20))
        master.client.save()
        assert (tmp_path / "master" / "dump.rdb").exists()
        master.kill()
        master.command += ["--key-load-delay", "80000"]
        master.start()
        with pytest.raises(RetryableError, match="BusyLoading"):
            index.locate([key(1)])
        with pytest.raises(RetryableError, match="BusyLoading"):
            index.join(A)
        wait_for(works(lambda: records(index, 1) == [True]), "loaded", 60)
        for one in (index, at_replica):
            one.close()


def test_a_single_server_that_comes_back_with_old_data_has_another_epoch(tmp_path):
    with Servers(tmp_path) as servers:
        server = servers.make("server")
        index = connect(f"redis://{server.endpoint}/0")
        a = index.join(A)
        epoch = index.renew(a, A)
        server.client.save()
        index.announce([(key(1), Record(a, 1000, 7))])
        server.kill()
        server.start()
        fresh = wait_for(works(lambda: index.renew(a, A)), "renewed")
        assert records(index, 1) == [False]
        assert fresh != epoch
        index.close()


def test_no_server_of_a_cluster_anywhere_is_retryable():
    index = connect(f"redis+cluster://{fresh_address()}:1,{fresh_address()}:2", timeout_s=0.2, slow_timeout_s=0.2)
    with pytest.raises(RetryableError):
        index.locate([key(0)])
    index.close()
    assert SLOTS == 16384
