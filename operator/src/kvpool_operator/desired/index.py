"""The managed index: one Redis without persistence. It is a hint; the nodes announce again what it forgets."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.quantity import exact_bytes, to_bytes
from kvpool_operator.api.v1alpha1 import ManagedIndex
from kvpool_operator.desired import names
from kvpool_operator.desired.labels import labels, metadata, selector
from kvpool_operator.desired.podparts import USER, container, pull_secrets, security
from kvpool_operator.desired.services import INDEX_PORT

if TYPE_CHECKING:
    from kvpool_operator.desired.env import Inputs, Manifest

__all__ = ["index_statefulset"]

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
        "metadata": metadata(pool, name, "index"),
        "spec": {
            "replicas": 1,
            "serviceName": name,
            "selector": {"matchLabels": selector(pool, "index")},
            "template": {
                "metadata": {
                    "labels": labels(pool.metadata.name, "index"),
                    "annotations": {"kvpool.dev/secret-digest": _digest(inputs)},
                },
                "spec": {
                    "serviceAccountName": name,
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 5,
                    "securityContext": {
                        "fsGroup": USER,
                        "runAsNonRoot": True,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    **pull_secrets(env),
                    **_tolerations(inputs),
                    "containers": [_redis(inputs)],
                    "volumes": [
                        {"name": "data", "emptyDir": {}},
                        {
                            "name": "secret",
                            "secret": {
                                "secretName": names.secret(pool.metadata.name),
                                "defaultMode": 0o440,
                                "items": [{"key": "managed-index-password", "path": "index-password"}],
                            },
                        },
                    ],
                },
            },
        },
    }


def _redis(inputs: Inputs) -> Manifest:
    settings = inputs.pool.spec.index.managed or ManagedIndex()
    memory = -(-to_bytes(settings.max_memory) // _MIB) * _MIB
    limit = -(-memory * 5 // 4 // _MIB) * _MIB + 96 * _MIB  # what Redis itself takes: fragmentation, connections
    return container(
        inputs.env,
        "index",
        *("kvpool-sidecar", "index", "--port", str(INDEX_PORT), "--dir", "/data", "--max-memory", str(memory)),
        env=[
            {"name": "KVPOOL_SECRET_DIR", "value": _SECRET_DIR},
            {"name": "KVPOOL_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        ports=[{"name": "redis", "containerPort": INDEX_PORT, "protocol": "TCP"}],
        readinessProbe={"tcpSocket": {"port": "redis"}, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 3},
        livenessProbe={"tcpSocket": {"port": "redis"}, "periodSeconds": 10, "timeoutSeconds": 3, "failureThreshold": 6},
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


def _digest(inputs: Inputs) -> str:
    s = inputs.secret
    return hmac.new(s.pool_secret.encode(), s.managed_index_password.encode(), hashlib.sha256).hexdigest()[:16]
