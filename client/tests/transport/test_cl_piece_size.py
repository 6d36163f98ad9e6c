"""The size of one read: whole pieces at a drive's or memory's rate, small ones without a processor."""

from __future__ import annotations

from kvpool.transport.piece_size import MAX_PIECE_BYTES, PieceSize

KIB = 1 << 10


def test_the_first_piece_and_fast_ones_are_the_largest() -> None:
    pieces = PieceSize()
    assert pieces.bytes == MAX_PIECE_BYTES
    pieces.note(MAX_PIECE_BYTES, 0.002)
    assert pieces.bytes == MAX_PIECE_BYTES


def test_a_slow_piece_makes_the_next_one_small_immediately() -> None:
    pieces = PieceSize()
    pieces.note(MAX_PIECE_BYTES, 0.6)
    assert pieces.bytes == 256 * KIB
    assert pieces.seconds(MAX_PIECE_BYTES) == 0.6


def test_the_size_follows_the_rate_in_between() -> None:
    pieces = PieceSize()
    pieces.note(MAX_PIECE_BYTES, 0.04)
    assert pieces.bytes == MAX_PIECE_BYTES // 2


def test_one_fast_piece_among_slow_ones_doubles_the_size_and_no_more() -> None:
    pieces = PieceSize()
    pieces.note(MAX_PIECE_BYTES, 0.16)
    assert pieces.bytes == 512 * KIB
    pieces.note(512 * KIB, 0.0001)
    assert pieces.bytes == 1024 * KIB


def test_small_blocks_say_nothing_of_the_rate() -> None:
    pieces = PieceSize()
    pieces.note(4 * KIB, 1.0)
    assert pieces.bytes == MAX_PIECE_BYTES
