"""Which pods of this node want a socket, as the API server says. Pure parsing; what is odd is left out."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

__all__ = ["INJECT_LABEL", "POOL_ANNOTATION", "TargetPod", "wanted_pod"]

INJECT_LABEL = "kvpool.dev/inject"
POOL_ANNOTATION = "kvpool.dev/pool"
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class TargetPod(NamedTuple):
    """A pod that is to be served."""

    uid: str
    namespace: str
    pod: str
    service_account: str

    def add_message(self) -> dict[str, str]:
        return {"op": "add", **self._asdict()}


def wanted_pod(raw: Any, pool: str) -> tuple[str, TargetPod | None]:
    """The uid of a pod object, and the pod if it belongs to `pool` (namespace/name) and still runs.

    An empty uid: not a pod at all. The uid becomes part of a path, so it must look like one that the API server gives.
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
    """Ended, or told to end and no container runs any more: then the kubelet wants the volume back."""
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
