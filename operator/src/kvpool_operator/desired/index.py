"""Managed index: one Redis server. The index is a hint that the nodes rebuild, so a single instance is sufficient.

It restarts only for another image, memory size or volume: it reads a changed password from its Secret
(kvpool_sidecar.commands.index_server).

Default memory of the index:

    entries = nodes x capacity of a node's local tiers / 1 MiB        (most models have larger blocks)
    memory  = entries x 110 bytes                                     (docs/contribute/scale.md: 96 to 112 measured)

The memory is rounded up to 64Mi, 256Mi, 1Gi, 4Gi or 16Gi, because another size restarts the index. The calculation uses
at least four nodes, so that a new pool can grow without a restart. The current size is kept while the next smaller step
would be sufficient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.annotations import ANNOTATION_INDEX_MEMORY
from kvpool_operator.api.fields import INDEX_PORT
from kvpool_operator.api.quantity import exact_bytes, to_bytes
from kvpool_operator.desired import names
from kvpool_operator.desired.labels import metadata
from kvpool_operator.desired.pod_template import container, resources, security, workload
from kvpool_operator.desired.secrets import index_server_files, password_files
from kvpool_operator.desired.services import PROBE_PORT
from kvpool_operator.desired.users import USER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool_operator.api.v1alpha1 import IndexPersistence, KVCachePool
    from kvpool_operator.desired.inputs import Inputs, Manifest

__all__ = ["ENTRY_BYTES", "current_index_memory", "index_claim", "index_memory", "index_statefulset"]

_SECRET_DIR: Final = "/etc/kvpool-secret"  # noqa: S105  a path
_DATA_DIR: Final = "/data"
_PORTS: Final[tuple[Manifest, ...]] = (
    {"name": "redis", "containerPort": INDEX_PORT, "protocol": "TCP"},
    {"name": "probes", "containerPort": PROBE_PORT, "protocol": "TCP"},
)
_SMALL: Final[Manifest] = {"resources": resources("10m", "48Mi", "128Mi")}
_MIB: Final = 2**20
ENTRY_BYTES: Final = 110
_BLOCK_BYTES: Final = 2**20
_STEPS: Final = tuple(_MIB * 64 * 4**n for n in range(5))
_MIN_NODES: Final = 4


def index_memory(pool: KVCachePool, nodes: int, present: int) -> int:
    """Return the bytes for entries, a multiple of 1 MiB. `present`: current memory of the index, 0 if there is none."""
    requested = pool.spec.index.managed.max_memory if pool.spec.index.managed else None
    if requested is not None:
        return -(-to_bytes(requested) // _MIB) * _MIB
    capacity = sum(t.local.capacity_bytes for t in pool.spec.tiers if t.local is not None)
    wanted = max(nodes, _MIN_NODES) * capacity // _BLOCK_BYTES * ENTRY_BYTES
    step = next((s for s in _STEPS if s >= wanted), _STEPS[-1])
    return present if present == step * 4 and present in _STEPS else step


def index_statefulset(inputs: Inputs) -> Manifest | None:
    """Return None for an external index."""
    pool, env = inputs.pool, inputs.env
    if pool.spec.index.external is not None:
        return None
    name = names.index(pool.metadata.name)
    manifest = workload(
        "StatefulSet",
        pool,
        env,
        name=name,
        component="index",
        spec={"replicas": 1, "serviceName": name},
        pod={
            "serviceAccountName": name,
            "terminationGracePeriodSeconds": 60 if _persistence(pool) else 5,
            "securityContext": {
                "fsGroup": USER,
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **_tolerations(inputs),
            **_containers(inputs),
            "volumes": [
                {"name": "data"} | _data(pool),
                {
                    "name": "secret",
                    "secret": {
                        "secretName": names.secret(pool.metadata.name),
                        "defaultMode": 0o440,
                        "items": [*password_files(managed=True), *index_server_files(inputs)],
                    },
                },
            ],
        },
    )
    memory = {"annotations": {ANNOTATION_INDEX_MEMORY: str(_memory(inputs))}}
    return manifest | {"metadata": manifest["metadata"] | memory}


def index_claim(inputs: Inputs) -> Manifest | None:
    """Return the volume of the entries; None without persistence."""
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


def current_index_memory(statefulset: Manifest | None) -> int:
    """Return the bytes for entries of the existing index; 0 if there is none, or without the annotation."""
    annotations = (statefulset or {}).get("metadata", {}).get("annotations") or {}
    text = str(annotations.get(ANNOTATION_INDEX_MEMORY, ""))
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _memory(inputs: Inputs) -> int:
    return index_memory(inputs.pool, inputs.nodes, inputs.index_memory)


def _persistence(pool: KVCachePool) -> IndexPersistence | None:
    return pool.spec.index.managed.persistence if pool.spec.index.managed else None


def _data(pool: KVCachePool) -> Manifest:
    if _persistence(pool) is None:
        return {"emptyDir": {}}
    return {"persistentVolumeClaim": {"claimName": names.index(pool.metadata.name)}}


def _containers(inputs: Inputs) -> Manifest:
    """One container of the sidecar image; with another image for the server, the work is divided among three."""
    image = inputs.env.index_image
    if not image:
        return {"containers": [_server(inputs, _command(inputs, "--http-port", str(PROBE_PORT)), ports=_PORTS)]}
    prepare = container(inputs.env, "prepare", *_command(inputs, "--stage", "prepare"), **_common(inputs), **_SMALL)
    server = _server(inputs, ["valkey-server", f"{_DATA_DIR}/server.conf"], ports=_PORTS[:1]) | {"image": image}
    supervise = _command(inputs, "--stage", "supervise", "--http-port", str(PROBE_PORT))
    supervisor = container(inputs.env, "supervisor", *supervise, ports=_PORTS[1:], **_common(inputs), **_SMALL)
    return {"initContainers": [prepare], "containers": [server, supervisor]}


def _command(inputs: Inputs, *more: str) -> list[str]:
    persistent = _persistence(inputs.pool) is not None
    return [
        *("kvpool-sidecar", "index-server", "--port", str(INDEX_PORT), "--dir", _DATA_DIR),
        *("--max-memory", str(_memory(inputs)), *more, *(["--persist"] if persistent else [])),
        *(["--tls"] if inputs.pool.spec.index.is_encrypted else []),
    ]


def _common(inputs: Inputs) -> Manifest:
    return {
        "env": [
            {"name": "KVPOOL_SECRET_DIR", "value": _SECRET_DIR},
            {"name": "KVPOOL_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "securityContext": security(),
        "volumeMounts": [
            {"name": "data", "mountPath": _DATA_DIR},
            {"name": "secret", "mountPath": _SECRET_DIR, "readOnly": True},
        ],
    }


def _server(inputs: Inputs, command: list[str], *, ports: Sequence[Manifest]) -> Manifest:
    memory = _memory(inputs)
    persistent = _persistence(inputs.pool) is not None
    # overhead of Redis: fragmentation, connections, pages that change while entries are saved; and the supervisor
    # process
    limit = -(-memory * (7 if persistent else 5) // 4 // _MIB) * _MIB + 160 * _MIB
    return container(
        inputs.env,
        "index",
        *command,
        **_common(inputs),
        ports=list(ports),
        # /healthz counts an index that loads its entries as alive; the startup probe allows ten minutes
        startupProbe=_probe("/healthz", period=2, failures=300),
        readinessProbe=_probe("/readyz", period=2, failures=3),
        livenessProbe=_probe("/healthz", period=10, failures=6),
        resources={
            "requests": {"cpu": "50m", "memory": exact_bytes(memory)},
            "limits": {"memory": exact_bytes(limit)},
        },
    )


def _tolerations(inputs: Inputs) -> Manifest:
    """Return the tolerations of the sidecars: in a cluster whose nodes are all tainted, the index needs them too."""
    tolerations = inputs.pool.spec.nodes.tolerations
    if not tolerations:
        return {}
    return {"tolerations": [t.model_dump(by_alias=True, exclude_none=True) for t in tolerations]}


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": PROBE_PORT},  # of the pod: another container may serve it
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
