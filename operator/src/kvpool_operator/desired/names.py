"""Names of a pool's objects. They begin with the name of the pool, which has at most 40 characters."""

from __future__ import annotations

__all__ = [
    "claim",
    "config",
    "events",
    "hints",
    "index",
    "plan",
    "preflight",
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
    """Secret with the token of routers."""
    return f"{pool}-events"


def hints(pool: str) -> str:
    """Secret with the token of POST /hints."""
    return f"{pool}-hints"


def preflight(pool: str) -> str:
    """DaemonSet, ConfigMap and Secret of the preflight checks."""
    return f"{pool}-preflight"


def plan(pool: str) -> str:
    """ConfigMap with the planned changes of a pool with `mode: DryRun`."""
    return f"{pool}-plan"


def wipe(pool: str) -> str:
    """DaemonSet that removes the blocks of a deleted pool."""
    return f"{pool}-wipe"


def claim(pool: str, tier: str) -> str:
    """PersistentVolumeClaim of an NFS tier."""
    return f"{pool}-tier-{tier}"


def volume(namespace: str, pool: str, tier: str) -> str:
    """PersistentVolume of an NFS tier."""
    return f"kvpool-{namespace}-{pool}-{tier}"
