"""Serving side of RDMA reads for one peer connection: memory registration, staging and release."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvpool.protocol import peer_wire, wire
from kvpool_sidecar.peers.rdma.staging import Staged

if TYPE_CHECKING:
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.peers.rdma.staging import Staging

__all__ = ["PeerRdma"]


class PeerRdma:
    """Serves RDMA, STAGE and RELEASE. Without `staging` there is no registered memory, and the peer uses OPEN."""

    OPERATIONS: ClassVar = (wire.Op.RDMA, wire.Op.STAGE, wire.Op.RELEASE)

    def __init__(self, staging: Staging | None, stats: Stats) -> None:
        self._lease = staging.lease() if staging is not None else None
        self._stats = stats

    def response(self, op: int, key: bytes) -> bytes:
        """Return the response; empty for RELEASE."""
        if op == wire.Op.RELEASE:
            if self._lease is not None:
                self._lease.release(peer_wire.PEER_TOKEN.unpack(key)[0])
            return b""
        if op == wire.Op.RDMA:
            if self._lease is None:
                return _response(peer_wire.PeerStatus.MISS)
            return _response(peer_wire.PeerStatus.OK, self._lease.metadata())
        staged = self._lease.stage(key) if self._lease is not None else peer_wire.PeerStatus.BUSY
        if not isinstance(staged, Staged):
            return _response(staged)
        self._stats.add("peer_served", "blocks")
        self._stats.add("peer_served", "bytes", staged.size)
        return _response(peer_wire.PeerStatus.OK, peer_wire.PEER_STAGED.pack(*staged))


def _response(status: peer_wire.PeerStatus, body: bytes = b"") -> bytes:
    return peer_wire.PEER_RESPONSE.pack(wire.MAGIC, status, 0, 0, len(body)) + body
