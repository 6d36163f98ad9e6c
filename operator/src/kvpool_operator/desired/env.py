"""What the desired objects depend on besides the pool's spec."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Env", "ExternalUrl", "PoolSecret"]


@dataclass(frozen=True)
class Env:
    """This installation: the same for all pools."""

    sidecar_image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    kubelet_dir: str = "/var/lib/kubelet"
    rendezvous_role: str = "kvpool-sidecar-rendezvous"
    """ClusterRole (of the chart) that lets a sidecar's rendezvous part list and watch pods."""


@dataclass(frozen=True)
class PoolSecret:
    """What is random about a pool: made once, kept in the Secret `NAME-secret`, never made anew while that is there."""

    pool_id: str
    """Identity of the pool's data. It outlives the KVCachePool where that says so."""
    pool_secret: str
    """64 hexadecimal digits."""
    index_password: str
    """Of the index that the operator runs, or that of the user's own index."""

    def __repr__(self) -> str:
        return f"PoolSecret(pool_id={self.pool_id!r})"


@dataclass(frozen=True)
class ExternalUrl:
    """The user's own index: the URL without its password, which goes into the pool's Secret."""

    url: str
    username: str
    password: str

    def __repr__(self) -> str:
        return "ExternalUrl(...)"
