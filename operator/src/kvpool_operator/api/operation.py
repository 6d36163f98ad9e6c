"""kvpool.dev/v1alpha1 KVCacheOperation: something that is done to a pool once, and its results."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from kvpool_operator.api import operation_fields as f
from kvpool_operator.api.conditions import Condition  # noqa: TC001  read by pydantic
from kvpool_operator.api.rules import with_rules
from kvpool_operator.api.v1alpha1 import KVCacheObject, Model
from kvpool_operator.api.v1alpha1_status import Count, Counts, Text  # noqa: TC001  read by pydantic

__all__ = [
    "MAX_FAILURES",
    "KVCacheOperation",
    "NodeFailure",
    "OperationSpec",
    "OperationStatus",
    "Phase",
    "Purge",
]

KIND: Final = "KVCacheOperation"
PLURAL: Final = "kvcacheoperations"
MAX_FAILURES: Final = 16

Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Cancelled"]


class PoolRef(Model):
    """A pool of the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the KVCachePool."""


class Purge(Model):
    """Remove blocks from every node's drives and from the shared tier. All that is given must fit a block.

    Blocks are known by what their headers say: tenant, fingerprint, when they were made, and in pools with
    `tenancy.saltTags` which salt their request had.
    """

    model_config = Model.model_config | {"json_schema_extra": with_rules(f.SOME_BLOCKS)}

    tenant: f.TenantName | None = None
    """Blocks of this tenant: the name of a namespace, for what its pods stored while it was a tenant by itself;
    kvt/NAME for a KVCacheTenant of the pool; kvt:NAME:UID for one that was deleted."""
    fingerprint: f.Digest | None = None
    """Blocks with this fingerprint (status.fingerprints of the pool), such as those of a model that is not used any
    more; its first 8 digits or more."""
    salts: (
        Annotated[
            list[f.Salt],
            Field(min_length=1, max_length=f.MAX_SALTS, json_schema_extra={"x-kubernetes-list-type": "set"}),
        ]
        | None
    ) = None
    """Blocks of requests with one of these values of `cache_salt`, in any tenant unless `tenant` is given. Each is the
    salt's SHA-256, so that the salt itself is not told here: `printf %s "$SALT" | sha256sum` gives the digits behind
    "sha256:". Only blocks that were stored while the pool's `tenancy.saltTags` was on, by engines that tell salts
    (docs/how-to/operations.md), are found; a block without a salt fits none."""
    older_than: f.Age | None = None
    """Blocks that were made so long before this operation was, such as 72h."""
    all: bool = False
    """true: every block of the pool."""

    @model_validator(mode="after")
    def _some_blocks(self) -> Purge:
        f.SOME_BLOCKS.check(
            self.all != any(v is not None for v in (self.tenant, self.fingerprint, self.salts, self.older_than))
        )
        return self


class Warm(Model):
    """Have every node copy the pool's hottest blocks from its peers, as one that joins does
    (docs/concepts/warm-up.md)."""

    bandwidth: f.Bandwidth = "100Mi"
    """Bytes per second on each node, such as 100Mi; a quarter of it while engines load and store there."""


class Verify(Model):
    """Read every block and compare its checksum. Those that are not right are quarantined, and computed again."""

    bandwidth: f.Bandwidth = "100Mi"
    """Bytes per second on each node, such as 100Mi."""


class Preflight(Model):
    """Look at every node as before a roll-out (docs/reference/preflight.md), while it serves. A node where something
    fails is
    among `failures`, with what to do about it."""

    measure: bool = False
    """true: also write at most 256 MiB to each local tier and read it back, which takes that much from the engines for
    up to 2 s; slow drives are warned of."""


class Drain(Model):
    """Copy the hot blocks of a node that exist nowhere else to the shared tier or to other nodes, as when it leaves
    (docs/how-to/drain.md). The node stays; cordon it where it is to be drained until it goes."""

    node: f.NodeName
    """Name of the node."""
    bandwidth: f.Bandwidth = "256Mi"
    """Bytes per second that leave the node, such as 256Mi."""


class OperationSpec(Model):
    """What is to be done, to which pool. It cannot be changed; deleting the operation cancels it."""

    model_config = Model.model_config | {"json_schema_extra": with_rules(f.ONE_ACTION, f.SPEC_STAYS)}

    pool_ref: PoolRef
    """The pool, in the operation's namespace."""
    purge: Purge | None = None
    """Remove blocks."""
    warm: Warm | None = None
    """Copy hot blocks to where they are not."""
    verify: Verify | None = None
    """Check all blocks."""
    preflight: Preflight | None = None
    """Look at the nodes."""
    drain: Drain | None = None
    """Copy a node's hot blocks elsewhere."""
    timeout: f.Limit = "1h"
    """The operation ends after so long, Failed, with the nodes named that are not done."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000, json_schema_extra={"format": "int64"})] = (
        604_800
    )
    """The operation is removed so long after its end, in seconds: a week unless said otherwise."""

    @model_validator(mode="after")
    def _one_wish(self) -> OperationSpec:
        f.ONE_ACTION.check(sum(getattr(self, name) is not None for name in f.ACTIONS) == 1)
        return self

    @property
    def kind(self) -> str:
        """What is to be done: purge, warm, verify, preflight or drain."""
        return next(name for name in f.ACTIONS if getattr(self, name) is not None)


class OperationNodes(Model):
    """Nodes that take part."""

    total: Count = 0
    """Nodes of the pool."""
    done: Count = 0
    """Nodes that have done all that was asked of them."""
    failed: Count = 0
    """Nodes that could not."""
    summary: Text = "0/0"
    """Nodes that are done, and all, such as 23/24."""


class OperationResults(Model):
    """What was counted, all nodes together, by tier. A purge counts blocks and bytes that are gone, and bad blocks that
    were kept in quarantine and are gone; a verification blocks and bytes that were read, and corrupt blocks; a warm-up
    blocks and bytes that were copied; a preflight what was looked at (`checks`), and what of it warned or failed; a
    drain blocks and bytes that were copied off the node."""

    local: Counts = Field(default_factory=dict)
    """On the nodes' own drives; a block on two nodes counts twice."""
    shared: Counts = Field(default_factory=dict)
    """On the shared tier."""


class NodeFailure(Model):
    """A node that is not done."""

    node: Text
    """Name of the node."""
    message: Annotated[str, Field(max_length=600)] = ""
    """Why."""


class OperationStatus(Model):
    """How the operation stands."""

    phase: Phase = "Pending"
    """Pending: nothing was asked of a node yet. Running. Succeeded: every node is done. Failed: `failures` says which
    are not. Cancelled: it was deleted, or its pool was."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """What is going on, or what came of it."""
    start_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When the nodes were first asked."""
    completion_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When it ended."""
    nodes: OperationNodes = Field(default_factory=OperationNodes)
    """Nodes that take part."""
    results: OperationResults = Field(default_factory=OperationResults)
    """What was counted, by tier."""
    failures: Annotated[list[NodeFailure], Field(max_length=MAX_FAILURES)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Nodes that are not done, at most 16, and why."""
    conditions: Annotated[list[Condition], Field(max_length=8)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Complete: True when the operation has ended; its reason is the phase."""

    def dump(self) -> dict[str, Any]:
        """As the API server holds it."""
        return self.model_dump(by_alias=True, exclude_none=True)


class KVCacheOperation(KVCacheObject):
    """One operation, as the API server holds it."""

    spec: OperationSpec
