"""Reading what the pods that look at a pool's nodes have found."""

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

_MOST_ASKED: Final = 3
"""Pods that do not start, of which Events are read: one request each."""
_YOUNG_S: Final = 10.0
"""Until then a volume may still be bound, a ConfigMap still arrive: what a pod waits for is no answer yet."""


async def observe_preflight(
    cluster: ApiClient, scraper: StatusClient, pods_of_pools: Lister, pool: KVCachePool, daemonset: Manifest | None
) -> PreflightRun:
    """What its pods answered to what the DaemonSet asks now; pods of an earlier question do not count."""
    if daemonset is None:
        return PreflightRun()
    pods = pods_of_pools.list(pool.metadata.namespace, labels.selector(pool, COMPONENT))
    asked = _spec(daemonset["spec"]["template"])
    pods = [p for p in pods if podview.is_staying(p) and _spec(p) == asked]
    answers = await scraper.get_raw([a for p in pods if (a := podview.address(p))], HTTP_PORT)
    looks = [_look(p, answers.get(podview.address(p))) for p in pods]
    mute = [n for n, look in enumerate(looks) if look.passed is None and not podview.address(pods[n])]
    mute = [n for n in mute if not _is_young(pods[n])][:_MOST_ASKED]
    told = await asyncio.gather(*(_mount_trouble(cluster, pods[n]) for n in mute))
    for n, trouble in zip(mute, told, strict=True):
        if trouble:
            looks[n] = _failed(looks[n].node, trouble)
    status = daemonset.get("status") or {}
    is_current = status.get("observedGeneration", 0) >= daemonset["metadata"].get("generation", 1)
    desired = int(status.get("desiredNumberScheduled", 0)) if is_current else None
    return PreflightRun(desired, tuple(sorted(looks, key=lambda look: look.node)), asked)


def _spec(pod: Manifest) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(ANNOTATION_PREFLIGHT_SPEC, ""))


def _look(pod: Manifest, answer: object) -> NodePreflight:
    node = podview.node(pod)
    result = parse(answer, node)
    problem = podview.problem(pod)
    if result.passed is not None or problem is None:
        return result
    if problem.kind is podview.PodProblemKind.UNSCHEDULABLE and _is_young(pod):
        return result
    return _failed(node, problem.message)


def _is_young(pod: Manifest) -> bool:
    made = str(pod["metadata"].get("creationTimestamp") or "")
    return bool(made) and (datetime.now(UTC) - datetime.fromisoformat(made)).total_seconds() < _YOUNG_S


def _failed(node: str, trouble: str) -> NodePreflight:
    """A pod that does not start is an answer: the sidecar's would not either."""
    advice = "the sidecar's pod would not start either: mend this first"
    return NodePreflight(node, False, (Finding("Pod", "Fail", trouble[:300], advice, node=node),))


async def _mount_trouble(cluster: ApiClient, pod: Manifest) -> str:
    """A volume that cannot be mounted shows in an Event alone."""
    about = f"involvedObject.name={pod['metadata']['name']},involvedObject.kind=Pod,reason=FailedMount"
    events = await cluster.list("Event", namespace=pod["metadata"]["namespace"], fields=about)
    mine = [e for e in events if e.get("involvedObject", {}).get("uid") == pod["metadata"].get("uid")]
    newest = max(mine, key=lambda e: str(e.get("lastTimestamp") or ""), default={})
    return str(newest.get("message", ""))[:300]
