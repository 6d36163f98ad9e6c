"""Encrypted blocks: what comes back is what went in, a missing key is a miss, and the medium discloses nothing."""

from __future__ import annotations

import dataclasses
import os

import pytest
from sc_keys import ONE, OTHER, ring_text
from sc_nodes import MIB
from test_sc_store import FileContract

from kvpool.errors import ConfigError, CorruptBlockError
from kvpool.protocol import block
from kvpool.protocol.block import HEADER_BYTES, EngineBlock
from kvpool.protocol.keys import shared_key_id as key_id_of
from kvpool.protocol.keys import tenant_tag
from kvpool_sidecar.blocks.encryption import CHUNK_BYTES, EncryptedBlock, encrypt, stored_len
from kvpool_sidecar.storage.base import CommitOutcome
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_sidecar.storage.shared.compressed import CompressedStore
from kvpool_sidecar.storage.shared.encrypted import EncryptedStore
from kvpool_sidecar.storage.shared.filesystem import FilesystemStore
from kvpool_sidecar.storage.shared.key_ring import KeyRing, TenantTags, parse_keys
from kvpool_testing.blocks import TAG, block_id, header, key, payload, put, read

OVERHEAD = stored_len(1) - 1  # of a block with one chunk
SEALED_CHUNK = CHUNK_BYTES + 16
FIRST = HEADER_BYTES + HEADER_BYTES + 16  # where the second chunk begins in the file


class Ring:
    """A key ring of a file that tests rewrite."""

    def __init__(self, *known: bytes) -> None:
        self.text = ring_text(known[0] if known else None, *known)
        self.now = 0.0
        self.ring = KeyRing(
            lambda: self.text, TenantTags(lambda tenant: tenant_tag(b"s" * 32, tenant)), lambda: self.now
        )

    def set(self, text: bytes) -> None:
        self.text = text
        self.now += 3600


# -- the contract


class EncryptedContract(FileContract):
    detects_writers = False
    verifies = True
    codec = block.CODEC_NONE

    @pytest.fixture
    def store(self, tmp_path):
        self.directory = tmp_path
        local = MemoryStore(32 << 20)
        inner = FilesystemStore(str(tmp_path), pool_uid="u")
        store = CompressedStore(
            EncryptedStore(inner, local, Ring(ONE).ring, max_payload=16 * MIB),
            local,
            codec=self.codec,
            max_payload=16 * MIB,
        )
        yield store
        store.close()
        local.close()

    @pytest.mark.parametrize("at", [0, 40, 4095, 4096, 8192, 8208, -1])
    def test_a_flipped_bit_is_found_and_the_block_quarantined(self, store, at):
        put(store, 1)
        assert store.verify(key(1))
        self.corrupt(store, key(1), at % self.path(store, key(1)).stat().st_size)
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

    def test_a_block_says_of_itself_what_its_writer_said(self, store):
        """But nothing that is derived from its content: a purge needs the tenant, the model and the age."""
        put(store, 1)
        said = store.header(key(1))
        assert (said.block_key, said.tenant_tag, said.payload_len) == (key(1), TAG, 20_000)
        assert said.block_id != block_id(1)
        assert store.header(key(2)) is None
        self.corrupt(store, key(1), 100)
        with pytest.raises(CorruptBlockError):
            store.header(key(1))

    def test_keys_tells_every_block_and_its_length(self, store):
        for n in range(5):
            put(store, n, 10_000 + n)
        found = dict(store.keys())
        assert set(found) == {key(n) for n in range(5)}
        if self.codec == block.CODEC_NONE:
            assert found == {key(n): stored_len(10_000 + n) for n in range(5)}


class TestEncrypted(EncryptedContract):
    pass


class TestEncryptedAndCompressed(EncryptedContract):
    codec = block.CODEC_ZSTD


# -- the file


def sealed(data: bytes, under: bytes = ONE, n: int = 1) -> bytearray:
    """The file of an encrypted block with the payload `data`."""
    head = header(n, data)
    source, target = os.memfd_create("plain"), os.memfd_create("sealed")
    try:
        os.pwrite(source, block.encode_header(head) + data, 0)
        encrypt(under, source, head, target)
        return bytearray(os.pread(target, 1 << 30, 0))
    finally:
        os.close(source)
        os.close(target)


def unsealed(file: bytes, under: bytes = ONE) -> bytes:
    fd, got = os.memfd_create("sealed"), bytearray()
    try:
        os.pwrite(fd, file, 0)
        outer = block.decode_header(bytes(file[:HEADER_BYTES]), packed=True)
        assert outer.stored_len == len(file) - HEADER_BYTES
        encrypted = EncryptedBlock(fd, outer, under)
        encrypted.header()

        def take(piece: memoryview, offset: int) -> None:
            assert offset == len(got)
            assert len(piece) <= CHUNK_BYTES
            got.extend(piece)

        encrypted.read(take)
        return bytes(got)
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_what_was_encrypted_is_decrypted(size):
    data = os.urandom(size)
    file = sealed(data)
    assert len(file) == HEADER_BYTES + stored_len(size)
    assert unsealed(file) == data


def resized(file: bytearray, rest: bytes) -> bytes:
    """The file with another end and an outer header that states its length: what an attacker can write."""
    outer = block.decode_header(bytes(file[:HEADER_BYTES]), packed=True)
    return block.encode_header(dataclasses.replace(outer, stored_len=len(rest))) + rest


def swapped(file: bytearray) -> bytes:
    one, two = slice(FIRST, FIRST + SEALED_CHUNK), slice(FIRST + SEALED_CHUNK, FIRST + 2 * SEALED_CHUNK)
    file[one], file[two] = file[two], file[one]
    return bytes(file)


def respoken(file: bytearray, **fields) -> bytes:
    outer = block.decode_header(bytes(file[:HEADER_BYTES]), packed=True)
    return block.encode_header(dataclasses.replace(outer, **fields)) + bytes(file[HEADER_BYTES:])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: resized(file, bytes(file[HEADER_BYTES:-SEALED_CHUNK])),
        lambda file: resized(file, bytes(file[HEADER_BYTES:] + file[-SEALED_CHUNK:])),
        lambda file: resized(file, bytes(file[HEADER_BYTES:-1])),
        swapped,
        lambda file: bytes(file[:FIRST]) + bytes(sealed(bytes(3 * CHUNK_BYTES))[FIRST:]),
        lambda file: respoken(file, block_key=key(2)),
        lambda file: respoken(file, tenant_tag=b"u" * 16),
        lambda file: respoken(file, fingerprint=b"u" * 32),
        lambda file: respoken(file, payload_len=3 * CHUNK_BYTES - 1),
        lambda file: respoken(file, created_ms=9),
        lambda file: respoken(file, salt_tag=b"u" * 16),
        lambda file: respoken(file, payload_sum=b"u" * 16),
        lambda file: respoken(file, engine_block=EngineBlock(b"u" * 32)),
    ],
    ids=[
        "chunk-cut-off", "chunk-repeated", "byte-cut-off", "chunks-swapped", "chunks-of-another-file", "key", "tenant",
        "fingerprint", "payload-length", "age", "salt-tag", "file-salt", "name-in-engine",
    ],
)  # fmt: skip
def test_a_file_put_together_otherwise_is_corrupt(spoil):
    with pytest.raises(CorruptBlockError):
        unsealed(spoil(sealed(bytes(3 * CHUNK_BYTES))))


def test_every_byte_counts():
    file = sealed(b"x" * 100)
    for at in [*range(HEADER_BYTES, FIRST, 97), *range(FIRST, len(file))]:
        spoiled = bytearray(file)
        spoiled[at] ^= 1
        with pytest.raises(CorruptBlockError):
            unsealed(spoiled)


def test_another_key_decrypts_nothing():
    with pytest.raises(CorruptBlockError):
        unsealed(sealed(b"x" * 100), OTHER)


def test_equal_blocks_have_different_files():
    one, two = sealed(b"x" * 100), sealed(b"x" * 100)
    assert one[FIRST:] != two[FIRST:]
    assert one[: HEADER_BYTES - 16] != two[: HEADER_BYTES - 16]


def test_a_cut_source_is_not_encrypted():
    head = header(1, b"x" * 100)
    source, target = os.memfd_create("plain"), os.memfd_create("sealed")
    os.pwrite(source, block.encode_header(head) + b"x" * 99, 0)
    with pytest.raises(CorruptBlockError):
        encrypt(ONE, source, head, target)
    os.close(source)
    os.close(target)


# -- keys


def test_the_file_of_keys_is_read_again():
    keys = Ring(ONE)
    assert keys.ring.key_for(TAG) == ONE
    keys.text = ring_text(OTHER, ONE, OTHER)
    assert keys.ring.key_for(TAG) == ONE, "not before it is due"
    keys.now += 3
    assert keys.ring.key_for(TAG) == OTHER
    assert keys.ring.key(key_id_of(ONE)) == ONE
    keys.set(ring_text(OTHER, OTHER))
    assert keys.ring.key(key_id_of(ONE)) is None
    keys.set(b"")
    assert keys.ring.key_for(TAG) is None
    assert keys.ring.ids() == []


def test_a_tenant_has_its_own_key():
    text = ring_text(ONE, ONE, OTHER, tenants={"team-a": OTHER})
    ring = KeyRing(lambda: text, TenantTags(str.encode))
    assert ring.key_for(b"team-a") == OTHER
    assert ring.key_for(b"team-b") == ONE


def test_a_listed_tenant_whose_key_is_gone_does_not_get_that_of_others():
    text = ring_text(ONE, ONE, tenants={"team-a": OTHER})
    assert KeyRing(lambda: text, TenantTags(str.encode)).key_for(b"team-a") is None


def test_a_tenant_never_gets_the_default_key_before_or_after_its_own():
    text, now = ring_text(ONE, ONE), 0.0
    ring = KeyRing(lambda: text, TenantTags(str.encode, lambda: [b"kvt:new:1"]), lambda: now)
    assert ring.key_for(b"kvt:new:1") is None
    assert ring.key_for(b"namespace") == ONE
    text, now = ring_text(ONE, ONE, OTHER, tenants={"kvt:old:1": OTHER}), 10.0
    assert ring.key_for(b"kvt:old:1") == OTHER
    text, now = ring_text(ONE, ONE), 20.0
    assert ring.key_for(b"kvt:old:1") is None


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b'"x"',
        b'{"default": "", "tenants": {}}',
        b'{"default": "", "tenants": {}, "keys": []}',
        b'{"default": "zz", "tenants": {}, "keys": {}}',
        b'{"default": "", "tenants": {"a": 1}, "keys": {}}',
        ring_text(None, b"short"),
        ring_text(ONE, ONE).replace(ONE.hex().encode(), OTHER.hex().encode()),
    ],
)
def test_a_malformed_file_of_keys_gives_no_key(text):
    with pytest.raises(ConfigError):
        parse_keys(text, str.encode)
    keys = Ring(ONE)
    assert keys.ring.key_for(TAG) == ONE
    keys.set(text)
    assert keys.ring.key_for(TAG) is None
    assert keys.ring.problem
