"""Status of the sidecar as JSON: the source of /status for the operator and people, and of the gauges in /metrics."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvpool.protocol.block import FORMAT_VERSIONS
from kvpool.protocol.wire import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvpool.transport.circuit_breaker import CircuitBreaker
    from kvpool_sidecar.counters import Stats
    from kvpool_sidecar.index.registration import IndexRegistration
    from kvpool_sidecar.index.resolver import BlockResolver
    from kvpool_sidecar.peers.rdma.factory import RdmaStack
    from kvpool_sidecar.peers.security import PeerSecurity
    from kvpool_sidecar.replication.write_back import WriteBack
    from kvpool_sidecar.resilience.fair_queue import FairQueues
    from kvpool_sidecar.serving.config_holder import ConfigHolder
    from kvpool_sidecar.serving.fingerprints import Fingerprints
    from kvpool_sidecar.serving.listener import PodListeners
    from kvpool_sidecar.shared_gc.controller import SharedGcController
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = ["Phase", "StatusReport"]

_MOST_TENANTS = 512
_TIERS = [tier.name.lower() for tier in Tier if tier != Tier.MISS]


class Phase(StrEnum):
    """Phase of a sidecar; during a takeover (kvpool_sidecar.app.takeover) one of two sidecars does not serve."""

    STANDING_BY = "StandingBy"
    """Has requested the drives and waits."""
    SERVING = "Serving"
    HANDED_OVER = "HandedOver"
    """Has released the drives, and takes them back if its successor ends."""


class StatusReport:
    """Call it for a fresh report: JSON values only, no name of a tenant."""

    def __init__(
        self,
        *,
        node: str,
        config: ConfigHolder,
        live: Callable[[], dict[str, Any]],
        tenants: Callable[[], Sequence[bytes]],
        local: LocalStore,
        shared: SharedTier | None,
        announcer: IndexRegistration,
        index_login: Callable[[], str],
        peers: BlockResolver,
        copier: WriteBack | None,
        keeper: SharedGcController | None,
        listeners: PodListeners,
        fingerprints: Fingerprints,
        congestion_control: str,
        rdma: RdmaStack,
        admission: FairQueues,
        warm_up: Callable[[], dict[str, Any]],
        drain: Callable[[], dict[str, Any]],
        security: PeerSecurity,
        breakers: Mapping[str, CircuitBreaker],
        kv_events: Callable[[], dict[str, Any]] | None = None,
        stats: Stats,
        ready: Callable[[], bool],
    ) -> None:
        self._node = node
        self._config = config
        self._live = live
        self._tenants = tenants
        self._local = local
        self._shared = shared
        self._announcer = announcer
        self._index_login = index_login
        self._peers = peers
        self._copier = copier
        self._keeper = keeper
        self._listeners = listeners
        self._fingerprints = fingerprints
        self._congestion_control = congestion_control
        self._rdma = rdma
        self._admission = admission
        self._warm_up = warm_up
        self._drain = drain
        self._security = security
        self._breakers = breakers
        self._kv_events = kv_events
        self.stats = stats
        self.ready = ready

    def __call__(self) -> dict[str, Any]:
        usage, config = self._local.usage(), self._config.current
        index = self._announcer.status()
        return {
            "node": self._node,
            "phase": Phase.SERVING.value,
            "generation": config.generation,
            "config": self._live(),
            "block_formats": list(FORMAT_VERSIONS),
            "ready": self.ready(),
            "scanned": self._local.scanned,
            "capacity_bytes": usage.capacity_bytes,
            "used_bytes": usage.used_bytes,
            "pinned_bytes": self._local.pinned_bytes,
            "blocks": usage.blocks,
            "tenants": self._by_tenant(),
            "index": {
                "configured": bool(config.index.url),
                "connected": index.connected,
                "epoch": index.epoch,
                "announced": index.announced,
                "full": index.full,
                "login": self._index_login(),
                "node_number": self._announcer.number,
                "node_generation": self._local.generation,
                "peers": self._peers.live_peers,
            },
            "shared": {
                "configured": self._shared is not None,
                "available": self._shared is not None and self._shared.available,
                "problem": self._shared_problem(),
                "waiting": self._copier.waiting if self._copier is not None else 0,
                "dirty_bytes": self._copier.dirty_bytes if self._copier is not None else 0,
                "copies": self.stats.whole("copies"),
                **({"sweep": self._keeper.status()} if self._keeper is not None else {}),
            },
            "drives": {root.name: "failing" if root.health.fenced else "ok" for root in self._local.drives},
            "filesystems": {root.name: "shared" if root.shares_filesystem else "own" for root in self._local.drives},
            "pods": len(self._listeners.uids()),
            "clients": self._listeners.connections,
            "hits": self._by_tier("client_hits"),
            "bytes": self._by_tier("client_bytes"),
            "misses": self.stats.whole("client_misses"),
            "served": self.stats.whole("served"),
            "lookup": self.stats.whole("lookup"),
            "stored": self.stats.whole("stored"),
            "rejected": self.stats.whole("rejected"),
            "refused": self.stats.whole("refused"),
            "events": self.stats.whole("events"),
            "peer_served": self.stats.whole("peer_served"),
            "transport": "RDMA" if self._rdma.fetcher is not None else "TCP",
            "transport_reason": self._rdma.reason,
            "rdma": self.stats.whole("rdma"),
            "prefetch": self.stats.whole("prefetch"),
            "admission": self._admission.status(),
            "warm_up": self._warm_up(),
            "drain": self._drain(),
            "compression": self.stats.whole("compression"),
            "peers": self._security.status(),
            "breakers": {part: breaker.is_open for part, breaker in self._breakers.items()},
            **({"kv_events": self._kv_events()} if self._kv_events is not None else {}),
            "congestion_control": self._congestion_control,
            "fingerprints": self._fingerprints.latest(),
        }

    def _by_tenant(self) -> dict[str, dict[str, int]]:
        """By tag, where it matters whose a block is: the configured tenants, then those that take the most."""
        found = self._local.tenants()
        first = [tag for tag in self._tenants() if tag in found]
        rest = sorted(found.keys() - set(first), key=lambda tag: -found[tag].used_bytes)
        return {tag.hex(): found[tag]._asdict() for tag in [*first, *rest][:_MOST_TENANTS]}

    def _shared_problem(self) -> str:
        """Reading may work where writing is refused, so a copy's failure counts where nothing else is wrong."""
        told = self._shared.problem if self._shared is not None else ""
        return told or (self._copier.problem if self._copier is not None else "")

    def _by_tier(self, family: str) -> dict[str, int]:
        counts = self.stats.whole(family)
        return {tier: counts.get(tier, 0) for tier in _TIERS}
