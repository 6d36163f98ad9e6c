"""Compressed blocks: what comes back is what went in, and no frame, however it lies, takes more memory than it may."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from sc_nodes import MIB, wait_for
from sc_raw import block_id as raw_block_id
from test_sc_store import FileContract

from kvpool import config
from kvpool.errors import CorruptBlockError
from kvpool.protocol import block, wire
from kvpool_sidecar.blocks import compression as codec
from kvpool_sidecar.blocks.events import BlockEvents, BlockPromoted
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.local.drive import Drive
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.shared.compressed import CompressedStore
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore
from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.blocks import header, key, payload, put, read

BOTH = (block.CODEC_ZSTD, block.CODEC_LZ4)
HEAD = block.HEADER_BYTES


class File:
    """A block file in memory."""

    def __init__(self, body: bytes = b"") -> None:
        self.fd = os.memfd_create("block")
        os.pwrite(self.fd, body, HEAD)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        os.close(self.fd)

    def body(self, size: int) -> bytes:
        return os.pread(self.fd, size, HEAD)


def squeeze(which: int, data: bytes, limit: int = 1 << 30) -> bytes | None:
    with File(data) as source, File() as target:
        stored = codec.compress(which, source.fd, len(data), target.fd, limit)
        return None if stored is None else target.body(stored)


def unsqueeze(which: int, stored: bytes, data: bytes, says: int | None = None) -> bytes:
    """Read `stored` back under a header that states `says` bytes and the checksum of `data`."""
    head = replace(header(1, data), codec=which, payload_len=len(data) if says is None else says)
    head = replace(head, stored_len=len(stored))
    got = bytearray()

    def write(piece: memoryview, offset: int) -> None:
        assert offset == len(got)
        assert len(piece) <= codec.STEP_BYTES
        got.extend(piece)
        assert len(got) <= head.payload_len, "never more than was announced"

    with File(stored) as source:
        codec.decompress(source.fd, head, write)
    return bytes(got)


# repetitive, random, and both; small, and over several steps
PAYLOADS = st.one_of(
    st.binary(min_size=1, max_size=2000),
    st.builds(lambda piece, n: piece * n, st.binary(min_size=1, max_size=50), st.integers(1, 4000)),
    st.builds(lambda seed, n: random.Random(seed).randbytes(n), st.integers(), st.integers(1, 3 * MIB)),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BOTH), PAYLOADS)
def test_what_went_in_comes_out(which, data):
    assert unsqueeze(which, squeeze(which, data), data) == data


@pytest.mark.parametrize("which", BOTH)
def test_what_does_not_shrink_is_given_up_early(which):
    data = random.Random(1).randbytes(4 * MIB)
    assert squeeze(which, data, limit=len(data) * 15 // 16) is None
    assert len(squeeze(which, bytes(4 * MIB), limit=MIB)) < 64 * 1024


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(BOTH),
    st.builds(lambda piece, n: piece * n, st.binary(min_size=1, max_size=20), st.integers(1, 2000)),
    st.data(),
)
def test_whatever_is_changed_is_found(which, data, draw):
    """A bit flipped, a tail cut off, bytes added, a frame added, another length stated: never other bytes."""
    stored = squeeze(which, data)
    says = len(data)
    kind = draw.draw(st.sampled_from(["flip", "cut", "add", "twice", "more", "less"]))
    if kind == "flip":
        at = draw.draw(st.integers(0, len(stored) - 1))
        stored = stored[:at] + bytes([stored[at] ^ 1 << draw.draw(st.integers(0, 7))]) + stored[at + 1 :]
    elif kind == "cut":
        stored = stored[: draw.draw(st.integers(0, len(stored) - 1))]
    elif kind == "add":
        stored += draw.draw(st.binary(min_size=1, max_size=20))
    elif kind == "twice":
        stored += stored
    else:
        says += 1 if kind == "more" else -1
    try:
        assert unsqueeze(which, stored, data, says) == data  # a bit that means nothing
        assert kind == "flip"
    except CorruptBlockError:
        pass


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(BOTH), st.binary(max_size=300), st.integers(1, 1 << 40))
def test_hostile_bytes_are_a_corrupt_block_and_nothing_else(which, stored, says):
    with pytest.raises(CorruptBlockError):
        unsqueeze(which, stored, b"x", says)


def zstd_bomb(says: int, holds: int) -> bytes:
    """A frame of `holds` zeros whose header says `says`; both at least 64 KiB, so that the field is 4 bytes long."""
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(holds)))
    size = zstandard.frame_header_size(bytes(frame))
    assert int.from_bytes(frame[size - 4 : size], "little") == holds
    frame[size - 4 : size] = says.to_bytes(4, "little")
    return bytes(frame)


def lz4_bomb(holds: int) -> bytes:
    return lz4.frame.compress(bytes(holds), store_size=False)


@pytest.mark.parametrize(
    ("which", "stored"),
    [
        (block.CODEC_ZSTD, zstandard.ZstdCompressor().compress(bytes(64 * MIB))),
        (block.CODEC_ZSTD, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 * MIB))),
        (block.CODEC_ZSTD, zstd_bomb(MIB, 64 * MIB)),
        (block.CODEC_ZSTD, zstandard.ZstdCompressor().compress(bytes(MIB)) * 20),
        (block.CODEC_LZ4, lz4.frame.compress(bytes(64 * MIB))),
        (block.CODEC_LZ4, lz4_bomb(64 * MIB)),
        (block.CODEC_LZ4, lz4.frame.compress(bytes(MIB)) * 20),
    ],
    ids=["honest", "unstated", "lying", "frames", "lz4-honest", "lz4-unstated", "lz4-frames"],
)
def test_a_bomb_is_refused(which, stored):
    assert len(stored) < MIB
    with pytest.raises(CorruptBlockError):
        unsqueeze(which, stored, bytes(MIB))


def test_a_frame_that_wants_a_large_window_is_refused():
    params = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, source_size=200 * MIB)
    running = zstandard.ZstdCompressor(compression_params=params).compressobj(size=200 * MIB)
    stored = b"".join([*(running.compress(bytes(MIB)) for _ in range(200)), running.flush()])
    assert zstandard.get_frame_parameters(stored).window_size == 1 << 27
    with pytest.raises(CorruptBlockError, match="wants too much"):
        unsqueeze(block.CODEC_ZSTD, stored, b"x", 200 * MIB)


MEMORY = """
import os, resource, sys
from kvpool.protocol import block
from kvpool_sidecar.blocks import compression as codec
which, says = int(sys.argv[1]), int(sys.argv[2])
fd = os.open(sys.argv[3], os.O_RDONLY)
head = block.BlockHeader(bytes(32), bytes(32), bytes(32), bytes(16), says, bytes(16), 1,
                         os.fstat(fd).st_size - block.HEADER_BYTES, which)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = [0]
def write(piece, offset):
    count[0] += len(piece)
try:
    codec.decompress(fd, head, write)
except Exception as e:
    print(type(e).__name__, e, file=sys.stderr)
print(count[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(
    ("which", "says", "stored"),
    [
        (block.CODEC_ZSTD, 256 * MIB, zstandard.ZstdCompressor(level=1).compress(bytes(256 * MIB))),
        (block.CODEC_LZ4, 256 * MIB, lz4.frame.compress(bytes(256 * MIB), block_size=lz4.frame.BLOCKSIZE_MAX4MB)),
        (block.CODEC_ZSTD, 2 * MIB, zstd_bomb(2 * MIB, 256 * MIB)),
    ],
    ids=["zstd", "lz4", "zstd-lying"],
)
def test_memory_does_not_grow_with_what_a_frame_holds(tmp_path, which, says, stored):
    """Also an honest block of 256 MiB passes through a few MiB (FAULTS: RSS below twice the block)."""
    file = tmp_path / "block"
    file.write_bytes(bytes(HEAD) + stored)
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(which), str(says), str(file)], capture_output=True, text=True, check=True
    )
    written, grown_kib = map(int, run.stdout.split())
    assert "CorruptBlockError" in run.stderr  # the checksum of the honest ones is not in this header
    assert written <= says
    assert written == says or says < 256 * MIB
    assert grown_kib < 24 * 1024


# -- in a store


class NotPacked(FileContract):
    detects_writers = False
    codec = block.CODEC_NONE

    @pytest.fixture
    def store(self, tmp_path):
        self.directory = tmp_path
        keep = MemoryStore(32 << 20)
        store = CompressedStore(
            FilesystemStore(str(tmp_path), pool_uid="u"), keep, codec=self.codec, max_payload=16 * MIB
        )
        yield store
        store.close()
        keep.close()


class TestNotPacked(NotPacked):
    pass


class Packed(NotPacked):
    """The contract, where files are shorter than their payloads and what is opened was verified."""

    @pytest.mark.parametrize("at", [0, 40, 4095, 4096, 4110, -1])
    def test_a_flipped_bit_is_found_and_the_block_quarantined(self, store, at):
        put(store, 1)
        assert store.verify(key(1))
        self.corrupt(store, key(1), at % self.path(store, key(1)).stat().st_size)
        if at == 0:  # not a block at all: its reader finds out
            with pytest.raises(CorruptBlockError):
                read(store, 1)
        else:
            assert read(store, 1) is None
        assert not store.verify(key(1))
        assert not store.contains(key(1))
        assert put(store, 1) == CommitOutcome.STORED
        assert read(store, 1) == payload(1)

    @pytest.mark.parametrize("size", [0, 100, 4096, 4097, -1])
    def test_a_truncated_block_is_a_miss_or_found_corrupt(self, store, size):
        put(store, 1)
        self.truncate(store, key(1), size % self.path(store, key(1)).stat().st_size)
        assert not store.verify(key(1))
        assert store.open(key(1)) is None

    def test_keys_tells_every_block_and_its_length(self, store):
        for n in range(5):
            put(store, n, 10_000 + n)
        assert set(dict(store.keys())) == {key(n) for n in range(5)}
        assert all(0 < length < 1000 for length in dict(store.keys()).values())


class TestPackedByZstd(Packed):
    codec = block.CODEC_ZSTD


class TestPackedByLz4(Packed):
    codec = block.CODEC_LZ4


class Tiers:
    """A shared directory and one drive; `packed(codec)` is the shared store of a pool with that codec."""

    def __init__(self, directory) -> None:
        self.directory = directory / "shared"
        self.shared = FilesystemStore(str(self.directory), pool_uid="u")
        self.local = Drive("nvme", str(directory / "nvme"), quota.CapacityLimits(64 * MIB, 85, 75, 1000), pool_uid="u")
        self.local.scan()
        self.promoted: list[tuple[bytes, int]] = []
        self.events = BlockEvents()
        self.events.subscribe(BlockPromoted, self.promoted.append)
        self.counts: dict[str, int] = {}

    def packed(self, which: int, **kw) -> CompressedStore:
        def count(what: str, n: int) -> None:
            self.counts[what] = self.counts.get(what, 0) + n

        return CompressedStore(
            self.shared, self.local, codec=which, count=count,
            **{"max_payload": 16 * MIB, "events": self.events, **kw},
        )  # fmt: skip

    def close(self) -> None:
        self.shared.close()
        self.local.close()


@pytest.fixture
def tiers(tmp_path):
    (tmp_path / "shared").mkdir(mode=0o700)
    one = Tiers(tmp_path)
    yield one
    one.close()


def test_a_pool_reads_blocks_of_every_codec_whatever_its_own_is(tiers):
    for n, which in enumerate((block.CODEC_NONE, *BOTH)):
        put(tiers.packed(which), n, MIB)
    assert sorted(n < MIB // 2 for n in dict(tiers.shared.keys()).values()) == [False, True, True]
    for which in (block.CODEC_NONE, *BOTH):
        store = tiers.packed(which)
        for n in range(3):
            assert read(store, n) == payload(n, MIB)
            tiers.local.delete(key(n))


def test_what_is_read_is_a_plain_block_of_the_local_tier(tiers):
    store = tiers.packed(block.CODEC_ZSTD)
    put(store, 1, MIB)
    found = store.open(key(1))
    head = block.decode_header(os.pread(found.fd, HEAD, 0))  # as a client does, who knows no codec
    os.close(found.fd)
    assert (head.codec, head.stored_len) == (block.CODEC_NONE, MIB)
    assert tiers.promoted == [(key(1), MIB)]
    assert read(tiers.local, 1) == payload(1, MIB)
    assert tiers.counts["compressed"] == tiers.counts["decompressed"] == 1
    assert tiers.counts["stored-bytes"] < tiers.counts["raw-bytes"] == MIB


def test_what_does_not_shrink_is_kept_as_it_is(tiers):
    store = tiers.packed(block.CODEC_LZ4)
    data = random.Random(1).randbytes(MIB)
    pending = store.begin(key(1), MIB)
    os.pwrite(pending.writer, data, HEAD)
    os.pwrite(pending.writer, block.encode_header(header(1, data)), 0)
    assert pending.commit() == CommitOutcome.STORED
    assert dict(tiers.shared.keys()) == {key(1): MIB}
    found = store.open(key(1))
    os.close(found.fd)
    assert found.payload_len == MIB
    assert not tiers.local.contains(key(1))


@pytest.mark.parametrize("which", BOTH)
def test_a_flipped_bit_in_a_compressed_block_is_a_miss_and_quarantined(tiers, which):
    store = tiers.packed(which)
    put(store, 1, MIB)
    (file,) = tiers.directory.rglob(key(1).hex())
    whole = bytearray(file.read_bytes())
    whole[-9] ^= 4
    file.chmod(0o600)
    file.write_bytes(whole)
    assert store.open(key(1)) is None
    assert not store.contains(key(1))
    assert not tiers.local.contains(key(1))
    assert not store.verify(key(1))


def test_many_who_want_the_same_block_have_it_decompressed_once(tiers, monkeypatch):
    store = tiers.packed(block.CODEC_ZSTD)
    put(store, 1, MIB)
    everybody, slow = threading.Barrier(6), codec.decompress

    def decompress(*args):
        time.sleep(0.2)  # all others come meanwhile
        slow(*args)

    monkeypatch.setattr(codec, "decompress", decompress)
    found = []

    def want() -> None:
        everybody.wait()
        found.append(read(store, 1))

    threads = [threading.Thread(target=want) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [payload(1, MIB)] * 6
    assert tiers.counts["decompressed"] == 1


def test_a_block_larger_than_the_pool_allows_is_not_decompressed(tiers):
    put(tiers.packed(block.CODEC_ZSTD), 1, 4 * MIB)
    assert tiers.packed(block.CODEC_ZSTD, max_payload=MIB).open(key(1)) is None
    assert not tiers.local.contains(key(1))


def test_without_room_in_the_local_tier_a_compressed_block_is_a_miss(tiers, tmp_path):
    put(tiers.packed(block.CODEC_ZSTD), 1, 4 * MIB)
    small = Drive("small", str(tmp_path / "small"), quota.CapacityLimits(MIB, 85, 75, 1000), pool_uid="u")
    small.scan()
    store = CompressedStore(tiers.shared, small, codec=block.CODEC_NONE, max_payload=16 * MIB)
    assert store.open(key(1)) is None
    assert store.contains(key(1))  # it is not at fault
    small.close()


def test_a_block_of_a_codec_that_is_yet_to_come_is_a_miss_and_stays(tiers):
    store = tiers.packed(block.CODEC_ZSTD)
    put(store, 1, MIB)
    (file,) = tiers.directory.rglob(key(1).hex())
    whole = bytearray(file.read_bytes())
    whole[10] = 9
    file.chmod(0o600)
    file.write_bytes(whole)
    assert store.open(key(1)) is None
    assert not store.verify(key(1))
    assert store.contains(key(1))


def test_a_client_cannot_store_a_compressed_block(tiers):
    data = payload(1, MIB)
    stored = squeeze(block.CODEC_ZSTD, data)
    pending = tiers.local.begin(key(1), len(stored))
    os.pwrite(pending.writer, stored, HEAD)
    head = replace(header(1, data), codec=block.CODEC_ZSTD, stored_len=len(stored))
    os.pwrite(pending.writer, block.encode_header(head), 0)
    with pytest.raises(CorruptBlockError):
        pending.commit()


# -- with real sidecars


@pytest.mark.parametrize("name", ["Zstd", "LZ4"])
def test_blocks_are_compressed_on_their_way_to_the_shared_tier(cluster, name):
    c = cluster(shared=True, index=False)
    a = c.node("a", cache=config.CacheConfig(compression=name))
    data = {raw_block_id(n): bytes([n]) * MIB for n in range(4)}
    with a.connect() as raw:
        assert set(raw.put(data)) == {wire.CommitStatus.STORED}
    wait_for(lambda: a.status()["shared"]["copies"].get("copied", 0) == 4, "copied")
    a.kill()
    files = [f for f in (c.shared / "blocks").rglob("*") if f.is_file()]
    assert len(files) == 4
    assert all(f.stat().st_size < MIB // 4 for f in files)
    b = c.node("b", cache=config.CacheConfig(prefetch_bytes=0))  # of a pool that compresses no more
    with b.connect() as raw:
        assert raw.lookup(list(data)) == [wire.Tier.SHARED] * 4
        assert raw.get(list(data)) == list(data.values())
        assert raw.lookup(list(data)) == [wire.Tier.LOCAL] * 4
    with b.connect("team-b") as raw:
        assert raw.lookup(list(data)) == [0] * 4
    assert b.status()["compression"]["decompressed"] == 4
