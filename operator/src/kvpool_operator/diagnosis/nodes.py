"""Findings about nodes: silent sidecars, mounts, clocks, network policies. Pure."""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.fields import INDEX_PORT
from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.findings.row import Severity
from kvpool_operator.desired.labels import labels as labels_of
from kvpool_operator.diagnosis.finding import make
from kvpool_operator.k8s.selectors import matches
from kvpool_operator.text import summarize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvpool_operator.diagnosis.finding import PoolFinding
    from kvpool_operator.diagnosis.observed import Observed

__all__ = ["blocking_policies", "broken_operator", "failed_checks", "silent_nodes", "wrong_clocks"]

_SKEW_S: Final = 60.0
_REFUSED_S: Final = 300.0
"""Certificates between nodes are valid from 5 minutes before they are made (kvpool_sidecar.peers.ca)."""
_MOUNT_CHECKS: Final = frozenset(
    {"RootFilesystem", "Directory", "Filesystem", "SameDevice", "NotMounted", "NotShared", "SharedDirectory"}
)
_MAX_CHECKS: Final = 8


def silent_nodes(i: Observed) -> Iterator[PoolFinding]:
    """Nodes that are not Ready, and sidecars that are Ready and do not answer."""
    down = {str((n.get("metadata") or {}).get("name")) for n in i.cluster.nodes if not _is_ready(n)}
    for sidecar in i.snapshot.sidecars:
        if sidecar.node in down:
            yield make(
                Code.NODE_UNREACHABLE,
                f"Node {sidecar.node}",
                "the node is not Ready",
                fix=f"kubectl describe node {sidecar.node}",
            )
        elif sidecar.report is None and sidecar.ready and not sidecar.problem:
            yield make(
                Code.NODE_UNREACHABLE,
                f"Node {sidecar.node}",
                "the sidecar is Ready and does not answer on its HTTP port",
            )


def _is_ready(node: Mapping[str, Any]) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def failed_checks(i: Observed) -> Iterator[PoolFinding]:
    """Preflight checks that failed or warned; mounts have a code of their own."""
    for found in i.preflight[:_MAX_CHECKS]:
        is_mount = found.check in _MOUNT_CHECKS
        code = Code.WRONG_MOUNT if is_mount else Code.PREFLIGHT_FAILED
        tier = f" of tier {found.tier}" if found.tier else ""
        summary = f"{found.check}{tier}: {found.message}"
        severity = Severity.ERROR if found.level == "Fail" else Severity.WARNING
        yield make(code, f"Node {found.node}", summary, fix=found.advice, severity=severity)


def wrong_clocks(i: Observed) -> Iterator[PoolFinding]:
    """Nodes whose clock is off the median of the nodes and of the observer, which counts as one more node."""
    offsets = {node: r.clock_offset_s for node, r in i.reports if r.clock_offset_s is not None}
    if not offsets:
        return
    middle = median_low([*offsets.values(), 0.0])
    for node, offset in sorted(offsets.items()):
        seconds = offset - middle
        if abs(seconds) > _SKEW_S:
            side = "ahead of" if seconds > 0 else "behind"
            severity = Severity.ERROR if abs(seconds) > _REFUSED_S else Severity.WARNING
            minutes = round(abs(seconds) / 60)
            summary = f"the node's clock is about {minutes} minutes {side} the others"
            yield make(Code.CLOCKS_DIFFER, f"Node {node}", summary, severity=severity)


def blocking_policies(i: Observed) -> Iterator[PoolFinding]:
    """NetworkPolicies that select the pool's pods while none of them admits a port that the pool needs."""
    peer = i.pool.spec.transport.port
    needs: list[tuple[str, int]] = [("sidecar", peer)]
    if i.pool.spec.index.external is None:
        needs.append(("index", INDEX_PORT))
    for component, port in needs:
        labels = labels_of(i.pool.metadata.name, component)
        selecting = [p for p in i.cluster.network_policies if _selects(p, i.pool.metadata.namespace, labels)]
        if selecting and not any(_admits(policy, port) for policy in selecting):
            names = [str(policy["metadata"].get("name")) for policy in selecting]
            word = "NetworkPolicy" if len(names) == 1 else "NetworkPolicies"
            summary = (
                f"{word} {summarize(names)} in {i.pool.metadata.namespace}: TCP {port} of the {component} is closed"
            )
            fix = f"admit TCP {port} from the pool's pods in a NetworkPolicy, or set networkPolicy.enabled of the chart"
            yield make(Code.NETWORK_POLICY_BLOCKS, i.subject, summary, fix=fix)


def _selects(policy: Mapping[str, Any], namespace: str, labels: Mapping[str, str]) -> bool:
    spec = policy.get("spec") or {}
    is_ingress = "Ingress" in (spec.get("policyTypes") or ["Ingress"])
    same = (policy.get("metadata") or {}).get("namespace") == namespace
    return bool(same and is_ingress and matches(spec.get("podSelector") or {}, labels))


def _admits(policy: Mapping[str, Any], port: int) -> bool:
    rules: Sequence[Mapping[str, Any]] = (policy.get("spec") or {}).get("ingress") or []
    return any(_admits_port(rule.get("ports") or [], port) for rule in rules)


def _admits_port(ports: Sequence[Mapping[str, Any]], port: int) -> bool:
    """Whether a rule admits the port; one without ports admits all. Named ports count as admitted."""
    if not ports:
        return True
    return any(
        p.get("protocol", "TCP") == "TCP"
        and (not isinstance(p.get("port"), int) or p["port"] <= port <= int(p.get("endPort") or p["port"]))
        for p in ports
    )


def broken_operator(i: Observed) -> Iterator[PoolFinding]:
    """The operator does not run: only a command can find that."""
    if i.cluster.operator_problem:
        yield make(Code.OPERATOR_UNAVAILABLE, i.subject, i.cluster.operator_problem)
