"""Encrypted tiers: a missing key is a miss and deletes nothing, and the medium discloses nothing."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest
from sc_keys import ONE, OTHER, ring_text
from sc_nodes import MIB, wait_for
from sc_raw import block_id as raw_block_id
from test_sc_encryption import Ring
from test_sc_objects import MAX, make_store

from kvpool import config
from kvpool.errors import PoolUnavailableError, ProtocolError
from kvpool.protocol import block, wire
from kvpool.protocol.block import EngineBlock
from kvpool.protocol.keys import shared_key_id as key_id_of
from kvpool_sidecar.admin.confirm_key import ConfirmKeyForgotten
from kvpool_sidecar.admin.context import Context
from kvpool_sidecar.blocks import encryption
from kvpool_sidecar.blocks.encryption import stored_len
from kvpool_sidecar.blocks.events import BlockEvents, BlockPromoted
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.buckets.fsspec import FsspecBucket
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.shared.compressed import CompressedStore
from kvpool_sidecar.storage.shared.encrypted import EncryptedStore
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore
from kvpool_sidecar.storage.shared.key_ring import NoKeyError
from kvpool_sidecar.storage.shared.tier import SharedTier
from kvpool_testing.blocks import TAG, header, key, payload, put, read, write

# -- in a store


class Tier:
    """One shared directory; `node(ring)` is the store of a node with a local tier of its own."""

    def __init__(self, directory) -> None:
        self.directory = directory
        self.shared = FilesystemStore(str(directory), pool_uid="u")
        self.locals: list[MemoryStore] = []
        self.counts: dict[str, int] = {}
        self.promoted: list[BlockPromoted] = []

    def count(self, what: str, n: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + n

    def node(self, keys: Ring | None, codec: int = block.CODEC_NONE, **kw) -> CompressedStore:
        local = MemoryStore(64 << 20)
        self.locals.append(local)
        events = BlockEvents()
        events.subscribe(BlockPromoted, self.promoted.append)
        inner = self.shared
        if keys is not None:
            settings = {"max_payload": 16 * MIB, "events": events, "count": self.count, **kw}
            inner = EncryptedStore(self.shared, local, keys.ring, **settings)
        return CompressedStore(inner, local, codec=codec, max_payload=16 * MIB, events=events)

    def files(self) -> list:
        return [f for f in (self.directory / "blocks").rglob("*") if f.is_file()]


@pytest.fixture
def tier(tmp_path):
    tier = Tier(tmp_path)
    yield tier
    tier.shared.close()
    for local in tier.locals:
        local.close()


@pytest.mark.parametrize("codec", [block.CODEC_NONE, block.CODEC_ZSTD, block.CODEC_LZ4])
def test_another_node_with_the_key_reads_it_and_keeps_a_plain_copy(tier, codec):
    put(tier.node(Ring(ONE), codec), 1, 3 * MIB)
    node = tier.node(Ring(ONE))
    assert node.contains(key(1))
    assert read(node, 1) == payload(1, 3 * MIB)
    assert read(tier.locals[-1], 1) == payload(1, 3 * MIB)
    assert tier.promoted == [(key(1), 3 * MIB)]


@pytest.mark.parametrize("keys", [Ring(), Ring(OTHER)], ids=["none", "another"])
def test_without_its_key_a_block_is_absent_and_stays(tier, keys):
    put(tier.node(Ring(ONE)), 1)
    node = tier.node(keys)
    assert not node.contains(key(1))
    assert read(node, 1) is None
    assert not node.verify(key(1))
    assert read(tier.node(Ring(ONE)), 1) == payload(1)
    assert tier.counts["no-key"] >= 2


def test_a_node_without_a_key_stores_nothing(tier):
    pending = tier.node(Ring()).begin(key(1), 20_000)
    write(pending, header(1, payload(1)), payload(1))
    with pytest.raises(NoKeyError):
        pending.commit()
    assert tier.files() == []


def test_a_node_with_another_key_replaces_nothing(tier):
    put(tier.node(Ring(ONE)), 1)
    assert put(tier.node(Ring(OTHER)), 1) == CommitOutcome.ALREADY_PRESENT
    assert read(tier.node(Ring(ONE)), 1) == payload(1)


def test_after_a_rotation_old_and_new_blocks_are_read(tier):
    keys = Ring(ONE)
    node = tier.node(keys)
    put(node, 1)
    keys.set(ring_text(OTHER, ONE, OTHER))
    put(node, 2)
    outer = [tier.shared.header(key(n)) for n in (1, 2)]
    assert [encryption.key_id_in(o) for o in outer] == [key_id_of(ONE), key_id_of(OTHER)]
    assert [read(node, n) for n in (1, 2)] == [payload(1), payload(2)]


def test_a_forgotten_key_makes_its_blocks_misses_until_they_are_purged(tier):
    keys = Ring(ONE)
    put(tier.node(keys), 1)
    keys.set(ring_text(OTHER, OTHER))
    node = tier.node(keys)
    assert not node.contains(key(1))
    assert read(node, 1) is None
    assert node.header(key(1)).tenant_tag == TAG  # a purge by tenant finds it
    assert node.purge([key(1)]) == 1
    assert put(node, 1) == CommitOutcome.STORED
    assert read(node, 1) == payload(1)


@pytest.mark.parametrize("codec", [block.CODEC_NONE, block.CODEC_ZSTD])
def test_a_block_that_is_not_encrypted_is_absent_and_replaced(tier, codec):
    put(tier.node(None, codec), 1)
    node = tier.node(Ring(ONE))
    assert not node.contains(key(1))
    assert read(node, 1) is None
    assert not node.verify(key(1))
    assert len(tier.files()) == 1, "it stays until it is stored again"
    assert put(node, 1) == CommitOutcome.STORED
    assert tier.shared.header(key(1)).codec == block.CODEC_AES256GCM
    assert read(node, 1) == payload(1)


def test_a_pool_that_does_not_encrypt_takes_encrypted_blocks_for_absent(tier):
    put(tier.node(Ring(ONE)), 1)
    node = tier.node(None, block.CODEC_ZSTD)
    assert read(node, 1) is None
    assert not node.verify(key(1))
    assert read(tier.node(Ring(ONE)), 1) == payload(1)


def test_a_block_larger_than_the_pool_allows_is_not_decrypted(tier):
    put(tier.node(Ring(ONE)), 1, 2 * MIB)
    assert read(tier.node(Ring(ONE), max_payload=MIB), 1) is None


def test_a_block_of_another_tenant_cannot_be_renamed(tier):
    """Who can write to the medium gives a block the name of another one."""
    node = tier.node(Ring(ONE))
    put(node, 1)
    put(node, 2)
    one, two = (next(f for f in tier.files() if f.name == key(n).hex()) for n in (1, 2))
    two.unlink()
    one.rename(two)
    assert read(node, 2) is None
    assert not node.contains(key(2))


def test_the_medium_holds_neither_payload_nor_hashes(tier):
    marker, engine = b"the prompt of a customer, as cached" * 1000, os.urandom(32)
    head = dataclasses.replace(header(1, marker), engine_block=EngineBlock(engine))
    pending = tier.node(Ring(ONE)).begin(key(1), len(marker))
    write(pending, head, marker)
    pending.commit()
    (file,) = tier.files()
    content = file.read_bytes()
    for secret in (marker[:16], engine, head.payload_sum, head.block_id, ONE):
        assert secret not in content


# -- in an object store


class Objects:
    def __init__(self, path) -> None:
        self.url = f"file://{path}/p"

    def store(self, *, is_encrypted: bool = True, local=None):
        largest = stored_len(MAX) if is_encrypted else MAX
        return make_store(FsspecBucket(self.url), is_encrypted=is_encrypted, max_payload=largest, local=local)

    def node(self, keys: Ring, local: MemoryStore) -> EncryptedStore:
        return EncryptedStore(self.store(), local, keys.ring, max_payload=MAX)


@pytest.mark.parametrize("size", [20_000, MAX])
def test_objects_are_encrypted(tmp_path, size):
    objects, local, other = Objects(tmp_path), MemoryStore(32 << 20), MemoryStore(32 << 20)
    put(objects.node(Ring(ONE), local), 1, size)
    node = objects.node(Ring(ONE), other)
    assert node.contains(key(1))
    assert node.verify(key(1))
    assert read(node, 1) == payload(1, size)
    assert read(other, 1) == payload(1, size)
    (file,) = (f for f in tmp_path.rglob(key(1).hex()) if f.is_file())
    assert payload(1, size)[:64] not in file.read_bytes()
    for store in (node, local, other):
        store.close()


def test_a_missing_key_deletes_no_object(tmp_path):
    objects, local = Objects(tmp_path), MemoryStore(32 << 20)
    put(objects.node(Ring(ONE), local), 1)
    for store in (objects.node(Ring(OTHER), local), objects.store(is_encrypted=False)):
        assert read(store, 1) is None
        assert not store.verify(key(1))
        store.close()
    again = objects.node(Ring(ONE), local)
    assert read(again, 1) == payload(1)
    again.close()
    local.close()


def test_a_spoiled_object_is_a_miss_and_quarantined(tmp_path):
    objects, local = Objects(tmp_path), MemoryStore(32 << 20)
    node = objects.node(Ring(ONE), local)
    put(node, 1)
    (file,) = (f for f in tmp_path.rglob(key(1).hex()) if f.is_file())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert read(node, 1) is None
    assert not node.contains(key(1))
    node.close()
    local.close()


# -- with real sidecars


def test_blocks_are_encrypted_on_their_way_to_the_shared_tier(cluster):
    c = cluster(shared=True, index=False)
    keys = c.secret / "shared-keys.json"
    keys.write_bytes(ring_text(ONE, ONE))
    shared = config.SharedTier("shared", str(c.shared), encryption="AES256GCM")
    a = c.node("a", shared=shared)
    data = {raw_block_id(n): b"a customer's prompt %d " % n * (MIB // 22) for n in range(4)}
    data = {one: content[:MIB] for one, content in data.items()}
    with a.connect() as raw:
        assert set(raw.put(data)) == {wire.CommitStatus.STORED}
    wait_for(lambda: a.status()["shared"]["copies"].get("copied", 0) == 4, "copied")
    a.kill()
    files = [f for f in (c.shared / "blocks").rglob("*") if f.is_file()]
    assert len(files) == 4
    assert not any(b"a customer's prompt" in f.read_bytes() for f in files)
    b = c.node("b", shared=shared, cache=config.CacheConfig(prefetch_bytes=0))
    with b.connect() as raw:
        assert raw.lookup(list(data)) == [wire.Tier.SHARED] * 4
        assert raw.get(list(data)) == list(data.values())
    with b.connect("team-b") as raw:
        assert raw.lookup(list(data)) == [0] * 4
    assert b.status()["encryption"]["decrypted"] == 4


def test_a_sidecar_forgets_a_key_without_a_restart(cluster):
    c = cluster(shared=True, index=False)
    keys = c.secret / "shared-keys.json"
    keys.write_bytes(ring_text(ONE, ONE))
    shared = config.SharedTier("shared", str(c.shared), encryption="AES256GCM")
    a = c.node("a", shared=shared)
    with a.connect() as raw:
        raw.put({raw_block_id(n): bytes([n]) * MIB for n in range(2)})
    wait_for(lambda: a.status()["shared"]["copies"].get("copied", 0) == 2, "copied")
    a.kill()
    b = c.node("b", shared=shared, cache=config.CacheConfig(prefetch_bytes=0))
    with b.connect() as raw:
        assert raw.get([raw_block_id(0)]) == [bytes(MIB)]
        keys.write_bytes(ring_text(OTHER, OTHER))
        wait_for(lambda: b.status()["shared"]["encryption"]["keys"] == [key_id_of(OTHER).hex()], "the new keys")
        assert raw.get([raw_block_id(1)]) == [None]
    assert len([f for f in (c.shared / "blocks").rglob("*") if f.is_file()]) == 2, "nothing was quarantined"


def test_a_sidecar_without_keys_serves_its_local_blocks_and_copies_none(cluster):
    c = cluster(shared=True, index=False)
    a = c.node("a", shared=config.SharedTier("shared", str(c.shared), encryption="AES256GCM"))
    data = {raw_block_id(1): b"x" * MIB}
    with a.connect() as raw:
        assert set(raw.put(data)) == {wire.CommitStatus.STORED}
        wait_for(lambda: a.status()["shared"]["copies"].get("no-key", 0) == 1, "not copied")
        assert raw.get(list(data)) == list(data.values())
    assert [f for f in (c.shared / "blocks").rglob("*") if f.is_file()] == []


# -- the receipt


def confirm(tier, keys, tenant="kvt:acme:1", clock=time.monotonic):
    context = Context()
    shared = SharedTier(tier.node(keys))
    try:
        ConfirmKeyForgotten(b"s" * 32, shared, clock)({"tenant": tenant}, context)
    finally:
        shared.close()
    return context.counts


def test_a_node_confirms_that_it_has_forgotten_a_key(tier):
    keys = Ring(ONE)
    keys.set(ring_text(ONE, ONE, OTHER, tenants={"kvt:acme:1": OTHER}))
    times = iter([0.0, 1.0, 181.0])
    with pytest.raises(PoolUnavailableError, match="still has"):
        confirm(tier, keys, clock=lambda: next(times))
    keys.set(ring_text(ONE, ONE))
    assert confirm(tier, keys) == {"keysForgotten": 1}
    assert confirm(tier, None) == {"keysForgotten": 1}


@pytest.mark.parametrize("params", [{}, {"tenant": ""}, {"tenant": 1}, {"tenant": "a", "more": 1}])
def test_a_confirmation_of_something_else_is_refused(params):
    with pytest.raises(ProtocolError):
        ConfirmKeyForgotten(b"s" * 32, None)(params, Context())
