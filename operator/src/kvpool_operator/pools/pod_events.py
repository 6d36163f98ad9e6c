"""Emits Events about engine pods and their controllers: each once while Events are kept, whichever process emits it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.pools.apply import emit_event

if TYPE_CHECKING:
    from kvpool_operator.api.reasons import EventReason
    from kvpool_operator.k8s.client import ApiClient
    from kvpool_operator.observe.engine_pods import EnginePod, Owner

__all__ = ["emit_owner_event", "emit_pod_event"]


async def emit_pod_event(
    pod: EnginePod, reason: EventReason, message: str, cluster: ApiClient, *, warning: bool
) -> None:
    """Emit an Event about the pod."""
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid}
    await emit_event(about, reason, message, cluster, warning=warning, name=_name(pod.name, reason, pod.uid))


async def emit_owner_event(pod: EnginePod, owner: Owner, reason: EventReason, message: str, cluster: ApiClient) -> None:
    """Emit a Warning about the controller of the pod."""
    about = {
        "apiVersion": owner.api_version,
        "kind": owner.kind,
        "namespace": pod.namespace,
        "name": owner.name,
        "uid": owner.uid,
    }
    name = _name(owner.name, reason, owner.uid)
    await emit_event(about, reason, f"{pod.name}: {message}", cluster, warning=True, name=name)


def _name(name: str, reason: EventReason, uid: str) -> str:
    return f"{name[:200]}.kvpool-{reason.lower()}.{uid[:8]}"
