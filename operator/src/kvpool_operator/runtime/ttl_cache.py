"""What is remembered of objects that no watch tells of, so that not every pass asks for them again.

They hardly ever change, and a pool is looked at by itself from time to time: then all of them are asked for. Passes
in between, which an event brings, take what was found last. What this operator writes itself it forgets first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvpool_operator.k8s.client import Manifest, NamespacedName

__all__ = ["TTLCache"]


class _Found(NamedTuple):
    at: float
    objects: tuple[Manifest, ...]


class TTLCache:
    """Of all pools, by namespace and name; for one event loop, in which one pass at a time looks at a pool.

    `for_s`: how long what was found is taken for what there is, in seconds; 0: every pass asks.
    """

    def __init__(self, for_s: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._for_s = for_s
        self._clock = clock
        self._found: dict[NamespacedName, _Found] = {}

    async def get(
        self, key: NamespacedName, read: Callable[[], Awaitable[list[Manifest]]], *, bypass: bool
    ) -> list[Manifest]:
        """The objects; `fresh`: as they are now. What `read` raises goes through, and nothing is remembered."""
        last = self._found.get(key)
        if not bypass and last is not None and self._clock() - last.at < self._for_s():
            return list(last.objects)
        self.forget(key)
        at = self._clock()
        found = await read()
        self._found[key] = _Found(at, tuple(_slim(o) for o in found))
        return found

    def forget(self, key: NamespacedName) -> None:
        """They are about to change, or the pool is gone."""
        self._found.pop(key, None)


def _slim(manifest: Manifest) -> Manifest:
    """Without who set which field: as long as all the rest, and nobody here reads it."""
    metadata = {k: v for k, v in manifest["metadata"].items() if k != "managedFields"}
    return {**manifest, "metadata": metadata}
