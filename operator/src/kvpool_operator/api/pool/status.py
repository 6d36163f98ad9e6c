"""Status of a KVCachePool. Only `kvpool_operator.pools.status` writes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvpool_operator.api.conditions import Condition  # noqa: TC001  read by pydantic
from kvpool_operator.api.findings.row import Severity  # noqa: TC001  read by pydantic
from kvpool_operator.api.model import Count, Counts, Model, Text

__all__ = [
    "MAX_FINDINGS",
    "MAX_FINGERPRINTS",
    "MAX_IMAGE_PROBLEMS",
    "MAX_MODELS",
    "MAX_PODS",
    "CacheStatus",
    "Capacity",
    "ClientImageProblem",
    "FindingStatus",
    "FingerprintStatus",
    "HitRateWindow",
    "IndexStatus",
    "ModelHitRate",
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
MAX_MODELS = 32
MAX_FINDINGS = 16
MAX_IMAGE_PROBLEMS = 16

MAX_FOUND = 8

Phase = Literal["Pending", "Provisioning", "Ready", "Degraded", "Updating", "DryRun", "Paused", "Deleting", "Failed"]


class NodesStatus(Model):
    """Nodes of the pool."""

    desired: Count = 0
    """Number of nodes that match the spec."""
    ready: Count = 0
    """Number of nodes whose sidecar serves."""
    updated: Count = 0
    """Number of nodes whose sidecar runs the current spec."""
    summary: Text = "0/0"
    """Ready and desired nodes, such as 24/24."""


class Capacity(Model):
    """Capacity and usage of the local tiers, summed over the nodes that report."""

    total: Text = "0"
    """Capacity of all nodes together, such as 24Ti."""
    used: Text = "0"
    """Size of the blocks on all nodes together."""
    used_percent: Annotated[int, Field(ge=0)] = 0
    """Used capacity in percent."""
    blocks: Count = 0
    """Number of blocks on all nodes together. A block on two nodes counts twice."""


class HitRateWindow(Model):
    """Hit rate in a sliding window."""

    window: Text
    """Length of the window: 5m or 1h."""
    tokens_asked: Count = 0
    """Tokens that engines requested from the pool. Each request counts once."""
    tokens_found: Count = 0
    """Tokens that the pool found."""
    hit_rate: Text = ""
    """tokensFound divided by tokensAsked, from 0.00 to 1.00. Empty if no engine requested any token."""


class ModelHitRate(Model):
    """Hit rate of one model."""

    model: Text
    """Name of the model, as engines report it. `other`: all models above 32, and engines that report no name."""
    tokens_asked: Count = 0
    """Tokens that engines requested in the last hour."""
    tokens_found: Count = 0
    """Tokens that the pool found in the last hour."""
    hit_rate: Text = ""
    """Hit rate of the last hour. Empty if no engine requested any token."""
    windows: Annotated[list[HitRateWindow], Field(max_length=4)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Hit rate of the last 5 minutes and of the last hour."""


class CacheStatus(Model):
    """Hit rate of lookups, and results of loads."""

    hit_rate: Text = ""
    """Hit rate of the last hour, from 0.00 to 1.00: tokens found divided by tokens that engines requested. 1.00 only if
    all were found. Empty if no engine requested any token."""
    tokens_asked: Count = 0
    """Tokens that engines requested in the last hour. Each request counts once."""
    tokens_found: Count = 0
    """Tokens that the pool found in the last hour."""
    windows: Annotated[list[HitRateWindow], Field(max_length=4)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Hit rate of the last 5 minutes and of the last hour."""
    models: Annotated[list[ModelHitRate], Field(max_length=MAX_MODELS)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Hit rate by model, at most 32; the most requested models first."""
    misses: Counts = Field(default_factory=dict)
    """Tokens that were not found in the last hour, by the reason of the first missing block of each request."""
    seconds_saved: Annotated[int, Field(json_schema_extra={"format": "int64"})] = 0
    """Seconds by which loads were faster than computing the same tokens since the sidecars started. Negative if they
    were slower. 0 if no engine measures its rate; vLLM does."""
    load_success_rate: Text = ""
    """Success rate of loads since the sidecars started, from 0.00 to 1.00: blocks loaded divided by blocks that engines
    tried to load. Empty before the first load."""
    hits: Counts = Field(default_factory=dict)
    """Number of blocks that were loaded since the sidecars started, by tier: local (the node's own drive), peer
    (another node), shared."""
    bytes: Counts = Field(default_factory=dict)
    """Bytes that engines read, by tier."""
    load_failures: Counts = Field(default_factory=dict)
    """Number of blocks that engines tried to load and did not get since the sidecars started, by reason."""


class IndexStatus(Model):
    """Prefix index."""

    mode: Literal["Managed", "External"] = "Managed"
    """Managed: the operator runs it. External: an existing server."""
    connected: Text = "0/0"
    """Nodes that are connected to the index, and nodes that report, such as 24/24."""
    announced: Count = 0
    """Number of blocks that the nodes have registered in the index."""
    memory: Text = ""
    """Memory of a managed index for entries, such as 256Mi."""
    password: Text = ""
    """During a password rotation of a managed index: the nodes that have not logged in with the new password yet."""


class TransportStatus(Model):
    """Transfer of blocks between nodes."""

    effective: Text = ""
    """Protocol in use: TCP or RDMA. Several, separated by commas, if nodes differ."""
    reason: Text = ""
    """Reason why RDMA is not used, if it is not."""


class FingerprintStatus(Model):
    """Group of compatible blocks. Engines share blocks only if model, weights, layout, and versions are equal."""

    digest: Text
    """Shortened fingerprint."""
    engine: Text = ""
    """Engine and version that write these blocks."""
    model: Text = ""
    """Model name."""
    size: Text = "0"
    """Size of these blocks on all nodes."""
    connected: Count = 0
    """Number of connected pods that use these blocks."""
    pods: Annotated[list[Annotated[str, Field(max_length=330)]], Field(max_length=MAX_PODS)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Pods that use or used these blocks, as namespace/name, at most 8; connected pods first."""
    last_seen: Text = ""
    """Time when the last pod that uses these blocks disconnected. Empty while one is connected."""
    tested: bool = True
    """Whether this release was tested with the version of the engine. If false, the engine passed a self-test."""


class ClientImageProblem(Model):
    """Namespace in which a pod waited for the image of the client."""

    namespace: Text = ""
    """Name of the namespace."""
    image: Annotated[str, Field(max_length=512)] = ""
    """Image that could not be pulled."""
    last_seen: Text = ""
    """Time of the last such pod. New pods of the namespace are not injected for one hour from then."""


class PodsStatus(Model):
    """Pods with the opt-in label that select this pool."""

    selected: Count = 0
    """Number of pods that select this pool."""
    injected: Count = 0
    """Number of pods that were injected."""
    skipped: Count = 0
    """Number of pods that were not injected. Their annotation kvpool.dev/skip-reason has the reason."""
    not_injected: Count = 0
    """Number of pods that were created while the webhook was unavailable, or before their namespace or a pool selected
    them. Recreate them to inject them."""
    skip_reasons: dict[str, Count] = Field(default_factory=dict, max_length=16)
    """Number of skipped pods by reason."""
    connected: Count = 0
    """Number of injected pods whose engine is connected to the sidecar of its node."""
    silent: Count = 0
    """Number of injected pods that have been Ready for 2 minutes and whose engine is not connected, or reports that it
    runs without the pool. Condition EnginesConnected names some of them."""
    outdated: Count = 0
    """Number of pods with the client of another KVPool version, or with the configuration of an earlier spec of the
    pool. They work. Recreate them to update them."""
    client_image_problems: Annotated[list[ClientImageProblem], Field(max_length=MAX_IMAGE_PROBLEMS)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Namespaces in which the image of the client could not be pulled, at most 16."""


class PreflightFinding(Model):
    """Preflight check that did not pass on a node."""

    node: Text = ""
    """Name of the node."""
    check: Text = ""
    """Name of the check."""
    level: Text = ""
    """Fail: the pool cannot work on the node as the spec requires. Warn: it can."""
    tier: Text = ""
    """Name of the tier, if the check is about a tier."""
    message: Annotated[str, Field(max_length=300)] = ""
    """Result of the check."""
    advice: Annotated[str, Field(max_length=300)] = ""
    """Action to take."""


class PreflightMeasure(Model):
    """Worst measurement of one tier over all nodes, by a single stream of at most 256 MiB on each node."""

    tier: Text = ""
    """Name of the tier."""
    write_mbps: Annotated[Count, Field(alias="writeMBps")] = 0
    """Lowest write rate in megabytes per second. 0: not measured."""
    read_mbps: Annotated[Count, Field(alias="readMBps")] = 0
    """Lowest read rate in megabytes per second."""
    round_trip_ms: Annotated[Count, Field(alias="roundTripMs")] = 0
    """Shared tiers: longest round trip of a small file or object, in milliseconds."""
    slowest_node: Text = ""
    """Node with the lowest read rate."""


class PreflightStatus(Model):
    """Results of the preflight checks."""

    spec: Text = ""
    """Digest of the part of the spec that the checks depend on."""
    state: Text = ""
    """Checking: the checks are running. Held: too few nodes passed, so the rollout waits and the checks are repeated.
    Done: the result is valid until tiers, transport, index, or nodes of the spec, or the annotation
    kvpool.dev/preflight change."""
    since: Text = ""
    """Start time of the checks."""
    nodes: Count = 0
    """Number of nodes that match the spec."""
    passed: Count = 0
    """Number of nodes where no check failed."""
    failed: Count = 0
    """Number of nodes where a check failed. The remaining nodes did not respond."""
    findings: Annotated[list[PreflightFinding], Field(max_length=MAX_FOUND)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Checks that did not pass, the most severe first, at most 8."""
    measured: Annotated[list[PreflightMeasure], Field(max_length=MAX_FOUND)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Measurements, by tier."""


class FindingStatus(Model):
    """Result of the diagnosis of the pool."""

    code: Annotated[str, Field(pattern="^KVP[0-9]{4}$")]
    """Stable code, such as KVP0402. The page of findings has its cause, effect and fix."""
    severity: Severity
    """Error: the pool or an engine does not work as configured. Warning: hits are lost. Info: worth knowing."""
    subject: Text
    """Kind and name of the object that the finding is about."""
    summary: Annotated[str, Field(max_length=500)] = ""
    """What was observed."""
    fix: Annotated[str, Field(max_length=300)] = ""
    """Action to take."""


class PoolStatus(Model):
    """Observed state of the pool."""

    observed_generation: Annotated[int, Field(json_schema_extra={"format": "int64"})] = 0
    """metadata.generation of the spec that this status describes."""
    phase: Phase = "Pending"
    """Summary of the state for people. Programs should check the conditions."""
    pool_id: Annotated[str, Field(alias="poolID", max_length=64)] = ""
    """Identity of the pool's data. It stays the same when a new pool of the same name takes over retained blocks."""
    nodes: NodesStatus = Field(default_factory=NodesStatus)
    """Nodes of the pool."""
    capacity: Capacity = Field(default_factory=Capacity)
    """Capacity and usage of the local tiers."""
    cache: CacheStatus = Field(default_factory=CacheStatus)
    """Hit rate of lookups, and results of loads."""
    index: IndexStatus = Field(default_factory=IndexStatus)
    """Prefix index."""
    transport: TransportStatus = Field(default_factory=TransportStatus)
    """Transfer of blocks between nodes."""
    fingerprints: Annotated[list[FingerprintStatus], Field(max_length=MAX_FINGERPRINTS)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Groups of compatible blocks that are in use, and those that take the most space, at most 10."""
    pods: PodsStatus = Field(default_factory=PodsStatus)
    """Pods with the opt-in label that select this pool."""
    preflight: PreflightStatus | None = None
    """Results of the preflight checks. Absent with `preflight: Skip`."""
    findings: Annotated[list[FindingStatus], Field(max_length=MAX_FINDINGS)] | None = Field(
        default=None, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Results of the diagnosis, the most severe first, at most 16. Absent if there are none."""
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Conditions of the pool."""

    def dump(self) -> dict[str, Any]:
        """Return the status as the API server stores it."""
        return self.model_dump(by_alias=True, exclude_none=True)
