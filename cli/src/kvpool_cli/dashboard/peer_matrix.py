"""Which node reads from which, as a matrix. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_NODES = 32
_MARKS = {"reachable": "✓", "unreachable": "✗", "unverified": "…", "unknown": "–", "self": ""}


def peer_matrix(nodes: Sequence[str], pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return names of nodes and a row of cells for each. Of more than MAX_NODES nodes, those with failures first."""
    known = {(str(p.get("node")), str(p.get("peer"))): p for p in pairs}
    names = sorted({*nodes, *(name for pair in known for name in pair)})
    failed = {name for pair, row in known.items() if row.get("state") == "unreachable" for name in pair}
    shown = sorted(sorted(names, key=lambda name: (name not in failed, name))[:MAX_NODES])
    return {
        "nodes": shown,
        "hidden": len(names) - len(shown),
        "rows": [{"node": one, "cells": [_cell(one, other, known) for other in shown]} for one in shown],
    }


def _cell(node: str, peer: str, known: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, str]:
    row = known.get((node, peer), {})
    state = "self" if node == peer else str(row.get("state") or "unknown")
    if state not in _MARKS:
        state = "unknown"
    reason = f": {row['reason']}" if row.get("reason") else ""
    text = "" if state == "self" else f"{node} from {peer}: {state}{reason}"
    return {"state": state, "mark": _MARKS[state], "text": text}
