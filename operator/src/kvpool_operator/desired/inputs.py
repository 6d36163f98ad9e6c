"""What the desired objects depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvpool_operator.desired.configmap import render_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool.config import TenantConfig
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.configmap import RenderedConfig

__all__ = ["ExternalIndexUrl", "Inputs", "InstallationConfig", "Manifest", "PoolSecret"]

Manifest = dict[str, Any]


@dataclass(frozen=True)
class InstallationConfig:
    """This installation: the same for all pools."""

    sidecar_image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    kubelet_dir: str = "/var/lib/kubelet"
    rendezvous_role: str = "kvpool-sidecar-rendezvous"
    """ClusterRole (of the chart) that lets a sidecar's rendezvous part list and watch pods."""
    network_policies: bool = False
    """Whether each pool gets NetworkPolicies."""
    metrics_per_tenant: bool = False
    """Whether sidecars tell metrics by tenant."""


@dataclass(frozen=True)
class PoolSecret:
    """What is random about a pool: made once, kept in the Secret `NAME-secret`, never made anew while that is there."""

    pool_id: str
    """Identity of the pool's data. It outlives the KVCachePool where `deletionPolicy` says so."""
    pool_secret: str = field(repr=False)
    """64 hexadecimal digits."""
    managed_index_password: str = field(repr=False)
    """Password of the index that the operator runs."""
    peer_files: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The authority of the pool's sidecars, PEM by the name of its file (kvpool_operator.pki.peer_ca)."""
    managed_index_previous: str = field(default="", repr=False)
    """The one before it, which is good until all sidecars have shown the new one; else empty."""
    managed_index_revision: str = "0"
    """`spec.index.managed.passwordRevision` that the password was made for."""


@dataclass(frozen=True)
class ExternalIndexUrl:
    """The user's own index: its URL, without the password."""

    url: str
    username: str
    password: str = field(repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the sidecars find beside the password: `index-ca.crt`, `index-client.crt`, `index-client.key`, in PEM."""


@dataclass(frozen=True)
class Inputs:
    """Everything that decides what a pool's objects look like."""

    pool: KVCachePool
    env: InstallationConfig
    secret: PoolSecret
    allowed_namespaces: tuple[str, ...] = ("*",)
    external: ExternalIndexUrl | None = None
    tenants: tuple[TenantConfig, ...] = ()
    nodes: int = 0
    """Nodes that carry the pool, as far as is known."""
    index_memory: int = 0
    """Bytes that the managed index has for entries now; 0 if there is none."""
    drives: tuple[frozenset[str], ...] = ()
    """Directories of the local tiers of each sidecar's pod that is there."""
    resync_token: str = ""
    """Value of rollout.RESYNC_ANNOTATION: new pods that are ready while their predecessors still run. Empty: none."""

    @cached_property
    def config(self) -> RenderedConfig:
        """The configuration of the sidecars, rendered on first use."""
        return render_config(self)

    @property
    def index_files(self) -> Mapping[str, str]:
        return self.external.files if self.external else {}
