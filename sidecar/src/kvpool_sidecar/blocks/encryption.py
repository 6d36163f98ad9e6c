"""Encryption of block files: file to file, in chunks, with bounded memory. The only module that knows AES-GCM.

An encrypted block file is a header with codec 16 (kvpool.protocol.block), then sealed chunks. The first chunk holds the
4096 bytes of the inner header, each further one 1 MiB of what follows it in the inner file (the last one less). A
sealed chunk is its bytes and a tag of 16 bytes, AES-256-GCM:

key    HKDF-SHA256 of the tenant's key, salted with the file's 32 random bytes, bound to key id and tenant tag
nonce  7 zero bytes, the chunk's number in 4 bytes, and 1 in the last chunk, else 0
AAD    SHA-256 of the outer header, which states lengths, block key, tenant tag and codec

A key encrypts one file only, so numbers serve as nonces. Two of n files under one tenant's key have the same salt with
a probability below n² / 2^257. No chunk can be cut off, moved within the file, or taken from another file.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvpool.errors import CorruptBlockError
from kvpool.protocol import block
from kvpool.protocol.block import CODEC_AES256GCM, HEADER_BYTES
from kvpool.protocol.keys import shared_key_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.protocol.block import BlockHeader

__all__ = ["CHUNK_BYTES", "KEY_BYTES", "KEY_ID_BYTES", "EncryptedBlock", "encrypt", "key_id_in", "stored_len"]

KEY_BYTES = 32
KEY_ID_BYTES = 16
CHUNK_BYTES = 1 << 20
_TAG = 16
_SALT = 32
_FIRST = HEADER_BYTES + _TAG
_PURPOSE = b"kvpool-shared-block-v1"


def key_id_in(outer: BlockHeader) -> bytes:
    """Return the id of the key that a block was encrypted with. Meaningless for other codecs."""
    return outer.block_id[:KEY_ID_BYTES]


def stored_len(inner_len: int) -> int:
    """Return the bytes behind the outer header for `inner_len` bytes behind the inner one."""
    return _FIRST + inner_len + _TAG * -(-inner_len // CHUNK_BYTES)


def encrypt(key: bytes, source: int, inner: BlockHeader, target: int) -> None:
    """Encrypt the block file `source`, whose header is `inner`, into the file `target`.

    OSError; CorruptBlockError if `source` is too short.
    """
    salt, key_id = os.urandom(_SALT), shared_key_id(key)
    rest = _SALT - KEY_ID_BYTES
    outer = replace(
        inner,
        codec=CODEC_AES256GCM,
        stored_len=stored_len(inner.stored_len),
        block_id=key_id + salt[:rest],
        payload_sum=salt[rest:],
        engine_block=None,
    )
    header = block.encode_header(outer)
    cipher, bound = _cipher(key, outer), hashlib.sha256(header).digest()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    sealed = memoryview(bytearray(CHUNK_BYTES + _TAG))
    at, number, done, size = HEADER_BYTES, 0, 0, HEADER_BYTES
    end = HEADER_BYTES + inner.stored_len
    while done < end:
        _read(source, buffer[:size], done)
        cipher.encrypt_into(_nonce(number, last=done + size == end), buffer[:size], bound, sealed[: size + _TAG])
        _write(target, sealed[: size + _TAG], at)
        at, number, done = at + size + _TAG, number + 1, done + size
        size = min(CHUNK_BYTES, end - done)
    _write(target, memoryview(header), 0)


class EncryptedBlock:
    """Reads one encrypted block file. Nothing it returns is unauthenticated. CorruptBlockError if a chunk is not whole.

    `outer` is the decoded header of the file `source`, whose length the caller has compared; `key` is the one it names.
    """

    def __init__(self, source: int, outer: BlockHeader, key: bytes) -> None:
        self._source = source
        self._outer = outer
        self._where = outer.block_key.hex()
        self._bound = hashlib.sha256(os.pread(source, HEADER_BYTES, 0)).digest()
        self._cipher = _cipher(key, outer)
        rest = outer.stored_len - _FIRST
        self.inner_len = rest - _TAG * -(-rest // (CHUNK_BYTES + _TAG))
        if self.inner_len <= 0 or stored_len(self.inner_len) != outer.stored_len:
            raise CorruptBlockError("the encrypted block has an impossible length", block_key=self._where)

    def header(self) -> BlockHeader:
        """Decrypt the inner header, which describes the same block as the outer one."""
        outer, plain = self._outer, memoryview(bytearray(HEADER_BYTES))
        self._open(0, plain, HEADER_BYTES, last=False)
        inner = block.decode_header(plain, where=self._where, packed=True)
        same = ("block_key", "fingerprint", "tenant_tag", "payload_len", "created_ms", "salt_tag")
        if inner.codec == CODEC_AES256GCM or inner.stored_len != self.inner_len:
            raise CorruptBlockError("the encrypted block holds another length", block_key=self._where)
        if any(getattr(inner, name) != getattr(outer, name) for name in same):
            raise CorruptBlockError("the encrypted block holds another block", block_key=self._where)
        return inner

    def read(self, write: Callable[[memoryview, int], None]) -> None:
        """Decrypt what follows the inner header: `write(piece, offset)` gets at most CHUNK_BYTES at a time, in order.

        If this fails, what was written is void.
        """
        plain = memoryview(bytearray(min(CHUNK_BYTES, self.inner_len)))
        at, done, number = HEADER_BYTES + _FIRST, 0, 1
        while done < self.inner_len:
            size = min(CHUNK_BYTES, self.inner_len - done)
            self._open(number, plain[:size], at, last=done + size == self.inner_len)
            write(plain[:size], done)
            at, done, number = at + size + _TAG, done + size, number + 1

    def _open(self, number: int, plain: memoryview, at: int, *, last: bool) -> None:
        sealed = memoryview(bytearray(len(plain) + _TAG))
        _read(self._source, sealed, at)
        try:
            self._cipher.decrypt_into(_nonce(number, last=last), sealed, self._bound, plain)
        except InvalidTag:
            raise CorruptBlockError(f"chunk {number} fails its authentication", block_key=self._where) from None


def _cipher(key: bytes, outer: BlockHeader) -> AESGCM:
    salt = outer.block_id[KEY_ID_BYTES:] + outer.payload_sum
    info = _PURPOSE + key_id_in(outer) + outer.tenant_tag
    return AESGCM(HKDF(SHA256(), KEY_BYTES, salt, info).derive(key))


def _nonce(number: int, *, last: bool) -> bytes:
    return bytes(7) + number.to_bytes(4, "big") + bytes([last])


def _read(fd: int, into: memoryview, at: int) -> None:
    while into:
        got = os.preadv(fd, [into], at)
        if got == 0:
            raise CorruptBlockError("the block file is cut short")
        into, at = into[got:], at + got


def _write(fd: int, piece: memoryview, at: int) -> None:
    while piece:
        done = os.pwrite(fd, piece, at)
        piece, at = piece[done:], at + done
