"""A shared store whose blocks may be compressed.

The pool's codec compresses a new block unless that saves less than a sixteenth of its size. Blocks of any codec can be
read, so a pool can change its codec at any time. Clients get descriptors of plain files, and local drives store plain
files: opening a compressed block decompresses it into the local tier, verifies it before it is visible, and opens it
there. So readers hold no memory, the descriptor is as safe as any other, the next read is local, and a block that
missed its deadline is there for the next load.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.errors import CorruptBlockError, RefusedError, TierFullError
from kvpool.protocol.block import CODEC_LZ4, CODEC_NONE, CODEC_ZSTD, HEADER_BYTES, BlockHeader, encode_header
from kvpool_sidecar.blocks import compression as codec
from kvpool_sidecar.blocks import file as blockfile
from kvpool_sidecar.storage.base import Block, CommitOutcome, Store, WriteTransaction
from kvpool_sidecar.storage.shared.promotion import PromotingStore, open_memory, write_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool_sidecar.blocks.events import BlockEvents


__all__ = ["CompressedStore"]

log = logging.getLogger(__name__)

_PACKED = blockfile.Expect(packed=True)


class CompressedStore(PromotingStore):
    """See PromotingStore; `inner` stores the compressed blocks. `keys` yields the stored lengths."""

    def __init__(
        self,
        inner: Store,
        local: Store,
        *,
        codec: int,
        max_payload: int,
        events: BlockEvents | None = None,
        count: Callable[[str, int], None] = lambda _what, _n: None,
    ) -> None:
        super().__init__(inner, local, max_payload=max_payload, events=events, count=count)
        self._codec = codec

    def open(self, block_key: bytes) -> Block | None:
        """None also for a compressed block that is corrupt, which quarantines it, or that the local tier has no room
        for."""
        found = self._inner.open(block_key)
        if found is None:
            return None
        kind = blockfile.codec_of(found.fd)
        if kind == CODEC_NONE:
            return found
        try:
            return self._open_promoted(block_key, found) if kind in (CODEC_ZSTD, CODEC_LZ4) else None
        except CorruptBlockError as e:
            log.warning("a compressed block of the shared tier: %s", e)
            self.quarantine(block_key)
            return None
        except (TierFullError, RefusedError) as e:
            log.info("a compressed block cannot be brought to this node: %s", e)
            return None
        finally:
            os.close(found.fd)

    def peek(self, block_key: bytes) -> Block | None:
        return self.open(block_key)  # receivers of descriptors expect plain blocks

    def verify(self, block_key: bytes) -> bool:
        found = self._inner.peek(block_key)
        if found is None:
            return False
        try:
            kind = blockfile.codec_of(found.fd)
            if kind in (CODEC_ZSTD, CODEC_LZ4):
                codec.decompress(found.fd, self._header(block_key, found), lambda _piece, _offset: None)
                return True
            if kind != CODEC_NONE:
                return False  # of a newer build, which knows what to think of it
        except CorruptBlockError:
            self.quarantine(block_key)
            return False
        finally:
            os.close(found.fd)
        return self._inner.verify(block_key)

    def _header(self, block_key: bytes, found: Block) -> BlockHeader:
        header = blockfile.read_header(found.fd, block_key, found.payload_len, _PACKED)
        if header.payload_len > self._max_payload:
            raise CorruptBlockError(f"a payload of {header.payload_len} bytes is too large", block_key=block_key.hex())
        return header

    def _open_promoted(self, block_key: bytes, found: Block) -> Block | None:
        self._promotions.run(block_key, lambda: self._decompress(block_key, found))
        return self._local.open(block_key)

    def _decompress(self, block_key: bytes, found: Block) -> None:
        header = self._header(block_key, found)

        def write_payload(fd: int) -> None:
            codec.decompress(found.fd, header, lambda piece, offset: write_at(fd, piece, HEADER_BYTES + offset))

        plain = replace(header, codec=CODEC_NONE, stored_len=header.payload_len)
        self._promote(plain, write_payload, counted="decompressed")

    # -- writing

    def begin_write(self, block_key: bytes, payload_len: int) -> WriteTransaction:
        if self._codec == CODEC_NONE:
            return self._inner.begin_write(block_key, payload_len)
        return super().begin_write(block_key, payload_len)

    def publish(self, pending: WriteTransaction, header: BlockHeader) -> bool:
        size = header.payload_len
        writer, reader = open_memory()
        try:
            stored = codec.compress(self._codec, pending.reader, size, writer, size - size // 16)
            if stored is None:
                self._count("incompressible", 1)
                return self._pass_on(pending.block_key, pending.reader, size)
            os.pwrite(writer, encode_header(replace(header, codec=self._codec, stored_len=stored)), 0)
            self._count("compressed", 1)
            self._count("raw-bytes", size)
            self._count("stored-bytes", stored)
            return self._pass_on(pending.block_key, reader, stored)
        finally:
            os.close(writer)
            os.close(reader)

    def _pass_on(self, block_key: bytes, source: int, stored_len: int) -> bool:
        target = self._inner.begin(block_key, stored_len)
        if target is None:
            return False
        try:
            done = 0
            while done < target.file_bytes:
                done += os.sendfile(target.writer, source, done, target.file_bytes - done)
        except BaseException:
            target.abort()
            raise
        return target.commit(_PACKED) is CommitOutcome.STORED
