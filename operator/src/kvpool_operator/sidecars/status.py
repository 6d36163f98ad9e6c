"""Status of a sidecar as /status reports it (docs/contribute/design/contracts.md); invalid values count as missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from kvpool_operator.sidecars.cache import CacheReport
from kvpool_operator.text import one_line, parse_count

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ConnectedPod",
    "DrainReport",
    "Fingerprint",
    "PeerReport",
    "Phase",
    "ReportedTenantUsage",
    "SidecarStatus",
    "UnreachablePeer",
]

Phase = Literal["", "Serving", "StandingBy", "HandedOver"]
"""Role of a pod on a node that may have two; empty: not reported (older releases)."""

_TEXT = 200
_MOST_FIELDS = 48
_MOST_PODS = 16
_MOST_TENANTS = 1024
_MOST_PEERS = 64
_MOST_CONNECTED = 512
_MOST_PROBLEMS = 64
_PHASES: Final[dict[str, Phase]] = {phase: phase for phase in get_args(Phase)}


@dataclass(frozen=True)
class ConnectedPod:
    """A pod whose engine reported a fingerprint. `seen`: Unix time of its last connection."""

    uid: str
    connected: bool
    seen: int


@dataclass(frozen=True)
class Fingerprint:
    """Blocks of one fingerprint on a node."""

    digest: str
    engine: str
    model: str
    bytes: int
    fields: dict[str, str] = field(default_factory=dict)
    """Digests of the fingerprint inputs, by field; empty if its clients do not report them."""
    connected: int = 0
    """Number of connected pods."""
    pods: tuple[ConnectedPod, ...] = ()
    """Some of the pods that are or were connected."""
    is_tested: bool = True
    """Whether the plug-in was tested with the engine's version. Older sidecars and clients do not report it."""


@dataclass(frozen=True)
class DrainReport:
    """Progress of a drain. `clean`: every hot block of the node has another copy."""

    leaving: bool = False
    by_node: bool = False
    """The operator requested it because the node leaves; otherwise an operation did."""
    clean: bool = False
    moved_blocks: int = 0
    moved_bytes: int = 0
    remaining_blocks: int = 0
    remaining_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True)
class UnreachablePeer:
    """A live peer that the sidecar cannot read from."""

    node: str
    reason: str


@dataclass(frozen=True)
class PeerReport:
    """Peers by the result of the sidecar's probes. `unreachable` has at most 64 of them, `failed` counts all."""

    verified: int = 0
    failed: int = 0
    unverified: int = 0
    unreachable: tuple[UnreachablePeer, ...] = ()


@dataclass(frozen=True)
class ReportedTenantUsage:
    """Usage of one tenant on a node."""

    used_bytes: int = 0
    blocks: int = 0
    over_quota: int = 0
    """Blocks evicted because of its quota."""


@dataclass(frozen=True)
class SidecarStatus:
    """Status of one sidecar. Counters start with the process. A sidecar that does not serve reports its phase only."""

    phase: Phase = ""
    ready: bool = False
    generation: int = 0
    config: str = ""
    """Digest of the configuration that it runs (kvpool.config.digest); empty if not reported."""
    config_problem: str = ""
    """Why it does not run the latest configuration."""
    capacity_bytes: int = 0
    used_bytes: int = 0
    blocks: int = 0
    index_connected: bool = False
    index_announced: int = 0
    index_full: bool = False
    """Whether the index has no memory for more entries."""
    node_generation: int = 0
    """Generation of the first tier's directory on the node."""
    index_login: str = ""
    """Digest of the password that it used last (kvpool.protocol.keys.index_login)."""
    scanned: bool = True
    """False until it has scanned its drives."""
    block_formats: tuple[int, ...] = ()
    """Versions of the block format that it reads; empty if not reported."""
    shared_problem: str = ""
    """Why the shared tier is unavailable on this node; empty if it is available or not configured."""
    failing_drives: tuple[str, ...] = ()
    """Names of local tiers that return I/O errors."""
    clients: int = 0
    agent_connected: bool = True
    """Whether the node agent is connected; true if not reported."""
    transport: str = ""
    transport_reason: str = ""
    """Why RDMA is not used; empty if it is."""
    cache: CacheReport = field(default_factory=CacheReport)
    """Hit rate of lookups."""
    hits: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    """Refused requests, connections and writes by reason."""
    clock_offset_s: float | None = None
    """Seconds by which its clock is ahead of the observer's; None if not reported."""
    fingerprints: tuple[Fingerprint, ...] = ()
    connected_pods: frozenset[str] = frozenset()
    """Uids of pods whose engine is connected."""
    engine_problems: dict[str, str] = field(default_factory=dict)
    """Why an engine runs without the pool, in the words of its plug-in, by the pod's uid. Untrusted text."""
    uptime_s: float = float("inf")
    """Seconds since the process started; infinite if not reported."""
    drain: DrainReport = field(default_factory=DrainReport)
    peers: PeerReport | None = None
    """None if it does not probe its peers (older releases)."""
    tenants: dict[str, ReportedTenantUsage] = field(default_factory=dict)
    """Usage by tenant tag, if the pool has tenants or quotas."""
    shared_tenants: dict[str, int] = field(default_factory=dict)
    """Bytes in the shared directory by tenant tag, as last counted."""

    @classmethod
    def parse(cls, raw: Any, received_at: float | None = None) -> SidecarStatus:
        """Never raises. `received_at`: Unix time of the observer's clock when the answer arrived."""
        r = raw if isinstance(raw, dict) else {}
        index = _dict(r.get("index"))
        shared, drives = _dict(r.get("shared")), _dict(r.get("drives"))
        away = shared.get("configured") is True and shared.get("available") is False
        kinds = _list(r.get("fingerprints"))
        config = _dict(r.get("config"))
        tenants = list(_dict(r.get("tenants")).items())[:_MOST_TENANTS]
        swept = list(_dict(_dict(shared.get("sweep")).get("tenants")).items())[:_MOST_TENANTS]
        return cls(
            phase=_PHASES.get(_text(r.get("phase")), ""),
            ready=r.get("ready") is True,
            generation=parse_count(r.get("generation")),
            config=_text(config.get("digest"))[:64],
            config_problem=_text(config.get("problem")),
            capacity_bytes=parse_count(r.get("capacity_bytes")),
            used_bytes=parse_count(r.get("used_bytes")),
            blocks=parse_count(r.get("blocks")),
            index_connected=index.get("connected") is True,
            index_announced=parse_count(index.get("announced")),
            index_full=index.get("full") is True,
            node_generation=parse_count(index.get("node_generation")),
            index_login=_text(index.get("login"))[:64],
            scanned=r.get("scanned") is not False,
            block_formats=tuple(n for n in _list(r.get("block_formats"))[:16] if type(n) is int),
            shared_problem=(_text(shared.get("problem")) or "not available") if away else "",
            failing_drives=tuple(sorted(str(k)[:64] for k, v in list(drives.items())[:64] if v == "failing")),
            clients=parse_count(r.get("clients")),
            agent_connected=_dict(r.get("agent")).get("connected") is not False,
            transport=_text(r.get("transport")),
            transport_reason=_text(r.get("transport_reason")),
            cache=CacheReport.parse(r.get("cache")),
            hits=_counts(r.get("hits")),
            bytes=_counts(r.get("bytes")),
            misses=_counts(r.get("misses")),
            refused=_counts(r.get("refused")),
            clock_offset_s=_offset(r.get("time"), received_at),
            fingerprints=tuple(_fingerprint(k) for k in kinds[:10] if isinstance(k, dict) and _text(k.get("digest"))),
            connected_pods=frozenset(_connected(r, kinds)),
            engine_problems=_problems(r.get("engine_problems")),
            uptime_s=float(parse_count(r["uptime_seconds"])) if "uptime_seconds" in r else float("inf"),
            drain=_drain(_dict(r.get("drain"))),
            peers=_peers(r.get("reachability")),
            tenants={str(tag)[:64]: _tenant(_dict(use)) for tag, use in tenants},
            shared_tenants={str(tag)[:64]: parse_count(size) for tag, size in swept},
        )


def _offset(reported: Any, received_at: float | None) -> float | None:
    seconds = parse_count(reported)
    return float(seconds - int(received_at)) if seconds and received_at is not None else None


def _drain(d: dict[str, Any]) -> DrainReport:
    return DrainReport(
        leaving=d.get("leaving") is True,
        by_node="node" in _list(d.get("leaving_for")),
        clean=d.get("clean") is True,
        moved_blocks=parse_count(d.get("moved_blocks")),
        moved_bytes=parse_count(d.get("moved_bytes")),
        remaining_blocks=parse_count(d.get("remaining_blocks")),
        remaining_bytes=parse_count(d.get("remaining_bytes")),
        problem=_text(d.get("problem")),
    )


def _connected(r: dict[str, Any], kinds: list[Any]) -> Iterator[str]:
    if "connected_pods" in r:
        yield from (_text(uid) for uid in _list(r["connected_pods"])[:_MOST_CONNECTED])
        return
    for kind in kinds[:10]:  # of a release that lists them by fingerprint only
        for pod in _list(_dict(kind).get("pods"))[:_MOST_PODS]:
            if _dict(pod).get("connected") is True:
                yield _text(pod.get("uid"))


def _problems(value: Any) -> dict[str, str]:
    rows = [row for row in _list(value)[:_MOST_PROBLEMS] if isinstance(row, dict)]
    return {uid: one_line(_text(row.get("problem"))) for row in rows if (uid := _text(row.get("uid")))}


def _peers(value: Any) -> PeerReport | None:
    if not isinstance(value, dict):
        return None
    rows = [row for row in _list(value.get("rows"))[:_MOST_PEERS] if isinstance(row, dict)]
    return PeerReport(
        verified=parse_count(value.get("reachable")),
        failed=parse_count(value.get("unreachable")),
        unverified=parse_count(value.get("unverified")),
        unreachable=tuple(
            UnreachablePeer(_text(row.get("node")), _text(row.get("reason"))[:32])
            for row in rows
            if row.get("state") == "unreachable"
        ),
    )


def _tenant(use: dict[str, Any]) -> ReportedTenantUsage:
    return ReportedTenantUsage(
        parse_count(use.get("used_bytes")), parse_count(use.get("blocks")), parse_count(use.get("over_quota"))
    )


def _fingerprint(k: dict[str, Any]) -> Fingerprint:
    fields = list(_dict(k.get("fields")).items())[:_MOST_FIELDS]
    pods = [p for p in _list(k.get("pods"))[:_MOST_PODS] if isinstance(p, dict) and _text(p.get("uid"))]
    return Fingerprint(
        digest=_text(k.get("digest"))[:64],
        engine=_text(k.get("engine")),
        model=_text(k.get("model")),
        bytes=parse_count(k.get("bytes")),
        fields={str(name)[:48]: value[:8] for name, value in fields if isinstance(value, str)},
        connected=parse_count(k.get("connected")),
        pods=tuple(ConnectedPod(_text(p["uid"]), p.get("connected") is True, parse_count(p.get("seen"))) for p in pods),
        is_tested=k.get("tested") is not False,
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _counts(value: Any) -> dict[str, int]:
    return {str(k)[:64]: parse_count(v) for k, v in list(_dict(value).items())[:32]}


def _text(value: Any) -> str:
    if isinstance(value, dict):  # {"effective": "TCP", ...}
        value = value.get("effective")
    return value[:_TEXT] if isinstance(value, str) else ""
