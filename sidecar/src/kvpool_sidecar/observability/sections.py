"""Sections of /status, one per group of parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvpool.protocol.wire import Tier
from kvpool.stats import ratio_text
from kvpool_sidecar.storage.shared.encrypted import encryption_status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    from kvpool_sidecar.serving.lookup_figures import LookupFigures
    from kvpool_sidecar.shared_gc.controller import SharedGcController
    from kvpool_sidecar.storage.local.store import LocalStore
    from kvpool_sidecar.storage.shared.tier import SharedTier

__all__ = [
    "CacheSection",
    "ClientSection",
    "CounterSection",
    "IndexSection",
    "NamedSection",
    "NetworkSection",
    "StatusProvider",
    "StorageSection",
]

_MAX_TENANTS = 512
_TIERS = [tier.name.lower() for tier in Tier if tier != Tier.MISS]
_COUNTERS = ("served", "lookup", "stored", "rejected", "refused", "events", "peer_served", "rdma", "prefetch")


class StatusProvider(Protocol):
    """A part with a status of its own."""

    def status(self) -> dict[str, Any]:
        """Return JSON values only."""


class NamedSection:
    """The status of one part under its name; `{"state": "off"}` without the part."""

    def __init__(self, name: str, provider: StatusProvider | None) -> None:
        self._name = name
        self._provider = provider

    def status(self) -> dict[str, Any]:
        return {self._name: {"state": "off"} if self._provider is None else self._provider.status()}


class StorageSection:
    """Usage and health of the tiers."""

    def __init__(
        self,
        config: ConfigHolder,
        stats: Stats,
        local: LocalStore,
        shared: SharedTier | None,
        write_back: WriteBack | None,
        gc: SharedGcController | None,
    ) -> None:
        self._config = config
        self._stats = stats
        self._local = local
        self._shared = shared
        self._write_back = write_back
        self._gc = gc

    def status(self) -> dict[str, Any]:
        usage = self._local.usage()
        drives = self._local.drives
        return {
            "scanned": self._local.scanned,
            "capacity_bytes": usage.capacity_bytes,
            "used_bytes": usage.used_bytes,
            "pinned_bytes": self._local.pinned_bytes,
            "blocks": usage.blocks,
            "max_blocks": self._local.max_blocks,
            "eviction_trust": round(self._local.table.order_trust, 3),
            "tenants": self._by_tenant(),
            "shared": {
                "configured": self._shared is not None,
                "available": self._shared is not None and self._shared.available,
                "problem": self._shared_problem(),
                "waiting": self._write_back.waiting if self._write_back is not None else 0,
                "dirty_bytes": self._write_back.dirty_bytes if self._write_back is not None else 0,
                "copies": self._stats.whole("copies"),
                **self._encryption(),
                **({"sweep": self._gc.status()} if self._gc is not None else {}),
            },
            "drives": {drive.name: "failing" if drive.health.fenced else "ok" for drive in drives},
            "endurance": {drive.name: drive.endurance.status() for drive in drives},
            "filesystems": {drive.name: "shared" if drive.shares_filesystem else "own" for drive in drives},
        }

    def _by_tenant(self) -> dict[str, dict[str, int]]:
        """Return usage by tag, if blocks are accounted by tenant: configured tenants first, then the largest."""
        usage = self._local.tenants()
        first = [tag for tag in self._config.tenancy.tags if tag in usage]
        rest = sorted(usage.keys() - set(first), key=lambda tag: -usage[tag].used_bytes)
        return {tag.hex(): usage[tag]._asdict() for tag in [*first, *rest][:_MAX_TENANTS]}

    def _encryption(self) -> dict[str, Any]:
        found = encryption_status(self._shared.store) if self._shared is not None else {}
        return {"encryption": found} if found else {}

    def _shared_problem(self) -> str:
        """Return the tier's problem, or that of the copies: reads may succeed where writes fail."""
        problem = self._shared.problem if self._shared is not None else ""
        return problem or (self._write_back.problem if self._write_back is not None else "")


class IndexSection:
    """State of the prefix index and of this node's registration in it."""

    def __init__(
        self,
        config: ConfigHolder,
        local: LocalStore,
        registration: IndexRegistration,
        resolver: BlockResolver,
        login: Callable[[], str],
    ) -> None:
        self._config = config
        self._local = local
        self._registration = registration
        self._resolver = resolver
        self._login = login

    def status(self) -> dict[str, Any]:
        index = self._registration.status()
        return {
            "index": {
                "configured": bool(self._config.current.index.url),
                "connected": index.connected,
                "epoch": index.epoch,
                "announced": index.announced,
                "full": index.full,
                "login": self._login(),
                "node_number": self._registration.number,
                "node_generation": self._local.generation,
                "peers": self._resolver.live_peers,
            }
        }


class ClientSection:
    """Pods, connections, fingerprints and queues."""

    def __init__(self, listeners: PodListeners, fingerprints: Fingerprints, queues: FairQueues) -> None:
        self._listeners = listeners
        self._fingerprints = fingerprints
        self._queues = queues

    def status(self) -> dict[str, Any]:
        return {
            "pods": len(self._listeners.uids()),
            "clients": self._listeners.connections,
            "admission": self._queues.status(),
            "fingerprints": self._fingerprints.latest(),
            "connected_pods": self._fingerprints.connected_pods(),
            "engine_problems": self._fingerprints.problems(),
        }


class CounterSection:
    """Counters since the start of the process."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def status(self) -> dict[str, Any]:
        return {
            "hits": self._by_tier("client_hits"),
            "bytes": self._by_tier("client_bytes"),
            "misses": self._stats.whole("client_misses"),
            "compression": self._stats.whole("compression"),
            "encryption": self._stats.whole("encryption"),
            **{family: self._stats.whole(family) for family in _COUNTERS},
        }

    def _by_tier(self, family: str) -> dict[str, int]:
        counts = self._stats.whole(family)
        return {tier: counts.get(tier, 0) for tier in _TIERS}


class CacheSection:
    """Hit rate of lookups, and the success rate of loads; member names are those of the pool's `status.cache`."""

    def __init__(self, stats: Stats, lookups: LookupFigures) -> None:
        self._stats = stats
        self._lookups = lookups

    def status(self) -> dict[str, Any]:
        loaded = sum(self._stats.whole("client_hits").values())
        tried = loaded + sum(self._stats.whole("client_misses").values())
        times = self._stats.whole("client_time")
        figures = {name: times.get(name, 0) for name in ("saved_us", "lost_us", "computed_tokens", "computed_us")}
        return {
            "cache": {
                **self._lookups.status(),
                "loadSuccessRate": ratio_text(loaded, tried),
                "secondsSaved": (figures["saved_us"] - figures["lost_us"]) // 1_000_000,
                "time": figures,
            }
        }


class NetworkSection:
    """Transport between nodes."""

    def __init__(
        self,
        security: PeerSecurity,
        rdma: RdmaStack,
        breakers: Mapping[str, CircuitBreaker],
        congestion_control: str,
    ) -> None:
        self._security = security
        self._rdma = rdma
        self._breakers = breakers
        self._congestion_control = congestion_control

    def status(self) -> dict[str, Any]:
        return {
            "transport": "RDMA" if self._rdma.fetcher is not None else "TCP",
            "transport_reason": self._rdma.reason,
            "peers": self._security.status(),
            "breakers": {part: breaker.is_open for part, breaker in self._breakers.items()},
            "congestion_control": self._congestion_control,
        }
