"""Preflight DaemonSet, which checks every node before sidecars are created or changed there, and the objects it reads.

Its pods have the mounts, network namespace, user and limits of the sidecars. They read a separate ConfigMap and Secret,
so that a preflight run of a new spec does not affect running sidecars.
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
from kvpool_operator.desired.labels import metadata
from kvpool_operator.desired.networkpolicy import preflight_policy
from kvpool_operator.desired.nfs import nfs_claims, nfs_volumes
from kvpool_operator.desired.pod_template import (
    CONFIG_FILE,
    CONFIG_MOUNT,
    container,
    device_claims,
    device_resources,
    init_nodes,
    object_store_env,
    object_store_mounts,
    object_store_volumes,
    placement,
    resources,
    security,
    tier_mounts,
    tier_volumes,
    workload,
)
from kvpool_operator.desired.users import USER, server_user

if TYPE_CHECKING:
    from kvpool_operator.desired.inputs import Inputs, Manifest

__all__ = ["COMPONENT", "build_preflight", "preflight_spec"]

COMPONENT: Final = "preflight"
_SECRET_DIR: Final = "/etc/kvpool-secret"  # noqa: S105  a path


_SIZES: Final[Any] = {
    "local": {"capacity", "reserve_free"},
    "shared": {"capacity"},
    "object_store": {"capacity"},
}
"""Tier fields that need no new preflight run, because they do not depend on the nodes."""


def preflight_spec(inputs: Inputs) -> str:
    """Return a digest of the spec fields that the checks depend on: nodes, tiers without sizes, transport, external
    index.

    Secrets and default values are excluded, so that another operator version does not repeat the checks of every pool.
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
    """Return the DaemonSet and the objects that it reads, in the order of application."""
    pool = inputs.pool
    policy = preflight_policy(pool, inputs.env)
    wanted = (_secret(inputs), _configmap(inputs), policy, *nfs_volumes(pool), *nfs_claims(pool), _daemonset(inputs))
    return [m for m in wanted if m is not None]


def _url(inputs: Inputs) -> str:
    return inputs.external.url if inputs.external else ""


def _configmap(inputs: Inputs) -> Manifest:
    """Return pool.json without the managed index, which starts during the preflight run."""
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
    """Return the credentials of an external index."""
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
    return workload(
        "DaemonSet",
        pool,
        env,
        name=name,
        component=COMPONENT,
        spec={"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "100%"}}},
        pod_annotations={ANNOTATION_PREFLIGHT_SPEC: preflight_spec(inputs)},
        pod={
            **placement(pool),
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **init_nodes(pool, env),
            **device_claims(pool),
            "containers": [_checks(inputs)],
            "volumes": [
                *tier_volumes(pool),
                *object_store_volumes(pool),
                {"name": "config", "configMap": {"name": name}},
                *_secret_volumes(inputs),
            ],
        },
    )


def _checks(inputs: Inputs) -> Manifest:
    """Return the container that runs the checks. It is Ready when they have finished; /status has the result."""
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
        resources=device_resources(pool, resources("50m", "64Mi", "512Mi")),
        securityContext=security(server_user(pool)),
        volumeMounts=[
            CONFIG_MOUNT,
            *tier_mounts(pool),
            *object_store_mounts(pool),
            *({"name": v["name"], "mountPath": _SECRET_DIR, "readOnly": True} for v in _secret_volumes(inputs)),
        ],
    )


def _secret_volumes(inputs: Inputs) -> list[Manifest]:
    if not inputs.external:
        return []
    secret = {"secretName": names.preflight(inputs.pool.metadata.name), "defaultMode": 0o440}
    return [{"name": "secret", "secret": secret}]
