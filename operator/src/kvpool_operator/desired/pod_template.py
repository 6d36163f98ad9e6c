"""Pod template parts that several workloads of a pool share: placement, security context, volumes, mounts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from kvpool_operator.api.quantity import exact_bytes, to_bytes
from kvpool_operator.desired import names
from kvpool_operator.desired.config import MOUNTS
from kvpool_operator.desired.labels import labels, metadata, selector
from kvpool_operator.desired.users import USER, server_user

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_operator.api.pool.tiers import VolumeClaimSpec
    from kvpool_operator.api.v1alpha1 import KVCachePool, LabelSelector, Tier
    from kvpool_operator.desired.inputs import InstallationConfig, Manifest

__all__ = [
    "CONFIG_DIR",
    "CONFIG_FILE",
    "CONFIG_MOUNT",
    "READ_ONLY_MOUNTS",
    "container",
    "device_claims",
    "device_resources",
    "init_nodes",
    "node_affinity",
    "object_store_env",
    "object_store_mounts",
    "object_store_volumes",
    "placement",
    "pull_secrets",
    "resources",
    "security",
    "tier_mounts",
    "tier_volumes",
    "workload",
]

READ_ONLY_MOUNTS: Final = "/tiers-ro"
_OBJECT_STORE: Final = "object-store"
_DEVICE: Final = "rdma"
_OBJECT_STORE_DIR: Final = "/etc/kvpool-object-store"
CONFIG_DIR: Final = "/etc/kvpool"
CONFIG_FILE: Final = f"{CONFIG_DIR}/pool.json"
CONFIG_MOUNT: Final[Manifest] = {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True}


def workload(
    kind: Literal["DaemonSet", "StatefulSet"],
    pool: KVCachePool,
    env: InstallationConfig,
    *,
    name: str,
    component: str,
    pod: Manifest,
    spec: Manifest | None = None,
    pod_annotations: Mapping[str, str] | None = None,
    pod_labels: Mapping[str, str] | None = None,
) -> Manifest:
    """Return a workload whose pods have no token and no service links. `pod` and `spec` add fields."""
    template = {"labels": labels(pool.metadata.name, component) | dict(pod_labels or {})}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": metadata(pool, name, component),
        "spec": {
            "selector": {"matchLabels": selector(pool, component)},
            **(spec or {}),
            "template": {
                "metadata": template | ({"annotations": dict(pod_annotations)} if pod_annotations else {}),
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                    **pull_secrets(env),
                    **pod,
                },
            },
        },
    }


def init_nodes(pool: KVCachePool, env: InstallationConfig, *, migrate: bool = False) -> Manifest:
    """Return the init container that makes the sidecars' user the owner of the tiers' directories. It is idempotent.

    There is none if all directories are in volumes of the pod: then no container of the pool runs as root.

    `migrate`: it takes over what an earlier user of the sidecars owns; no sidecar serves the node meanwhile.
    """
    mounts = tier_mounts(pool)
    if not mounts:
        return {}
    prepare = container(
        env,
        "prepare-node",
        *("kvpool-sidecar", "init-node", "--config", CONFIG_FILE, "--uid", str(server_user(pool))),
        *(("--migrate",) if migrate else ()),
        resources=resources("10m", "64Mi", "256Mi"),
        securityContext=security(0, "CHOWN"),
        volumeMounts=[CONFIG_MOUNT, *mounts],
    )
    return {"initContainers": [prepare]}


def container(env: InstallationConfig, name: str, /, *command: str, **more: Any) -> Manifest:
    """Return a container with the sidecar image. After a failure, its last output is the termination message."""
    return {
        "name": name,
        "image": env.sidecar_image,
        "imagePullPolicy": env.image_pull_policy,
        "command": list(command),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **more,
    }


def security(user: int = USER, *capabilities: str) -> Manifest:
    """Return a security context with only the named capabilities. The pod sets the seccomp profile."""
    dropped: Manifest = {"drop": ["ALL"]}
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": dropped | ({"add": list(capabilities)} if capabilities else {}),
        "readOnlyRootFilesystem": True,
        "runAsGroup": USER if user else 0,
        "runAsNonRoot": user != 0,
        "runAsUser": user,
    }


def resources(cpu: str, memory: str, memory_limit: str) -> Manifest:
    """Return resources without a CPU limit: a throttled sidecar would delay engines."""
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory_limit}}


def pull_secrets(env: InstallationConfig) -> Manifest:
    """Return the imagePullSecrets of a pod spec."""
    return {"imagePullSecrets": [{"name": s} for s in env.image_pull_secrets]} if env.image_pull_secrets else {}


def device_claims(pool: KVCachePool) -> Manifest:
    """Return the resourceClaims of a pod spec: devices by dynamic resource allocation."""
    name = pool.spec.transport.rdma.resource_claim_template_name
    if pool.spec.transport.protocol == "TCP" or name is None:
        return {}
    return {"resourceClaims": [{"name": _DEVICE, "resourceClaimTemplateName": name}]}


def device_resources(pool: KVCachePool, base: Manifest) -> Manifest:
    """Return the resources of a container with the pool's RDMA devices added, as limits and as claims of the pod."""
    transport = pool.spec.transport
    if transport.protocol == "TCP":
        return base
    limits = base["limits"] | {r.name: str(r.count) for r in transport.rdma.resources}
    claims = {"claims": [{"name": _DEVICE}]} if transport.rdma.resource_claim_template_name else {}
    return base | {"limits": limits} | claims


def placement(pool: KVCachePool) -> Manifest:
    """Return affinity, tolerations and priority class of a pod spec."""
    nodes = pool.spec.nodes
    spec: Manifest = {}
    affinity = node_affinity(nodes.selector)
    if affinity:
        spec["affinity"] = affinity
    if nodes.tolerations:
        spec["tolerations"] = [t.model_dump(by_alias=True, exclude_none=True) for t in nodes.tolerations]
    if nodes.priority_class_name:
        spec["priorityClassName"] = nodes.priority_class_name
    return spec


def node_affinity(selector: LabelSelector) -> Manifest:
    """Convert a label selector to required node affinity; empty for the empty selector, which matches every node."""
    wanted: list[Manifest] = [
        {"key": k, "operator": "In", "values": [v]} for k, v in sorted(selector.match_labels.items())
    ]
    wanted += [
        {"key": e.key, "operator": e.operator} | ({"values": list(e.values)} if e.values else {})
        for e in selector.match_expressions
    ]
    if not wanted:
        return {}
    term = {"nodeSelectorTerms": [{"matchExpressions": wanted}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": term}}


def tier_volumes(pool: KVCachePool, *, ephemeral: bool = False) -> list[Manifest]:
    """Return a volume for each tier that is a directory. `ephemeral`: also those that live with the sidecar's pod."""
    return [{"name": f"tier-{t.name}"} | _source(pool, t) for t in _directories(pool, ephemeral=ephemeral)]


def _directories(pool: KVCachePool, *, ephemeral: bool) -> list[Tier]:
    return [
        t
        for t in pool.spec.tiers
        if t.object_store is None and (ephemeral or t.local is None or t.local.path is not None)
    ]


def _source(pool: KVCachePool, tier: Tier) -> Manifest:
    if tier.local and tier.local.volume_claim_template:
        return {"ephemeral": {"volumeClaimTemplate": _claim_template(pool, tier.local.volume_claim_template.spec)}}
    if tier.local:
        return {"hostPath": {"path": tier.local.path, "type": "DirectoryOrCreate"}}
    assert tier.shared is not None  # noqa: S101  the model holds exactly one of them
    if tier.shared.host_path:
        # it must exist, so that a missing mount does not become a private directory of the node
        return {"hostPath": {"path": tier.shared.host_path.path, "type": "Directory"}}
    if tier.shared.pvc:
        return {"persistentVolumeClaim": {"claimName": tier.shared.pvc.claim_name}}
    return {"persistentVolumeClaim": {"claimName": names.claim(pool.metadata.name, tier.name)}}


def _claim_template(pool: KVCachePool, spec: VolumeClaimSpec) -> Manifest:
    """Return the template of the claims, which belong to their pods: without the label of what the operator prunes."""
    storage_class = {"storageClassName": spec.storage_class_name} if spec.storage_class_name else {}
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": "kvpool", **selector(pool, "sidecar")}},
        "spec": {
            "accessModes": list(spec.access_modes),
            **storage_class,
            "resources": {"requests": {"storage": exact_bytes(to_bytes(spec.resources.requests.storage))}},
            "volumeMode": "Filesystem",
        },
    }


def tier_mounts(pool: KVCachePool, *, server: bool = False) -> list[Manifest]:
    """Each directory at /tiers/NAME.

    `server`: also those of the pod's own volumes, and each at /tiers-ro/NAME for descriptors that are handed out.
    """
    tiers = _directories(pool, ephemeral=server)
    mounts: list[Manifest] = [{"name": f"tier-{t.name}", "mountPath": f"{MOUNTS}/{t.name}"} for t in tiers]
    if server:
        mounts += [
            {"name": f"tier-{t.name}", "mountPath": f"{READ_ONLY_MOUNTS}/{t.name}", "readOnly": True} for t in tiers
        ]
    return mounts


def object_store_volumes(pool: KVCachePool) -> list[Manifest]:
    """The Secret with the object store's credentials. A pod starts without it: then the tier says that it may not."""
    secrets = [t.object_store.secret_ref for t in pool.spec.tiers if t.object_store and t.object_store.secret_ref]
    return [
        {"name": _OBJECT_STORE, "secret": {"secretName": s.name, "defaultMode": 0o440, "optional": True}}
        for s in secrets
    ]


def object_store_mounts(pool: KVCachePool) -> list[Manifest]:
    """Where a container sees the credentials."""
    return [{"name": v["name"], "mountPath": _OBJECT_STORE_DIR, "readOnly": True} for v in object_store_volumes(pool)]


def object_store_env(pool: KVCachePool) -> list[Manifest]:
    """Return the environment variables with the directory of the credentials."""
    return [{"name": "KVPOOL_OBJECT_SECRET_DIR", "value": m["mountPath"]} for m in object_store_mounts(pool)]
