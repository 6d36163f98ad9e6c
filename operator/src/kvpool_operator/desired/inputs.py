"""What the desired objects depend on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvpool_operator.api.installation_limits import InstallationLimits
from kvpool_operator.desired.config import managed_index_url, render_config, to_pool_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool.config import TenantConfig
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.config import RenderedConfig
    from kvpool_operator.desired.users import Drive

__all__ = ["ExternalIndexUrl", "Inputs", "InstallationConfig", "Manifest", "PoolSecret"]

Manifest = dict[str, Any]


@dataclass(frozen=True)
class InstallationConfig:
    """Settings of the installation, equal for all pools."""

    sidecar_image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    network_policies: bool = False
    """Whether each pool gets NetworkPolicies."""
    issuer_url: str = "https://kvpool-issuer.kvpool-system.svc:9444"
    """URL by which sidecars request certificates from the operator."""
    index_image: str = ""
    """Image with `valkey-server` on its PATH for managed indexes. Empty: the server of the sidecar image."""
    metrics_per_tenant: bool = False
    """Whether sidecars export metrics per tenant."""
    limits: InstallationLimits = InstallationLimits()
    """What pools may name beyond the rules of the CRD."""


@dataclass(frozen=True)
class PoolSecret:
    """Random values of a pool, generated once and stored in the Secret `NAME-secret`."""

    pool_id: str
    """Identity of the pool's data. With `deletionPolicy: Retain` it outlives the KVCachePool."""
    pool_secret: str = field(repr=False)
    """64 hexadecimal digits."""
    managed_index_password: str = field(repr=False)
    """Password of the index that the operator runs."""
    peer_files: Mapping[str, str] = field(default_factory=dict, repr=False)
    """CA of the pool's sidecars as the Secret contains it, PEM by file name (kvpool_operator.pki.peer_ca)."""
    peer_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Derived keys of that CA, PEM by file name. They are in the operator's memory alone."""
    managed_index_previous: str = field(default="", repr=False)
    """Previous password, valid until all sidecars have logged in with the new one; otherwise empty."""
    shared_keys: str = field(default="", repr=False)
    """Keys of the encrypted shared tier, JSON (kvpool_operator.desired.shared_keys); empty: none were ever needed."""
    managed_index_revision: str = "0"
    """`spec.index.managed.passwordRevision` for which the password was generated."""
    index_files: Mapping[str, str] = field(default_factory=dict, repr=False)
    """CA and certificate of the managed index, PEM by file name (kvpool_operator.pki.index_tls)."""


@dataclass(frozen=True)
class ExternalIndexUrl:
    """Connection to an external index. The URL does not contain the password."""

    url: str
    username: str
    password: str = field(repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further files for the sidecars: `index-ca.crt`, `index-client.crt`, `index-client.key`, in PEM."""


@dataclass(frozen=True)
class Inputs:
    """All inputs of the manifests of a pool."""

    pool: KVCachePool
    env: InstallationConfig
    secret: PoolSecret
    allowed_namespaces: tuple[str, ...] = ("*",)
    external: ExternalIndexUrl | None = None
    tenants: tuple[TenantConfig, ...] = ()
    nodes: int = 0
    """Number of nodes of the pool, as far as it is known."""
    index_memory: int = 0
    """Current bytes of the managed index for entries; 0 if there is none."""
    drives: tuple[frozenset[Drive], ...] = ()
    """Local tier directories of each existing sidecar pod."""
    resync_token: str = ""
    """Value of ANNOTATION_RESYNC: new pods that are ready while their predecessors still run. Empty: none."""

    @cached_property
    def config(self) -> RenderedConfig:
        """The configuration of the sidecars, rendered on first use."""
        external = self.external
        config = to_pool_config(
            self.pool,
            pool_id=self.secret.pool_id,
            index_url=external.url if external else managed_index_url(self.pool),
            index_username=external.username if external else "kvpool",
            allowed_namespaces=self.allowed_namespaces,
            tenants=self.tenants,
        )
        return render_config(config, self.secret.pool_secret)

    @property
    def index_files(self) -> Mapping[str, str]:
        return self.external.files if self.external else {}
