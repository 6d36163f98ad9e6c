"""Errors of the operator.

::

    OperatorError                      `reason` is a word for a metric; messages never hold secrets or content
    +-- RetryableError                 the same request may succeed later: the controller requeues with backoff
    |   +-- ApiUnavailableError        the API server did not answer in time, or limits requests
    |   +-- ConflictError              another client changed the object in between
    |   +-- SidecarUnavailableError    a sidecar did not answer a command, or is overloaded
    |   +-- EvictionBlockedError       a PodDisruptionBudget does not allow the eviction now
    +-- PermanentError                 the same request fails until the user changes something
    |   +-- SidecarRejectedError       a sidecar does not know a command
    |   +-- InvalidPoolError           the KVCachePool is invalid (also ValueError)
    |   +-- LeafRefusedError           a token or a certificate signing request is not acceptable
    |   +-- RejectedError              the API server rejects a request: forbidden, invalid
    +-- NotLeaderError                 this process no longer holds the Lease: it must not write
"""

from __future__ import annotations

__all__ = [
    "ApiUnavailableError",
    "ConflictError",
    "EvictionBlockedError",
    "InvalidPoolError",
    "LeafRefusedError",
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
    """The same request may succeed later."""


class ApiUnavailableError(RetryableError):
    """The API server did not answer, or answered with a temporary error; `status` is the HTTP status, 0 for none."""

    reason = "ApiUnavailable"

    def __init__(self, message: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ConflictError(RetryableError):
    """The object changed in between, or exists already."""

    reason = "Conflict"


class SidecarUnavailableError(RetryableError):
    """A sidecar did not answer a command, or is overloaded."""

    reason = "SidecarUnavailable"


class EvictionBlockedError(RetryableError):
    """A PodDisruptionBudget does not allow the eviction now."""

    reason = "EvictionBlocked"


class PermanentError(OperatorError):
    """The user must change something first."""


class InvalidPoolError(PermanentError, ValueError):
    """The KVCachePool is invalid; the message names the field and the fix."""

    reason = "InvalidSpec"


class SidecarRejectedError(PermanentError):
    """A sidecar does not know a command: it may be of another version."""

    reason = "SidecarRejected"


class LeafRefusedError(PermanentError):
    """A token or a certificate signing request is not acceptable; the message says why and contains neither."""

    reason = "LeafRefused"


class RejectedError(PermanentError):
    """The API server rejected the request; `status` is the HTTP status."""

    reason = "Rejected"

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotLeaderError(OperatorError):
    """This process no longer holds the Lease."""

    reason = "NotLeader"
