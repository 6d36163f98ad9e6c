"""DaemonSet of the sidecars: no token, no directory of the kubelet, and no root but to prepare the tiers
(docs/contribute/design/contracts.md, Sidecar pod)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.annotations import ANNOTATION_CONFIG_DIGEST, LABEL_SOCKETS, SOCKETS_FROM_AGENT
from kvpool_operator.api.fields import ADMIN_PORT, HTTP_PORT
from kvpool_operator.api.quantity import exact_bytes, to_bytes
from kvpool_operator.desired import names
from kvpool_operator.desired.config import write_buffer_bytes
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
from kvpool_operator.desired.rollout import may_surge, requests_devices, resync_metadata, rolling_update
from kvpool_operator.desired.secrets import PEER_CERTIFICATES, index_ca_files, password_files, shared_key_files
from kvpool_operator.desired.users import USER, server_user

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Inputs, InstallationConfig, Manifest

__all__ = ["ISSUER_AUDIENCE", "obtains_certificates", "sidecar_daemonset"]

_MIB: Final = 1 << 20
_SECRET_DIR: Final = "/etc/kvpool-secret"  # noqa: S105  a path
_ISSUER_DIR: Final = "/var/run/secrets/kvpool.dev/issuer"
_ISSUER_TOKEN: Final = "issuer-token"  # noqa: S105  the name of a volume
ISSUER_AUDIENCE: Final = "kvpool.dev/issuer"
"""Audience of the token by which a sidecar requests its certificate. The API server refuses tokens for it."""
_HANDOFF: Final = "/run/handoff"


def sidecar_daemonset(inputs: Inputs) -> Manifest:
    """Return the DaemonSet of the sidecars."""
    pool, env = inputs.pool, inputs.env
    manifest = workload(
        "DaemonSet",
        pool,
        env,
        name=names.sidecar(pool.metadata.name),
        component="sidecar",
        spec={**_min_ready(pool), "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": rolling_update(inputs)}},
        pod_annotations={ANNOTATION_CONFIG_DIGEST: inputs.config.restart_digest},
        pod_labels={LABEL_SOCKETS: SOCKETS_FROM_AGENT},
        pod={
            **placement(pool),
            "serviceAccountName": names.sidecar(pool.metadata.name),
            "terminationGracePeriodSeconds": 10,
            "securityContext": {
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **init_nodes(pool, env, migrate=True),
            **device_claims(pool),
            "containers": [_server(pool, env)],
            "volumes": [*tier_volumes(pool, ephemeral=True), *object_store_volumes(pool), *_volumes(inputs)],
        },
    )
    return manifest | {"metadata": manifest["metadata"] | resync_metadata(inputs)}


def obtains_certificates(daemonset: Manifest | None) -> bool:
    """Whether all sidecars of a live DaemonSet request their certificates from the operator; True if there is none."""
    if daemonset is None:
        return True
    template, status = daemonset["spec"]["template"]["spec"], daemonset.get("status") or {}
    is_current = status.get("observedGeneration", 0) >= daemonset["metadata"].get("generation", 1)
    is_updated = status.get("updatedNumberScheduled", 0) >= status.get("desiredNumberScheduled", 0)
    asks = any(volume.get("name") == _ISSUER_TOKEN for volume in template.get("volumes") or [])
    return asks and is_current and is_updated and not status.get("numberUnavailable", 0)


def _min_ready(pool: KVCachePool) -> Manifest:
    """Omit zero, which the API server does not store."""
    seconds = pool.spec.nodes.update.min_ready_seconds
    return {"minReadySeconds": seconds} if seconds else {}


def _server(pool: KVCachePool, env: InstallationConfig) -> Manifest:
    """Return the container that stores and serves the node's blocks, without kubelet directories and token."""
    return container(
        env,
        "server",
        *("kvpool-sidecar", "serve"),
        env=[
            {"name": "KVPOOL_CONFIG", "value": CONFIG_FILE},
            {"name": "KVPOOL_SECRET_DIR", "value": _SECRET_DIR},
            {"name": "KVPOOL_ISSUER_URL", "value": env.issuer_url},
            {"name": "KVPOOL_ISSUER_TOKEN", "value": f"{_ISSUER_DIR}/token"},
            {"name": "KVPOOL_RENDEZVOUS_SOCKET", "value": f"{_HANDOFF}/handoff.sock"},
            *object_store_env(pool),
            *([{"name": "KVPOOL_METRICS_PER_TENANT", "value": "true"}] if env.metrics_per_tenant else []),
            *([{"name": "KVPOOL_ALLOW_TAKEOVER", "value": "true"}] if may_surge(pool) else []),
            _field("KVPOOL_NODE", "spec.nodeName"),
            _field("KVPOOL_ADDRESS", "status.podIP"),
        ],
        ports=[
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
            {"name": "peer", "containerPort": pool.spec.transport.port, "protocol": "TCP"},
            *_event_ports(pool),
        ],
        readinessProbe=_probe("/readyz", period=2, failures=3),
        livenessProbe=_probe("/healthz", period=10, failures=6),
        resources=_server_resources(pool),
        securityContext=security(server_user(pool)),
        volumeMounts=[
            CONFIG_MOUNT,
            {"name": "secret", "mountPath": _SECRET_DIR, "readOnly": True},
            {"name": _ISSUER_TOKEN, "mountPath": _ISSUER_DIR, "readOnly": True},
            {"name": "handoff", "mountPath": _HANDOFF},
            *tier_mounts(pool, server=True),
            *object_store_mounts(pool),
        ],
    )


def _event_ports(pool: KVCachePool) -> list[Manifest]:
    events = pool.spec.events
    if not events.enabled:
        return []
    return [
        {"name": "kv-events", "containerPort": events.port, "protocol": "TCP"},
        {"name": "kv-replay", "containerPort": events.replay_port, "protocol": "TCP"},
    ]


def _server_resources(pool: KVCachePool) -> Manifest:
    """Return resources with the write buffer, with RDMA's pinned memory, and with RDMA devices."""
    rdma = pool.spec.transport.rdma
    pinned = write_buffer_bytes(pool) + (to_bytes(rdma.memory) if requests_devices(pool) else 0)
    limit = to_bytes(pool.spec.nodes.memory_limit)
    request = min(limit, 256 * _MIB + max(0, limit - 2048 * _MIB))
    return device_resources(pool, resources("100m", exact_bytes(request + pinned), exact_bytes(limit + pinned)))


def _volumes(inputs: Inputs) -> list[Manifest]:
    name = inputs.pool.metadata.name
    wanted = ("pool-secret", *PEER_CERTIFICATES, *sorted(inputs.index_files))
    return [
        {"name": "config", "configMap": {"name": names.config(name)}},
        {
            "name": "secret",
            "secret": {
                "secretName": names.secret(name),
                "defaultMode": 0o440,
                "items": [
                    *({"key": k, "path": k} for k in wanted),
                    *password_files(managed=inputs.external is None),
                    *index_ca_files(inputs),
                    *shared_key_files(inputs),
                ],
            },
        },
        {
            "name": _ISSUER_TOKEN,
            "projected": {
                "defaultMode": 0o440,
                "sources": [
                    {"serviceAccountToken": {"path": "token", "audience": ISSUER_AUDIENCE, "expirationSeconds": 3600}}
                ],
            },
        },
        {"name": "handoff", "emptyDir": {}},  # the node agent connects to the server here
    ]


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }
