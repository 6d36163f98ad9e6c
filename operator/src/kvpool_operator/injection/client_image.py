"""Namespaces in which the client's image could not be pulled: their new pods are not injected for a while. Pure.

The evidence is a pod that waits for the image of its init container. It is kept for an hour after the last such pod
was seen, so that the successor of that pod is not injected into the same wait. Another image starts without evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.pool.status import MAX_IMAGE_PROBLEMS, ClientImageProblem
from kvpool_operator.times import elapsed_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["HOLD_S", "blocked_namespaces", "image_problems"]

HOLD_S: Final = 3600.0
"""Seconds without a waiting pod after which pods of the namespace are injected again."""
_GRAIN_S: Final = 60.0


def image_problems(
    previous: Mapping[str, Any], waiting: Iterable[tuple[str, str]], now: str
) -> list[ClientImageProblem]:
    """Return the namespaces with the image and the time of the last evidence, the newest first.

    `previous`: the pool's status; `waiting`: namespace and image of each pod that waits; `now`: RFC 3339. The time of
    an entry grows by a minute or more, so that the status is not written at each reconcile.
    """
    found = {entry.namespace: entry for entry in _entries(previous) if elapsed_s(entry.last_seen, now) < HOLD_S}
    for namespace, image in waiting:
        known = found.get(namespace)
        if known is None or known.image != image or elapsed_s(known.last_seen, now) >= _GRAIN_S:
            found[namespace] = ClientImageProblem(namespace=namespace, image=image[:512], last_seen=now)
    newest = sorted(found.values(), key=lambda entry: (entry.last_seen, entry.namespace), reverse=True)
    return newest[:MAX_IMAGE_PROBLEMS]


def blocked_namespaces(status: Mapping[str, Any], image: str, now: str) -> frozenset[str]:
    """Return the namespaces whose pods would wait for `image`, by a pool's status."""
    return frozenset(
        entry.namespace
        for entry in _entries(status)
        if entry.image == image and elapsed_s(entry.last_seen, now) < HOLD_S
    )


def _entries(status: Mapping[str, Any]) -> list[ClientImageProblem]:
    pods = status.get("pods")
    rows = pods.get("clientImageProblems") if isinstance(pods, dict) else None
    found = []
    for row in (rows if isinstance(rows, list) else [])[:MAX_IMAGE_PROBLEMS]:
        if isinstance(row, dict):
            namespace, image, seen = (str(row.get(name) or "") for name in ("namespace", "image", "lastSeen"))
            found.append(ClientImageProblem(namespace=namespace, image=image, last_seen=seen))
    return found
