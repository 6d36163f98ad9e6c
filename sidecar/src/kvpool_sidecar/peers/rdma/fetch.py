"""The reading side: have a peer stage blocks, read them, release them. What fails is read over TCP.

Control runs over connections of its own, a few per peer, shared by all clients: the connections that clients read from
must carry block files only.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import KVPoolError, ProtocolError
from kvpool.protocol import peer_wire, wire
from kvpool.protocol.block import HEADER_BYTES, decode_header, require
from kvpool_sidecar.peers.rdma.agent import MAX_METADATA, wait_all
from kvpool_sidecar.peers.rdma.staging import LONGEST_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.peers.rdma.agent import NixlAgent, Transfer
    from kvpool_sidecar.peers.rdma.slots import Slot, SlotPool

__all__ = ["RdmaFetcher", "ReadRequest"]

log = logging.getLogger(__name__)

_IDLE_LINKS = 2
_DOWN_S = 5.0
_LONGEST_S = LONGEST_S * 2 / 3  # from before the peer staged: what is here by then was not yet anything else
_NOTHING = bytes(32)


class ReadRequest(NamedTuple):
    """A block: its key, and the payload's length that the index names."""

    key: bytes
    payload_len: int


class _Read(NamedTuple):
    at: int
    slot: Slot
    token: int
    transfer: Transfer


class RdmaFetcher:
    """Thread-safe. `dial(peer, timeout_s)` gives a proven connection."""

    def __init__(
        self,
        agent: NixlAgent,
        slots: SlotPool,
        dial: Callable[[NodeInfo, float], PeerConnection],
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._slots = slots
        self._dial = dial
        self._stats = stats
        self._clock = clock
        self._lock = threading.Lock()
        self._links: dict[NodeInfo, list[PeerConnection]] = {}
        self._names: dict[NodeInfo, str] = {}  # of agents that we can read from
        self._down: dict[NodeInfo, float] = {}

    def fetch(self, peer: NodeInfo, wanted: Sequence[ReadRequest], tenant: bytes, deadline: float) -> list[Slot | None]:
        """Whole block files in slots, in the order of `wanted`; None for what did not come. Back by `deadline`.

        The receiver gives each slot back (`give`). Only the key is checked: the reader of a block checks the rest.
        """
        slots: list[Slot | None] = [None] * len(wanted)
        deadline = min(deadline, self._clock() + _LONGEST_S)
        with self._lock:
            if self._down.get(peer, 0.0) > self._clock():
                return slots
        link: PeerConnection | None = None
        try:
            link = self._connection(peer, deadline)
            name = self._peer_name(peer, link, deadline)
            if name is not None:
                self._fetch(name, link, wanted, tenant, deadline, slots)
                self._release_connection(peer, link)
                link = None
        except (KVPoolError, OSError) as e:
            log.warning("reading from %s by RDMA: %s; TCP is used for a while", peer.node, e)
            self._stats.add("rdma", "failed")
            self._remove_peer(peer)
        finally:
            if link is not None:
                link.close()
        return slots

    def release(self, slot: Slot) -> None:
        """The client has read it."""
        self._slots.release(slot)

    def close(self) -> None:
        """Close connections and idle slots."""
        with self._lock:
            links = [link for links in self._links.values() for link in links]
            self._links.clear()
        for link in links:
            link.close()
        self._slots.close()

    def _fetch(
        self,
        name: str,
        link: PeerConnection,
        wanted: Sequence[ReadRequest],
        tenant: bytes,
        deadline: float,
        slots: list[Slot | None],
    ) -> None:
        room: list[tuple[int, Slot]] = []
        reads: list[_Read] = []
        try:
            for at, (_, payload_len) in enumerate(wanted):
                slot = self._slots.acquire(tenant, HEADER_BYTES + payload_len)
                if slot is None:
                    self._stats.add("rdma", "no-room")
                    break
                room.append((at, slot))
            if not room:
                return
            link.send_request(wire.Op.STAGE, [wanted[at].key for at, _ in room])
            for at, slot in list(room):
                answer = link.response_body(peer_wire.PEER_STAGED.size, deadline)
                if answer is None:
                    self._stats.add("rdma", "not-staged")
                    continue
                address, size, token = _staged(answer, HEADER_BYTES + wanted[at].payload_len)
                room.remove((at, slot))
                try:
                    transfer = self._agent.read(name, slot.address, address, size)
                except BaseException:
                    self._slots.discard(slot)
                    raise
                reads.append(_Read(at, slot, token, transfer))
            wait_all([read.transfer for read in reads], deadline)
            for read in reads:
                require(decode_header(read.slot.memory[:HEADER_BYTES]), block_key=wanted[read.at].key)
            for read in reads:
                slots[read.at] = read.slot
            link.send_request(wire.Op.RELEASE, [peer_wire.PEER_TOKEN.pack(read.token) for read in reads])
            self._stats.add("rdma", "blocks", len(reads))
        except BaseException:
            for read in reads:
                if slots[read.at] is None:
                    read.transfer.abandon()
                    self._slots.discard(read.slot)  # whatever it holds, no client may see it
            raise
        finally:
            for _, slot in room:
                self._slots.release(slot)

    def _connection(self, peer: NodeInfo, deadline: float) -> PeerConnection:
        while True:
            with self._lock:
                idle = self._links.get(peer)
                link = idle.pop() if idle else None
            if link is None:
                return self._dial(peer, max(0.001, deadline - self._clock()))
            if link.alive:
                return link
            link.close()

    def _release_connection(self, peer: NodeInfo, link: PeerConnection) -> None:
        with self._lock:
            idle = self._links.setdefault(peer, [])
            if len(idle) < _IDLE_LINKS:
                idle.append(link)
                return
        link.close()

    def _peer_name(self, peer: NodeInfo, link: PeerConnection, deadline: float) -> str | None:
        """The peer's agent; None, and not asked again for a while, if it has none."""
        with self._lock:
            name = self._names.get(peer)
        if name is None:
            link.send_request(wire.Op.RDMA, [_NOTHING])
            metadata = link.response_body(MAX_METADATA, deadline)
            if metadata is None:
                with self._lock:
                    self._down[peer] = self._clock() + _DOWN_S
                self._stats.add("rdma", "peer-has-none")
                return None
            name = self._agent.add_peer(metadata)
            with self._lock:
                self._names[peer] = name
        return name

    def _remove_peer(self, peer: NodeInfo) -> None:
        with self._lock:
            self._down[peer] = self._clock() + _DOWN_S
            name = self._names.pop(peer, None)
            links = self._links.pop(peer, [])
        for link in links:
            link.close()
        if name is not None:
            with contextlib.suppress(KVPoolError):
                self._agent.remove_peer(name)


def _staged(answer: bytes, expected: int) -> tuple[int, int, int]:
    if len(answer) != peer_wire.PEER_STAGED.size:
        raise ProtocolError("not an answer to STAGE")
    address, size, token = peer_wire.PEER_STAGED.unpack(answer)
    if size != expected:  # more would be written behind the slot
        raise ProtocolError("the peer has a block of another length")
    return int(address), int(size), int(token)
