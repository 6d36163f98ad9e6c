"""spec.tiers of a KVCachePool: local drives, a shared file system or an object store."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from kvpool_operator.api import fields as f
from kvpool_operator.api.addresses import MountOption  # noqa: TC001  read by pydantic
from kvpool_operator.api.model import Model, SecretName
from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.api.rules import with_rules

__all__ = ["LocalTier", "ObjectStoreTier", "SharedTier", "Tier"]


_MIN_CAPACITY: Final = 64 << 20


class VolumeClaimRequests(Model):
    """Requests of a claim."""

    storage: f.ClaimSize
    """Size of each node's volume, such as 500Gi."""


class VolumeClaimResources(Model):
    """Resources of a claim."""

    requests: VolumeClaimRequests
    """Requests of the claim."""


class VolumeClaimSpec(Model):
    """Spec of a PersistentVolumeClaim, as far as pools set it. The volume has a file system."""

    storage_class_name: f.ClaimClass | None = None
    """Name of a StorageClass of local volumes. Its volumeBindingMode should be WaitForFirstConsumer. If it is omitted,
    the default StorageClass of the cluster applies."""
    access_modes: Annotated[
        list[Literal["ReadWriteOnce", "ReadWriteOncePod"]],
        Field(min_length=1, max_length=1, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ] = Field(default=["ReadWriteOnce"])
    """Access mode of the volume: one pod uses it."""
    resources: VolumeClaimResources
    """Resources of the claim."""


class VolumeClaimTemplate(Model):
    """Template of the PersistentVolumeClaims, one for each sidecar pod."""

    spec: VolumeClaimSpec
    """Spec of the claims."""


class LocalTier(Model):
    """Each node's own drive (tier G3): a directory of the node, or a volume of a StorageClass. Set exactly one of path
    and volumeClaimTemplate."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(f.ONE_LOCAL, f.LOCAL_STAYS, f.CAPACITY_IS_GIVEN, f.CAPACITY_FITS_CLAIM)
    )

    path: f.LocalPath | None = None
    """Directory on the node, preferably on a dedicated NVMe drive. It is created if it does not exist, owned by the
    sidecars' user, and used by this pool only. It must be below a directory of the operator's allowedPaths.
    Immutable."""
    volume_claim_template: VolumeClaimTemplate | None = None
    """Generic ephemeral volume of each sidecar pod, such as one of TopoLVM, OpenEBS or local-path. The claim and its
    blocks live as long as the pod: a replaced pod starts with an empty tier. No directory of the node is mounted."""
    capacity: f.Capacity | None = None
    """Maximum size of the blocks on each node, such as 500Gi. Eviction keeps usage below it. Required with `path`. With
    `volumeClaimTemplate` it is the requested storage less `reserveFree` if it is omitted."""
    reserve_free: f.Reserve = "5%"
    """Free space that the pool leaves on the drive's file system regardless of `capacity`: a percentage, or a quantity
    such as 50Gi. It prevents disk pressure on the node."""
    dedicated_filesystem: Literal["Require", "Prefer", "Ignore"] = "Prefer"
    """Check whether the directory is on the node's own file system, where the kubelet stores its files. Require: the
    sidecar reports an error and does not start there; this also detects a drive that is not mounted. Prefer: the
    sidecar logs a warning and starts. Ignore: no check."""

    @model_validator(mode="after")
    def _one_local(self) -> LocalTier:
        template = self.volume_claim_template
        f.ONE_LOCAL.check((self.path is None) != (template is None))
        f.CAPACITY_IS_GIVEN.check(self.capacity is not None or self.path is None)
        f.CAPACITY_FITS_CLAIM.check(
            self.capacity is None or template is None or to_bytes(self.capacity) <= self.size_bytes
        )
        return self

    @property
    def size_bytes(self) -> int:
        """Size of the volume if a claim asks for one, otherwise the capacity."""
        if self.volume_claim_template is not None:
            return to_bytes(self.volume_claim_template.spec.resources.requests.storage)
        return to_bytes(self.capacity or 0)

    @property
    def capacity_bytes(self) -> int:
        """Maximum size of the blocks on each node."""
        if self.capacity is not None:
            return to_bytes(self.capacity)
        reserve, size = self.reserve_free, self.size_bytes
        kept = -(-size * int(reserve[:-1]) // 100) if reserve.endswith("%") else to_bytes(reserve)
        return max(size - kept, _MIN_CAPACITY)


class HostPathShare(Model):
    """Directory where every node already mounts the shared file system."""

    path: f.SharedPath
    """Directory on every node. It must exist, so that a missing mount is an error instead of an empty directory. It is
    owned by user 65532 (or nodes.runAsUser) and used by this pool only. It must be below a directory of the operator's
    allowedPaths. Immutable."""


class ClaimShare(Model):
    """PersistentVolumeClaim with access mode ReadWriteMany."""

    claim_name: f.ClaimName
    """Name of a PersistentVolumeClaim in the namespace of the pool. Immutable."""


class NfsShare(Model):
    """NFS export. The operator creates the PersistentVolume and the PersistentVolumeClaim."""

    server: f.NfsServer
    """Host name or IP address of the NFS server. Immutable."""
    path: f.ExportPath
    """Exported directory, such as /exports/kv. User 65532 (or nodes.runAsUser) must be able to write to it.
    Immutable."""
    mount_options: Annotated[
        list[MountOption],
        Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
    ] = Field(default=["soft", "timeo=30", "retrans=2"])
    """NFS mount options. The default fails a request to an unreachable server after a timeout, and the engine
    recomputes the block. Add nconnect=8 or proto=rdma if the server supports them. Only known options are allowed; soft
    (unless softerr is given), nosuid, nodev, and noexec are always added."""


Encryption = Literal["None", "AES256GCM"]


class SharedTier(Model):
    """File system that every node mounts (tier G4). Set exactly one of hostPath, pvc, and nfs."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.ONE_SHARE, f.SHARE_STAYS))

    host_path: HostPathShare | None = None
    """Directory where every node already mounts the shared file system (CephFS, Lustre, NFS over RDMA, ...)."""
    pvc: ClaimShare | None = None
    """PersistentVolumeClaim with access mode ReadWriteMany."""
    nfs: NfsShare | None = None
    """NFS export that the operator mounts."""
    capacity: f.Capacity
    """Maximum size of this pool's blocks in the shared file system, all nodes together, such as 20Ti. Above
    `cache.eviction.highWatermark`, garbage collection removes the least recently used blocks."""
    encryption: Encryption = "None"
    """Encryption of the blocks there. AES256GCM: sidecars encrypt each block with a key of its tenant, which is in the
    pool's Secret. Blocks of the other kind are misses after a change. A change recreates the sidecar pods, one node at
    a time. Upgrade all sidecars before."""

    @model_validator(mode="after")
    def _one_share(self) -> SharedTier:
        f.ONE_SHARE.check(sum(s is not None for s in (self.host_path, self.pvc, self.nfs)) == 1)
        return self


class ObjectStoreTier(Model):
    """Object store (tier G4). Blocks are objects under the ID of the pool. Blocks are cached locally on read."""

    url: f.ObjectUrl
    """URL of the bucket and prefix, such as s3://bucket/prefix. The bucket must exist. gs:// and abfs:// need a custom
    sidecar image with gcsfs or adlfs. Immutable."""
    secret_ref: SecretName | None = None
    """Secret with the credentials, one key each: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and as needed
    AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, AWS_CA_BUNDLE (PEM). If it is omitted, the credentials of the node
    or of the sidecars' service account apply. Changes of the Secret take effect without a restart."""
    endpoint: f.ObjectEndpoint | None = None
    """Endpoint of an S3-compatible server other than AWS, such as http://minio.storage:9000."""
    region: f.ObjectRegion | None = None
    """Region of the bucket."""
    capacity: f.Capacity
    """Maximum size of this pool's blocks in the object store, such as 20Ti."""
    encryption: Encryption = "None"
    """Encryption of the blocks there, by the sidecars: as `shared.encryption`. Earlier KVPool releases quarantine
    encrypted objects: upgrade all sidecars before."""


class Tier(Model):
    """Storage tier: a name and exactly one of local, shared, and objectStore."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra=with_rules(f.ONE_SOURCE, f.SOURCE_STAYS, additionalProperties=None)
    )

    name: f.TierName
    """Name of the tier: at most 24 lower-case letters, digits, and hyphens. Status and metrics use it."""
    local: LocalTier | None = None
    """Each node's own drive (tier G3)."""
    shared: SharedTier | None = None
    """File system that every node mounts (tier G4)."""
    object_store: ObjectStoreTier | None = None
    """Object store (tier G4)."""

    @model_validator(mode="after")
    def _one_source(self) -> Tier:
        f.ONE_SOURCE.check(sum(s is not None for s in (self.local, self.shared, self.object_store)) == 1)
        return self

    @property
    def is_encrypted(self) -> bool:
        """Whether sidecars encrypt the blocks of this tier."""
        source = self.shared or self.object_store
        return source is not None and source.encryption != "None"
