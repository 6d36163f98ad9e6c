"""Load pods on the cluster: the real client library in an injected pod, in an engine's place (e2e/load/load.py)."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from typing import Any

from kubectl import ROOT, Proxy, apply, get, kubectl, until

IMAGE = os.environ.get("KVPOOL_BASE_IMAGE", "python:3.11-slim-bookworm")
PORT = 8000
BLOCK_BYTES = 256 * 1024
_FILES = {
    "load.py": ROOT / "e2e" / "load" / "load.py",
    "hostile.py": ROOT / "e2e" / "load" / "hostile.py",
    "sc_raw.py": ROOT / "sidecar" / "tests" / "sc_raw.py",
    "kvpool_testing/history.py": ROOT / "sidecar/testing/kvpool_testing/history.py",
    "kvpool_testing/stalls.py": ROOT / "sidecar/testing/kvpool_testing/stalls.py",
    "kvpool_testing/traffic.py": ROOT / "sidecar/testing/kvpool_testing/traffic.py",
}


@dataclass(frozen=True)
class LoadPod:
    """A pod that stores and loads when told; its orders go through the API server."""

    proxy: Proxy
    namespace: str
    name: str

    def order(self, what: str, timeout: float = 120, **asked: Any) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(
            self.proxy.request(self.namespace, self.name, PORT, f"/{what}", asked, timeout=timeout)
        )
        return told

    def put(self, first: int, count: int) -> dict[str, Any]:
        return self.order("put", first=first, count=count)

    def get(self, first: int, count: int) -> dict[str, Any]:
        return self.order("get", first=first, count=count)

    def report(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.proxy.request(self.namespace, self.name, PORT, "/report", timeout=30))
        return told

    def connected(self) -> bool:
        return bool(self.report()["connected"])

    def wait_connected(self, timeout: float = 120) -> None:
        until(f"{self.namespace}/{self.name} is connected", self.connected, timeout)

    def check(self) -> dict[str, Any]:
        """No invariant was broken, and something was called at all; the report."""
        told = self.report()
        assert told["broken"] == [], told["broken"][:10]
        assert sum(v for k, v in told["counts"].items() if ":" not in k) > 0, "nothing was called: nothing was checked"
        return told

    def delete(self) -> None:
        kubectl("-n", self.namespace, "delete", "pod", self.name, "--wait=true", "--timeout=60s", "--ignore-not-found")

    @property
    def annotations(self) -> dict[str, str]:
        pod = get("pod", "-n", self.namespace, self.name)
        notes: dict[str, str] = pod["metadata"].get("annotations") or {}
        return notes


def manifest(
    name: str,
    *,
    namespace: str,
    node: str,
    pool: str | None,
    block_bytes: int = BLOCK_BYTES,
    tenant: str = "",
    settings: dict[str, Any] | None = None,
    program: str = "load.py",
) -> dict[str, Any]:
    """The pod; without `pool` it does not opt in. It runs under Pod Security `restricted`.

    `tenant`: whose blocks it takes for right; the namespace unless given. `settings`: see Load in load.py.
    """
    env = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "LOAD_TENANT", "value": tenant or namespace},
        {"name": "LOAD_BLOCK_BYTES", "value": str(block_bytes)},
        {"name": "LOAD_SETTINGS", "value": json.dumps(settings or {})},
        {"name": "PYTHONPATH", "value": "/load"},
        {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
    ]
    container = {
        "name": "load",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", f"/load/{program}"],
        "env": env,
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/report", "port": PORT}, "periodSeconds": 1, "timeoutSeconds": 5},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "load", "mountPath": "/load", "readOnly": True}],
    }
    items = [{"key": path.rpartition("/")[2], "path": path} for path in _FILES]
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 12345,
            "runAsGroup": 12345,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "load", "configMap": {"name": "load", "items": items}}],
    }
    meta: dict[str, Any] = {"name": name, "namespace": namespace, "labels": {"app": "load"}}
    if pool is not None:
        meta["labels"]["kvpool.dev/inject"] = "true"
        meta["annotations"] = {"kvpool.dev/pool": pool, "kvpool.dev/engine": "none"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def fresh() -> int:
    """The number of a first block, of 4096 that no case before used: what was stored once may be there for long."""
    return secrets.randbelow(2**19) * 4096


def bring_program(namespace: str) -> None:
    """What the pods run, as a ConfigMap."""
    data = {path.rpartition("/")[2]: file.read_text() for path, file in _FILES.items()}
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "load", "namespace": namespace}, "data": data}
    apply(json.dumps(made))


def start(
    proxy: Proxy,
    name: str,
    *,
    namespace: str,
    node: str,
    pool: str,
    block_bytes: int = BLOCK_BYTES,
    tenant: str = "",
    settings: dict[str, Any] | None = None,
) -> LoadPod:
    """Make the pod and wait until it is connected to its node's sidecar."""
    bring_program(namespace)
    pod = LoadPod(proxy, namespace, name)
    pod.delete()  # of a case that failed on a cluster that was kept
    made = manifest(
        name,
        namespace=namespace,
        node=node,
        pool=pool,
        block_bytes=block_bytes,
        tenant=tenant,
        settings=settings,
    )
    apply(json.dumps(made))
    pod.wait_connected()
    return pod
