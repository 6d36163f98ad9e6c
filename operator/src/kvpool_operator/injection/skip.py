"""Why a pod was left as it was. The words are part of the API: they appear in annotations, warnings and metrics."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Skip", "SkipReason"]


class SkipReason(StrEnum):
    """Every reason for which an opted-in pod is admitted without injection."""

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
    NOT_READY = "webhook-not-ready"
    INTERNAL_ERROR = "internal-error"


class Skip(Exception):  # noqa: N818  it is an outcome, not an error
    """Raised where the decision falls; caught in one place. `sentence` says what the user can do."""

    def __init__(self, reason: SkipReason, sentence: str) -> None:
        super().__init__(f"{reason}: {sentence}")
        self.reason = reason
        self.sentence = sentence
