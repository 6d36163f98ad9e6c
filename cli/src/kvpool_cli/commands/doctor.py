"""`kvpool doctor`: find out why a pool, or one pod, has no hits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster import source
from kvpool_cli.output import Style, emit

if TYPE_CHECKING:
    import argparse

    from kvpool_cli.cluster.documents import Documents
    from kvpool_cli.cluster.render import Check
    from kvpool_cli.cluster.view import PoolState

NAME = "doctor"
HELP = "diagnose a pool or a pod: cause, effect and fix"
DESCRIPTION = "Diagnose pools, or one engine pod. Exit code 1: there are errors or warnings."
CLUSTER = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the target."""
    parser.add_argument("target", nargs="?", default="", metavar="POOL | pod/NAMESPACE/NAME", help="default: all pools")
    source.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print checks and findings."""
    documents = source.documents_of(args)
    return _pod(args, documents) if args.target.startswith("pod/") else _pools(args, documents)


def _pools(args: argparse.Namespace, documents: Documents) -> int:
    from kvpool_cli.cluster.render import check_lines, exit_code, finding_lines, note_lines, summary_line
    from kvpool_cli.cluster.view import choose, pool_state

    states = [pool_state(documents, key) for key in choose(documents, args.target, args.namespace or "")]
    findings = [finding for state in states for finding in state.findings]

    def text(style: Style) -> str:
        lines: list[str] = []
        for state in states:
            lines += [style.paint(f"Pool {state.key}", "bold"), *check_lines(condition_checks(state), style), ""]
            lines += finding_lines(state.findings, style, with_details=True)
            lines += [summary_line(state.findings), ""]
        return "\n".join([*lines, *note_lines(documents.notes, style)])

    emit(args, {"pools": [_dump(state) for state in states], "notes": documents.notes}, text)
    return exit_code(findings)


def _dump(state: PoolState) -> dict[str, Any]:
    checks = [check.dump() for check in condition_checks(state)]
    return {"pool": state.key, "checks": checks, "findings": [finding.dump() for finding in state.findings]}


def condition_checks(state: PoolState) -> list[Check]:
    """The pool's conditions as checks."""
    from kvpool_cli.cluster.render import Check

    words = {"True": "ok", "False": "FAIL", "Unknown": "skip"}
    checks = []
    for c in state.status.get("conditions") or []:
        if c["type"] in ("Progressing", "RollingUpdateSafe"):
            continue
        checks.append(Check(words.get(c["status"], "skip"), f"{c['type']}: {c['message']}"))  # type: ignore[arg-type]
    return checks


def _pod(args: argparse.Namespace, documents: Documents) -> int:
    from kvpool_cli.cluster.pods import pod_name, pod_state
    from kvpool_cli.cluster.render import check_lines, exit_code, finding_lines, note_lines, summary_line

    namespace, name = pod_name(args.target, source.namespace_of(args))
    state = pod_state(documents, namespace, name)
    data = {
        "pod": state.pod,
        "pool": state.pool,
        "checks": [check.dump() for check in state.checks],
        "findings": [finding.dump() for finding in state.findings],
        "notes": documents.notes,
    }

    def text(style: Style) -> str:
        lines = [style.paint(f"Pod {state.pod}", "bold"), *check_lines(state.checks, style), ""]
        lines += finding_lines(state.findings, style, with_details=True)
        return "\n".join([*lines, summary_line(state.findings), *note_lines(documents.notes, style)])

    emit(args, data, text)
    return exit_code(state.findings)
