"""PersistentVolume and claim of an NFS tier: only PersistentVolumes have mount options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.api.addresses import mount_options
from kvpool_operator.desired import names
from kvpool_operator.desired.labels import cluster_scoped_metadata, metadata

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Manifest

__all__ = ["nfs_claims", "nfs_volumes"]

_NOMINAL: Final = "1Gi"
"""Required size of the volume. NFS ignores it; the sidecars enforce the capacity of the tier."""


def nfs_volumes(pool: KVCachePool) -> list[Manifest]:
    """Return PersistentVolumes that are reserved for the pool's claims. Their deletion does not change the export."""
    ns, name = pool.metadata.namespace, pool.metadata.name
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": cluster_scoped_metadata(pool, names.volume(ns, name, tier.name), "sidecar"),
            "spec": {
                "capacity": {"storage": _NOMINAL},
                "accessModes": ["ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "mountOptions": mount_options(tier.shared.nfs.mount_options),
                "nfs": {"server": tier.shared.nfs.server, "path": tier.shared.nfs.path},
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "namespace": ns,
                    "name": names.claim(name, tier.name),
                },
            },
        }
        for tier in pool.spec.tiers
        if tier.shared and tier.shared.nfs
    ]


def nfs_claims(pool: KVCachePool) -> list[Manifest]:
    """Return the claims of these volumes."""
    ns, name = pool.metadata.namespace, pool.metadata.name
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata(pool, names.claim(name, tier.name), "sidecar"),
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": names.volume(ns, name, tier.name),
                "resources": {"requests": {"storage": _NOMINAL}},
            },
        }
        for tier in pool.spec.tiers
        if tier.shared and tier.shared.nfs
    ]
