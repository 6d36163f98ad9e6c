"""Runs a KVCacheOperation from the command line: creates it, waits, and shows its progress."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from kvpool_cli.errors import FINDINGS, INTERRUPTED, OK, CliError, NotFoundError, UnreachableError
from kvpool_cli.kubectl import Kubectl, pool_name
from kvpool_cli.output import Style, emit

if TYPE_CHECKING:
    import argparse

_ENDED = ("Succeeded", "Failed", "Cancelled")
_KIND = "kvcacheoperations.kvpool.dev"
_FAILURES_IN_A_ROW = 5
_POLL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pool, and whether to wait."""
    parser.add_argument("pool", metavar="POOL", help="NAME or NAMESPACE/NAME")
    parser.add_argument("--timeout", default="1h", metavar="DURATION", help="time limit of the operation")
    parser.add_argument("--no-wait", action="store_true", help="create the operation, and do not wait for its end")


def execute(args: argparse.Namespace, kind: str, action: dict[str, Any], poll_s: float = _POLL_S) -> int:
    """Create the operation and wait. 1 if it did not succeed; 130 after Ctrl-C, which leaves the operation running."""
    kubectl = Kubectl.of(args)
    namespace, name = pool_name(args.pool)
    namespace = namespace or kubectl.namespace()
    created = kubectl.create(manifest(kind, action, namespace, name, args.timeout))
    operation = f"{namespace}/{created['metadata']['name']}"
    if args.no_wait:
        emit(args, {"operation": operation, "status": {}}, lambda _: f"created KVCacheOperation {operation}")
        return OK
    try:
        status = _wait(kubectl, operation, poll_s)
    except KeyboardInterrupt:
        where, _, one = operation.partition("/")
        print(
            f"\nthe operation continues on the nodes: kubectl -n {where} get kvop {one} -w\n"
            f"to cancel it: kubectl -n {where} delete kvop {one}",
            file=sys.stderr,
        )
        return INTERRUPTED
    emit(args, {"operation": operation, "status": status}, lambda style: result_text(operation, status, style))
    return OK if status.get("phase") == "Succeeded" else FINDINGS


def manifest(kind: str, action: dict[str, Any], namespace: str, pool: str, timeout: str) -> dict[str, Any]:
    """Return the KVCacheOperation."""
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCacheOperation",
        "metadata": {"generateName": f"{pool[:40]}-{kind}-", "namespace": namespace},
        "spec": {"poolRef": {"name": pool}, kind: action, "timeout": timeout},
    }


def _wait(kubectl: Kubectl, operation: str, poll_s: float) -> dict[str, Any]:
    """Poll until the end; some failures of requests in a row are endured."""
    namespace, _, name = operation.partition("/")
    shown, failures = "", 0
    print(f"KVCacheOperation {operation}", file=sys.stderr)
    while True:
        try:
            status = kubectl.get(_KIND, name, namespace).get("status") or {}
            failures = 0
        except NotFoundError:
            raise CliError(f"KVCacheOperation {operation} was deleted: it is cancelled") from None
        except UnreachableError as e:
            failures += 1
            if failures >= _FAILURES_IN_A_ROW:
                raise UnreachableError(f"{e}; KVCacheOperation {operation} continues") from None
            status = {}
        line = progress_line(status)
        if status and line != shown:
            print(line, file=sys.stderr, flush=True)
            shown = line
        if status.get("phase") in _ENDED:
            return dict(status)
        time.sleep(poll_s)


def progress_line(status: dict[str, Any]) -> str:
    """One line about the progress."""
    nodes = status.get("nodes") or {}
    message = str(status.get("message") or "")[:160]
    return f"  {status.get('phase', 'Pending')}: {nodes.get('summary', '0/0')} nodes{'; ' if message else ''}{message}"


def result_text(operation: str, status: dict[str, Any], style: Style) -> str:
    """The end of an operation: phase, counts, and the nodes that failed."""
    phase = str(status.get("phase"))
    lines = [f"{style.paint(phase, 'green' if phase == 'Succeeded' else 'red')}: {operation}"]
    for tier, counts in (status.get("results") or {}).items():
        if counts:
            lines.append(f"  {tier}: " + ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    lines += [f"  {f.get('node')}: {f.get('message')}" for f in status.get("failures") or []]
    return "\n".join(lines)
