"""`kvpool status`: pools on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster import source
from kvpool_cli.output import Style, emit, table

if TYPE_CHECKING:
    import argparse

    from kvpool_cli.cluster.view import PoolState

NAME = "status"
HELP = "show pools: nodes, hit rate, capacity, peers, engines, findings"
CLUSTER = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pool."""
    parser.add_argument("pool", nargs="?", default="", metavar="POOL", help="NAME or NAMESPACE/NAME (default: all)")
    source.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the pools; exit code 1 if one has errors or warnings."""
    from kvpool_cli.cluster.render import exit_code, note_lines
    from kvpool_cli.cluster.summary import summarize
    from kvpool_cli.cluster.view import choose, pool_state

    documents = source.documents_of(args)
    states = [pool_state(documents, key) for key in choose(documents, args.pool, args.namespace or "")]
    rows = [summarize(state) for state in states]

    def text(style: Style) -> str:
        return "\n\n".join(_text(state, style) for state in states) + "\n".join(
            ["", *note_lines(documents.notes, style)]
        )

    emit(args, {"pools": rows, "notes": documents.notes}, text)
    return exit_code(finding for state in states for finding in state.findings)


def _text(state: PoolState, style: Style) -> str:
    from kvpool_cli.cluster.render import finding_lines, section, summary_line

    phase = str(state.status.get("phase") or "Unknown")
    color = "green" if phase == "Ready" else "yellow"
    nodes, index = section(state.status, "nodes"), section(state.status, "index")
    head = f"{style.paint('Pool ' + state.key, 'bold')}   {style.paint(phase, color)}, {summary_line(state.findings)}"
    rows = [
        ["Nodes", f"{nodes.get('summary', '0/0')} serve, {nodes.get('updated', 0)} up to date"],
        ["Hit rate", _hit_rate(section(state.status, "cache"))],
        ["Capacity", _capacity(section(state.status, "capacity"))],
        ["Index", f"{index.get('mode', '-')}, {index.get('connected', '0/0')} nodes connected"],
        ["Peers", _peers(state)],
        ["Engines", _engines(section(state.status, "pods"))],
    ]
    parts = [head, table(rows)]
    models = _models(state)
    if models:
        parts += ["", table(models, ("MODEL", "ENGINE", "FINGERPRINT", "CONNECTED", "SIZE", "HIT%"), (3, 4, 5), style)]
    if state.findings:
        parts += ["", *finding_lines(state.findings, style)]
    return "\n".join(parts)


def _hit_rate(cache: dict[str, Any]) -> str:
    from kvpool_cli.cluster.render import percent, quantity

    parts = []
    for window in cache.get("windows") or []:
        asked, found = int(window.get("tokensAsked") or 0), int(window.get("tokensFound") or 0)
        parts.append(f"{percent(found, asked)} of {quantity(asked)} tokens ({window.get('window')})")
    saved = cache.get("secondsSaved") or 0
    return ", ".join(parts or ["no prompt was requested"]) + (f"; {saved} s of prefill saved" if saved else "")


def _capacity(capacity: dict[str, Any]) -> str:
    used = f"{capacity.get('used', '0')} of {capacity.get('total', '0')} ({capacity.get('usedPercent', 0)} %)"
    return f"{used}, {capacity.get('blocks', 0)} blocks"


def _peers(state: PoolState) -> str:
    from kvpool_cli.cluster.summary import peer_counts

    counts = peer_counts(state)
    total = sum(counts.values())
    if not total:
        return "not read" if state.missing_rights else "no node has a peer"
    rest = f", {counts['unverified']} not probed yet" if counts["unverified"] else ""
    return f"{counts['verified']} of {total} reads between nodes verified, {counts['failed']} fail{rest}"


def _engines(pods: dict[str, Any]) -> str:
    connected, injected = pods.get("connected", 0), pods.get("injected", 0)
    skipped, missed = pods.get("skipped", 0), pods.get("notInjected", 0)
    return f"{connected} of {injected} injected pods connected, {skipped} skipped, {missed} not injected"


def _models(state: PoolState) -> list[list[str]]:
    from kvpool_cli.cluster.render import percent

    rates = {m["model"]: m for m in (state.status.get("cache") or {}).get("models") or []}
    rows = []
    for f in state.status.get("fingerprints") or []:
        rate = rates.get(f["model"], {})
        hit = percent(int(rate.get("tokensFound") or 0), int(rate.get("tokensAsked") or 0)).removesuffix(" %")
        rows.append([f["model"] or "-", f["engine"] or "-", f["digest"], str(f["connected"]), f["size"], hit])
    return rows
