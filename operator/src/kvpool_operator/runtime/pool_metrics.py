"""Metrics from the status of each pool, for alerts about a pool rather than a pod."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client.metrics_core import Metric

    from kvpool_operator.k8s.client import NamespacedName

__all__ = ["PoolMetrics"]

_CONDITION: Final = "1 if the pool's condition is True, 0 if it is False or Unknown."
_NODES: Final = "Nodes of the pool: desired, ready and updated."
_PODS: Final = (
    "Pods that selected the pool, by state: selected (all), injected, skipped, notInjected (created while no webhook "
    "answered), outdated (injected by another version), connected, and silent (Ready for 2 minutes, not connected)."
)


class PoolMetrics(Collector):
    """Collects the last status of each pool. Empty on replicas that do not lead."""

    def __init__(self) -> None:
        self._statuses: dict[NamespacedName, Mapping[str, Any]] = {}

    def set_status(self, key: NamespacedName, status: Mapping[str, Any]) -> None:
        """Record the computed status of a pool."""
        self._statuses[key] = status

    def forget(self, key: NamespacedName) -> None:
        """The pool no longer exists."""
        self._statuses.pop(key, None)

    def describe(self) -> Iterable[Metric]:
        return self._families()

    def collect(self) -> Iterable[Metric]:
        conditions, nodes, pods = families = self._families()
        for key, status in sorted(self._statuses.items()):
            for c in status.get("conditions") or []:
                conditions.add_metric([*key, c["type"]], float(c["status"] == "True"))
            for family, part in ((nodes, "nodes"), (pods, "pods")):
                for state, n in (status.get(part) or {}).items():
                    if type(n) is int:
                        family.add_metric([*key, state], n)
        return families

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
        return (
            GaugeMetricFamily("kvpool_pool_condition", _CONDITION, labels=["namespace", "pool", "type"]),
            GaugeMetricFamily("kvpool_pool_nodes", _NODES, labels=["namespace", "pool", "state"]),
            GaugeMetricFamily("kvpool_pool_pods", _PODS, labels=["namespace", "pool", "state"]),
        )
