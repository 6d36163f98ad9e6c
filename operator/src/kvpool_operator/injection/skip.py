"""Reasons for not injecting a pod. They are part of the API: annotations, warnings and metrics contain them."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

__all__ = ["Skip", "SkipReason"]


class SkipReason(StrEnum):
    """Reason why an opted-in pod is admitted without injection."""

    BAD_ANNOTATION = "bad-annotation"
    POOL_NOT_FOUND = "pool-not-found"
    POOL_AMBIGUOUS = "pool-ambiguous"
    NAMESPACE_NOT_ALLOWED = "namespace-not-allowed"
    INJECTION_DISABLED = "injection-disabled"
    CONTAINER_NOT_FOUND = "container-not-found"
    UNSUPPORTED_ENGINE = "unsupported-engine"
    CONNECTOR_PRESENT = "connector-present"
    COMMAND_NOT_EXTENDABLE = "command-not-extendable"
    NAME_CONFLICT = "name-conflict"
    USER_RESERVED = "user-reserved"
    CLIENT_IMAGE_UNAVAILABLE = "client-image-unavailable"
    NOT_READY = "webhook-not-ready"
    INTERNAL_ERROR = "internal-error"


class Skip(Exception):  # noqa: N818  it is an outcome, not an error
    """Decision not to inject a pod. `message` has the problem and the action to take.

    `has_engine` false: nothing in the pod looks like an engine, so only a pod that asked for the pool is reported.
    """

    def __init__(self, reason: SkipReason, message: str, *, has_engine: bool = True) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.has_engine = has_engine
        self.selected_by: Literal["", "label", "pool", "namespace"] = "label"
        """What selected the pod, as in `pool_selection`."""
