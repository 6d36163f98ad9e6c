"""IndexReady, TransportReady and PeersReachable: nodes find and read each other's blocks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.conditions import Verdict, first_verdict
from kvpool_operator.api.reasons import Reason
from kvpool_operator.desired import names
from kvpool_operator.text import summarize

if TYPE_CHECKING:
    from kvpool_operator.pools.conditions.inputs import ConditionInput, PoolCheck

__all__ = ["INDEX_READY", "PEERS_REACHABLE", "TRANSPORT_READY", "peers_clause"]

_MAX_REASONS: Final = 500
_MAX_PAIRS: Final = 8
_MAX_MESSAGE: Final = 4096
_DEGRADED: Final = "find only their own and shared blocks"


def invalid_index_config(i: ConditionInput) -> Verdict | None:
    """The URL or a Secret of an external index is unusable."""
    if not i.snapshot.external_problem:
        return None
    return Verdict.false(Reason.INVALID_INDEX_CONFIG, i.snapshot.external_problem)


def index_not_running(i: ConditionInput) -> Verdict | None:
    """The managed index has no ready replica."""
    if i.pool.spec.index.external is not None:
        return None
    redis = i.snapshot.object("StatefulSet", names.index(i.pool.metadata.name))
    if ((redis or {}).get("status") or {}).get("readyReplicas"):
        return None
    return Verdict.false(Reason.INDEX_NOT_RUNNING, f"the index is not running; nodes {_DEGRADED}")


def index_status_unavailable(i: ConditionInput) -> Verdict | None:
    if i.reports:
        return None
    return Verdict.unknown(Reason.STATUS_UNAVAILABLE, "no sidecar has reported its connection to the index")


def nodes_not_connected(i: ConditionInput) -> Verdict | None:
    connected = sum(r.index_connected for r in i.reports)
    if connected == len(i.reports):
        return None
    return Verdict.false(Reason.NODES_NOT_CONNECTED, f"{_connected(i)}; the others {_DEGRADED}")


def connected(i: ConditionInput) -> Verdict:
    return Verdict.true(Reason.CONNECTED, _connected(i))


INDEX_READY: Final[tuple[PoolCheck, ...]] = (
    invalid_index_config,
    index_not_running,
    index_status_unavailable,
    nodes_not_connected,
    connected,
)


def transport_status_unavailable(i: ConditionInput) -> Verdict | None:
    if _protocols(i):
        return None
    return Verdict.unknown(Reason.STATUS_UNAVAILABLE, "no sidecar has reported its transport")


def protocol_mismatch(i: ConditionInput) -> Verdict | None:
    requested = i.pool.spec.transport.protocol
    if requested == "Auto" or _protocols(i) == {requested}:
        return None
    used = ", ".join(sorted(_protocols(i)))
    return Verdict.false(
        Reason.PROTOCOL_MISMATCH, f"spec.transport.protocol is {requested}, but nodes use {used}{_why_tcp(i)}"
    )


def protocol_matched(i: ConditionInput) -> Verdict:
    why = _why_tcp(i) if i.pool.spec.transport.protocol == "Auto" else ""
    return Verdict.true(
        Reason.PROTOCOL_MATCHED, f"blocks travel between nodes over {' and '.join(sorted(_protocols(i)))}{why}"
    )


TRANSPORT_READY: Final[tuple[PoolCheck, ...]] = (transport_status_unavailable, protocol_mismatch, protocol_matched)


def peer_status_unavailable(i: ConditionInput) -> Verdict | None:
    if any(r.peers is not None for r in i.reports):
        return None
    return Verdict.unknown(Reason.STATUS_UNAVAILABLE, "no sidecar has reported whether it reads from its peers")


def peers_unreachable(i: ConditionInput) -> Verdict | None:
    """Name the pairs: the node that reads, the peer, and why it fails."""
    failed = sum(r.peers.failed for r in i.reports if r.peers is not None)
    if not failed:
        return None
    pairs = [
        f"{sidecar.node} from {peer.node} ({peer.reason})"
        for sidecar in i.snapshot.sidecars
        if sidecar.report is not None and sidecar.report.peers is not None
        for peer in sidecar.report.peers.unreachable
    ]
    named = summarize(sorted(pairs), _MAX_PAIRS, failed)
    return Verdict.false(
        Reason.PEERS_UNREACHABLE, f"nodes cannot read blocks of others, and recompute them: {named}"[:_MAX_MESSAGE]
    )


def peers_not_verified(i: ConditionInput) -> Verdict | None:
    reports = [r.peers for r in i.reports if r.peers is not None]
    missing = sum(r.unverified for r in reports)
    if not missing and len(reports) == len(i.reports):
        return None
    total = sum(r.unverified + r.verified + r.failed for r in reports)
    silent = len(i.reports) - len(reports)
    extra = f"; {silent} nodes run a release that does not probe" if silent else ""
    return Verdict.unknown(
        Reason.PEERS_NOT_VERIFIED, f"{total - missing} of {total} reads between nodes were verified so far{extra}"
    )


def peers_verified(i: ConditionInput) -> Verdict:
    if not any(r.peers.verified for r in i.reports if r.peers is not None):
        return Verdict.true(Reason.PEERS_VERIFIED, "no node has a peer")
    return Verdict.true(Reason.PEERS_VERIFIED, "each node has read from each of its peers")


PEERS_REACHABLE: Final[tuple[PoolCheck, ...]] = (
    peer_status_unavailable,
    peers_unreachable,
    peers_not_verified,
    peers_verified,
)


def peers_clause(i: ConditionInput) -> str:
    """What Ready says about reads between nodes: only what was verified."""
    verdict = first_verdict(PEERS_REACHABLE, i)
    if verdict.is_true:
        return "" if len(i.reports) < 2 else ", and each has read from the others"
    if verdict.reason == Reason.PEERS_UNREACHABLE:
        return "; some cannot read from others (see PeersReachable)"
    return "; reads between them are not verified"


def _connected(i: ConditionInput) -> str:
    return f"{sum(r.index_connected for r in i.reports)} of {len(i.reports)} nodes are connected to the index"


def _protocols(i: ConditionInput) -> set[str]:
    return {r.transport for r in i.reports if r.transport}


def _why_tcp(i: ConditionInput) -> str:
    reasons = sorted({r.transport_reason for r in i.reports if r.transport_reason})
    return f" ({'; '.join(reasons)})"[:_MAX_REASONS] if reasons else ""
