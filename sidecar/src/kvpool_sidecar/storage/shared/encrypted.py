"""A shared store whose blocks are encrypted: the medium holds no payload, no prompt hash and no payload checksum.

The wrapped store holds encrypted block files (kvpool_sidecar.blocks.encryption). A plain block is decrypted into the
local tier, where its descriptor is as safe as any other; a compressed one into memory for `CompressedStore`. A block
whose key this sidecar does not have is absent and stays: another sidecar may have the key. A block that is not
encrypted is absent too, and is replaced when it is stored again.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, TypeVar

from kvpool.errors import CorruptBlockError, RefusedError, TierFullError
from kvpool.protocol.block import (
    CODEC_AES256GCM,
    CODEC_LZ4,
    CODEC_NONE,
    CODEC_ZSTD,
    HEADER_BYTES,
    encode_header,
    require,
    running_checksum,
)
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.blocks.encryption import EncryptedBlock, encrypt, key_id_in, stored_len
from kvpool_sidecar.storage.base import Block, CommitOutcome, Store, WrapperStore, WriteTransaction
from kvpool_sidecar.storage.shared.key_ring import NoKeyError
from kvpool_sidecar.storage.shared.promotion import PromotingStore, open_memory, write_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.protocol.block import BlockHeader
    from kvpool_sidecar.blocks.events import BlockEvents
    from kvpool_sidecar.storage.shared.key_ring import KeyRing

__all__ = ["EncryptedStore", "encryption_status", "key_ring_of"]

log = logging.getLogger(__name__)

_PACKED = blockfile.Expect(packed=True)
_NOT_ENCRYPTED = (CODEC_NONE, CODEC_ZSTD, CODEC_LZ4)
T = TypeVar("T")
_TRIALS = 2  # damage in transit must not quarantine the block


class EncryptedStore(PromotingStore):
    """See PromotingStore; `inner` stores the encrypted files.

    `keys` and `header` yield stored lengths and the outer header.
    """

    def __init__(
        self,
        inner: Store,
        local: Store,
        ring: KeyRing,
        *,
        max_payload: int,
        events: BlockEvents | None = None,
        count: Callable[[str, int], None] = lambda _what, _n: None,
    ) -> None:
        super().__init__(inner, local, max_payload=max_payload, events=events, count=count)
        self.ring = ring

    def contains(self, block_key: bytes) -> bool:
        """Read the header: whether this sidecar has the key. True for a torn header, which its reader quarantines."""
        try:
            outer = self._inner.header(block_key)
        except CorruptBlockError:
            return self._inner.contains(block_key)
        if outer is None or outer.codec != CODEC_AES256GCM:
            return False
        return self.ring.key(key_id_in(outer)) is not None

    def open(self, block_key: bytes) -> Block | None:
        """None also for a block that is corrupt, which quarantines it, or that the local tier has no room for."""
        return self._whole(block_key, self._inner.open, lambda found: self._open(block_key, found))

    def peek(self, block_key: bytes) -> Block | None:
        """Decrypt into memory."""
        return self._whole(block_key, self._inner.peek, lambda found: self._peek(block_key, found))

    def verify(self, block_key: bytes) -> bool:
        return self._whole(block_key, self._inner.peek, lambda found: self._verify(block_key, found)) is True

    def _whole(
        self, block_key: bytes, source: Callable[[bytes], Block | None], use: Callable[[Block], T | None]
    ) -> T | None:
        """Return what `use` makes of the stored block; None if it is absent, corrupt, or finds no room."""
        for trial in range(1, _TRIALS + 1):
            found = source(block_key)
            if found is None:
                return None
            try:
                return use(found)
            except CorruptBlockError as e:
                log.warning("an encrypted block of the shared tier (trial %d of %d): %s", trial, _TRIALS, e)
            except (TierFullError, RefusedError) as e:
                log.info("an encrypted block cannot be brought to this node: %s", e)
                return None
            finally:
                os.close(found.fd)
        self._count("corrupt", 1)
        self.quarantine(block_key)
        return None

    def _encrypted(self, block_key: bytes, found: Block) -> EncryptedBlock | None:
        """None for a block that is not encrypted, is of a newer build, or whose key is missing."""
        if blockfile.codec_of(found.fd) not in (*_NOT_ENCRYPTED, CODEC_AES256GCM):
            return None
        outer = blockfile.read_header(found.fd, block_key, found.payload_len, _PACKED)
        if outer.codec != CODEC_AES256GCM:
            self._count("not-encrypted", 1)
            return None
        if outer.payload_len > self._max_payload:
            raise CorruptBlockError(f"a payload of {outer.payload_len} bytes is too large", block_key=block_key.hex())
        key = self.ring.key(key_id_in(outer))
        if key is None:
            self._count("no-key", 1)
            return None
        return EncryptedBlock(found.fd, outer, key)

    def _open(self, block_key: bytes, found: Block) -> Block | None:
        encrypted = self._encrypted(block_key, found)
        if encrypted is None:
            return None
        inner = encrypted.header()
        if inner.codec != CODEC_NONE:
            return self._into_memory(encrypted, inner)
        self._promotions.run(block_key, lambda: self._decrypt(encrypted, inner))
        return self._local.open(block_key)

    def _peek(self, block_key: bytes, found: Block) -> Block | None:
        encrypted = self._encrypted(block_key, found)
        return None if encrypted is None else self._into_memory(encrypted, encrypted.header())

    def _verify(self, block_key: bytes, found: Block) -> bool:
        encrypted = self._encrypted(block_key, found)
        if encrypted is None:
            return False
        encrypted.header()
        encrypted.read(lambda _piece, _offset: None)
        return True

    def _into_memory(self, encrypted: EncryptedBlock, inner: BlockHeader) -> Block:
        writer, reader = open_memory()
        try:
            encrypted.read(lambda piece, offset: write_at(writer, piece, HEADER_BYTES + offset))
            os.pwrite(writer, encode_header(inner), 0)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._count("decrypted", 1)
        return Block(reader, inner.stored_len)

    def _decrypt(self, encrypted: EncryptedBlock, inner: BlockHeader) -> None:
        def write_payload(fd: int) -> None:
            running = running_checksum()

            def write(piece: memoryview, offset: int) -> None:
                running.update(piece)
                write_at(fd, piece, HEADER_BYTES + offset)

            encrypted.read(write)
            require(inner, payload_sum=running.digest)

        self._promote(inner, write_payload, counted="decrypted")

    # -- writing

    def publish(self, pending: WriteTransaction, header: BlockHeader) -> bool:
        """NoKeyError if the tenant has no key here."""
        block_key = pending.block_key
        key = self.ring.key_for(header.tenant_tag)
        if key is None:
            self._count("no-key", 1)
            raise NoKeyError("no key for the block's tenant", block_key=block_key.hex())
        self._remove_not_encrypted(block_key)
        target = self._inner.begin(block_key, stored_len(header.stored_len))
        if target is None:
            return False
        try:
            encrypt(key, pending.reader, header, target.writer)
        except BaseException:
            target.abort()
            raise
        is_stored = target.commit(_PACKED) is CommitOutcome.STORED
        self._count("encrypted", 1)
        return is_stored

    def _remove_not_encrypted(self, block_key: bytes) -> None:
        try:
            present = self._inner.header(block_key)
        except CorruptBlockError:
            return  # its reader quarantines it, unless a newer build can read it
        if present is not None and present.codec in _NOT_ENCRYPTED:
            self._inner.delete(block_key)


def key_ring_of(store: Store) -> KeyRing | None:
    """Return the keys of the shared tier `store`; None if it is not encrypted."""
    while isinstance(store, WrapperStore):
        if isinstance(store, EncryptedStore):
            return store.ring
        store = store.inner
    return None


def encryption_status(store: Store) -> dict[str, Any]:
    """Return the ids of the keys of the shared tier `store`, and its problem; empty if it is not encrypted."""
    ring = key_ring_of(store)
    return {} if ring is None else {"keys": ring.ids(), "problem": ring.problem}
