"""Reads the results of a preflight run from its pods."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.annotations import ANNOTATION_PREFLIGHT_SPEC
from kvpool_operator.api.fields import HTTP_PORT
from kvpool_operator.desired import labels
from kvpool_operator.desired.preflight import COMPONENT
from kvpool_operator.k8s import pods as podview
from kvpool_operator.preflight.results import Finding, NodePreflight, PreflightRun, parse

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.k8s.client import ApiClient, Manifest
    from kvpool_operator.k8s.reflector import Lister
    from kvpool_operator.sidecars.status_client import StatusClient

__all__ = ["observe_preflight"]

MAX_EVENT_QUERIES: Final = 3
"""Pods that do not start, of which Events are read: one request each."""
STARTUP_GRACE_S: Final = 10.0
"""Until then a volume may still be bound or a ConfigMap still arrive, so a pending pod is no result."""


async def observe_preflight(
    cluster: ApiClient, scraper: StatusClient, pool_pods: Lister, pool: KVCachePool, daemonset: Manifest | None
) -> PreflightRun:
    """Results of the current preflight DaemonSet; pods of an older preflight spec do not count."""
    if daemonset is None:
        return PreflightRun()
    spec = _spec(daemonset["spec"]["template"])
    pods = pool_pods.list(pool.metadata.namespace, labels.selector(pool, COMPONENT))
    pods = [p for p in pods if podview.is_staying(p) and _spec(p) == spec]
    answers = await scraper.get_raw([a for p in pods if (a := podview.address(p))], HTTP_PORT)
    nodes = [_result(p, answers.get(podview.address(p))) for p in pods]
    pending = [n for n, node in enumerate(nodes) if node.passed is None and not podview.address(pods[n])]
    pending = [n for n in pending if not _is_starting(pods[n])][:MAX_EVENT_QUERIES]
    problems = await asyncio.gather(*(_mount_problem(cluster, pods[n]) for n in pending))
    for n, problem in zip(pending, problems, strict=True):
        if problem:
            nodes[n] = _failed(nodes[n].node, problem)
    status = daemonset.get("status") or {}
    is_current = status.get("observedGeneration", 0) >= daemonset["metadata"].get("generation", 1)
    desired = int(status.get("desiredNumberScheduled", 0)) if is_current else None
    return PreflightRun(desired, tuple(sorted(nodes, key=lambda n: n.node)), spec)


def _spec(pod: Manifest) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(ANNOTATION_PREFLIGHT_SPEC, ""))


def _result(pod: Manifest, answer: object) -> NodePreflight:
    node = podview.node(pod)
    result = parse(answer, node)
    problem = podview.problem(pod)
    if result.passed is not None or problem is None:
        return result
    if problem.kind is podview.PodProblemKind.UNSCHEDULABLE and _is_starting(pod):
        return result
    return _failed(node, problem.message)


def _is_starting(pod: Manifest) -> bool:
    created = str(pod["metadata"].get("creationTimestamp") or "")
    return bool(created) and (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds() < STARTUP_GRACE_S


def _failed(node: str, problem: str) -> NodePreflight:
    """A pod that does not start is a failed result: the sidecar's pod would not start either."""
    advice = "the sidecar's pod would not start either: fix this first"
    return NodePreflight(node, False, (Finding("Pod", "Fail", problem[:300], advice, node=node),))


async def _mount_problem(cluster: ApiClient, pod: Manifest) -> str:
    """Only an Event shows that a volume cannot be mounted."""
    about = f"involvedObject.name={pod['metadata']['name']},involvedObject.kind=Pod,reason=FailedMount"
    events = await cluster.list("Event", namespace=pod["metadata"]["namespace"], fields=about)
    mine = [e for e in events if e.get("involvedObject", {}).get("uid") == pod["metadata"].get("uid")]
    newest = max(mine, key=lambda e: str(e.get("lastTimestamp") or ""), default={})
    return str(newest.get("message", ""))[:300]
