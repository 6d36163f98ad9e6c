"""The short-lived DaemonSet that looks at every node before sidecars are made or changed there, and what it reads.

Its pods see what the sidecars will see: the same mounts, network namespace, user and limits. They read a ConfigMap and
a Secret of their own, so that what runs is not touched by a look at what is asked for now.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvpool.config import IndexConfig, dumps
from kvpool_operator.api.annotations import ANNOTATION_PREFLIGHT, ANNOTATION_PREFLIGHT_SPEC
from kvpool_operator.api.fields import HTTP_PORT
from kvpool_operator.desired import names
from kvpool_operator.desired.labels import labels, metadata, selector
from kvpool_operator.desired.networkpolicy import preflight_policy
from kvpool_operator.desired.nfs import nfs_claims, nfs_volumes
from kvpool_operator.desired.pod_template import (
    CONFIG_FILE,
    CONFIG_MOUNT,
    USER,
    container,
    object_store_env,
    object_store_mounts,
    object_store_volumes,
    placement,
    pull_secrets,
    resources,
    security,
    tier_mounts,
    tier_volumes,
)

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Inputs, InstallationConfig, Manifest

__all__ = ["COMPONENT", "build_preflight", "preflight_spec"]

COMPONENT: Final = "preflight"
_SECRET_DIR: Final = "/etc/kvpool-secret"  # noqa: S105  a path


_SIZES: Final[Any] = {
    "local": {"capacity", "reserve_free"},
    "shared": {"capacity"},
    "object_store": {"capacity"},
}
"""Of a tier: what can be changed without a look, for no node can do more or less because of it."""


def preflight_spec(inputs: Inputs) -> str:
    """Short digest of what a look depends on: nodes, tiers but for sizes, transport, an external index.

    No secret goes in, and no default: another version of the operator must not have every pool looked at anew.
    """
    spec = inputs.pool.spec
    parts = {
        "nodes": spec.nodes.selector.model_dump(exclude_defaults=True),
        "tiers": [t.model_dump(exclude=_SIZES, exclude_defaults=True) for t in spec.tiers],
        "transport": spec.transport.model_dump(include={"protocol", "rdma", "encryption"}, exclude_defaults=True),
        "index": [spec.index.external is not None, _url(inputs)],
        "again": inputs.pool.metadata.annotations.get(ANNOTATION_PREFLIGHT, "")[:253],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def build_preflight(inputs: Inputs) -> list[Manifest]:
    """The DaemonSet and everything it needs, in the order in which it is applied."""
    pool = inputs.pool
    policy = preflight_policy(pool, inputs.env)
    wanted = (_secret(inputs), _configmap(inputs), policy, *nfs_volumes(pool), *nfs_claims(pool), _daemonset(inputs))
    return [m for m in wanted if m is not None]


def _url(inputs: Inputs) -> str:
    return inputs.external.url if inputs.external else ""


def _configmap(inputs: Inputs) -> Manifest:
    """pool.json without the managed index, which starts while the nodes are looked at."""
    config = replace(inputs.config.config, generation=0)
    if not inputs.external:
        config = replace(config, index=IndexConfig(""))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(inputs.pool, names.preflight(inputs.pool.metadata.name), COMPONENT),
        "data": {"pool.json": dumps(config)},
    }


def _secret(inputs: Inputs) -> Manifest | None:
    """What an external index asks for."""
    if not inputs.external:
        return None
    values = {"index-password": inputs.external.password, **inputs.index_files}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(inputs.pool, names.preflight(inputs.pool.metadata.name), COMPONENT),
        "type": "Opaque",
        "data": {k: base64.b64encode(v.encode()).decode() for k, v in values.items()},
    }


def _daemonset(inputs: Inputs) -> Manifest:
    pool, env = inputs.pool, inputs.env
    name = names.preflight(pool.metadata.name)
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata(pool, name, COMPONENT),
        "spec": {
            "selector": {"matchLabels": selector(pool, COMPONENT)},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "100%"}},
            "template": {
                "metadata": {
                    "labels": labels(pool.metadata.name, COMPONENT),
                    "annotations": {ANNOTATION_PREFLIGHT_SPEC: preflight_spec(inputs)},
                },
                "spec": {
                    **placement(pool),
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 1,
                    "securityContext": {
                        "fsGroup": USER,
                        "fsGroupChangePolicy": "OnRootMismatch",
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    **pull_secrets(env),
                    "initContainers": [_prepare(pool, env)],
                    "containers": [_look(inputs)],
                    "volumes": [
                        *tier_volumes(pool),
                        *object_store_volumes(pool),
                        {"name": "config", "configMap": {"name": name}},
                        *_secret_volumes(inputs),
                    ],
                },
            },
        },
    }


def _prepare(pool: KVCachePool, env: InstallationConfig) -> Manifest:
    """As in the sidecars' pods: a new directory is root's."""
    return container(
        env,
        "prepare-node",
        *("kvpool-sidecar", "init-node", "--config", CONFIG_FILE),
        resources=resources("10m", "64Mi", "256Mi"),
        securityContext=security(0, "CHOWN"),
        volumeMounts=[CONFIG_MOUNT, *tier_mounts(pool)],
    )


def _look(inputs: Inputs) -> Manifest:
    """Ready when it has an answer, good or bad; the operator reads it at /status."""
    pool = inputs.pool
    return container(
        inputs.env,
        "preflight",
        *("kvpool-sidecar", "preflight", "--serve"),
        env=[
            {"name": "KVPOOL_CONFIG", "value": CONFIG_FILE},
            {"name": "KVPOOL_SECRET_DIR", "value": _SECRET_DIR},
            *object_store_env(pool),
            {"name": "KVPOOL_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "KVPOOL_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        ports=[{"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"}],
        readinessProbe={
            "httpGet": {"path": "/readyz", "port": "http"},
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        resources=_resources(pool),
        securityContext=security(),
        volumeMounts=[
            CONFIG_MOUNT,
            *tier_mounts(pool),
            *object_store_mounts(pool),
            *({"name": v["name"], "mountPath": _SECRET_DIR, "readOnly": True} for v in _secret_volumes(inputs)),
        ],
    )


def _resources(pool: KVCachePool) -> Manifest:
    """With the devices that the sidecars will have."""
    made = resources("50m", "64Mi", "512Mi")
    transport = pool.spec.transport
    if transport.protocol != "TCP":
        made["limits"] |= {r.name: str(r.count) for r in transport.rdma.resources}
    return made


def _secret_volumes(inputs: Inputs) -> list[Manifest]:
    if not inputs.external:
        return []
    secret = {"secretName": names.preflight(inputs.pool.metadata.name), "defaultMode": 0o440}
    return [{"name": "secret", "secret": secret}]
