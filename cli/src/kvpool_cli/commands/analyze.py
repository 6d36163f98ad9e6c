"""`kvpool analyze`: check manifests before they are applied, or the workloads of a cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster import source
from kvpool_cli.errors import UsageError
from kvpool_cli.kubectl import Kubectl
from kvpool_cli.output import Style, emit

if TYPE_CHECKING:
    import argparse

    from kvpool_operator.diagnosis import PoolFinding

NAME = "analyze"
HELP = "check manifests before they are applied, with the webhook's own decision"
DESCRIPTION = (
    "Check Pods and objects with pod templates: files before they are applied, or all workloads of the cluster."
)
CLUSTER = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add files and pools."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("-f", "--filename", action="append", metavar="FILE", help="manifests; - for standard input")
    what.add_argument("-A", "--all", action="store_true", help="the workloads of the cluster")
    parser.add_argument("--pool", metavar="FILE", help="file with KVCachePools, instead of those of the cluster")


def run(args: argparse.Namespace) -> int:
    """Print the findings."""
    from kvpool_cli.cluster.analyzer import analyze
    from kvpool_cli.cluster.render import exit_code, finding_lines, summary_line

    pools, namespaces = _surroundings(args)
    texts = [_workloads(args)] if args.all else [_read(name) for name in args.filename]
    findings: list[PoolFinding] = []
    injected = 0
    try:
        for text in texts:
            found, count = analyze(text, pools, namespaces, source.namespace_of(args))
            findings += found
            injected += count
    except ValueError as e:
        raise UsageError(str(e)) from None

    def text_of(style: Style) -> str:
        return "\n".join(
            [*finding_lines(findings, style), f"{injected} templates are injected, {summary_line(findings)}"]
        )

    emit(args, {"injected": injected, "findings": [finding.dump() for finding in findings]}, text_of)
    return exit_code(findings)


def _surroundings(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Pools, and namespaces by name."""
    args.source = None
    if args.pool:
        import yaml

        try:
            loaded = [d for d in yaml.safe_load_all(_read(args.pool)) if isinstance(d, dict)]
        except yaml.YAMLError:
            raise UsageError(f"{args.pool} is not valid YAML") from None
        pools = [d for d in loaded if d.get("kind") == "KVCachePool"]
        if not pools:
            raise UsageError(f"{args.pool} has no KVCachePool")
        args.namespace = args.namespace or "default"
        return [{**p, "metadata": {"namespace": args.namespace, **p["metadata"]}} for p in pools], {}
    kubectl = Kubectl.of(args)
    pools = kubectl.get("kvcachepools.kvpool.dev", everywhere=True).get("items") or []
    found = kubectl.get("namespaces").get("items") or []
    return pools, {str(n["metadata"]["name"]): n for n in found}


def _workloads(args: argparse.Namespace) -> str:
    """Workloads that no controller owns, as one List."""
    kinds = "deployments.apps,statefulsets.apps,daemonsets.apps,replicasets.apps,jobs.batch,pods"
    items = Kubectl.of(args).get(kinds, everywhere=True).get("items") or []
    own = [i for i in items if not any(o.get("controller") for o in i["metadata"].get("ownerReferences") or [])]
    return json.dumps({"kind": "List", "items": [_unset(item) for item in own]})


def _unset(item: dict[str, Any]) -> dict[str, Any]:
    """Without what is not part of a manifest, which makes the input long."""
    metadata = {k: v for k, v in item["metadata"].items() if k != "managedFields"}
    return {k: v for k, v in item.items() if k not in ("status", "metadata")} | {"metadata": metadata}


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{name} cannot be read: {e}") from None
