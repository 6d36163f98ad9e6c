"""Diagnosis of a pool: analyzers from an observed snapshot to findings. Pure; the operator and the command share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvpool_operator.diagnosis import blocks, conditions, engines, injection, nodes
from kvpool_operator.diagnosis.finding import PoolFinding, ranked
from kvpool_operator.diagnosis.observed import ClusterObjects, Observed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["ANALYZERS", "OF_CLUSTER", "ClusterObjects", "Observed", "PoolFinding", "diagnose"]

ANALYZERS: Final[tuple[Callable[[Observed], Iterator[PoolFinding]], ...]] = (
    conditions.from_conditions,
    injection.pods_not_served,
    injection.labels_on_workloads,
    injection.pods_of_unknown_pools,
    injection.rejected_pods,
    engines.silent_engines,
    engines.engines_apart,
    engines.prompts_apart,
    engines.untested_engines,
    blocks.missed_tokens,
    blocks.unfound_prompts,
    blocks.slow_loads,
    blocks.over_quota,
    blocks.full_index,
    blocks.tenants_not_in_effect,
    nodes.silent_nodes,
    nodes.failed_checks,
    nodes.wrong_clocks,
    nodes.blocking_policies,
    nodes.broken_operator,
)

OF_CLUSTER: Final[tuple[Callable[[Observed], Iterator[PoolFinding]], ...]] = (
    injection.labels_on_workloads,
    injection.pods_of_unknown_pools,
    injection.rejected_pods,
    nodes.blocking_policies,
    nodes.broken_operator,
)
"""Analyzers that read `Observed.cluster` only: they need no answer of a sidecar."""


def diagnose(
    observed: Observed, analyzers: Iterable[Callable[[Observed], Iterator[PoolFinding]]] = ANALYZERS
) -> tuple[PoolFinding, ...]:
    """Run all analyzers; the most severe findings first."""
    return ranked(finding for analyzer in analyzers for finding in analyzer(observed))
