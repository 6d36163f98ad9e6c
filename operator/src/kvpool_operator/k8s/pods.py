"""What pods and selectors say, in words that a status can use. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import LabelSelector
    from kvpool_operator.k8s.client import Manifest

__all__ = [
    "PodProblem",
    "PodProblemKind",
    "address",
    "is_ready",
    "is_staying",
    "node",
    "problem",
    "ready_since",
    "selector_text",
]


def selector_text(selector: LabelSelector) -> str:
    """A label selector as the API takes it in a URL."""
    parts = [f"{k}={v}" for k, v in sorted(selector.match_labels.items())]
    for e in selector.match_expressions:
        match e.operator:
            case "In" | "NotIn":
                parts.append(f"{e.key} {e.operator.lower()} ({','.join(e.values)})")
            case "Exists":
                parts.append(e.key)
            case "DoesNotExist":
                parts.append(f"!{e.key}")
    return ",".join(parts)


def node(pod: Manifest) -> str:
    """The node of a DaemonSet's pod, also before it is scheduled: it carries an affinity to that node alone."""
    spec = pod.get("spec") or {}
    if spec.get("nodeName"):
        return str(spec["nodeName"])
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    for term in affinity.get("nodeSelectorTerms") or []:
        for wanted in term.get("matchFields") or []:
            if wanted.get("key") == "metadata.name" and wanted.get("values"):
                return str(wanted["values"][0])
    return ""


def address(pod: Manifest) -> str:
    """IP of a running pod; empty if the pod does not run."""
    status = pod.get("status") or {}
    return str(status.get("podIP", "")) if status.get("phase") == "Running" else ""


def is_ready(pod: Manifest) -> bool:
    """Whether its Ready condition is True."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def is_staying(pod: Manifest) -> bool:
    """Whether the pod is not being deleted."""
    return "deletionTimestamp" not in pod["metadata"]


def ready_since(pod: Manifest) -> datetime | None:
    """Since when its Ready condition is True; None: it is not."""
    for c in (pod.get("status") or {}).get("conditions") or []:
        if c.get("type") == "Ready" and c.get("status") == "True" and c.get("lastTransitionTime"):
            return datetime.fromisoformat(str(c["lastTransitionTime"]))
    return None


class PodProblemKind(StrEnum):
    """Class of a problem that keeps a pod from being ready."""

    CONTAINER_FAILED = "ContainerFailed"
    CONTAINER_WAITING = "ContainerWaiting"
    UNSCHEDULABLE = "Unschedulable"


@dataclass(frozen=True)
class PodProblem:
    """Why a pod is not ready. `message` is one line."""

    kind: PodProblemKind
    message: str


def problem(pod: Manifest) -> PodProblem | None:
    """Why a pod is not ready; None if it is ready or no cause is known."""
    if is_ready(pod):
        return None
    status = pod.get("status") or {}
    for c in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        found = _container_problem(c)
        if found is not None:
            return found
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = f"cannot be scheduled: {str(condition.get('message') or '')[:200]}"
            return PodProblem(PodProblemKind.UNSCHEDULABLE, message)
    return None


def _container_problem(status: Manifest) -> PodProblem | None:
    state = status.get("state") or {}
    waiting = state.get("waiting") or {}
    terminated = state.get("terminated") or (status.get("lastState") or {}).get("terminated")
    reason = str(waiting.get("reason") or "")
    name = status.get("name")
    if terminated and (terminated.get("exitCode") or reason == "CrashLoopBackOff"):
        lines = str(terminated.get("message") or "").strip().splitlines()
        cause = lines[-1] if lines else f"exit code {terminated.get('exitCode')}"
        return PodProblem(PodProblemKind.CONTAINER_FAILED, f"container {name} failed: {cause[:300]}")
    if reason and reason not in ("PodInitializing", "ContainerCreating"):
        message = f"container {name}: {reason}: {str(waiting.get('message') or '')[:200]}".rstrip(": ")
        return PodProblem(PodProblemKind.CONTAINER_WAITING, message)
    return None
