"""kvpool.dev/v1alpha1 KVCacheNode: one node's part of one pool. The operator makes, writes and removes it.

There is one for each pool and node, named POOL.NODE, owned by the pool. People read it; the operator reads back from it
when a drain began, so that a restart of the operator does not begin it anew.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from kvpool_operator.api.conditions import Condition

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
Text = Annotated[str, Field(max_length=253)]
Count = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
Time = Annotated[str, Field(max_length=64)]


class Model(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True, frozen=True, extra="ignore"
    )


class NodeSpec(Model):
    """Which pool and which node. Written by the operator; a change by others is undone."""

    pool: Text
    """Name of the KVCachePool, which is in the same namespace."""
    node: Text
    """Name of the node."""


class DeviceStatus(Model):
    """A local tier of the pool on this node."""

    name: Annotated[str, Field(max_length=63)]
    """Name of the tier in the pool's spec."""
    path: Text = ""
    """Directory on the node."""
    health: Literal["OK", "Failing", "Unknown"] = "Unknown"
    """OK: it serves. Failing: it returns errors and is passed by. Unknown: the sidecar does not tell."""


class DrainStatus(Model):
    """What becomes of the node's hot blocks when the node is to leave (spec.nodes.drain of the pool)."""

    state: DrainState = "None"
    """None: the node stays. Requested: the sidecar was not reached yet. Evacuating: hot blocks that exist nowhere else
    are being copied. Drained: all of them exist elsewhere, and new ones are copied as they come. Abandoned: the time
    was over before, or the pool's policy is Abandon; what remained is computed again when it is asked for."""
    reason: Text = ""
    """Why the node is to leave: it is cordoned, or a taint of Cluster Autoscaler or Karpenter."""
    start_time: Time = ""
    """When the operator saw it first."""
    end_time: Time = ""
    """When it was Drained or Abandoned."""
    moved_blocks: Count = 0
    """Blocks that were copied to the shared tier or to other nodes since."""
    moved: Text = "0"
    """Their size."""
    remaining_blocks: Count = 0
    """Hot blocks that are on this node alone, as far as the sidecar knows."""
    remaining: Text = "0"
    """Their size."""
    message: Annotated[str, Field(max_length=512)] = ""
    """What keeps the rest from being moved, if something does."""


class NodeCondition(Condition):
    """One aspect of the node's health."""

    type: Annotated[str, Field(max_length=64)]
    """What this condition is about: Ready (the node's sidecar serves), DiskHealthy (none of its drives returns errors)
    or IndexConnected (its blocks are found by others)."""
    observed_generation: int = 0
    """metadata.generation of the KVCachePool this was judged by, when the node last had something new to tell."""


class NodeStatus(Model):
    """The node as its sidecar last told. Numbers may be half a minute old, or older in a very large cluster."""

    devices: Annotated[list[DeviceStatus], Field(max_length=MAX_DEVICES)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """The pool's local tiers on this node."""
    capacity: Text = "0"
    """Room for blocks on this node, such as 500Gi."""
    used: Text = "0"
    """Part of it that blocks take."""
    blocks: Count = 0
    """Blocks on this node."""
    generation: Count = 0
    """Number of the first tier's directory, random and kept on its drive. Another one means that the drive was replaced
    or emptied: what the index said of the one before is void."""
    transport: Annotated[str, Field(max_length=63)] = ""
    """How this node reads from others: TCP or RDMA."""
    drain: DrainStatus = Field(default_factory=DrainStatus)
    """What becomes of its hot blocks when it is to leave."""
    conditions: Annotated[list[NodeCondition], Field(max_length=8)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Ready, DiskHealthy and IndexConnected."""

    def dump(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True)
