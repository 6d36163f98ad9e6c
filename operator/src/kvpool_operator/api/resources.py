"""Kinds of the API, with the inputs of their CRDs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpool_operator.api import operation
from kvpool_operator.api.condition_types import (
    NODE_CONDITIONS,
    OPERATION_CONDITIONS,
    POOL_CONDITIONS,
    TENANT_CONDITIONS,
)
from kvpool_operator.api.fields import POOL_NAME
from kvpool_operator.api.node import NODE_KIND, NODE_PLURAL, NodeSpec, NodeStatus
from kvpool_operator.api.pool.status import PoolStatus
from kvpool_operator.api.tenant import NOT_ITSELF, TENANT_KIND, TENANT_PLURAL, TenantSpec, TenantStatus
from kvpool_operator.api.v1alpha1 import KIND, PLURAL, PoolSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

    from kvpool_operator.api.rules import Rule

__all__ = ["NODE", "POOL", "RESOURCES", "TENANT", "Resource"]


@dataclass(frozen=True)
class Resource:
    """Namespaced kind. `spec` is None if only the operator writes it; columns: name, type, JSON path, priority."""

    kind: str
    plural: str
    short: str
    description: str
    spec: type[BaseModel] | None
    status: type[BaseModel]
    columns: tuple[tuple[str, str, str, int], ...]
    conditions: Mapping[str, str]
    """Condition types with their meaning."""
    rules: tuple[Rule, ...] = ()


POOL: Final = Resource(
    kind=KIND,
    plural=PLURAL,
    short="kvp",
    description="KVCachePool combines the drives of a cluster's nodes and an optional shared tier into one pool of KV "
    "cache blocks for inference engines. The pool can lose any block at any time. It never returns wrong data, never "
    "returns blocks of another tenant, and never delays an engine past its deadline.",
    spec=PoolSpec,
    status=PoolStatus,
    columns=(
        ("Phase", "string", ".status.phase", 0),
        ("Nodes", "string", ".status.nodes.summary", 0),
        ("Capacity", "string", ".status.capacity.total", 0),
        ("Used", "string", ".status.capacity.used", 0),
        ("HitRate", "string", ".status.cache.hitRate", 0),
        ("Pods", "integer", ".status.pods.injected", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 1),
        ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
        ("Index", "string", ".status.index.connected", 1),
        ("Transport", "string", ".status.transport.effective", 1),
    ),
    conditions=POOL_CONDITIONS,
    rules=(POOL_NAME,),
)

OPERATION: Final = Resource(
    kind=operation.KIND,
    plural=operation.PLURAL,
    short="kvop",
    description="KVCacheOperation runs one operation on a KVCachePool: purge blocks, warm up nodes, verify blocks, run "
    "preflight checks, or drain a node. The status reports progress and results. Deleting a running operation cancels "
    "it.",
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
    conditions=OPERATION_CONDITIONS,
)

NODE: Final = Resource(
    kind=NODE_KIND,
    plural=NODE_PLURAL,
    short="kvn",
    description="KVCacheNode reports the state of one node of a KVCachePool: drives, capacity, usage, and the "
    "evacuation of hot blocks before the node leaves. The operator creates, updates, and deletes it; it has no "
    "settings.",
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
    conditions=NODE_CONDITIONS,
)

TENANT: Final = Resource(
    kind=TENANT_KIND,
    plural=TENANT_PLURAL,
    short="kvt",
    description="KVCacheTenant combines namespaces into one tenant of a KVCachePool. They share a quota and find each "
    "other's blocks, and those of tenants that grant them read access. A namespace without a KVCacheTenant is a tenant "
    "of its own.",
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
    conditions=TENANT_CONDITIONS,
    rules=(NOT_ITSELF,),
)

RESOURCES: Final = (POOL, NODE, OPERATION, TENANT)
