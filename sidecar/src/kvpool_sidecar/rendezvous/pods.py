"""Parses pod objects and selects those that need a socket. Pure; malformed objects are skipped."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

__all__ = ["INJECT_LABEL", "POOL_ANNOTATION", "TargetPod", "parse_pod"]

INJECT_LABEL = "kvpool.dev/inject"
POOL_ANNOTATION = "kvpool.dev/pool"
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class TargetPod(NamedTuple):
    """A pod that needs a socket."""

    uid: str
    namespace: str
    pod: str
    service_account: str

    def add_message(self) -> dict[str, str]:
        return {"op": "add", **self._asdict()}


def parse_pod(raw: Any, pool: str) -> tuple[str, TargetPod | None]:
    """Return the uid of a pod object, and the pod if it belongs to `pool` (namespace/name) and still runs.

    An empty uid means that the object is not a pod. The uid becomes part of a path, so its format is checked.
    """
    meta = _dict(_dict(raw).get("metadata"))
    uid = meta.get("uid")
    if not isinstance(uid, str) or not _UID.fullmatch(uid):
        return "", None
    namespace, name = meta.get("namespace"), meta.get("name")
    account = _dict(_dict(raw).get("spec")).get("serviceAccountName") or "default"
    if not (isinstance(namespace, str) and isinstance(name, str) and isinstance(account, str)):
        return uid, None
    if _dict(meta.get("annotations")).get(POOL_ANNOTATION) != pool or _has_ended(raw):
        return uid, None
    return uid, TargetPod(uid, namespace, name, account)


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
