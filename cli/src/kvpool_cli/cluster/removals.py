"""How long ago a node had removed the blocks that lookups missed, from the sidecar's metrics."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from kvpool_cli.errors import CliError

if TYPE_CHECKING:
    from kvpool_cli.cluster.documents import Documents
    from kvpool_cli.kubectl import Kubectl

AGES: Final = {
    "minute": "less than a minute",
    "ten-minutes": "1 to 10 minutes",
    "hour": "10 minutes to an hour",
    "six-hours": "1 to 6 hours",
    "day": "6 hours to a day",
    "older": "a day or more",
}
"""Words for the values of the label `age` of kvpool_sidecar_removed_miss_lookups_total."""
_LINE: Final = re.compile(r'kvpool_sidecar_removed_miss_lookups_total\{age="([a-z-]{1,32})"\} ([0-9.e+]{1,24})')
_HTTP_PORT: Final = 7422


def removed_lookups(kubectl: Kubectl, documents: Documents, pod: str, pool: str) -> dict[str, int]:
    """Return lookups since the start of the pool's sidecar on the pod's node, by age of the removal.

    Empty if no such lookup was counted, or if the sidecar cannot be read. `pod`, `pool`: namespace/name.
    """
    sidecar = _sidecar_of(documents, pod, pool)
    if not sidecar:
        return {}
    namespace, _, name = sidecar.partition("/")
    try:
        text = kubectl.run("get", f"--raw=/api/v1/namespaces/{namespace}/pods/{name}:{_HTTP_PORT}/proxy/metrics")
    except CliError:
        return {}
    return parse(text.decode(errors="replace"))


def parse(metrics: str) -> dict[str, int]:
    """Return the counts of the metric above zero, the latest removals first. Pure."""
    found = {age: int(float(value)) for age, value in _LINE.findall(metrics)}
    return {age: found[age] for age in AGES if found.get(age)}


def _sidecar_of(documents: Documents, pod: str, pool: str) -> str:
    """Return namespace/name of the pool's sidecar that answered on the node of a pod; empty without one."""
    namespace, _, name = pool.partition("/")
    nodes = {_full(one): (one.get("spec") or {}).get("nodeName") for one in documents.of("engine_pods")}
    found = [
        _full(one)
        for one in documents.of("pool_pods")
        if one["metadata"].get("namespace") == namespace
        and (one["metadata"].get("labels") or {}).get("kvpool.dev/pool") == name
        and (one.get("spec") or {}).get("nodeName") == nodes.get(pod)
        and _full(one) in documents.statuses
    ]
    return found[0] if found else ""


def _full(manifest: dict[str, Any]) -> str:
    return f"{manifest['metadata'].get('namespace')}/{manifest['metadata'].get('name')}"
