"""The KVCachePool of a plan. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvpool_cli.planner.demand import DAY
from kvpool_cli.planner.verdicts import DEFAULT_MAX_BLOCK, LARGEST_MAX_BLOCK

if TYPE_CHECKING:
    from kvpool_cli.planner.plan import Plan

GIB = 2**30
_USABLE = 0.95
"""Share of a drive for blocks: a pool leaves 5 % free (tiers[].local.reserveFree)."""


def pool(plan: Plan, name: str = "chat") -> dict[str, Any]:
    """Return a KVCachePool with the sizes of the plan. Paths of drives are placeholders."""
    cache: dict[str, Any] = {"blockTokens": plan.block_tokens}
    largest = plan.layout.largest_object(plan.block_tokens)
    if largest > DEFAULT_MAX_BLOCK:
        cache["maxBlockSize"] = f"{min(math.ceil(largest / 2**20), LARGEST_MAX_BLOCK // 2**20)}Mi"
    fleet, need = plan.fleet, plan.need
    drives = max(1, fleet.drives)
    node = (need.capacity if need is not None else plan.layout.session_bytes(plan.tokens)) / fleet.nodes
    each = node / drives
    if fleet.drive_bytes:
        each = min(each, fleet.drive_bytes * _USABLE)
        if need is not None and need.writes * DAY > _rated(plan):
            cache["admission"] = {"policy": "Budget", "driveWritesPerDay": f"{fleet.drive_writes_per_day:g}"}
    capacity = f"{max(1, math.ceil(each / GIB), math.ceil(largest / GIB))}Gi"
    spec: dict[str, Any] = {
        "tiers": [
            {"name": f"nvme{n}", "local": {"path": f"/mnt/nvme{n}/kv", "capacity": capacity}} for n in range(drives)
        ],
        "cache": cache,
        "injection": {"vllm": {"hostMemory": f"{math.ceil(fleet.host_memory / 2**20)}Mi"}},
    }
    rates = [rate for rate in (fleet.drives * fleet.drive_read, fleet.network if fleet.moved else 0.0) if rate]
    if rates:
        spec["failOpen"] = {"expectedBandwidth": f"{min(10**6, max(1, int(min(rates) / 10**6)))}M"}
    return {"apiVersion": "kvpool.dev/v1alpha1", "kind": "KVCachePool", "metadata": {"name": name}, "spec": spec}


def _rated(plan: Plan) -> float:
    fleet = plan.fleet
    return fleet.nodes * fleet.drives * fleet.drive_bytes * fleet.drive_writes_per_day
