"""The kinds of the API, each with what its CRD is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpool_operator.api import operation
from kvpool_operator.api.fields import POOL_NAME
from kvpool_operator.api.node import NODE_KIND, NODE_PLURAL, NodeSpec, NodeStatus
from kvpool_operator.api.tenant import NOT_ITSELF, TENANT_KIND, TENANT_PLURAL, TenantSpec, TenantStatus
from kvpool_operator.api.v1alpha1 import KIND, PLURAL, PoolSpec
from kvpool_operator.api.v1alpha1_status import PoolStatus

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvpool_operator.api.rules import Rule

__all__ = ["NODE", "POOL", "RESOURCES", "TENANT", "Resource"]


@dataclass(frozen=True)
class Resource:
    """One namespaced kind. `spec` is None where nobody but the operator writes; columns: name, type, path, priority."""

    kind: str
    plural: str
    short: str
    description: str
    spec: type[BaseModel] | None
    status: type[BaseModel]
    columns: tuple[tuple[str, str, str, int], ...]
    rules: tuple[Rule, ...] = ()


POOL: Final = Resource(
    kind=KIND,
    plural=PLURAL,
    short="kvp",
    description="KVCachePool makes the drives of a cluster's nodes, and its shared file system, one pool of KV cache "
    "blocks for inference engines. The pool may lose any block at any time; it never returns wrong bytes, never "
    "crosses a tenant, and never makes an engine wait past its deadline.",
    spec=PoolSpec,
    status=PoolStatus,
    columns=(
        ("Phase", "string", ".status.phase", 0),
        ("Nodes", "string", ".status.nodes.summary", 0),
        ("Capacity", "string", ".status.capacity.total", 0),
        ("Used", "string", ".status.capacity.used", 0),
        ("Hits", "string", ".status.cache.hitRate", 0),
        ("Pods", "integer", ".status.pods.injected", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 1),
        ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
        ("Index", "string", ".status.index.connected", 1),
        ("Transport", "string", ".status.transport.effective", 1),
    ),
    rules=(POOL_NAME,),
)

OPERATION: Final = Resource(
    kind=operation.KIND,
    plural=operation.PLURAL,
    short="kvop",
    description="KVCacheOperation does something to a KVCachePool once, on all its nodes: it purges blocks, warms the "
    "nodes, verifies all blocks. Its status holds the results. Deleting one that runs cancels it.",
    spec=operation.OperationSpec,
    status=operation.OperationStatus,
    columns=(
        ("Pool", "string", ".spec.poolRef.name", 0),
        ("Phase", "string", ".status.phase", 0),
        ("Nodes", "string", ".status.nodes.summary", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Completed", "date", ".status.completionTime", 1),
        ("Message", "string", ".status.message", 1),
    ),
)

NODE: Final = Resource(
    kind=NODE_KIND,
    plural=NODE_PLURAL,
    short="kvn",
    description="KVCacheNode is one node's part of one KVCachePool: its drives, how full they are, and what becomes of "
    "its hot blocks when the node is to leave. The operator makes, writes and removes it; nothing is configured here.",
    spec=NodeSpec,
    status=NodeStatus,
    columns=(
        ("Pool", "string", ".spec.pool", 0),
        ("Node", "string", ".spec.node", 0),
        ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
        ("Used", "string", ".status.used", 0),
        ("Capacity", "string", ".status.capacity", 0),
        ("Drain", "string", ".status.drain.state", 0),
        ("Remaining", "string", ".status.drain.remaining", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Blocks", "integer", ".status.blocks", 1),
        ("Moved", "string", ".status.drain.moved", 1),
        ("Transport", "string", ".status.transport", 1),
        ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
    ),
)

TENANT: Final = Resource(
    kind=TENANT_KIND,
    plural=TENANT_PLURAL,
    short="kvt",
    description="KVCacheTenant makes namespaces one tenant of a KVCachePool: they find each other's blocks and nobody "
    "else's, unless another tenant lets them read its own, and share a quota. A namespace without one is a tenant by "
    "itself.",
    spec=TenantSpec,
    status=TenantStatus,
    columns=(
        ("Pool", "string", ".spec.poolRef.name", 0),
        ("Members", "integer", ".status.memberCount", 0),
        ("Quota", "string", ".spec.quota.capacity", 0),
        ("Used", "string", ".status.used.nodes", 0),
        ("Accepted", "string", '.status.conditions[?(@.type=="Accepted")].reason', 0),
        ("Enforced", "string", '.status.conditions[?(@.type=="Enforced")].status', 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Priority", "integer", ".spec.priority", 1),
        ("Evicted", "integer", ".status.used.evictedOverQuota", 1),
        ("Reads", "string", ".status.readsFrom", 1),
    ),
    rules=(NOT_ITSELF,),
)

RESOURCES: Final = (POOL, NODE, OPERATION, TENANT)
