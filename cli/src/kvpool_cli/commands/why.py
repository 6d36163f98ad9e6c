"""`kvpool why POD`: why prompts of one pod are not found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_cli.cluster import source
from kvpool_cli.kubectl import Kubectl
from kvpool_cli.output import Style, emit, table

if TYPE_CHECKING:
    import argparse

NAME = "why"
HELP = "explain the misses of one engine pod"
DESCRIPTION = "Explain the misses of one engine pod by the reasons that its node recorded, and by its fingerprint."
CLUSTER = True

REASONS = {
    "never-stored": "no tier has the block: the prompt is new, or was hashed differently",
    "evicted-capacity": "the tier was full",
    "evicted-space": "the file system was full",
    "evicted-quota": "the tenant was above its quota",
    "expired": "the block had reached its maximum age",
    "purged": "a purge removed it",
    "quarantined": "it was corrupt",
    "fingerprint-differs": "blocks of the model exist under other fingerprints only",
    "grant-unused": "another tenant has it, and the client is too old to use grants",
    "peer-unreachable": "only peers that cannot be reached have it",
    "index-unavailable": "the index did not answer",
    "slower-than-compute": "loading would take longer than computing",
    "deadline": "the answer was late",
    "busy": "the node was overloaded",
    "no-sidecar": "the engine had no connection",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pod."""
    parser.add_argument("pod", metavar="NAMESPACE/POD", help="an engine pod")
    source.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print steps, misses and findings."""
    from kvpool_cli.cluster.pods import pod_name, pod_state
    from kvpool_cli.cluster.removals import AGES, removed_lookups
    from kvpool_cli.cluster.render import check_lines, exit_code, finding_lines, percent, quantity

    documents = source.documents_of(args)
    state = pod_state(documents, *pod_name(args.pod, source.namespace_of(args)))
    total = sum(state.misses.values())
    ranked = sorted(state.misses.items(), key=lambda item: (-item[1], item[0]))
    rows = [[r, quantity(n), percent(n, total), REASONS.get(r, "")] for r, n in ranked if n]
    removed = {} if args.source else removed_lookups(Kubectl.of(args), documents, state.pod, state.pool)
    data = {
        "pod": state.pod,
        "pool": state.pool,
        "fingerprints": list(state.digests),
        "missedTokens": dict(ranked),
        "removedLookups": removed,
        "checks": [check.dump() for check in state.checks],
        "findings": [finding.dump() for finding in state.findings],
    }

    def text(style: Style) -> str:
        lines = [style.paint(f"Pod {state.pod}", "bold"), *check_lines(state.checks, style)]
        if state.digests:
            lines.append(f"       fingerprint {', '.join(state.digests)}")
        if rows:
            head = ("REASON", "TOKENS", "SHARE", "MEANING")
            lines += ["", "Missed in the last hour, by the first missing block of each request:"]
            lines.append(table(rows, head, right=(1, 2), style=style))
        if removed:
            ages = [[AGES[age], quantity(n), percent(n, sum(removed.values()))] for age, n in removed.items()]
            lines += ["", "Lookups of all pods of the node that missed a block after its removal, since the start:"]
            lines.append(table(ages, ("REMOVED BEFORE", "LOOKUPS", "SHARE"), right=(1, 2), style=style))
        return "\n".join([*lines, "", *finding_lines(state.findings, style)])

    emit(args, data, text)
    return exit_code(state.findings)
