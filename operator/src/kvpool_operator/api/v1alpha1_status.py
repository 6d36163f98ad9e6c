"""kvpool.dev/v1alpha1: what the operator answers. Written by `kvpool_operator.pools.status` only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from kvpool_operator.api.conditions import Condition  # noqa: TC001  read by pydantic

__all__ = [
    "MAX_FINGERPRINTS",
    "MAX_PODS",
    "CacheStatus",
    "Capacity",
    "FingerprintStatus",
    "IndexStatus",
    "NodesStatus",
    "Phase",
    "PodsStatus",
    "PoolStatus",
    "PreflightFinding",
    "PreflightMeasure",
    "PreflightStatus",
    "TransportStatus",
]

MAX_FINGERPRINTS = 10
MAX_PODS = 8

MAX_FOUND = 8

Phase = Literal["Pending", "Provisioning", "Ready", "Degraded", "Updating", "DryRun", "Paused", "Deleting", "Failed"]
Text = Annotated[str, Field(max_length=253)]
Count = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
# atomic: applied anew as a whole, for a map that loses its last entry would become null otherwise
Counts = Annotated[
    dict[Annotated[str, Field(max_length=64)], Count],
    Field(max_length=32, json_schema_extra={"x-kubernetes-map-type": "atomic"}),
]


class Model(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True, frozen=True, extra="ignore"
    )


class NodesStatus(Model):
    """The pool's nodes."""

    desired: Count = 0
    """Nodes that should carry a part of the pool."""
    ready: Count = 0
    """Nodes whose sidecar serves."""
    updated: Count = 0
    """Nodes whose sidecar runs the present spec."""
    summary: Text = "0/0"
    """Ready and desired nodes, such as 24/24."""


class Capacity(Model):
    """Room for blocks on the nodes that report; each sidecar counts its own drives."""

    total: Text = "0"
    """Room on all nodes together, such as 24Ti."""
    used: Text = "0"
    """Part of it that blocks take."""
    used_percent: Annotated[int, Field(ge=0)] = 0
    """The same in percent."""
    blocks: Count = 0
    """Blocks on all nodes together; a block on two nodes counts twice."""


class CacheStatus(Model):
    """What the pool was worth since its sidecars started."""

    hit_rate: Text = ""
    """Part of the blocks asked for that could be had, from 0.00 to 1.00; empty before the first question."""
    hits: Counts = Field(default_factory=dict)
    """Blocks that were had, by tier: local (the node's own drive), peer (another node), shared."""
    bytes: Counts = Field(default_factory=dict)
    """Bytes that engines read, by tier."""
    miss_reasons: Counts = Field(default_factory=dict)
    """Blocks that could not be had, by reason."""


class IndexStatus(Model):
    """The prefix index."""

    mode: Literal["Managed", "External"] = "Managed"
    """Managed: run by the operator. External: your own."""
    connected: Text = "0/0"
    """Nodes that are connected to the index, of those that report, such as 24/24."""
    announced: Count = 0
    """Blocks that the nodes have announced."""
    memory: Text = ""
    """Memory for entries that a managed index has, such as 256Mi."""
    password: Text = ""
    """While the password of a managed index is being changed: the nodes that have not shown the new one yet."""


class TransportStatus(Model):
    """How blocks travel between nodes."""

    effective: Text = ""
    """What is really used; several, with a comma between them, while nodes differ."""
    reason: Text = ""
    """Why RDMA is not used, where it is not."""


class FingerprintStatus(Model):
    """One kind of blocks: engines share blocks only where model, weights, layout and versions are the same."""

    digest: Text
    """Short name of the kind."""
    engine: Text = ""
    """Engine and version that write such blocks."""
    model: Text = ""
    """Model."""
    size: Text = "0"
    """Room that such blocks take on all nodes."""
    connected: Count = 0
    """Pods that use such blocks now."""
    pods: Annotated[list[Annotated[str, Field(max_length=330)]], Field(max_length=MAX_PODS)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Some of the pods that use them or did, as namespace/name, at most 8; those that do first."""
    last_seen: Text = ""
    """When a pod that uses them was last connected; empty while one is."""


class PodsStatus(Model):
    """Pods with the opt-in label that ask for this pool."""

    selected: Count = 0
    """All of them."""
    injected: Count = 0
    """Those that were given the pool."""
    skipped: Count = 0
    """Those that were not; their annotation kvpool.dev/skip-reason says why."""
    not_injected: Count = 0
    """Those that the webhook never saw, because it was away when they were made: make them again."""
    outdated: Count = 0
    """Those that carry the client of another version of KVPool, or are told of the pool as it was before its spec was
    changed; they work, and get the new one when made again."""


class PreflightFinding(Model):
    """Something that is not as it should be on a node."""

    node: Text = ""
    """The node."""
    check: Text = ""
    """What was looked at; docs/reference/preflight.md lists them."""
    level: Text = ""
    """Fail: the pool cannot work there as its spec asks. Warn: it can."""
    tier: Text = ""
    """The tier, where it is about one."""
    message: Annotated[str, Field(max_length=300)] = ""
    """What was found."""
    advice: Annotated[str, Field(max_length=300)] = ""
    """What to do about it."""


class PreflightMeasure(Model):
    """What was measured of one tier, of all nodes the worst; by one stream, at most 256 MiB on each node."""

    tier: Text = ""
    """The tier."""
    write_mbps: Annotated[Count, Field(alias="writeMBps")] = 0
    """Slowest writes, in megabytes per second; 0: not measured."""
    read_mbps: Annotated[Count, Field(alias="readMBps")] = 0
    """Slowest reads, in megabytes per second."""
    round_trip_ms: Annotated[Count, Field(alias="roundTripMs")] = 0
    """Shared tiers: longest time in milliseconds for a small file or object, there and back."""
    slowest_node: Text = ""
    """The node with the slowest reads."""


class PreflightStatus(Model):
    """What was found on the nodes before sidecars were made or changed there."""

    spec: Text = ""
    """Digest of the part of the spec that was looked at."""
    state: Text = ""
    """Checking: nodes are being looked at. Held: too few passed, so nothing is rolled out; they are looked at again and
    again. Done: the verdict stands until tiers, transport, index or nodes of the spec change, or the annotation
    kvpool.dev/preflight does."""
    since: Text = ""
    """When this look began."""
    nodes: Count = 0
    """Nodes that should carry a part of the pool."""
    passed: Count = 0
    """Nodes where nothing failed."""
    failed: Count = 0
    """Nodes where something failed; what is left of `nodes` did not answer."""
    findings: Annotated[list[PreflightFinding], Field(max_length=MAX_FOUND)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """What is not as it should be, the worst first, at most 8."""
    measured: Annotated[list[PreflightMeasure], Field(max_length=MAX_FOUND)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """What was measured, by tier."""


class PoolStatus(Model):
    """The pool as the operator last saw it."""

    observed_generation: Annotated[int, Field(json_schema_extra={"format": "int64"})] = 0
    """metadata.generation that this status was judged by."""
    phase: Phase = "Pending"
    """One word: Pending, Provisioning, Ready, Degraded, Updating, DryRun, Paused, Deleting or Failed.
    Programs should look at the conditions."""
    pool_id: Annotated[str, Field(alias="poolID", max_length=64)] = ""
    """Identity of the pool's data; it stays when a pool of the same name takes over retained blocks."""
    nodes: NodesStatus = Field(default_factory=NodesStatus)
    """The pool's nodes."""
    capacity: Capacity = Field(default_factory=Capacity)
    """Room for blocks, and how much of it is taken."""
    cache: CacheStatus = Field(default_factory=CacheStatus)
    """Hits, and the reasons of misses."""
    index: IndexStatus = Field(default_factory=IndexStatus)
    """The prefix index."""
    transport: TransportStatus = Field(default_factory=TransportStatus)
    """How blocks travel between nodes."""
    fingerprints: Annotated[list[FingerprintStatus], Field(max_length=MAX_FINGERPRINTS)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """The kinds of blocks that are in use, and those that take the most room, at most 10."""
    pods: PodsStatus = Field(default_factory=PodsStatus)
    """Pods with the opt-in label that ask for this pool."""
    preflight: PreflightStatus | None = None
    """What was found on the nodes before sidecars were made or changed there. Not there with `preflight: Skip`."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Ready is the one to wait for: the sidecars serve and the index is there. StorageReady, IndexReady, InjectionReady
    and TransportReady say which part is not as it should be, BlocksShareable whether engines find each other's blocks,
    PreflightPassed what was found on the nodes before, Progressing whether the operator is at work, RollingUpdateSafe
    whether replacing the sidecars now would keep what is cached."""

    def dump(self) -> dict[str, Any]:
        """As the API server holds it."""
        return self.model_dump(by_alias=True, exclude_none=True)
