"""Object stores keep the contract of every store: a directory, memory and a real S3-speaking server behind fsspec."""

from __future__ import annotations

import itertools
import os

import pytest
from sc_s3 import S3Server, s3_bucket

from kvpool.errors import ConfigError, TierFullError
from kvpool.protocol.block import HEADER_BYTES
from kvpool_sidecar.blocks.events import BlockEvents, BlockPromoted
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.buckets.fsspec import FsspecBucket
from kvpool_sidecar.storage.buckets.s3 import S3Bucket
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.shared.object_store import ObjectStore, ObjectStoreSettings
from kvpool_testing.blocks import header, key, payload, put, read, write
from kvpool_testing.store import StoreContract

_fresh = itertools.count(1)
MAX = 4 << 20


def make_store(bucket, *, local=None, events=None, **kw):
    settings = ObjectStoreSettings(**{"pool_uid": "uid-1", "max_payload": MAX, **kw})
    return ObjectStore(bucket, settings, local=local, events=events)


def object_name(one: bytes, pool: str = "uid-1") -> str:
    return f"{pool}/blocks/{one.hex()[:2]}/{one.hex()}"


class ObjectContract(StoreContract):
    detects_writers = False
    verifies = True
    bad_blocks = 20

    def bucket(self) -> FsspecBucket:
        raise NotImplementedError

    @pytest.fixture
    def store(self):
        store = make_store(self.bucket())
        yield store
        store.close()

    def content(self, one: bytes) -> bytearray:
        bucket, name = self.bucket(), object_name(one)
        size = bucket.size(name)
        fd = os.memfd_create("content")
        bucket.get_to_fd(name, fd, size)
        data = os.pread(fd, size, 0)
        os.close(fd)
        bucket.close()
        return bytearray(data)

    def replace(self, name: str, data: bytes) -> None:
        bucket = self.bucket()
        bucket.delete(name)
        fd = os.memfd_create("content")
        os.write(fd, data)
        assert bucket.put(name, fd, len(data))
        os.close(fd)
        bucket.close()

    def corrupt(self, store, key, offset):
        data = self.content(key)
        data[offset] ^= 1
        self.replace(object_name(key), data)

    def truncate(self, store, key, size):
        self.replace(object_name(key), self.content(key)[:size])

    def test_a_bad_block_is_kept_for_a_look_and_only_a_few_are(self, store):
        for n in range(self.bad_blocks):
            put(store, n, 100)
            self.corrupt(store, key(n), HEADER_BYTES)
            assert store.open(key(n)) is None
        kept = list(self.bucket().names("uid-1/quarantine"))
        assert 1 <= len(kept) <= 8

    def test_foreign_objects_are_nobodys_blocks(self, store):
        put(store, 1)
        for name in ("x", key(2).hex().upper(), key(3).hex() + "0", f"{key(4).hex()[:63]}/"):
            self.replace(f"uid-1/blocks/{key(2).hex()[:2]}/{name}".rstrip("/"), b"x" * 5000)
        self.replace(object_name(key(5)), b"y" * (HEADER_BYTES + MAX + 1))
        self.replace(object_name(key(6)), b"z" * 5000)
        assert set(dict(store.keys())) == {key(1), key(6)}
        assert not store.contains(key(5))
        assert store.open(key(5)) is None
        assert store.open(key(6)) is None

    def test_a_wipe_takes_this_pools_objects_and_no_others(self, store):
        other = make_store(self.bucket(), pool_uid="uid-2")
        for n in range(3):
            put(store, n, 100)
            put(other, n, 100)
        store.quarantine(key(2))
        assert store.wipe() == 4  # two blocks, a bad one, the mark
        assert list(store._bucket.names("uid-1")) == []
        assert len(dict(other.keys())) == 3
        assert put(store, 1) == CommitOutcome.STORED  # and the pool can begin again
        other.close()

    def test_pools_in_one_bucket_do_not_meet(self, store):
        put(store, 1)
        other = make_store(self.bucket(), pool_uid="uid-2")
        assert not other.contains(key(1))
        assert other.open(key(1)) is None
        assert list(other.keys()) == []
        put(other, 1, 999)
        assert read(store, 1) == payload(1)
        assert read(other, 1) == payload(1, 999)
        other.close()

    def test_a_format_of_the_future_is_refused(self, store):
        put(store, 1)
        self.replace("uid-1/POOL", b'{"format": 2, "pool_uid": "uid-1"}')
        later = make_store(self.bucket())
        with pytest.raises(ConfigError, match="format"):
            later.contains(key(1))
        later.close()

    def test_a_block_that_is_brought_here_is_kept_here(self, store):
        put(store, 1)
        local, reported = MemoryStore(1 << 20), []
        events = BlockEvents()
        events.subscribe(BlockPromoted, reported.append)
        near = make_store(self.bucket(), local=local, events=events)
        assert read(near, 1) == payload(1)
        assert read(local, 1) == payload(1)
        assert reported == [(key(1), 20_000)]
        self.replace(object_name(key(1)), b"x" * 24_096)
        assert not near.verify(key(1))  # the object itself is read, not what is here
        near.close()
        local.close()

    def test_where_the_drive_is_full_a_block_is_read_all_the_same(self, store):
        put(store, 1)
        local = MemoryStore(100)
        near = make_store(self.bucket(), local=local)
        assert read(near, 1) == payload(1)
        assert local.usage().blocks == 0
        near.close()

    def test_a_rotten_block_is_not_brought_here(self, store):
        put(store, 1)
        self.corrupt(store, key(1), 20_000)
        local = MemoryStore(1 << 20)
        near = make_store(self.bucket(), local=local)
        assert near.open(key(1)) is None
        assert local.usage() == (1 << 20, 0, 0)
        near.close()

    def test_a_block_that_rotted_on_its_way_out_is_not_stored(self, store):
        pending = store.begin(key(1), 20_000)
        write(pending, header(1, payload(1)), payload(1))
        os.pwrite(pending.writer, b"rot", 20_000)
        with pytest.raises(Exception, match="checksum"):
            pending.commit()
        assert not store.contains(key(1))

    def test_capacity_counts_what_others_stored(self, store):
        for n in range(4):
            put(store, n)
        small = make_store(self.bucket(), capacity_bytes=120_000, recount_s=0)
        small.maintain()
        assert small.usage()[1:] == (4 * 24_096, 4)
        with pytest.raises(TierFullError):
            small.begin(key(9), 30_000)
        store.delete(key(0))
        small.maintain()
        assert put(small, 9) == CommitOutcome.STORED
        small.close()

    def test_what_is_on_its_way_is_bounded_and_given_back(self, store):
        small = make_store(self.bucket(), in_flight_bytes=1)  # so: one largest block at a time
        first = small.begin(key(1), MAX)
        with pytest.raises(TierFullError):
            small.begin(key(2), MAX)
        first.abort()
        assert put(small, 2) == CommitOutcome.STORED
        assert read(small, 2) == payload(2)
        assert small._space.in_flight_bytes == 0
        assert small._space.promised_bytes == 0
        small.close()


class TestDirectory(ObjectContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.directory = tmp_path

    def bucket(self):
        return FsspecBucket(f"file://{self.directory}/prefix")

    def test_nothing_half_written_stays(self, store):
        put(store, 1)
        put(store, 2)
        assert not list(self.directory.glob("prefix/tmp*"))


class TestMemory(ObjectContract):
    @pytest.fixture(autouse=True)
    def _place(self):
        self.name = f"test-{os.getpid()}-{next(_fresh)}"

    def bucket(self):
        return FsspecBucket(f"memory://{self.name}")


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("s3") / "s3.log").start()
    yield server
    server.stop()


class TestS3(ObjectContract):
    bad_blocks = 2

    @pytest.fixture(autouse=True)
    def _place(self, s3):
        self.server = s3
        self.name = f"kv-{next(_fresh)}"
        s3.make_bucket(self.name)

    def bucket(self):
        return s3_bucket(self.server.url, f"s3://{self.name}/pools/a")


def test_the_same_bucket_through_fsspec_alone(s3):
    """As other services are used: the whole contract at S3 takes fsspec too long."""
    s3.call("PUT", "by-s3fs")
    one = make_store(s3_bucket(s3.url, "s3://by-s3fs", kind=FsspecBucket))
    other = make_store(s3_bucket(s3.url, "s3://by-s3fs"))  # the two see the same
    data = payload(1)
    pendings = [store.begin(key(1), len(data)) for store in (one, other)]
    for pending in pendings:
        write(pending, header(1, data), data)
    assert not one.contains(key(1))
    assert pendings[1].commit() == CommitOutcome.STORED
    assert pendings[0].commit() == CommitOutcome.ALREADY_PRESENT
    put(one, 2, 999)
    assert read(one, 1) == read(other, 1) == data
    assert dict(one.keys()) == dict(other.keys()) == {key(1): 20_000, key(2): 999}
    assert one.quarantine(key(2))
    assert not other.contains(key(2))
    assert one.delete(key(1))
    assert not one.delete(key(1))
    assert one.open(key(1)) is None
    assert one.wipe() == 2
    one.close()
    other.close()


@pytest.mark.parametrize("kind", [S3Bucket, FsspecBucket])
def test_blocks_in_several_pieces_are_whole(s3, kind):
    s3.call("PUT", "large")
    store = make_store(s3_bucket(s3.url, f"s3://large/{kind.__name__}", kind=kind), max_payload=64 << 20)
    size = (20 << 20) + 1
    assert put(store, 1, size) == CommitOutcome.STORED
    assert read(store, 1) == payload(1, size)
    store.close()


@pytest.mark.parametrize(
    "url",
    ["ftp://x/y", "s3://key:secret@bucket/x", "s3://bucket?x=1", "bucket", "file:///a/../b", "s3://a b", "s3://x#y"],
)
def test_urls_that_are_refused(url):
    with pytest.raises(ConfigError, match="fsspec"):
        FsspecBucket(url)


def test_a_missing_package_is_named():
    with pytest.raises(ConfigError, match="gcsfs"):
        FsspecBucket("gs://bucket/x")
