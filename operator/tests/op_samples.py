"""Pools, inputs and a cluster in memory for the operator's tests."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.desired import Inputs, InstallationConfig, PoolSecret
from kvpool_operator.errors import ConflictError, OperatorError, RejectedError
from kvpool_operator.k8s.client import KINDS, ApiClient, Manifest, ObjectRef, ref
from kvpool_operator.k8s.reflector import Lister
from kvpool_operator.observe.observer import OWNED_KINDS, Listers

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]

ENV = InstallationConfig(sidecar_image="registry.example/kvpool-sidecar:0.1.0")
SECRET = PoolSecret(
    pool_id="5d0c9a52-pool",
    pool_secret="ab" * 32,
    managed_index_password="redis-password",
    peer_files={"peer-ca.crt": "certificate", "peer-ca.key": "key"},
)
LOCAL = {"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "10Gi"}}


def pool_manifest(**spec: Any) -> Manifest:
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {
            "name": "chat",
            "namespace": "kvpool-system",
            "uid": "6f1e0a58-uid",
            "generation": 3,
            "resourceVersion": "7",
            "finalizers": ["kvpool.dev/cleanup"],
        },
        "spec": {"tiers": [LOCAL], **spec},
    }


def pool(**spec: Any) -> KVCachePool:
    return KVCachePool.parse(pool_manifest(**spec))


def example(name: str) -> KVCachePool:
    raw = yaml.safe_load((ROOT / "examples" / name).read_text())
    raw["metadata"] |= {"namespace": "kvpool-system", "uid": "6f1e0a58-uid", "generation": 3}
    return KVCachePool.parse(raw)


def inputs(**spec: Any) -> Inputs:
    return Inputs(pool(**spec), ENV, SECRET)


class MemoryCluster(ApiClient):
    """Objects in a dictionary. Knows of server-side apply as much as one field manager can see."""

    def __init__(self) -> None:
        self.objects: dict[ObjectRef, Manifest] = {}
        self.calls: list[tuple[str, ObjectRef]] = []
        self.refuse: dict[str, OperatorError] = {}  # kind: error of every write
        self._versions = itertools.count(100)

    def put(self, manifest: Manifest) -> Manifest:
        stored = copy.deepcopy(manifest)
        stored["metadata"].setdefault("uid", f"uid-{next(self._versions)}")
        stored["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[ref(stored)] = stored
        return stored

    def writes(self) -> list[tuple[str, ObjectRef]]:
        return [(verb, r) for verb, r in self.calls if verb not in ("get", "list")]

    async def get(self, target: ObjectRef) -> Manifest | None:
        self.calls.append(("get", target))
        return copy.deepcopy(self.objects.get(target))

    async def list(
        self, kind: str, *, namespace: str = "", labels: str = "", fields: str = "", fresh: bool = False
    ) -> list[Manifest]:
        self.calls.append(("list", ObjectRef(kind, namespace, "")))
        wanted = dict(part.split("=", 1) for part in labels.split(",") if part)
        return [
            copy.deepcopy(o)
            for r, o in self.objects.items()
            if r.kind == kind
            and (not namespace or r.namespace == namespace)
            and wanted.items() <= (o["metadata"].get("labels") or {}).items()
        ]

    async def create(self, manifest: Manifest) -> Manifest:
        if "generateName" in manifest["metadata"]:
            manifest = copy.deepcopy(manifest)
            manifest["metadata"]["name"] = f"{manifest['metadata'].pop('generateName')}{next(self._versions)}"
        target = ref(manifest)
        self._write("create", target)
        if target in self.objects:
            raise ConflictError(f"{target} exists")
        return self.put(manifest)

    async def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        target = ref(manifest)
        self._write(f"apply {subresource}".strip(), target)
        live = self.objects.get(target)
        if subresource:
            if live is None:
                raise RejectedError(f"{target} not found", 404)
            return self.put({**live, subresource: manifest[subresource]})
        kept = {} if live is None else {k: live[k] for k in ("status",) if k in live}
        uid = {} if live is None else {"uid": live["metadata"]["uid"]}
        return self.put({**kept, **manifest, "metadata": {**manifest["metadata"], **uid}})

    async def patch(self, target: ObjectRef, patch: Manifest, *, subresource: str = "") -> Manifest:
        self._write("patch", target)
        live = self.objects.get(target)
        if live is None:
            raise RejectedError(f"{target} not found", 404)
        version = patch.get("metadata", {}).get("resourceVersion")
        if version is not None and version != live["metadata"]["resourceVersion"]:
            raise ConflictError(f"{target} changed")
        return self.put(merge(live, patch))

    async def delete(self, target: ObjectRef, *, uid: str = "", foreground: bool = False) -> None:
        self._write("delete", target)
        live = self.objects.get(target)
        if live is None:
            return
        if uid and live["metadata"]["uid"] != uid:
            raise ConflictError(f"{target} is another one")
        del self.objects[target]

    async def evict(self, target: ObjectRef, *, uid: str) -> None:
        await self.delete(target, uid=uid)

    def _write(self, verb: str, target: ObjectRef) -> None:
        assert target.kind in KINDS
        self.calls.append((verb, target))
        if target.kind in self.refuse:
            raise self.refuse[target.kind]


class MemoryLister(Lister):
    """A reflector's store that never lags behind: the cluster's own objects."""

    def __init__(self, cluster: MemoryCluster, kind: str, labels: dict[str, str] | None = None) -> None:
        self._cluster = cluster
        self._kind = kind
        self._labels = labels or {}

    def get(self, namespace: str, name: str) -> Manifest | None:
        return copy.deepcopy(self._cluster.objects.get(ObjectRef(self._kind, namespace, name)))

    def list(self, namespace: str = "", labels: Mapping[str, str] | None = None) -> list[Manifest]:
        wanted = {**self._labels, **(labels or {})}
        return [
            copy.deepcopy(o)
            for r, o in sorted(self._cluster.objects.items())
            if r.kind == self._kind
            and namespace in ("", r.namespace)
            and wanted.items() <= (o["metadata"].get("labels") or {}).items()
        ]


def listers(cluster: MemoryCluster) -> Listers:
    """What `Informers` would give an observer."""
    ours = {"app.kubernetes.io/managed-by": "kvpool-operator"}
    return Listers(
        namespaces=MemoryLister(cluster, "Namespace"),
        engine_pods=MemoryLister(cluster, "Pod", {"kvpool.dev/inject": "true"}),
        pool_pods=MemoryLister(cluster, "Pod"),
        owned={kind: MemoryLister(cluster, kind, ours) for kind in OWNED_KINDS},
    )


def merge(live: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    out = dict(live) if isinstance(live, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merge(out.get(key), value)
    return out
