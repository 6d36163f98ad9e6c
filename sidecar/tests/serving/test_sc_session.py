"""What one connection may say to a sidecar, and what happens to those who say something else. A real process."""

from __future__ import annotations

import array
import json
import os
import socket
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sc_nodes import Cluster, wait_for
from sc_raw import FINGERPRINT, GoneError, Raw, block_id, header, payload, write_block

from kvpool.protocol import block, wire
from kvpool.stats import BUCKETS_S

Begin, Commit, Open = wire.BeginStatus, wire.CommitStatus, wire.OpenStatus


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("session"), index=False) as cluster:
        yield cluster.node("a")


@pytest.fixture
def raw(node):
    with node.connect() as raw:
        yield raw


_next = iter(range(1_000_000, 9_000_000, 1000))


@pytest.fixture
def n():
    """A number whose blocks no other test uses."""
    return next(_next)


def ended(raw) -> bool:
    """Has the sidecar closed the connection, at most after an error?"""
    try:
        head, _, _ = raw.receive()
        assert head.op == wire.Op.ERROR | wire.REPLY
        raw.receive()
    except GoneError:
        return True
    except TimeoutError:
        return False
    return False


def test_hello_says_what_a_client_must_know(raw, node):
    assert raw.server.version == wire.PROTOCOL_VERSION
    assert raw.server.pool == "kvpool/test"
    assert len(raw.server.tenant_tag) == 16
    assert raw.server.max_block_bytes == node.pool.cache.max_block_bytes
    assert raw.server.deadlines["lookup_ms"] == 20


def test_what_is_stored_can_be_looked_up_and_read(raw, n):
    items = {block_id(n + i): payload(n + i) for i in range(100)}
    names = list(items)
    assert raw.lookup(names) == [wire.Tier.MISS] * 100
    assert raw.put(items) == [Commit.STORED] * 100
    assert raw.lookup(names) == [wire.Tier.LOCAL] * 100
    assert raw.get(names[:64]) == list(items.values())[:64]
    assert raw.put(items) == [Commit.HAVE] * 100


def test_a_lookup_ends_at_the_first_miss_unless_every_is_asked_for(raw, n):
    raw.put({block_id(n + i): payload(n + i) for i in (0, 1, 3, 40)})
    names = [block_id(n + i) for i in range(50)]
    local = wire.Tier.LOCAL
    assert raw.lookup(names) == [local, local] + [0] * 48
    every = raw.lookup(names, flags=wire.Flag.EXHAUSTIVE)
    assert [i for i, tier in enumerate(every) if tier] == [0, 1, 3, 40]


def test_the_largest_lookup_is_answered(raw, n):
    assert (
        raw.lookup([block_id(n + i) for i in range(wire.MAX_LOOKUP)], flags=wire.Flag.EXHAUSTIVE, ms=5000) == [0] * 4096
    )


def test_open_keeps_the_order_and_tells_misses(raw, n):
    raw.put({block_id(n): payload(n), block_id(n + 2): payload(n + 2)})
    got = raw.get([block_id(n + 1), block_id(n + 2), block_id(n), block_id(n + 3), block_id(n)])
    assert got == [None, payload(n + 2), payload(n), None, payload(n)]


def test_a_block_is_seen_by_other_connections_of_its_tenant_at_once(raw, node, n):
    raw.put({block_id(n): payload(n)})
    with node.connect() as other:
        assert other.get([block_id(n)]) == [payload(n)]


def test_two_tenants_never_meet(raw, node, n):
    """The same block id, by both; each reads its own, and the other's is the same miss as an absent block's."""
    with node.connect("team-b") as other:
        assert raw.put({block_id(n): b"a" * 5000}) == [Commit.STORED]
        assert other.lookup([block_id(n)]) == [wire.Tier.MISS]
        assert other.get([block_id(n)]) == [None]
        assert other.put({block_id(n): b"b" * 5000}) == [Commit.STORED]
        assert raw.get([block_id(n)]) == [b"a" * 5000]
        assert other.get([block_id(n)]) == [b"b" * 5000]
        assert raw.server.tenant_tag != other.server.tenant_tag
        mine, theirs = raw.open([block_id(n)])[0], other.open([block_id(n)])[0]
        assert mine.key != theirs.key
        for entry in (mine, theirs):
            os.close(entry.fd)


def test_a_block_with_the_tag_of_another_tenant_is_not_accepted(raw, node, n):
    with node.connect("team-b") as other:
        tag = other.server.tenant_tag
    ((status, token, key, fd),) = raw.begin([(block_id(n), 5000)])
    assert status == Begin.WRITE
    write_block(fd, header(block_id(n), key, b"x" * 5000, tag), b"x" * 5000)
    assert raw.commit([token]) == [Commit.REJECTED]
    assert raw.lookup([block_id(n)]) == [0]


@pytest.mark.parametrize(
    "changes",
    [
        {"block_id": block_id(1)},
        {"block_key": bytes(32)},
        {"payload_len": 4999, "stored_len": 4999},
        {"codec": 7},
        {"checksum_alg": 2},
    ],
)
def test_a_header_that_does_not_fit_is_not_accepted(raw, n, changes):
    ((_, token, key, fd),) = raw.begin([(block_id(n), 5000)])
    write_block(fd, header(block_id(n), key, b"x" * 5000, raw.server.tenant_tag, **changes), b"x" * 5000)
    assert raw.commit([token]) == [Commit.REJECTED]
    assert raw.lookup([block_id(n)]) == [0]


@pytest.mark.parametrize("size", [0, 1000, 4096 + 4999])
def test_a_file_that_was_cut_is_not_accepted(raw, n, size):
    ((_, token, key, fd),) = raw.begin([(block_id(n), 5000)])
    kept = os.dup(fd)
    write_block(fd, header(block_id(n), key, b"x" * 5000, raw.server.tenant_tag), b"x" * 5000)
    os.ftruncate(kept, size)
    with pytest.raises(PermissionError):
        os.ftruncate(kept, 4096 + 5000)
    os.close(kept)
    assert raw.commit([token]) == [Commit.REJECTED]


@pytest.mark.parametrize("size", [4096 + 5001, 10_000_000])
def test_a_writer_cannot_make_its_file_longer(raw, n, size):
    ((_, token, key, fd),) = raw.begin([(block_id(n), 5000)])
    with pytest.raises(PermissionError):
        os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", size - 1)
    with pytest.raises(PermissionError):
        os.posix_fallocate(fd, 0, size)
    write_block(fd, header(block_id(n), key, b"x" * 5000, raw.server.tenant_tag), b"x" * 5000)
    assert raw.commit([token]) == [Commit.STORED]


def test_a_client_that_keeps_its_descriptor_cannot_change_what_it_published(raw, n):
    ((_, token, key, fd),) = raw.begin([(block_id(n), 5000)])
    kept = os.dup(fd)
    write_block(fd, header(block_id(n), key, b"x" * 5000, raw.server.tenant_tag), b"x" * 5000)
    assert raw.commit([token]) == [Commit.STORED]
    with pytest.raises(PermissionError):
        os.pwrite(kept, b"y", 4096)
    os.close(kept)
    assert raw.get([block_id(n)]) == [b"x" * 5000]


def test_what_a_reader_gets_cannot_be_written(raw, n):
    raw.put({block_id(n): payload(n)})
    entry = raw.open([block_id(n)])[0]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(entry.fd, b"x", 5000)
    os.close(entry.fd)


def test_the_sidecar_fills_in_the_checksum_and_verifies_for_who_cannot(raw, node, n):
    ((_, token, key, fd),) = raw.begin([(block_id(n), 200_000)])
    data = payload(n, 200_000)
    write_block(fd, header(block_id(n), key, data, raw.server.tenant_tag, payload_sum=bytes(16)), data)
    assert raw.commit([token], flags=wire.Flag.VERIFY) == [Commit.STORED]
    assert raw.get([block_id(n)]) == [data]
    assert raw.get([block_id(n)], flags=wire.Flag.VERIFY | wire.Flag.LOCAL_ONLY) == [data]
    place = next(f for f in node.files() if f.name == key.hex())
    place.chmod(0o600)
    with place.open("r+b") as file:
        file.seek(100_000)
        file.write(b"rot")
    assert raw.get([block_id(n)], flags=wire.Flag.VERIFY | wire.Flag.LOCAL_ONLY) == [None]
    assert key.hex() in {f.name for f in node.files("quarantine")}


def test_tokens_die_with_the_connection(node, n):
    with node.connect() as first:
        ((_, token, key, fd),) = first.begin([(block_id(n), 5000)])
        write_block(fd, header(block_id(n), key, b"x" * 5000, first.server.tenant_tag), b"x" * 5000)
    with node.connect() as second:
        assert second.commit([token, 0, 77, 0xFFFFFFFF]) == [Commit.REJECTED] * 4
        assert second.lookup([block_id(n)]) == [0]


def test_a_token_is_good_once(raw, n):
    ((_, token, key, fd),) = raw.begin([(block_id(n), 5000)])
    write_block(fd, header(block_id(n), key, b"x" * 5000, raw.server.tenant_tag), b"x" * 5000)
    assert raw.commit([token, token]) == [Commit.STORED, Commit.REJECTED]


def test_too_large_and_too_many_blocks_are_refused(raw, node, n):
    limit = node.pool.cache.max_block_bytes
    answers = raw.begin([(block_id(n), 0), (block_id(n), limit + 1), (block_id(n), 2**64 - 1), (block_id(n), 1)])
    assert [a[0] for a in answers] == [Begin.REFUSED] * 3 + [Begin.WRITE]
    os.close(answers[3][3])
    # a quarter of the capacity for one pod's unfinished writes
    answers = raw.begin([(block_id(n + i), 16 << 20) for i in range(1, 20)])
    assert sum(a[0] == Begin.WRITE for a in answers) == 7
    for _, _, _, fd in answers:
        if fd >= 0:
            os.close(fd)


def test_unfinished_writes_of_a_connection_are_bounded_in_number_and_given_back(node, n):
    with node.connect() as raw:
        statuses = []
        for at in range(0, 192, 64):
            for status, _, _, fd in raw.begin([(block_id(n + at + i), 100) for i in range(64)]):
                statuses.append(status)
                if fd >= 0:
                    os.close(fd)
        assert statuses == [Begin.WRITE] * 128 + [Begin.REFUSED] * 64
    with node.connect() as raw:
        assert raw.put({block_id(n): payload(n)}) == [Commit.STORED]


def test_one_pod_has_a_bounded_number_of_connections_and_no_other_suffers(node):
    held = [node.connect() for _ in range(32)]
    with pytest.raises(GoneError):
        Raw(node.sockets["team-a"])
    with node.connect("team-b") as other:
        other.lookup([block_id(1)])
    for raw in held:
        raw.close()
    node.connect().close()


def test_a_pod_that_never_reads_gets_no_more_descriptors_and_no_other_suffers(node, n):
    """Descriptors in flight count against the sidecar's whole user (ACCESS trap: ETOOMANYREFS for everybody)."""
    names = [block_id(n + i) for i in range(64)]
    with node.connect() as raw:
        raw.put({name: payload(1, 1000) for name in names})
        body = struct.pack("<I", 1000) + b"".join(names)
        for request in range(1, 4):
            raw.send(wire.pack(wire.Op.OPEN, body, count=64, request=request))
        with node.connect("team-b") as other:
            assert other.put({block_id(n): payload(2)}) == [Commit.STORED]
            assert other.get([block_id(n)]) == [payload(2)]
        wait_for(lambda: node.status()["refused"].get("unread-descriptors"), "the sidecar held back")
        counts = []
        for _ in range(3):
            _, _, fds = raw.receive()
            counts.append(len(fds))
            for fd in fds:
                os.close(fd)
        assert counts[0] == 64
        assert 0 in counts[1:]


def test_descriptors_that_a_client_sends_are_dropped(raw, node, n):
    before = len(os.listdir(f"/proc/{node.process.pid}/fd"))
    fds = array.array("i", [0] * 50)
    for _ in range(5):
        raw.request += 1
        packet = wire.pack(wire.Op.LOOKUP, struct.pack("<I", 100) + block_id(n), count=1, request=raw.request)
        raw.socket.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        raw.receive()
    assert len(os.listdir(f"/proc/{node.process.pid}/fd")) <= before + 5


def test_a_report_is_counted_and_a_reported_block_that_is_fine_stays(raw, node, n):
    raw.put({block_id(n): payload(n)})
    before = node.status()
    report = {"corrupt": [block_id(n).hex()], "hits": {"local": 3}, "bytes": {"local": 300}, "misses": {"absent": 2}}
    raw.ask(wire.Op.REPORT, wire.pack_json(report))
    after = node.status()
    assert after["hits"]["local"] - before["hits"]["local"] == 3
    assert after["bytes"]["local"] - before["bytes"]["local"] == 300
    assert after["misses"]["absent"] - before["misses"].get("absent", 0) == 2
    assert raw.get([block_id(n)]) == [payload(n)]


def test_a_reported_block_that_is_corrupt_is_quarantined(raw, node, n):
    raw.put({block_id(n): payload(n)})
    entry = raw.open([block_id(n)])[0]
    os.close(entry.fd)
    place = next(f for f in node.files() if f.name == entry.key.hex())
    place.chmod(0o600)
    with place.open("r+b") as file:
        file.seek(9000)
        file.write(b"rot")
    raw.ask(wire.Op.REPORT, wire.pack_json({"corrupt": [block_id(n).hex()]}))
    wait_for(lambda: raw.lookup([block_id(n)]) == [0], "quarantined")
    assert place.name in {f.name for f in node.files("quarantine")}


# -- who says something else


def packet(op, body=b"", *, count=0, flags=0):
    return wire.pack(op, body, count=count, request=1, flags=flags)


def report_of(seconds) -> bytes:
    return packet(wire.Op.REPORT, json.dumps({"seconds": seconds}).encode())


BAD = {
    "empty-ish": b"K",
    "not ours": b"GET / HTTP/1.1\r\n\r\n",
    "unknown operation": packet(99),
    "reply": packet(wire.Op.LOOKUP | wire.REPLY),
    "error": packet(wire.Op.ERROR),
    "lookup without block ids": packet(wire.Op.LOOKUP, struct.pack("<I", 10)),
    "lookup without deadline": packet(wire.Op.LOOKUP, b"x"),
    "lookup with a count that lies": packet(wire.Op.LOOKUP, struct.pack("<I", 10) + bytes(32), count=2),
    "lookup with half a block id": packet(wire.Op.LOOKUP, struct.pack("<I", 10) + bytes(48), count=1),
    "open of too many": packet(wire.Op.OPEN, struct.pack("<I", 10) + bytes(65 * 32), count=65),
    "begin with a count that lies": packet(wire.Op.BEGIN, bytes(40), count=64),
    "begin of too many": packet(wire.Op.BEGIN, bytes(65 * 40), count=65),
    "begin of none": packet(wire.Op.BEGIN),
    "commit of none": packet(wire.Op.COMMIT),
    "commit of half a token": packet(wire.Op.COMMIT, bytes(6), count=1),
    "report that is no JSON": packet(wire.Op.REPORT, b"{"),
    "report that is a list": packet(wire.Op.REPORT, b"[]"),
    "report nested deeply": packet(wire.Op.REPORT, b"[" * 8000),
    "report of too many": packet(wire.Op.REPORT, json.dumps({"corrupt": ["00"] * 65}).encode()),
    "report of no block id": packet(wire.Op.REPORT, b'{"corrupt": ["xyz"]}'),
    "report with white space": packet(wire.Op.REPORT, json.dumps({"corrupt": ["  " + "00" * 31]}).encode()),
    "report of a path": packet(wire.Op.REPORT, b'{"corrupt": ["../../../../etc/passwd"]}'),
    "report of times in a list": report_of([]),
    "report of a number for times": report_of({"local": 1}),
    "report of times elsewhere": report_of({"elsewhere": [0] * (len(BUCKETS_S) + 2)}),
    "report of too few times": report_of({"local": [0] * (len(BUCKETS_S) + 1)}),
    "report of too many times": report_of({"local": [0] * 1500}),
    "report of negative times": report_of({"local": [-1] + [0] * (len(BUCKETS_S) + 1)}),
    "report of no times": report_of({"local": [True] + [0] * (len(BUCKETS_S) + 1)}),
    "report of broken times": report_of({"local": [1.5] + [0] * (len(BUCKETS_S) + 1)}),
    "report of endless times": report_of({"local": [1 << 60] + [0] * (len(BUCKETS_S) + 1)}),
    "report of text counts": packet(wire.Op.REPORT, b'{"hits": {"local": "many"}}'),
    "report of negative counts": packet(wire.Op.REPORT, b'{"hits": {"local": -1}}'),
    "report of infinite counts": packet(wire.Op.REPORT, b'{"hits": {"local": Infinity}}'),
    "report of huge counts": packet(wire.Op.REPORT, b'{"hits": {"local": 1' + b"0" * 400 + b"}}"),
    "a second hello of another version": packet(wire.Op.HELLO, wire.ClientHello(FINGERPRINT, version=2).pack()),
    "hello without fingerprint": packet(wire.Op.HELLO, b"{}"),
    "too long": b"KVP1" + bytes(wire.MAX_PACKET),
}


@pytest.mark.parametrize("what", BAD)
def test_garbage_ends_the_connection_and_nothing_else(node, what):
    with node.connect() as other, node.connect() as raw:
        raw.socket.sendall(BAD[what])
        assert ended(raw)
        other.lookup([block_id(1)])


def test_hello_comes_first(node):
    with node.connect(hello=False) as raw:
        raw.send(packet(wire.Op.LOOKUP, struct.pack("<I", 10) + block_id(1), count=1))
        assert ended(raw)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.binary(max_size=300),
    st.integers(0, 255).filter(lambda op: op != wire.Op.DONE),  # DONE has no reply
    st.integers(0, 65535),
    st.integers(0, 255),
)
def test_any_bytes_get_an_answer_or_an_end_and_the_sidecar_goes_on(node, body, op, count, flags):
    with node.connect(timeout=5) as raw:
        raw.send(wire.HEADER.pack(wire.MAGIC, op, flags, count, 1) + body)
        try:
            _, _, fds = raw.receive()
            for fd in fds:
                os.close(fd)
        except GoneError:
            pass
    with node.connect() as raw:
        raw.lookup([block_id(1)])


def test_a_connection_that_says_nothing_does_not_stay(node, tmp_path):
    raw = Raw(node.sockets["team-a"], hello=False, timeout=8)
    with pytest.raises(GoneError):
        raw.receive()
    raw.close()


def test_no_descriptor_leaks(node, n):
    """After all of the above and a few hundred requests more."""
    with node.connect() as raw:
        raw.put({block_id(n + i): payload(i, 5000) for i in range(32)})
        names = [block_id(n + i) for i in range(40)]
        raw.get(names)
        before = len(os.listdir(f"/proc/{node.process.pid}/fd"))
        for _ in range(50):
            raw.get(names)
            raw.lookup(names)
            for _, _, _, fd in raw.begin([(block_id(n + 500), 5000)]):
                os.close(fd)
            raw.commit([1, 2, 3])
        after = len(os.listdir(f"/proc/{node.process.pid}/fd"))
        assert after <= before + 51  # the begun ones are still open
    wait_for(lambda: len(os.listdir(f"/proc/{node.process.pid}/fd")) <= before, "they are closed with the connection")
    assert block.HEADER_BYTES == 4096
