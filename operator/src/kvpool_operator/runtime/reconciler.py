"""Contract between the controller and the reconcilers of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvpool_operator.k8s.client import Manifest

__all__ = ["Reconciler", "Result"]


@dataclass(frozen=True)
class Result:
    """Outcome of one reconcile."""

    requeue_after_s: float | None = None
    """Seconds until the next reconcile; None: wait for an event or the resync."""
    gone: bool = False
    """The object no longer exists."""
    status: Manifest | None = None
    """The computed status, written or not; None when the object is gone."""
    restarts: tuple[str, ...] = ()
    """Outcome of each eviction of an engine pod."""


class Reconciler(Protocol):
    """Brings one object closer to its desired state."""

    async def reconcile(self, namespace: str, name: str) -> Result:
        """Run one reconcile; RetryableError requeues the object with backoff."""
        ...
