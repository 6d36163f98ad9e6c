"""kvpool.dev/v1alpha1 KVCacheNode: state of one node of one pool. The operator creates, updates and deletes it.

There is one object per pool and node, named POOL.NODE and owned by the pool. The operator reads the start of a drain
back from it, so that a restart of the operator does not restart the drain.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvpool_operator.api.conditions import Condition
from kvpool_operator.api.model import Count, Model, Text

__all__ = [
    "NODE_KIND",
    "NODE_PLURAL",
    "DeviceStatus",
    "DrainState",
    "DrainStatus",
    "NodeCondition",
    "NodeSpec",
    "NodeStatus",
]

NODE_KIND = "KVCacheNode"
NODE_PLURAL = "kvcachenodes"
MAX_DEVICES = 8

DrainState = Literal["None", "Requested", "Evacuating", "Drained", "Abandoned"]
Time = Annotated[str, Field(max_length=64)]


class NodeSpec(Model):
    """Pool and node that this object describes. The operator writes it and reverts other changes."""

    pool: Text
    """Name of the KVCachePool in the same namespace."""
    node: Text
    """Name of the node."""


class DeviceStatus(Model):
    """Local tier of the pool on this node."""

    name: Annotated[str, Field(max_length=63)]
    """Name of the tier in the spec of the pool."""
    path: Text = ""
    """Directory on the node. Empty for a volume of the sidecar's pod."""
    health: Literal["OK", "Failing", "Unknown"] = "Unknown"
    """OK: the drive serves. Failing: the drive returns errors and is not used. Unknown: not
    reported."""


class DrainStatus(Model):
    """Evacuation of the node's hot blocks before the node leaves (spec.nodes.drain of the pool)."""

    state: DrainState = "None"
    """None: the node stays. Requested: the sidecar has not been reached yet. Evacuating: hot blocks that have no other
    copy are being copied. Drained: all hot blocks have another copy, and new ones are copied as they are stored.
    Abandoned: the timeout expired, or the policy of the pool is Abandon; engines recompute the remaining blocks."""
    reason: Text = ""
    """Reason why the node is leaving: it is cordoned, or has a taint of Cluster Autoscaler or Karpenter."""
    start_time: Time = ""
    """Time when the operator detected it."""
    end_time: Time = ""
    """Time when the state became Drained or Abandoned."""
    moved_blocks: Count = 0
    """Number of blocks that were copied to the shared tier or to other nodes."""
    moved: Text = "0"
    """Size of the copied blocks."""
    remaining_blocks: Count = 0
    """Number of hot blocks without a copy elsewhere, as far as the sidecar knows."""
    remaining: Text = "0"
    """Size of the remaining blocks."""
    message: Annotated[str, Field(max_length=512)] = ""
    """Problem that prevents the remaining blocks from being copied, if any."""


class NodeCondition(Condition):
    """One aspect of the state of the node."""

    type: Annotated[str, Field(max_length=64)]
    """Type of the condition."""
    observed_generation: int = 0
    """metadata.generation of the evaluated KVCachePool at the time of the node's last change."""


class NodeStatus(Model):
    """Last reported state of the node. Numbers can be 30 seconds old, or older in a very large cluster."""

    devices: Annotated[list[DeviceStatus], Field(max_length=MAX_DEVICES)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Local tiers of the pool on this node."""
    capacity: Text = "0"
    """Capacity for blocks on this node, such as 500Gi."""
    used: Text = "0"
    """Size of the blocks on this node."""
    blocks: Count = 0
    """Number of blocks on this node."""
    generation: Count = 0
    """Random number stored in the directory of the first tier. It changes when the drive is replaced or emptied; index
    entries of the previous generation are then invalid."""
    transport: Annotated[str, Field(max_length=63)] = ""
    """Protocol with which this node reads from other nodes: TCP or RDMA."""
    drain: DrainStatus = Field(default_factory=DrainStatus)
    """Evacuation of the hot blocks before the node leaves."""
    conditions: Annotated[list[NodeCondition], Field(max_length=8)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Conditions of the node."""

    def dump(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True)
