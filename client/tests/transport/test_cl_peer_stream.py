"""A batch on one peer stream: few calls of the kernel, every answer in its place, no wait past the deadline."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest
from cl_transfer import EXPECT, answer, load_of, send, soon

from kvpool.errors import CorruptBlockError, DeadlineExceededError, PoolUnavailableError
from kvpool.protocol import peer_wire, wire
from kvpool.transport import pending, transfer

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEDULED_S = 0.1  # between setting a timeout and looking at it, on a busy machine
MISS = peer_wire.PEER_RESPONSE.pack(wire.MAGIC, peer_wire.PeerStatus.MISS, 0, 0, 0)


class Counted(socket.socket):
    """Counts calls, and keeps the timeouts that were set together with the seconds then left."""

    def watch(self, batch: pending.Batch) -> None:
        self.batch, self.calls, self.late = batch, 0, []

    def recvmsg_into(self, *args: Any) -> Any:
        self.calls += 1
        whole, micros = struct.unpack("@ll", self.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
        self.late.append(time.monotonic() + whole + micros / 1e6 - self.batch.deadline)
        return super().recvmsg_into(*args)


@pytest.fixture
def pair() -> Iterator[tuple[Counted, socket.socket]]:
    ours, theirs = socket.socketpair()
    with Counted(fileno=ours.detach()) as counted, theirs:
        yield counted, theirs


def read(stream: transfer.PeerStream, sizes: list[int]) -> list[Any]:
    """The payload of each block, or the error that it ends with."""
    found: list[Any] = []
    for n, size in enumerate(sizes):
        buffer = bytearray(size)
        try:
            stream.read(load_of(memoryview(buffer)), is_last=n == len(sizes) - 1)
            found.append(bytes(buffer))
        except (CorruptBlockError, pending.PeerMissError) as e:
            found.append(type(e))
    return found


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("cut", [3, 16, 20, 4112, 70_000])
def test_every_answer_is_in_its_place_however_the_bytes_arrive(pair: Any, blocking: bool, cut: int) -> None:
    ours, theirs = pair
    ours.watch(batch := soon(60))
    ours.setblocking(blocking)
    payloads = [os.urandom(n) for n in (1, 5_000_000, 70_000, 4)]
    bad = answer(b"x" * 100, payload_sum=bytes(16))
    data = answer(payloads[0]) + MISS + MISS + answer(payloads[1]) + bad + answer(payloads[2]) + MISS
    thread = send(theirs, *(data[at : at + cut] for at in range(0, 3 * cut, cut)), data[3 * cut :])
    first = read(transfer.PeerStream(ours, batch, EXPECT), [1, 9, 9, 5_000_000, 100, 70_000, 7])
    thread.join(60)
    missed = pending.PeerMissError
    assert first == [payloads[0], missed, missed, payloads[1], CorruptBlockError, payloads[2], missed]
    theirs.sendall(answer(payloads[3]))  # the next batch on the same stream
    assert read(transfer.PeerStream(ours, batch, EXPECT), [4]) == [payloads[3]]


def test_a_batch_takes_one_call_a_block_and_one_more(pair: Any) -> None:
    ours, theirs = pair
    ours.watch(batch := soon(60))
    payloads = [os.urandom(3000) for _ in range(10)]
    theirs.sendall(b"".join(map(answer, payloads)))
    assert read(transfer.PeerStream(ours, batch, EXPECT), [3000] * 10) == payloads
    assert ours.calls == 11
    assert max(ours.late) < SCHEDULED_S  # no call could have lasted beyond the deadline


def test_bytes_of_the_next_batch_are_left_on_the_stream(pair: Any) -> None:
    ours, theirs = pair
    theirs.sendall(answer(b"one") + answer(b"two"))
    for expected in (b"one", b"two"):
        ours.watch(batch := soon(60))
        assert read(transfer.PeerStream(ours, batch, EXPECT), [3]) == [expected]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_whole_block_counts_although_the_next_never_comes(pair: Any, blocking: bool) -> None:
    ours, theirs = pair
    ours.setblocking(blocking)
    theirs.sendall(answer(b"whole") + MISS[:5])
    ours.watch(batch := soon(0.3))
    stream = transfer.PeerStream(ours, batch, EXPECT)
    load = load_of(memoryview(bytearray(5)))
    stream.read(load, is_last=False)
    assert load.view == b"whole"
    with pytest.raises(DeadlineExceededError):
        stream.read(load_of(memoryview(bytearray(5))), is_last=True)
    assert time.monotonic() >= batch.deadline
    assert max(ours.late) < SCHEDULED_S


def test_a_whole_block_counts_although_the_peer_ends_after_it(pair: Any) -> None:
    ours, theirs = pair
    theirs.sendall(answer(b"whole"))
    theirs.close()
    ours.watch(batch := soon(60))
    stream = transfer.PeerStream(ours, batch, EXPECT)
    stream.read(load_of(memoryview(bytearray(5))), is_last=False)
    with pytest.raises(PoolUnavailableError):
        stream.read(load_of(memoryview(bytearray(5))), is_last=True)
