"""Pod objects and a pods directory as a kubelet keeps it."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

POOL = "kvpool/test"


def pod(name: str, namespace: str = "team-a", *, uid: str = "", pool: str = POOL, **more) -> dict:
    """A pod object as the API server gives it."""
    return {
        "metadata": {
            "uid": uid or str(uuid.uuid5(uuid.NAMESPACE_DNS, name + namespace)),
            "name": name,
            "namespace": namespace,
            "labels": {"kvpool.dev/inject": "true"},
            "annotations": {"kvpool.dev/pool": pool},
            **more.pop("metadata", {}),
        },
        "spec": {"serviceAccountName": "default", "nodeName": "n"},
        "status": {"phase": "Running", **more.pop("status", {})},
    }


def sidecar(name: str, pool: str = POOL, *, user: int | None = None, **more) -> dict:
    """A sidecar's pod object as the DaemonSet controller makes it. `user`: of its server, by default this process's."""
    namespace, _, pool_name = pool.partition("/")
    labels = {
        "kvpool.dev/pool": pool_name,
        "kvpool.dev/sockets": "agent",
        "app.kubernetes.io/component": "sidecar",
        "app.kubernetes.io/managed-by": "kvpool-operator",
    }
    security = {"runAsUser": os.geteuid() if user is None else user}
    return {
        "metadata": {
            "uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, name + pool)),
            "name": name,
            "namespace": namespace,
            "labels": labels,
            "ownerReferences": [{"kind": "DaemonSet", "name": f"{pool_name}-sidecar", "controller": True}],
            **more.pop("metadata", {}),
        },
        "spec": {"nodeName": "n", "containers": [{"name": "server", "securityContext": security}]},
        "status": {"phase": "Running"},
    }


class Kubelet:
    """A pods directory as a kubelet keeps it, and the API server's list of them as a file."""

    def __init__(self, directory: Path, home: Path) -> None:
        self.pods_dir = directory
        self.file = home / "pods.json"
        self.pods: dict[str, dict] = {}
        self.publish()

    def publish(self) -> None:
        temporary = self.file.with_suffix(".new")
        temporary.write_text(json.dumps(list(self.pods.values())))
        temporary.rename(self.file)

    def volume(self, raw: dict) -> Path:
        return self.pods_dir / raw["metadata"]["uid"] / "volumes/kubernetes.io~empty-dir/kvpool"

    def add(self, raw: dict, *, volume: bool = True) -> Path:
        self.pods[raw["metadata"]["uid"]] = raw
        if volume:
            self.volume(raw).mkdir(parents=True, mode=0o777)
        self.publish()
        return self.volume(raw) / "kv.sock"

    def handoff(self, raw: dict) -> Path:
        """The path at which a sidecar's server listens."""
        self.pods[raw["metadata"]["uid"]] = raw
        directory = self.pods_dir / raw["metadata"]["uid"] / "volumes/kubernetes.io~empty-dir/handoff"
        directory.mkdir(parents=True, mode=0o777)
        self.publish()
        return directory / "handoff.sock"

    def remove(self, raw: dict) -> None:
        del self.pods[raw["metadata"]["uid"]]
        shutil.rmtree(self.pods_dir / raw["metadata"]["uid"])
        self.publish()
