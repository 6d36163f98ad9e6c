"""kvpool.dev/v1alpha1 KVCachePool: the spec that users write. `api.pool.status` has the status.

`kubectl explain` prints the text under each field. Defaults are defined here and nowhere else; `api.crdgen` generates
the CRD, and docs/generate/api.py the reference page, from these models.
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from kvpool_operator.api import fields as f
from kvpool_operator.api.model import (
    API_VERSION,
    GROUP,
    VERSION,
    KVCacheObject,
    LabelSelector,
    Metadata,
    Model,
    section,
)
from kvpool_operator.api.pool.cache import Cache, Tenancy
from kvpool_operator.api.pool.hints import Hints
from kvpool_operator.api.pool.index import ExternalIndex, Index, IndexPersistence
from kvpool_operator.api.pool.injection import InjectionSpec
from kvpool_operator.api.pool.nodes import Nodes, Toleration
from kvpool_operator.api.pool.tiers import LocalTier, ObjectStoreTier, Tier
from kvpool_operator.api.pool.transport import Events, FailOpen, Transport
from kvpool_operator.api.quantity import to_bytes
from kvpool_operator.api.rules import with_rules

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "ExternalIndex",
    "IndexPersistence",
    "KVCachePool",
    "LabelSelector",
    "LocalTier",
    "Metadata",
    "ObjectStoreTier",
    "PoolSpec",
    "Tier",
    "Toleration",
]

KIND = "KVCachePool"
PLURAL = "kvcachepools"


class PoolSpec(Model):
    """Desired state of the pool. Only `tiers` is required."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.WRITES_SOMEWHERE, f.EVENT_PORTS_DIFFER, f.BLOCK_FITS_TIER))

    mode: Literal["Enforce", "DryRun", "Paused"] = "Enforce"
    """Enforce: the operator reconciles the cluster with this spec. DryRun: the operator runs the preflight checks and
    writes the objects that it would create, change, and delete into the ConfigMap NAME-plan; it changes nothing else.
    Paused: the operator only reports the status. The cleanup of a deleted pool runs in every mode."""
    preflight: Literal["Require", "Warn", "Skip"] = "Warn"
    """Preflight checks of the nodes before sidecars are created, or changed because of other tiers, transport, index,
    or nodes: drives, file systems, speed, free space, shared tier, index, RDMA. status.preflight and the condition
    PreflightPassed report the result. Warn: the rollout starts when at least one node has passed, so that a failing
    node does not block the others. Require: the rollout starts when every node has passed. Skip: no checks."""
    nodes: Nodes = section(Nodes)
    """Nodes of the pool, and how their sidecars are updated and drained."""
    tiers: Annotated[
        list[Tier],
        Field(
            min_length=1,
            max_length=8,
            json_schema_extra=with_rules(
                f.SOME_LOCAL,
                f.ONE_SHARED,
                f.PATHS_DIFFER,
                **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
            ),
        ),
    ]
    """Storage tiers, from the fastest to the slowest: one or more local tiers (several drives share the blocks between
    them) and at most one shared or objectStore tier. Removing a tier from the spec leaves its blocks in place."""
    index: Index = section(Index)
    """Prefix index, which records which nodes hold each block."""
    cache: Cache = section(Cache)
    """Block format, write policy, eviction, and expiry."""
    tenancy: Tenancy = section(Tenancy)
    """Sharing of the pool between tenants (namespaces)."""
    fail_open: FailOpen = section(FailOpen)
    """Deadlines of engine requests to the pool. After a deadline the result is a miss."""
    transport: Transport = section(Transport)
    """Transfer of blocks between nodes."""
    events: Events = section(Events)
    """KV cache events for routers."""
    hints: Hints = section(Hints)
    """Session hints: a session has ended, or continues in about a given time."""
    injection: InjectionSpec = section(InjectionSpec)
    """Injection of engine pods: by the label kvpool.dev/inject: "true", by a label of their namespace, or by a
    selector."""
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    """Handling of the blocks when this pool is deleted. Retain: the blocks stay on the drives, and the Secret
    NAME-secret that identifies them stays too; a new pool with the same name, namespace, and paths finds them again.
    Delete: a wipe on every node that `nodes` selects removes the blocks, and the Secret is deleted."""
    cleanup_timeout: f.CleanupTime = "5m"
    """Maximum time that the deletion of this pool waits for unresponsive nodes, such as 5m. An Event names the nodes
    whose blocks were left."""

    @model_validator(mode="after")
    def _tiers(self) -> PoolSpec:
        local = [t.local for t in self.tiers if t.local]
        every = [f"{tier.path}/" for tier in local if tier.path] + [
            f"{t.shared.host_path.path}/" for t in self.tiers if t.shared and t.shared.host_path
        ]
        f.SOME_LOCAL.check(bool(local))
        f.ONE_SHARED.check(len(self.tiers) - len(local) <= 1)
        needs_shared = self.cache.write.policy in ("WriteBack", "WriteThroughSelective")
        f.WRITES_SOMEWHERE.check(not needs_shared or len(self.tiers) > len(local))
        ports = [*f.TAKEN_PORTS, self.transport.port, self.events.port, self.events.replay_port]
        f.EVENT_PORTS_DIFFER.check(not self.events.enabled or len(set(ports)) == len(ports))
        rooms = [to_bytes(tier.capacity) if tier.capacity is not None else tier.size_bytes for tier in local]
        f.BLOCK_FITS_TIER.check(all(to_bytes(self.cache.max_block_size) <= room for room in rooms))
        f.PATHS_DIFFER.check(not any(a.startswith(b) for a, b in itertools.permutations(every, 2)))
        if len({t.name for t in self.tiers}) != len(self.tiers):
            raise ValueError("give each tier a name of its own")
        return self


class KVCachePool(KVCacheObject):
    """KVCachePool object, as the API server stores it."""

    spec: PoolSpec

    @model_validator(mode="after")
    def _name(self) -> KVCachePool:
        f.POOL_NAME.check(re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", self.metadata.name) is not None)
        return self

    @property
    def key(self) -> str:
        """namespace/name"""
        return f"{self.metadata.namespace}/{self.metadata.name}"
