"""The operator's errors.

::

    OperatorError                 `reason` is a word for a condition or a metric; messages never hold secrets or content
    +-- RetryableError            the same step may work later: the queue tries again with growing pauses
    |   +-- ApiUnavailableError   the API server did not answer in time, or asked to come back later
    |   +-- ConflictError         somebody else changed the object in between
    |   +-- SidecarUnavailableError  a sidecar did not answer an order, or has too much to do
    |   +-- EvictionBlockedError             a PodDisruptionBudget does not allow an eviction now
    +-- PermanentError            the same step fails until somebody changes something
    |   +-- SidecarRejectedError   a sidecar does not understand an order
    |   +-- InvalidPoolError      the KVCachePool cannot be understood (also ValueError)
    |   +-- RejectedError         the API server refuses an object: forbidden, invalid
    +-- NotLeaderError            this process does not hold the Lease any more: it must not write
"""

from __future__ import annotations

__all__ = [
    "ApiUnavailableError",
    "ConflictError",
    "EvictionBlockedError",
    "InvalidPoolError",
    "NotLeaderError",
    "OperatorError",
    "PermanentError",
    "RejectedError",
    "RetryableError",
    "SidecarRejectedError",
    "SidecarUnavailableError",
]


class OperatorError(Exception):
    """Base of all errors of the operator."""

    reason = "Error"


class RetryableError(OperatorError):
    """The same step may work later."""


class ApiUnavailableError(RetryableError):
    """The API server did not answer, or not yet; `status` is its HTTP status, 0 for none."""

    reason = "ApiUnavailable"

    def __init__(self, message: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ConflictError(RetryableError):
    """The object changed in between, or exists already."""

    reason = "Conflict"


class SidecarUnavailableError(RetryableError):
    """A sidecar did not answer an order, or has too much to do."""

    reason = "Unanswered"


class EvictionBlockedError(RetryableError):
    """A PodDisruptionBudget does not allow it now."""

    reason = "Held"


class PermanentError(OperatorError):
    """Somebody must change something first."""


class InvalidPoolError(PermanentError, ValueError):
    """The KVCachePool cannot be understood; the message names the field and says what to do."""

    reason = "InvalidSpec"


class SidecarRejectedError(PermanentError):
    """A sidecar does not understand an order: another version of it, perhaps."""

    reason = "Refused"


class RejectedError(PermanentError):
    """The API server refuses what was asked; `status` is its HTTP status."""

    reason = "Rejected"

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotLeaderError(OperatorError):
    """The Lease is not held any more."""

    reason = "NotLeader"
