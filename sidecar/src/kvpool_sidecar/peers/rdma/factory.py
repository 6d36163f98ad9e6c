"""Builds the RDMA stack, or returns the reason for using TCP."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import PoolUnavailableError
from kvpool_sidecar.peers.rdma.agent import NixlAgent
from kvpool_sidecar.peers.rdma.fetch import RdmaFetcher
from kvpool_sidecar.peers.rdma.selection import detect_rdma, select_transport
from kvpool_sidecar.peers.rdma.slots import SlotPool
from kvpool_sidecar.peers.rdma.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpool.config import PeerConfig
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.base import NodeInfo
    from kvpool_sidecar.peers.connection import PeerConnection
    from kvpool_sidecar.storage.base import Store

__all__ = ["RdmaStack", "make"]

log = logging.getLogger(__name__)


class RdmaStack(NamedTuple):
    """Both sides of RDMA on this node, or none of them and the reason."""

    staging: Staging | None = None
    fetcher: RdmaFetcher | None = None
    reason: str = ""

    def close(self) -> None:
        """Release connections and memory."""
        if self.fetcher is not None:
            self.fetcher.close()


def make(
    config: PeerConfig, node: str, store: Store, dial: Callable[[NodeInfo, float], PeerConnection], stats: Stats
) -> RdmaStack:
    """Try the configured protocol. Takes some seconds with NIXL; never raises for missing devices or packages."""
    if config.encryption == "Always":
        return RdmaStack(reason="TCP: encryption is Always, which RDMA cannot do")
    package, devices = detect_rdma()
    choice = select_transport(config.protocol, package=package, devices=devices)
    if not choice.rdma:
        if config.protocol == "RDMA":
            log.warning("TCP is used between nodes: %s [KVP0405]", choice.reason)
        return RdmaStack(reason=choice.reason)
    try:
        agent = NixlAgent(f"kvpool/{node}")
        staging = Staging(agent, store, config.rdma_bytes // 2)
    except (PoolUnavailableError, OSError) as e:
        log.warning("TCP is used between nodes: %s [KVP0405]", e)
        return RdmaStack(reason=str(e))
    return RdmaStack(staging, RdmaFetcher(agent, SlotPool(agent, config.rdma_bytes // 2), dial, stats))
