"""Names of a pool's objects. All of them begin with the pool's name, which the API keeps to 40 characters."""

from __future__ import annotations

__all__ = [
    "claim",
    "cluster_binding",
    "config",
    "events",
    "index",
    "preflight",
    "rendered",
    "secret",
    "sidecar",
    "volume",
    "wipe",
]


def sidecar(pool: str) -> str:
    """DaemonSet, Service and ServiceAccount of the sidecars."""
    return f"{pool}-sidecar"


def index(pool: str) -> str:
    """StatefulSet, Service and ServiceAccount of the managed index."""
    return f"{pool}-index"


def config(pool: str) -> str:
    """ConfigMap with pool.json."""
    return f"{pool}-config"


def secret(pool: str) -> str:
    """Secret with the pool's random values."""
    return f"{pool}-secret"


def events(pool: str) -> str:
    """Secret with the token that routers show."""
    return f"{pool}-events"


def preflight(pool: str) -> str:
    """DaemonSet, ConfigMap and Secret of a look at the nodes."""
    return f"{pool}-preflight"


def rendered(pool: str) -> str:
    """ConfigMap that says what a pool with `mode: DryRun` would become."""
    return f"{pool}-plan"


def wipe(pool: str) -> str:
    """DaemonSet that removes a deleted pool's blocks."""
    return f"{pool}-wipe"


def cluster_binding(namespace: str, pool: str) -> str:
    """ClusterRoleBinding of the pool's sidecars."""
    return f"kvpool:{namespace}:{pool}"


def claim(pool: str, tier: str) -> str:
    """PersistentVolumeClaim of an NFS tier."""
    return f"{pool}-tier-{tier}"


def volume(namespace: str, pool: str, tier: str) -> str:
    """PersistentVolume of an NFS tier."""
    return f"kvpool-{namespace}-{pool}-{tier}"
