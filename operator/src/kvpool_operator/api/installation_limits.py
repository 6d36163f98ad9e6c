"""What the administrator of the installation allows pools: directories of nodes, and hosts to contact. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpool_operator.api.addresses import host_of
from kvpool_operator.errors import InvalidPoolError

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool

__all__ = ["DEFAULT_ALLOWED_PATHS", "InstallationLimits"]

DEFAULT_ALLOWED_PATHS: Final = ("/mnt", "/var/mnt", "/srv", "/data", "/var/lib/kvpool")


@dataclass(frozen=True)
class InstallationLimits:
    """Limits beyond the CRD, equal for all pools."""

    allowed_paths: tuple[str, ...] = DEFAULT_ALLOWED_PATHS
    """Directories of nodes below which pools have their own."""
    refused_hosts: frozenset[str] = frozenset()
    """Hosts that no pool contacts as storage, such as the Kubernetes API's address. Lower case."""

    nfs: bool = True
    """Whether pools may have NFS tiers."""

    def check(self, pool: KVCachePool) -> None:
        """InvalidPoolError with the field and what to write, if the pool exceeds a limit."""
        for number, tier in enumerate(pool.spec.tiers):
            where = f"spec.tiers[{number}]"
            if tier.local is not None and tier.local.path is not None:
                self._check_path(f"{where}.local.path", tier.local.path)
            if tier.shared is not None and tier.shared.host_path is not None:
                self._check_path(f"{where}.shared.hostPath.path", tier.shared.host_path.path)
            if tier.shared is not None and tier.shared.nfs is not None:
                if not self.nfs:
                    raise InvalidPoolError(
                        f"{where}.shared.nfs: NFS tiers are off in this installation; ask its administrator to set "
                        "sidecar.nfs.enabled of the chart, or mount the export on the nodes and use shared.hostPath"
                    )
                self._check_host(f"{where}.shared.nfs.server", tier.shared.nfs.server)
            if tier.object_store is not None and tier.object_store.endpoint is not None:
                self._check_host(f"{where}.objectStore.endpoint", tier.object_store.endpoint)

    def _check_path(self, where: str, path: str) -> None:
        if not any(path.startswith(f"{root}/") for root in self.allowed_paths):
            allowed = ", ".join(self.allowed_paths) or "none"
            raise InvalidPoolError(
                f"{where}: choose a directory below one that the operator allows ({allowed}), or ask its administrator "
                "to extend sidecar.allowedPaths of the chart"
            )

    def _check_host(self, where: str, server: str) -> None:
        if host_of(server) in self.refused_hosts:
            raise InvalidPoolError(f"{where}: give the name or address of a storage server, not of the Kubernetes API")
