"""spec.index of a KVCachePool: the managed or external prefix index."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from kvpool_operator.api import fields as f
from kvpool_operator.api.model import Model
from kvpool_operator.api.names import ObjectName, SecretDataKey  # noqa: TC001  read by pydantic
from kvpool_operator.api.rules import with_rules

__all__ = ["ExternalIndex", "Index", "IndexPersistence", "ManagedIndex"]


class IndexPersistence(Model):
    """Persistent volume of the managed index."""

    size: f.IndexDisk = "1Gi"
    """Size of the volume. Twice `maxMemory` is sufficient. It can be increased if the StorageClass allows expansion."""
    storage_class_name: f.StorageClass | None = None
    """StorageClass of the volume. If it is omitted, the cluster's default applies. Immutable."""


class ManagedIndex(Model):
    """Redis server that the operator runs for this pool only."""

    max_memory: f.IndexMemory | None = None
    """Memory for index entries, such as 256Mi. A block takes about 110 bytes per node that holds it, so 256Mi holds 2
    million blocks. When the memory is full, new blocks are found only on their own node and in the shared tier. If it
    is omitted, the operator provides for blocks of 1 MiB in the local tiers of all nodes (at least four), in steps of
    a factor of four from 64Mi to 16Gi; status.index.memory shows the result. A change to another step restarts the
    index."""
    password_revision: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Increase the number to rotate the password of the index. Both passwords are valid until every sidecar has logged
    in with the new one; then the old one is revoked. Nothing restarts and no lookup fails. status.index.password lists
    the nodes that have not changed yet."""
    persistence: IndexPersistence | None = None
    """Persistent volume for the entries, so that a restarted index loads them immediately. If it is omitted, a
    restarted index is empty, and the nodes register their blocks again at `rebuildRate`."""
    encryption: Literal["None", "Always"] = "None"
    """Always: the index accepts only TLS, with a certificate that the operator issues and renews. The server must have
    TLS: that of the chart's operator.indexImage, or of a sidecar image built with INDEX_TLS=1. None: entries and the
    password travel unencrypted. After a change, sidecars find no blocks of their peers until they are replaced too."""


class SecretKey(Model):
    """Reference to one key of a Secret in the namespace of the pool."""

    name: ObjectName
    """Name of the Secret."""
    key: SecretDataKey = "url"
    """Key in the Secret."""


class UsernameKey(SecretKey):
    """Reference to the user name in a Secret in the namespace of the pool."""

    key: SecretDataKey = "username"
    """Key in the Secret."""


class PasswordKey(SecretKey):
    """Reference to the password in a Secret in the namespace of the pool."""

    key: SecretDataKey = "password"
    """Key in the Secret."""


class CaKey(SecretKey):
    """Reference to CA certificates, in PEM, in a Secret in the namespace of the pool."""

    key: SecretDataKey = "ca.crt"
    """Key in the Secret."""


class TlsSecret(Model):
    """Reference to a Secret of type kubernetes.io/tls in the namespace of the pool."""

    name: ObjectName
    """Name of the Secret. It has the keys tls.crt and tls.key."""


class ExternalIndex(Model):
    """Existing Redis or Valkey (6.2 or newer): a single server, a Sentinel deployment, or a Cluster."""

    url_secret_ref: SecretKey
    """Secret key with the URL: redis://host:port/db, redis+sentinel://host:port,host:port/service/db, or
    redis+cluster://host:port,host:port. Use rediss instead of redis for TLS. user:password@ may precede the first
    host. The pool needs a dedicated database. The password never appears in a ConfigMap or in the status."""
    username_secret_ref: UsernameKey | None = None
    """Secret key with the name of the ACL user, if the URL does not contain it."""
    password_secret_ref: PasswordKey | None = None
    """Secret key with the password, if the URL does not contain it."""
    ca_secret_ref: CaKey | None = None
    """Secret key with the CA certificates that verify the server's certificate. If it is omitted, the system's trusted
    CAs apply."""
    client_certificate_secret_ref: TlsSecret | None = None
    """Secret with the client certificate and key, if the server requires mutual TLS."""


class Index(Model):
    """Prefix index: records which nodes hold each block. Without it, nodes still find their own and shared blocks."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.ONE_INDEX))

    managed: ManagedIndex | None = None
    """Redis server that the operator runs. This is the default."""
    external: ExternalIndex | None = None
    """Existing Redis or Valkey."""
    lookup_timeout: f.LookupTime = "20ms"
    """Maximum time that one lookup waits for the index, such as 20ms. After it, blocks of peers count as misses."""
    rebuild_rate: Annotated[int, Field(ge=100, le=10_000_000)] = 50_000
    """Blocks per second that all nodes together register after the index was emptied or replaced. The removal of
    entries of lost nodes scans the index at a fifth of this rate."""
    node_expiry: f.NodeExpiry = "1h"
    """Time after which the entries of a lost node are removed, such as 1h. Lookups ignore them within seconds of the
    loss."""

    @property
    def is_encrypted(self) -> bool:
        """Whether the operator runs the index with TLS."""
        return self.external is None and self.managed is not None and self.managed.encryption == "Always"

    @model_validator(mode="after")
    def _one_index(self) -> Index:
        f.ONE_INDEX.check(self.managed is None or self.external is None)
        return self
