"""The managed index: one Redis. It is a hint; the nodes announce again what it forgets, so one instance is enough.

Nothing starts it anew but another image, another size or another place for its entries: a changed password comes by its
Secret (kvpool_sidecar.commands.index_server).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.annotations import ANNOTATION_INDEX_MEMORY
from kvpool_operator.api.quantity import exact_bytes, to_bytes
from kvpool_operator.desired import names
from kvpool_operator.desired.index_sizing import index_memory
from kvpool_operator.desired.labels import labels, metadata, selector
from kvpool_operator.desired.pod_template import USER, container, pull_secrets, security
from kvpool_operator.desired.secrets import password_files
from kvpool_operator.desired.services import INDEX_PORT, PROBE_PORT

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import IndexPersistence, KVCachePool
    from kvpool_operator.desired.inputs import Inputs, Manifest

__all__ = ["index_claim", "index_statefulset", "memory_of"]

_SECRET_DIR: Final = "/etc/kvpool-secret"  # noqa: S105  a path
_MIB: Final = 2**20


def index_statefulset(inputs: Inputs) -> Manifest | None:
    """None where the user brings their own index."""
    pool, env = inputs.pool, inputs.env
    if pool.spec.index.external is not None:
        return None
    name = names.index(pool.metadata.name)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(pool, name, "index") | {"annotations": {ANNOTATION_INDEX_MEMORY: str(_memory(inputs))}},
        "spec": {
            "replicas": 1,
            "serviceName": name,
            "selector": {"matchLabels": selector(pool, "index")},
            "template": {
                "metadata": {"labels": labels(pool.metadata.name, "index")},
                "spec": {
                    "serviceAccountName": name,
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 60 if _persistence(pool) else 5,
                    "securityContext": {
                        "fsGroup": USER,
                        "runAsNonRoot": True,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    **pull_secrets(env),
                    **_tolerations(inputs),
                    "containers": [_redis(inputs)],
                    "volumes": [
                        {"name": "data"} | _data(pool),
                        {
                            "name": "secret",
                            "secret": {
                                "secretName": names.secret(pool.metadata.name),
                                "defaultMode": 0o440,
                                "items": password_files(managed=True),
                            },
                        },
                    ],
                },
            },
        },
    }


def index_claim(inputs: Inputs) -> Manifest | None:
    """The volume for its entries; None where they are not kept."""
    pool = inputs.pool
    persistence = _persistence(pool)
    if pool.spec.index.external is not None or persistence is None:
        return None
    storage_class = persistence.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(pool, names.index(pool.metadata.name), "index"),
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            **({"storageClassName": storage_class} if storage_class else {}),
            "resources": {"requests": {"storage": exact_bytes(to_bytes(persistence.size))}},
        },
    }


def memory_of(statefulset: Manifest | None) -> int:
    """Bytes for entries that a living index has; 0 if there is none, or if it does not say."""
    notes = (statefulset or {}).get("metadata", {}).get("annotations") or {}
    text = str(notes.get(ANNOTATION_INDEX_MEMORY, ""))
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _memory(inputs: Inputs) -> int:
    return index_memory(inputs.pool, inputs.nodes, inputs.index_memory)


def _persistence(pool: KVCachePool) -> IndexPersistence | None:
    return pool.spec.index.managed.persistence if pool.spec.index.managed else None


def _data(pool: KVCachePool) -> Manifest:
    if _persistence(pool) is None:
        return {"emptyDir": {}}
    return {"persistentVolumeClaim": {"claimName": names.index(pool.metadata.name)}}


def _redis(inputs: Inputs) -> Manifest:
    memory = _memory(inputs)
    keeps = _persistence(inputs.pool) is not None
    # what Redis itself takes: fragmentation, connections; while entries are written, pages that change meanwhile; and
    # what stands beside it
    limit = -(-memory * (7 if keeps else 5) // 4 // _MIB) * _MIB + 160 * _MIB
    return container(
        inputs.env,
        "index",
        *(
            "kvpool-sidecar",
            "index-server",
            "--port",
            str(INDEX_PORT),
            "--http-port",
            str(PROBE_PORT),
            "--dir",
            "/data",
        ),
        *("--max-memory", str(memory), *(["--persist"] if keeps else [])),
        env=[
            {"name": "KVPOOL_SECRET_DIR", "value": _SECRET_DIR},
            {"name": "KVPOOL_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        ports=[
            {"name": "redis", "containerPort": INDEX_PORT, "protocol": "TCP"},
            {"name": "probes", "containerPort": PROBE_PORT, "protocol": "TCP"},
        ],
        # one that reads its entries is alive: /healthz counts it so, and the first start has ten minutes
        startupProbe=_probe("/healthz", period=2, failures=300),
        readinessProbe=_probe("/readyz", period=2, failures=3),
        livenessProbe=_probe("/healthz", period=10, failures=6),
        resources={
            "requests": {"cpu": "50m", "memory": exact_bytes(memory)},
            "limits": {"memory": exact_bytes(limit)},
        },
        securityContext=security(),
        volumeMounts=[
            {"name": "data", "mountPath": "/data"},
            {"name": "secret", "mountPath": _SECRET_DIR, "readOnly": True},
        ],
    )


def _tolerations(inputs: Inputs) -> Manifest:
    """Those of the sidecars: where every node is tainted for engines, the index must fit in somewhere."""
    tolerations = inputs.pool.spec.nodes.tolerations
    if not tolerations:
        return {}
    return {"tolerations": [t.model_dump(by_alias=True, exclude_none=True) for t in tolerations]}


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "probes"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
