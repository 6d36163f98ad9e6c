"""What the page shows, from what `status -o json` prints. Pure.

All figures are texts: a dash is unknown, `0 %` is none of a known number. `percent` is for bars: None is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster.render import percent, quantity, section
from kvpool_cli.dashboard.peer_matrix import peer_matrix
from kvpool_operator.api.quantity import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Row = dict[str, Any]

UNKNOWN = "–"
MAX_NODES = 256
MAX_NOTES = 20
MAX_REASONS = 6
_LEVELS = {"Error": "error", "Warning": "warning", "Info": "info"}
_SOURCES = {"local": "own node", "peer": "other nodes", "shared": "shared tier"}


def view_model(document: Mapping[str, Any], docs_url: str = "") -> Row:
    """Return what the page shows. `docs_url`: address of the documentation site; empty: findings have no links."""
    return {
        "pools": [_pool(row, docs_url.rstrip("/")) for row in _rows(document.get("pools"))],
        "notes": [str(note)[:300] for note in list(document.get("notes") or [])[:MAX_NOTES]],
    }


def _pool(row: Row, docs_url: str) -> Row:
    sidecars = _rows(row.get("sidecars"))
    findings = [_finding(finding, docs_url) for finding in _rows(row.get("findings"))]
    phase = str(row.get("phase") or "Unknown")
    return {
        "pool": str(row.get("pool") or ""),
        "phase": phase,
        "level": _level(phase, findings),
        "facts": _facts(row, sidecars),
        "prompt": _prompt(section(row, "cache")),
        "models": [_model(model) for model in _rows(section(row, "cache").get("models"))],
        "tiers": _tiers(section(row, "cache"), sidecars),
        "nodes": [_node(sidecar, bool(row.get("missingRights"))) for sidecar in sidecars[:MAX_NODES]],
        "hiddenNodes": max(0, len(sidecars) - MAX_NODES),
        "peers": peer_matrix([str(s.get("node")) for s in sidecars], _rows(row.get("pairs"))),
        "findings": findings,
    }


def _level(phase: str, findings: list[Row]) -> str:
    levels = [finding["level"] for finding in findings]
    if "error" in levels or phase == "Failed":
        return "error"
    return "ok" if phase == "Ready" and "warning" not in levels else "warning"


def _facts(row: Row, sidecars: list[Row]) -> list[Row]:
    nodes, pods, index, capacity = (section(row, name) for name in ("nodes", "pods", "index", "capacity"))
    windows = {w.get("window"): w for w in _rows(section(row, "cache").get("windows"))}
    # without the right to read the sidecars, the figures are those that the operator wrote
    is_known = any(sidecar.get("answers") for sidecar in sidecars) or bool(row.get("missingRights") and capacity)
    used = f"{capacity.get('usedPercent', 0)} %" if is_known else UNKNOWN
    detail = f"{capacity.get('used', '0')} of {capacity.get('total', '0')}" if is_known else "no node answers"
    return [
        _fact("Nodes", str(nodes.get("summary") or UNKNOWN), f"{nodes.get('updated', UNKNOWN)} up to date"),
        *(_rate_fact(name, windows.get(window, {})) for name, window in (("Hit rate, 5 min", "5m"), ("1 h", "1h"))),
        _fact("Capacity", used, detail, capacity.get("usedPercent") if is_known else None),
        _fact("Engines", _part(pods, "connected", "injected"), f"{pods.get('skipped', UNKNOWN)} pods skipped"),
        _fact("Index", str(index.get("connected") or UNKNOWN), str(index.get("mode") or UNKNOWN)),
        _peers_fact(section(row, "peers")),
    ]


def _fact(name: str, value: str, detail: str, share: float | None = None) -> Row:
    return {"name": name, "value": value, "detail": detail, "percent": share}


def _rate_fact(name: str, window: Row) -> Row:
    asked = int(window.get("tokensAsked") or 0)
    detail = f"of {quantity(asked)} tokens" if asked else "no prompt was requested"
    label = name if name.startswith("Hit") else f"Hit rate, {name}"
    return _fact(label, _rate(window), detail, _share(int(window.get("tokensFound") or 0), asked))


def _peers_fact(counts: Row) -> Row:
    total = sum(int(n) for n in counts.values())
    value = f"{counts.get('verified', 0)}/{total}" if total else UNKNOWN
    return _fact("Reads between nodes", value, f"verified, {counts.get('failed', 0)} fail" if total else "no pairs")


def _part(counts: Row, part: str, whole: str) -> str:
    return f"{counts[part]}/{counts[whole]}" if part in counts and whole in counts else UNKNOWN


def _prompt(cache: Row) -> Row:
    """The life of the last hour's tokens: requested, then found or computed."""
    window: Row = next((w for w in _rows(cache.get("windows")) if w.get("window") == "1h"), {})
    asked, found = int(window.get("tokensAsked") or 0), int(window.get("tokensFound") or 0)
    loaded = {tier: int(n) for tier, n in section(cache, "hits").items()}
    misses = sorted(section(cache, "misses").items(), key=lambda item: (-int(item[1]), item[0]))
    missed = sum(int(n) for _, n in misses)
    return {
        "asked": _step(asked, asked, bool(asked)),
        "found": _step(found, asked, bool(asked)),
        "computed": _step(asked - found, asked, bool(asked)),
        "sources": [
            {"tier": tier, "name": name, **_step(loaded.get(tier, 0), sum(loaded.values()), bool(sum(loaded.values())))}
            for tier, name in _SOURCES.items()
        ],
        "reasons": [{"reason": reason, **_step(int(n), missed, bool(missed))} for reason, n in misses[:MAX_REASONS]],
    }


def _step(part: int, whole: int, is_known: bool) -> Row:
    count = quantity(part) if is_known else UNKNOWN
    return {"count": count, "share": _percent(part, whole), "percent": _share(part, whole)}


def _model(model: Row) -> Row:
    windows = {w.get("window"): w for w in _rows(model.get("windows"))}
    hour = windows.get("1h", {})
    asked, found = int(hour.get("tokensAsked") or 0), int(hour.get("tokensFound") or 0)
    return {
        "model": str(model.get("model") or UNKNOWN),
        "rate5m": _rate(windows.get("5m", {})),
        "rate1h": _rate(hour),
        "percent": _share(found, asked),
        "asked": quantity(asked),
        "found": quantity(found) if asked else UNKNOWN,
    }


def _tiers(cache: Row, sidecars: list[Row]) -> list[Row]:
    answering = [s for s in sidecars if s.get("answers")]
    loads, sizes = section(cache, "hits"), section(cache, "bytes")
    used = sum(int(s.get("usedBytes") or 0) for s in answering) if answering else None
    capacity = sum(int(s.get("capacityBytes") or 0) for s in answering) if answering else None
    failing = [f"{s['node']} {drive}" for s in answering for drive in s.get("failingDrives") or []]
    local = f"failing: {', '.join(failing[:4])}" if failing else "ok"
    rows = [_tier("local", local if answering else UNKNOWN, used, capacity)]
    shared = [section(s, "shared") for s in answering]
    if any(one.get("configured") for one in shared):
        available = sum(bool(one.get("available")) for one in shared)
        state = "ok" if available == len(shared) else f"{available} of {len(shared)} nodes have it"
        rows.append(_tier("shared", state, _most(shared, "usedBytes"), _most(shared, "capacityBytes")))
    is_known = bool(answering)
    for row in rows:
        tier = row["tier"]
        row["blocks"] = quantity(int(loads.get(tier) or 0)) if is_known else UNKNOWN
        row["bytes"] = format_bytes(int(sizes.get(tier) or 0)) if is_known and sizes else UNKNOWN
    return rows


def _tier(tier: str, state: str, used: int | None, capacity: int | None) -> Row:
    is_known = used is not None and bool(capacity)
    level = {"ok": "ok", UNKNOWN: "unknown"}.get(state, "error")
    share: Row = {"share": _percent(used or 0, capacity or 0) if is_known else UNKNOWN}
    share["percent"] = _share(used or 0, capacity or 0) if is_known else None
    return {"tier": tier, "state": state, "level": level, "used": _bytes(used), "capacity": _bytes(capacity), **share}


def _most(rows: Iterable[Row], name: str) -> int | None:
    return max((int(row[name]) for row in rows if row.get(name) is not None), default=None)


def _node(sidecar: Row, is_denied: bool) -> Row:
    if not sidecar.get("answers"):
        unknown = dict.fromkeys(("used", "capacity", "share", "blocks", "engines", "rate5m", "rate1h"), UNKNOWN)
        verdict = {"state": "not read", "level": "unknown"} if is_denied else {"state": "no answer", "level": "error"}
        return {"node": str(sidecar.get("node")), **verdict, "percent": None, **unknown}
    used, capacity = int(sidecar.get("usedBytes") or 0), int(sidecar.get("capacityBytes") or 0)
    windows = {w.get("window"): w for w in _rows(sidecar.get("windows"))}
    is_ready = bool(sidecar.get("ready"))
    return {
        "node": str(sidecar.get("node")),
        "state": str(sidecar.get("phase") or "Serving") if is_ready else "not ready",
        "level": "ok" if is_ready else "warning",
        "used": _bytes(used),
        "capacity": _bytes(capacity),
        "share": _percent(used, capacity),
        "percent": _share(used, capacity),
        "blocks": quantity(int(sidecar.get("blocks") or 0)),
        "engines": str(sidecar.get("clients") or 0),
        "rate5m": _rate(windows.get("5m", {})),
        "rate1h": _rate(windows.get("1h", {})),
    }


def _finding(finding: Row, docs_url: str) -> Row:
    page, _, anchor = str(finding.get("docs") or "").partition("#")
    path = page.removeprefix("docs/").removesuffix(".md")
    return {
        **{name: str(finding.get(name) or "") for name in ("code", "severity", "subject", "summary")},
        **{name: str(finding.get(name) or "") for name in ("cause", "effect", "fix")},
        "level": _LEVELS.get(str(finding.get("severity")), "info"),
        "docs": f"{page}#{anchor}" if page else "",
        "link": f"{docs_url}/{path}/#{anchor}" if docs_url and page else "",
    }


def _rate(window: Row) -> str:
    return _percent(int(window.get("tokensFound") or 0), int(window.get("tokensAsked") or 0))


def _percent(part: int, whole: int) -> str:
    return percent(part, whole) if whole else UNKNOWN


def _share(part: int, whole: int) -> float | None:
    return round(100 * min(part, whole) / whole, 1) if whole else None


def _bytes(size: int | None) -> str:
    return UNKNOWN if size is None else format_bytes(size)


def _rows(value: object) -> list[Row]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
