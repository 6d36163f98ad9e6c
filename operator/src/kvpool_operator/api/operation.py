"""kvpool.dev/v1alpha1 KVCacheOperation: one-time operation on a pool, and its results."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from kvpool_operator.api import operation_fields as f
from kvpool_operator.api.conditions import Condition  # noqa: TC001  read by pydantic
from kvpool_operator.api.model import Count, Counts, KVCacheObject, Model, Text
from kvpool_operator.api.rules import with_rules

__all__ = [
    "MAX_FAILURES",
    "KVCacheOperation",
    "NodeFailure",
    "OperationSpec",
    "OperationStatus",
    "Phase",
    "PurgeAction",
]

KIND: Final = "KVCacheOperation"
PLURAL: Final = "kvcacheoperations"
MAX_FAILURES: Final = 16

Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Cancelled"]


class OperationPoolRef(Model):
    """Reference to a pool in the namespace of the operation."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the KVCachePool."""


class PurgeAction(Model):
    """Remove blocks from the drives of every node and from the shared tier. A block must match all fields that are set.

    Fields are compared with the header of the block: tenant, fingerprint, creation time, and in pools with
    `tenancy.saltTags` the tag of the request's salt.
    """

    model_config = Model.model_config | {"json_schema_extra": with_rules(f.SOME_BLOCKS)}

    tenant: f.TenantName | None = None
    """Tenant of the blocks: the name of a namespace, for blocks that its pods stored while it had no KVCacheTenant;
    kvt/NAME for a KVCacheTenant of the pool; kvt:NAME:UID for a deleted KVCacheTenant."""
    fingerprint: f.Digest | None = None
    """Fingerprint of the blocks (status.fingerprints of the pool), such as that of a model that is no longer used: at
    least its first 8 digits."""
    salts: (
        Annotated[
            list[f.Salt],
            Field(min_length=1, max_length=f.MAX_SALTS, json_schema_extra={"x-kubernetes-list-type": "set"}),
        ]
        | None
    ) = None
    """Salts of the requests that stored the blocks (`cache_salt`), in any tenant unless `tenant` is set. Each entry is
    "sha256:" and the SHA-256 digest of the salt, so that the salt stays secret: `printf %s "$SALT" | sha256sum` prints
    the digest. Only blocks that were stored with the pool's `tenancy.saltTags` on, by engines that report salts, match;
    a block without a salt never matches."""
    older_than: f.Age | None = None
    """Minimum age of the blocks when this operation was created, such as 72h."""
    all: bool = False
    """true: remove every block of the pool."""

    @model_validator(mode="after")
    def _some_blocks(self) -> PurgeAction:
        f.SOME_BLOCKS.check(
            self.all != any(v is not None for v in (self.tenant, self.fingerprint, self.salts, self.older_than))
        )
        return self


class WarmAction(Model):
    """Copy the most popular blocks of the pool to every node from its peers, as when a node joins."""

    bandwidth: f.Bandwidth = "100Mi"
    """Maximum bytes per second on each node, such as 100Mi; a quarter of it while engines load and store there."""


class VerifyAction(Model):
    """Read every block and verify its checksum. Corrupt blocks are quarantined, and engines recompute them."""

    bandwidth: f.Bandwidth = "100Mi"
    """Maximum bytes per second on each node, such as 100Mi."""


class PreflightAction(Model):
    """Run the preflight checks on every node while it serves. `failures` lists the nodes where a check fails, with the
    action to take."""

    measure: bool = False
    """true: also write at most 256 MiB to each local tier and read it back, to detect slow drives. This takes drive
    bandwidth from the engines for up to 2 s."""


class DrainAction(Model):
    """Copy the hot blocks of a node that have no other copy to the shared tier or to other nodes, as when the node
    leaves. The node stays in the pool; cordon it instead to keep it drained until it leaves."""

    node: f.NodeName
    """Name of the node."""
    bandwidth: f.Bandwidth = "256Mi"
    """Maximum bytes per second that the node sends, such as 256Mi."""


class ReleaseAction(Model):
    """Report that a session has ended: its blocks are evicted first on every node that knows the session. No block is
    removed; one that is used again stays. For single sessions, such as a user's at the end of a contract: gateways and
    engines report the end of each session themselves (POST /hints)."""

    tenant: f.TenantName
    """Tenant of the session, as in `purge.tenant`."""
    session: f.SessionDigest
    """Digest of the session: "sha256:" and the SHA-256 digest of the session's name, so that the name stays secret.
    `printf %s "$SESSION" | sha256sum` prints it."""


class OperationSpec(Model):
    """Operation and pool. Immutable. Deleting the object cancels the operation. Set exactly one action."""

    model_config = Model.model_config | {"json_schema_extra": with_rules(f.ONE_ACTION, f.SPEC_STAYS)}

    pool_ref: OperationPoolRef
    """Pool in the namespace of the operation."""
    purge: PurgeAction | None = None
    """Remove blocks."""
    warm: WarmAction | None = None
    """Copy popular blocks to all nodes."""
    verify: VerifyAction | None = None
    """Verify the checksum of every block."""
    preflight: PreflightAction | None = None
    """Run the preflight checks on all nodes."""
    drain: DrainAction | None = None
    """Copy the hot blocks of one node to other places."""
    release: ReleaseAction | None = None
    """Report that a session has ended."""
    timeout: f.Limit = "1h"
    """Time limit, such as 1h. After it, the operation is Failed, and `failures` names the unfinished nodes."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000, json_schema_extra={"format": "int64"})] = (
        604_800
    )
    """Seconds after the end of the operation until the object is deleted. The default is one week."""

    @model_validator(mode="after")
    def _one_action(self) -> OperationSpec:
        f.ONE_ACTION.check(sum(getattr(self, name) is not None for name in f.ACTIONS) == 1)
        return self

    @property
    def kind(self) -> str:
        """Action that is set: purge, warm, verify, preflight, drain or release."""
        return next(name for name in f.ACTIONS if getattr(self, name) is not None)


class OperationNodes(Model):
    """Progress by node."""

    total: Count = 0
    """Number of target nodes."""
    done: Count = 0
    """Number of nodes that have finished."""
    failed: Count = 0
    """Number of nodes that have failed."""
    summary: Text = "0/0"
    """Finished nodes and target nodes, such as 23/24."""


class OperationResults(Model):
    """Counts of all nodes together, by tier. A purge counts removed blocks and bytes, and removed quarantined blocks; a
    verification counts read blocks and bytes, and corrupt blocks; a warm-up counts copied blocks and bytes; a preflight
    counts `checks`, warnings, and failures; a drain counts blocks and bytes copied off the node; a release counts
    released blocks, and the nodes that knew the session."""

    local: Counts = Field(default_factory=dict)
    """Counts of the local tiers. A block on two nodes counts twice."""
    shared: Counts = Field(default_factory=dict)
    """Counts of the shared tier."""


class NodeFailure(Model):
    """Node that has not finished."""

    node: Text
    """Name of the node."""
    message: Annotated[str, Field(max_length=600)] = ""
    """Reason."""


class OperationStatus(Model):
    """Progress and results of the operation."""

    phase: Phase = "Pending"
    """Pending: no node has received a request yet. Running: nodes are working. Succeeded: every node has finished.
    Failed: `failures` names the nodes that have not. Cancelled: the operation or its pool was deleted."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """Current activity, or result."""
    start_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """Time of the first request to the nodes."""
    completion_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """Time of the end."""
    nodes: OperationNodes = Field(default_factory=OperationNodes)
    """Progress by node."""
    results: OperationResults = Field(default_factory=OperationResults)
    """Counts of the operation, by tier."""
    failures: Annotated[list[NodeFailure], Field(max_length=MAX_FAILURES)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Unfinished or failed nodes with the reason, at most 16."""
    conditions: Annotated[list[Condition], Field(max_length=8)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Conditions of the operation."""

    def dump(self) -> dict[str, Any]:
        """Return the status as the API server stores it."""
        return self.model_dump(by_alias=True, exclude_none=True)


class KVCacheOperation(KVCacheObject):
    """KVCacheOperation object, as the API server stores it."""

    spec: OperationSpec
