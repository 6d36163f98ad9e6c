"""IndexReady and TransportReady: nodes find each other's blocks, and read them over the requested protocol. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.conditions import Verdict
from kvpool_operator.api.reasons import Reason
from kvpool_operator.desired import names

if TYPE_CHECKING:
    from kvpool_operator.pools.conditions.inputs import ConditionInput, PoolCheck

__all__ = ["INDEX_READY", "TRANSPORT_READY"]

_MAX_REASONS: Final = 500
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


def _connected(i: ConditionInput) -> str:
    return f"{sum(r.index_connected for r in i.reports)} of {len(i.reports)} nodes are connected to the index"


def _protocols(i: ConditionInput) -> set[str]:
    return {r.transport for r in i.reports if r.transport}


def _why_tcp(i: ConditionInput) -> str:
    reasons = sorted({r.transport_reason for r in i.reports if r.transport_reason})
    return f" ({'; '.join(reasons)})"[:_MAX_REASONS] if reasons else ""
