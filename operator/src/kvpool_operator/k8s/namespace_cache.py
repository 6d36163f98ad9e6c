"""What a watch tells of namespaces, and which of it can change a pool: labels, coming and going. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Namespaces"]


class Namespaces:
    """Remembers of each namespace what pools look at: its labels, and whether it is going."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[str, str], ...] | None] = {}

    def changed(self, event: str | None, name: str, labels: Mapping[str, str], going: bool) -> bool:
        """Whether a pool may have to change. `event`: ADDED, MODIFIED, DELETED, or None for one that was listed."""
        if event == "DELETED":
            self._known.pop(name, None)
            return True
        now = None if going else tuple(sorted(labels.items()))
        same = name in self._known and self._known[name] == now
        self._known[name] = now
        return event is not None and not same

    def is_going(self, name: str) -> bool | None:
        """Whether it is being deleted; None: nothing was told of it, or it is gone."""
        return self._known[name] is None if name in self._known else None
