"""The engine's blocks inside a block of the pool: their encoding, its bounds, and their place in the header."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import CorruptBlockError
from kvpool.protocol import block
from kvpool.protocol.router_blocks import MAX_DETAILS, NO_ROUTER_BLOCKS, RouterBlocks, pack_tokens

TOKENS = [0, 1, 255, 256, 65535, 65536, (1 << 24) - 1, 7]
BLOCKS = RouterBlocks(4, b"A" * 8 + b"B" * 8, b"P" * 8, pack_tokens(TOKENS))
HEADER = block.BlockHeader(
    b"k" * 32, b"i" * 32, b"f" * 32, b"t" * 16, 4096, b"s" * 16, 1_700_000_000_000,
    engine_block=block.EngineBlock(b"h" * 24 + b"B" * 8, b"p" * 32, bytes(4), 8, 0, BLOCKS),
)  # fmt: skip


def test_hashes_and_tokens_come_back() -> None:
    padded = BLOCKS.encode() + bytes(100)
    assert RouterBlocks.decode(padded) == BLOCKS
    assert (BLOCKS.count, BLOCKS.tokens, BLOCKS.token_numbers) == (2, 8, TOKENS)
    assert BLOCKS.hash_numbers == [int.from_bytes(b"A" * 8, "big"), int.from_bytes(b"B" * 8, "big")]


def test_blocks_without_tokens_have_no_content_in_their_encoding() -> None:
    bare = BLOCKS.without_tokens()
    assert bare.encode() == BLOCKS.encode()[: -3 * len(TOKENS)].replace(b"\2\0\1\0", b"\2\0\0\0")
    assert RouterBlocks.decode(bare.encode()) == bare
    assert not NO_ROUTER_BLOCKS
    assert NO_ROUTER_BLOCKS.encode() == b""


def test_the_largest_details_fill_the_header_exactly() -> None:
    count = (MAX_DETAILS - 16) // 8
    largest = RouterBlocks(1, bytes(8 * count))
    assert largest.size <= MAX_DETAILS < largest.size + 8
    assert RouterBlocks.decode(largest.encode()) == largest
    with pytest.raises(ValueError, match="at most"):
        RouterBlocks(1, bytes(8 * (count + 1)))


@pytest.mark.parametrize(
    ("block_tokens", "hashes", "parent", "token_ids"),
    [(4, b"A" * 7, b"", b""), (0, b"A" * 8, b"", b""), (4, b"A" * 8, b"P" * 7, b""), (4, b"A" * 8, b"", b"x" * 11),
     (4, b"", b"P" * 8, b"")],
)  # fmt: skip
def test_sizes_that_do_not_agree_are_refused(block_tokens: int, hashes: bytes, parent: bytes, token_ids: bytes) -> None:
    with pytest.raises(ValueError, match=r"malformed|not those"):
        RouterBlocks(block_tokens, hashes, parent, token_ids)


@pytest.mark.parametrize("token", [-1, 1 << 24, 1 << 40])
def test_a_token_of_more_than_24_bits_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="24 bits"):
        pack_tokens([1, token])


@given(st.binary(max_size=200) | st.binary(max_size=40).map(lambda rest: b"\4\0\0\0\2\0\1\0" + rest))
def test_any_bytes_are_blocks_or_a_value_error(data: bytes) -> None:
    try:
        found = RouterBlocks.decode(data)
    except ValueError:
        return
    assert found.encode() == data[: found.size]
    assert not any(data[found.size :])


@pytest.mark.parametrize("salt", [block.NO_SALT, b"S" * 16])
def test_a_header_with_the_engines_blocks_comes_back(salt: bytes) -> None:
    header = replace(HEADER, salt_tag=salt)
    encoded = block.encode_header(header)
    assert encoded[8] == block.FORMAT_VERSION_DETAILED
    assert block.decode_header(encoded) == header
    sum_of = block.payload_sum_of(encoded, b"k" * 32, b"i" * 32, b"f" * 32, b"t" * 16, 4096)
    assert sum_of == header.payload_sum


def test_a_name_without_the_engines_blocks_is_written_as_before() -> None:
    assert HEADER.engine_block is not None
    plain = replace(HEADER, engine_block=replace(HEADER.engine_block, router_blocks=NO_ROUTER_BLOCKS))
    assert block.encode_header(plain)[8] == block.FORMAT_VERSION_NAMED


@pytest.mark.parametrize(("offset", "value"), [(276, b"\5"), (280, b"\0\0"), (282, b"\2"), (4079, b"x"), (168, b"\0")])
def test_malformed_details_are_refused_though_the_checksum_holds(offset: int, value: bytes) -> None:
    body = bytearray(block.encode_header(HEADER)[:-16])
    body[offset : offset + len(value)] = value
    with pytest.raises(CorruptBlockError, match="engine block identity"):
        block.decode_header(bytes(body) + hashlib.blake2b(body, digest_size=16).digest())


def test_a_changed_token_fails_the_checksum() -> None:
    encoded = bytearray(block.encode_header(HEADER))
    encoded[276 + 8 + 16 + 8 + 3] ^= 1
    with pytest.raises(CorruptBlockError, match="checksum"):
        block.decode_header(bytes(encoded))
