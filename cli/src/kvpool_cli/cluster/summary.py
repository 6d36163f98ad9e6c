"""What `status -o json` prints about a pool, and what the dashboard shows. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster.render import section
from kvpool_operator.sidecars.cache import WINDOWS
from kvpool_operator.text import parse_count

if TYPE_CHECKING:
    from kvpool_cli.cluster.view import PoolState
    from kvpool_operator.observe.snapshot import Sidecar

_FIELDS = ("phase", "nodes", "capacity", "cache", "index", "transport", "pods", "fingerprints")


def summarize(state: PoolState) -> dict[str, Any]:
    """Return JSON values: the pool's status, its sidecars, pairs of nodes, and findings."""
    return {
        "pool": state.key,
        **{field: state.status.get(field) for field in _FIELDS},
        "sidecars": [_sidecar(one, state.raw_statuses.get(one.node, {})) for one in state.snapshot.sidecars],
        "peers": peer_counts(state),
        "pairs": [pair for node, status in state.raw_statuses.items() for pair in pairs(node, status)],
        "missingRights": list(state.missing_rights),
        "findings": [finding.dump() for finding in state.findings],
    }


def peer_counts(state: PoolState) -> dict[str, int]:
    """Directed pairs of nodes by the result of the last probe."""
    reports = [s.report.peers for s in state.snapshot.sidecars if s.report is not None and s.report.peers is not None]
    return {
        "verified": sum(r.verified for r in reports),
        "failed": sum(r.failed for r in reports),
        "unverified": sum(r.unverified for r in reports),
    }


def pairs(node: str, status: dict[str, object]) -> list[dict[str, str]]:
    """One row for each peer that the sidecar of a node lists in its `/status`."""
    rows = section(status, "reachability").get("rows")
    listed = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [
        {
            "node": node,
            "peer": str(row.get("node") or row.get("address") or "?"),
            "state": str(row.get("state") or "unverified"),
            "reason": str(row.get("reason") or ""),
        }
        for row in listed
    ]


def _sidecar(sidecar: Sidecar, status: dict[str, Any]) -> dict[str, Any]:
    """One node. Figures are None if its sidecar did not answer."""
    report = sidecar.report
    row: dict[str, Any] = {"node": sidecar.node, "answers": report is not None}
    if report is None:
        return row
    shared = section(status, "shared")
    swept = section(shared, "sweep")
    windows = {name: report.cache.windows[name] for name in WINDOWS if name in report.cache.windows}
    return row | {
        "ready": report.ready,
        "phase": report.phase,
        "usedBytes": report.used_bytes,
        "capacityBytes": report.capacity_bytes,
        "blocks": report.blocks,
        "clients": report.clients,
        "failingDrives": list(report.failing_drives),
        "windows": [{"window": n, "tokensAsked": w.asked, "tokensFound": w.found} for n, w in windows.items()],
        "shared": {
            "configured": shared.get("configured") is True,
            "available": shared.get("available") is True,
            "problem": report.shared_problem,
            # counted by a collection, which one node at a time runs
            "usedBytes": parse_count(swept.get("used_bytes")) if swept.get("last_s_ago") is not None else None,
            "capacityBytes": parse_count(swept.get("capacity_bytes")) or None,
        },
    }
