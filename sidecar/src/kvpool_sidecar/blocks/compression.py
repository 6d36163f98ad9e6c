"""Compression of payloads: file to file, in steps, with bounded memory. The only module that knows zstd and lz4.

A compressed payload is one frame, zstd (RFC 8878) or lz4 (the LZ4 frame format), that states the payload's length and
is followed by nothing. Reading one never believes it: the frame must state the length that the header states, the
caller bounds that length before, output is taken in pieces of at most STEP_BYTES, and neither a byte more nor a byte
less than the length may come.
"""

from __future__ import annotations

import io
import os
from typing import IO, TYPE_CHECKING, Protocol, cast

import lz4.frame
import zstandard

from kvpool.errors import CorruptBlockError
from kvpool.protocol import block
from kvpool.protocol.block import CODEC_LZ4, CODEC_NONE, CODEC_ZSTD, HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CODECS", "STEP_BYTES", "compress", "decompress"]

CODECS = {"None": CODEC_NONE, "Zstd": CODEC_ZSTD, "LZ4": CODEC_LZ4}
"""By their names in a pool's spec."""
STEP_BYTES = 1 << 20
_ZSTD_LEVEL = 1
_LZ4_LEVEL = 0
_ZSTD_WINDOW = 8 << 20  # what level 1 needs is less; a frame that wants more is refused
_READ_BYTES = 128 << 10
_ZSTD_MOST_HEADER = 18
_LZ4_MOST_HEADER = 19
_RLE = 1


class _Compressor(Protocol):
    def compress(self, data: memoryview, /) -> bytes: ...


def compress(codec: int, source: int, payload_len: int, target: int, limit: int) -> int | None:
    """Compress the payload of the block file `source` to where the payload goes in `target`; the stored length.

    None as soon as it takes more than `limit` bytes: not worth it. OSError; CorruptBlockError if `source` is too short.
    """
    begin, compressor, end = _ZSTD(payload_len) if codec == CODEC_ZSTD else _LZ4(payload_len)
    at = _write(target, begin, 0)
    done = 0
    buffer = memoryview(bytearray(STEP_BYTES))
    while done < payload_len:
        got = os.preadv(source, [buffer[: min(STEP_BYTES, payload_len - done)]], HEADER_BYTES + done)
        if got == 0:
            raise CorruptBlockError("payload is truncated")
        done += got
        piece = compressor.compress(buffer[:got])
        if at + len(piece) > limit:
            return None
        at = _write(target, piece, at)
    rest = end()
    return None if at + len(rest) > limit else _write(target, rest, at)


def _ZSTD(payload_len: int) -> tuple[bytes, _Compressor, Callable[[], bytes]]:  # noqa: N802
    running = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=True).compressobj(size=payload_len)
    return b"", running, running.flush


def _LZ4(payload_len: int) -> tuple[bytes, _Compressor, Callable[[], bytes]]:  # noqa: N802
    running = lz4.frame.LZ4FrameCompressor(block_size=lz4.frame.BLOCKSIZE_MAX1MB, compression_level=_LZ4_LEVEL)
    return running.begin(source_size=payload_len), running, running.flush


def _write(fd: int, data: bytes, at: int) -> int:
    """Where the next byte goes."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, HEADER_BYTES + at)
        at += done
        view = view[done:]
    return at


def decompress(source: int, header: block.BlockHeader, write: Callable[[memoryview, int], None]) -> None:
    """Decompress the payload of the block file `source`, whose header is `header` and whose lengths the caller bounds.

    `write(piece, offset)` gets at most STEP_BYTES at a time, in order. CorruptBlockError if it is not exactly one frame
    of exactly the payload's length and checksum: then what was written is void.
    """
    pieces = _from_zstd(source, header) if header.codec == CODEC_ZSTD else _from_lz4(source, header)
    running = block.running_checksum()
    done = 0
    try:
        for piece in pieces:
            if done + len(piece) > header.payload_len:
                raise CorruptBlockError("the frame holds more than it says", block_key=header.block_key.hex())
            running.update(piece)
            write(piece, done)
            done += len(piece)
    except (zstandard.ZstdError, RuntimeError, EOFError) as e:  # lz4 raises RuntimeError
        raise CorruptBlockError(
            f"the frame cannot be read: {type(e).__name__}", block_key=header.block_key.hex()
        ) from None
    if done != header.payload_len:
        raise CorruptBlockError("the frame holds less than it says", block_key=header.block_key.hex())
    block.require(header, payload_sum=running.digest)


class _Stored(io.RawIOBase):
    """The stored bytes of a block file, as a file object. The descriptor stays its owner's."""

    def __init__(self, fd: int, stored_len: int) -> None:
        super().__init__()
        self._fd = fd
        self._at = HEADER_BYTES
        self._end = HEADER_BYTES + stored_len

    def read(self, count: int = -1) -> bytes:
        left = self._end - self._at
        data = os.pread(self._fd, left if count < 0 else min(count, left), self._at)
        self._at += len(data)
        return data


def _from_zstd(source: int, header: block.BlockHeader) -> Iterator[memoryview]:
    frame = zstandard.get_frame_parameters(os.pread(source, _ZSTD_MOST_HEADER, HEADER_BYTES))
    if frame.content_size != header.payload_len or frame.dict_id or frame.window_size > _ZSTD_WINDOW:
        raise CorruptBlockError("the frame states another length, or wants too much", block_key=header.block_key.hex())
    if _zstd_frame_len(source, header.stored_len, has_checksum=frame.has_checksum) != header.stored_len:
        raise CorruptBlockError("the frame is not all there is", block_key=header.block_key.hex())
    stored = cast("IO[bytes]", _Stored(source, header.stored_len))
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    with decompressor.stream_reader(stored, read_size=_READ_BYTES, read_across_frames=False) as reader:
        buffer = memoryview(bytearray(STEP_BYTES))
        while got := reader.readinto(buffer):
            yield buffer[:got]


def _zstd_frame_len(source: int, stored_len: int, *, has_checksum: bool) -> int:
    """Bytes of the frame by the lengths of its blocks (RFC 8878, 3.1.1.2); more than `stored_len` if it is cut off."""
    at = int(zstandard.frame_header_size(os.pread(source, _ZSTD_MOST_HEADER, HEADER_BYTES)))
    last = False
    while not last:
        if at + 3 > stored_len:
            return stored_len + 1
        field = int.from_bytes(os.pread(source, 3, HEADER_BYTES + at), "little")
        last, kind, size = bool(field & 1), field >> 1 & 3, field >> 3
        at += 3 + (1 if kind == _RLE else size)
    return at + 4 * has_checksum


def _from_lz4(source: int, header: block.BlockHeader) -> Iterator[memoryview]:
    stored = _Stored(source, header.stored_len)
    info = lz4.frame.get_frame_info(os.pread(source, _LZ4_MOST_HEADER, HEADER_BYTES))
    if info["content_size"] != header.payload_len or info["skippable"]:
        raise CorruptBlockError("the frame states another length", block_key=header.block_key.hex())
    running = lz4.frame.LZ4FrameDecompressor()
    while not running.eof:
        data = stored.read(_READ_BYTES) if running.needs_input else b""
        if running.needs_input and not data:
            raise CorruptBlockError("the frame is cut off", block_key=header.block_key.hex())
        piece = running.decompress(data, max_length=STEP_BYTES)
        if piece:
            yield memoryview(piece)
    if running.unused_data or stored.read(1):
        raise CorruptBlockError("the frame is not all there is", block_key=header.block_key.hex())
