"""spec.nodes of a KVCachePool: selected nodes, drain policy, rolling update."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from kvpool_operator.api import fields as f
from kvpool_operator.api.model import LabelSelector, Model, section
from kvpool_operator.api.names import LabelKey, LabelValue  # noqa: TC001  read by pydantic
from kvpool_operator.api.rules import with_rules

__all__ = ["DrainPolicy", "Nodes", "NodesUpdate", "Toleration"]


class Toleration(Model):
    """Taint that the sidecars tolerate, as in a pod spec."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.KEY_FITS_OPERATOR, f.VALUE_FITS_OPERATOR))

    key: LabelKey | None = None
    """Taint key. If it is omitted with operator Exists, every taint is tolerated."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Equal compares `value`; Exists matches any value."""
    value: LabelValue | None = None
    """Taint value for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect. If it is omitted, all effects are tolerated."""

    @model_validator(mode="after")
    def _fits(self) -> Toleration:
        f.KEY_FITS_OPERATOR.check(self.key is not None or self.operator == "Exists")
        f.VALUE_FITS_OPERATOR.check(not self.value or self.operator == "Equal")
        return self


class DrainPolicy(Model):
    """Handling of a node's hot blocks when the node is cordoned or an autoscaler is about to remove it."""

    policy: Literal["Evacuate", "Abandon"] = "Evacuate"
    """Evacuate: the sidecar copies blocks that were used within the last hour and have no other copy to the shared
    tier or, without a shared tier, to nodes that stay. The KVCacheNode of the node reports the progress. Abandon:
    nothing is copied. Neither policy delays the node's drain: engines recompute blocks that were not copied in time."""
    timeout: f.DrainTime = "10m"
    """Time limit of the evacuation, such as 10m. After it, remaining blocks are abandoned."""
    bandwidth: f.DrainBandwidth = "256Mi"
    """Maximum bytes per second that one node sends during the evacuation, such as 256Mi."""


class NodesUpdate(Model):
    """Rolling update of the sidecars after a change of their pod template. Cached blocks are preserved."""

    max_unavailable: f.Unavailable = 1
    """Maximum number of nodes whose sidecar is replaced at the same time: a count, or a percentage of all nodes such
    as 10%, rounded up to at least one node. While a sidecar is replaced, lookups on its node miss."""
    min_ready_seconds: Annotated[int, Field(ge=0, le=3600)] = 20
    """Seconds that a new sidecar must be ready before the next one is replaced. In a pool of few nodes this keeps the
    hit rate of the pool high during the rollout; a pool of many nodes can use 0."""
    surge: bool = True
    """true: the new sidecar of a node starts while the old one serves, and takes over when it is ready, so that the
    node is without a sidecar for only a moment. The node needs free resources for the requests of a second sidecar
    pod. false: the old sidecar is stopped first. The old sidecar is always stopped first if sidecars request devices
    (transport.rdma.resources) or while the drives of the pool are replaced by others."""


class Nodes(Model):
    """Nodes of the pool."""

    selector: LabelSelector = section(LabelSelector)
    """Labels of the nodes that run a sidecar. If it is omitted, every node whose taints are tolerated runs one."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Taints that the sidecars tolerate, such as the taints of GPU nodes."""
    priority_class_name: f.PriorityClassName | None = None
    """PriorityClass of the sidecar pods. If it is omitted, the cluster's default applies."""
    run_as_user: Annotated[int, Field(ge=1000, le=2147483647)] | None = None
    """User id of the sidecars on the nodes. No other pod may run with it: the kernel counts open files that wait in
    sockets per user. If it is omitted, the id is derived from the pool and between 2000000000 and 2099999999; in a pool
    with a shared directory it is 65532, because that directory must be writable for a known user. Prefer an id of that
    range: pods that request one are not injected. After a change, local tiers get the new owner when a sidecar starts;
    the owner of a shared directory must be changed beforehand."""
    memory_limit: f.SidecarMemory = "2Gi"
    """Memory limit of a sidecar, such as 2Gi. `cache.write.buffer` and the memory for RDMA are added to it. It bounds
    the number of blocks of a node, whatever their size: about 2.2 million for each GiB. What exceeds 2Gi is added to
    the memory request."""
    drain: DrainPolicy = section(DrainPolicy)
    """Handling of a node's hot blocks when the node is about to leave."""
    update: NodesUpdate = section(NodesUpdate)
    """Rolling update of the sidecars."""
