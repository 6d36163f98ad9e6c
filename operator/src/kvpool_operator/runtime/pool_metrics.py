"""What the status of each pool says, in the words of Prometheus: for alerts that speak of a pool, not of a pod."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client.metrics_core import Metric

    from kvpool_operator.k8s.client import NamespacedName

__all__ = ["PoolMetrics"]

_CONDITION: Final = "1 while that condition of the pool is True, 0 while it is False or Unknown."
_NODES: Final = "Nodes of the pool: desired, and of these ready and updated."
_PODS: Final = (
    "Pods that ask for the pool: selected, and of these injected, skipped, missed by the webhook, and stale (injected "
    "by another version)."
)


class PoolMetrics(Collector):
    """The last status of each pool. Only the replica that leads has any."""

    def __init__(self) -> None:
        self._statuses: dict[NamespacedName, Mapping[str, Any]] = {}

    def set_status(self, key: NamespacedName, status: Mapping[str, Any]) -> None:
        """`status` of the pool `key` (namespace, name), as it was judged."""
        self._statuses[key] = status

    def forget(self, key: NamespacedName) -> None:
        """The pool is gone."""
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
