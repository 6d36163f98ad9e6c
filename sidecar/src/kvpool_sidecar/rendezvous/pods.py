"""Parses pod objects: engine pods that need a socket, and sidecars that serve them. Pure; skips malformed ones."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

__all__ = ["ENGINES", "SIDECARS", "SidecarPod", "TargetPod", "parse_pod", "parse_sidecar"]

POOL_ANNOTATION = "kvpool.dev/pool"
POOL_LABEL = "kvpool.dev/pool"
ENGINES = "kvpool.dev/inject=true"
"""Label selector of engine pods."""
SIDECARS = "app.kubernetes.io/component=sidecar,app.kubernetes.io/managed-by=kvpool-operator,kvpool.dev/sockets=agent"
"""Label selector of sidecars that get their sockets from the node agent. Sidecars of older releases do not match."""
_SERVER = "server"
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class TargetPod(NamedTuple):
    """A pod that needs a socket of `pool` (namespace/name)."""

    uid: str
    namespace: str
    pod: str
    service_account: str
    pool: str

    def add_message(self) -> dict[str, str]:
        return {
            "op": "add",
            "uid": self.uid,
            "namespace": self.namespace,
            "pod": self.pod,
            "service_account": self.service_account,
        }


class SidecarPod(NamedTuple):
    """A sidecar of `pool` (namespace/name), whose server runs as `user`."""

    uid: str
    pool: str
    user: int


def parse_pod(raw: Any) -> tuple[str, TargetPod | None]:
    """Return the uid of a pod object, and the pod if it names a pool and still runs.

    An empty uid means that the object is not a pod. The uid becomes part of a path, so its format is checked.
    """
    uid, meta = _identity(raw)
    if not uid or not _matches(meta, ENGINES):
        return uid, None
    namespace, name = meta.get("namespace"), meta.get("name")
    account = _dict(_dict(raw).get("spec")).get("serviceAccountName") or "default"
    pool = _dict(meta.get("annotations")).get(POOL_ANNOTATION)
    if not (isinstance(namespace, str) and isinstance(name, str) and isinstance(account, str)):
        return uid, None
    if not isinstance(pool, str) or _has_ended(raw):
        return uid, None
    return uid, TargetPod(uid, namespace, name, account, pool)


def parse_sidecar(raw: Any) -> tuple[str, SidecarPod | None]:
    """Return the uid of a pod object, and the sidecar if the pod is one of its namespace's pools and is to stay.

    The pool is that of the pod's own namespace, so no other namespace can have its sockets. The labels and the owner
    are as trustworthy as the clients that may create pods there; the chart's ValidatingAdmissionPolicy restricts the
    labels.
    """
    uid, meta = _identity(raw)
    if not uid or not _matches(meta, SIDECARS):
        return uid, None
    namespace, pool = meta.get("namespace"), _dict(meta.get("labels")).get(POOL_LABEL)
    user = _server_user(raw)
    if not (isinstance(namespace, str) and isinstance(pool, str) and pool and user is not None):
        return uid, None
    owners = meta.get("ownerReferences")
    is_owned = isinstance(owners, list) and any(_is_daemonset(_dict(o), f"{pool}-sidecar") for o in owners)
    # a sidecar that is being deleted keeps its sockets; the next one gets new ones
    if not is_owned or "deletionTimestamp" in meta or _has_ended(raw):
        return uid, None
    return uid, SidecarPod(uid, f"{namespace}/{pool}", user)


def _identity(raw: Any) -> tuple[str, dict[str, Any]]:
    meta = _dict(_dict(raw).get("metadata"))
    uid = meta.get("uid")
    return (uid if isinstance(uid, str) and _UID.fullmatch(uid) else ""), meta


def _matches(meta: dict[str, Any], selector: str) -> bool:
    """Return whether the labels match a selector of equalities. The API server selects too; a file does not."""
    labels = _dict(meta.get("labels"))
    return all(labels.get(key) == value for key, _, value in (part.partition("=") for part in selector.split(",")))


def _is_daemonset(owner: dict[str, Any], name: str) -> bool:
    return owner.get("controller") is True and owner.get("kind") == "DaemonSet" and owner.get("name") == name


def _server_user(raw: dict[str, Any]) -> int | None:
    """Return the user of the container that serves; None unless the pod object sets it."""
    containers = _dict(raw.get("spec")).get("containers")
    for container in containers if isinstance(containers, list) else []:
        if _dict(container).get("name") == _SERVER:
            user = _dict(_dict(container).get("securityContext")).get("runAsUser")
            return user if type(user) is int else None
    return None


def _has_ended(raw: dict[str, Any]) -> bool:
    """Return whether the pod has ended, or is being deleted and runs no container: the kubelet unmounts its volume."""
    status = _dict(raw.get("status"))
    if status.get("phase") in ("Succeeded", "Failed"):
        return True
    if "deletionTimestamp" not in _dict(raw.get("metadata")):
        return False
    containers = status.get("containerStatuses")
    if not isinstance(containers, list):
        return True
    return not any("running" in _dict(_dict(container).get("state")) for container in containers)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
