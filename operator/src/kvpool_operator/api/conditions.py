"""Conditions of Kubernetes objects, and the verdicts and policy chains that set them. Pure.

A condition is decided by a chain of small named checks: the first check that returns a verdict sets the condition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

if TYPE_CHECKING:
    from kvpool_operator.api.reasons import Reason

__all__ = [
    "MESSAGE_LENGTH",
    "Check",
    "Condition",
    "ConditionStatus",
    "Verdict",
    "find",
    "first_verdict",
    "set_condition",
    "with_verdicts",
]

MESSAGE_LENGTH = 1024

ConditionStatus = Literal["True", "False", "Unknown"]
T = TypeVar("T")
Check = Callable[[T], "Verdict | None"]
"""One link of a policy chain: a verdict if the check applies to the subject, else None."""


class Condition(BaseModel):
    """One aspect of the state of an object."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True, frozen=True
    )

    type: Annotated[str, Field(max_length=64)]
    """Type of the condition."""
    status: ConditionStatus
    """True, False or Unknown."""
    observed_generation: int = 0
    """metadata.generation of the evaluated spec. If it is lower than the object's, the condition is outdated."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] = ""
    """Time of the last change of `status`."""
    reason: Annotated[str, Field(max_length=128)]
    """Reason for the status: one CamelCase word from a fixed list, for programs."""
    message: Annotated[str, Field(max_length=MESSAGE_LENGTH)] = ""
    """Description of the state and the action to take, for people."""

    def dump(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True)


@dataclass(frozen=True)
class Verdict:
    """Status, reason and message of a condition, before it gets its type, generation and transition time."""

    status: ConditionStatus
    reason: Reason
    message: str

    @classmethod
    def true(cls, reason: Reason, message: str) -> Verdict:
        return cls("True", reason, message)

    @classmethod
    def false(cls, reason: Reason, message: str) -> Verdict:
        return cls("False", reason, message)

    @classmethod
    def unknown(cls, reason: Reason, message: str) -> Verdict:
        return cls("Unknown", reason, message)

    @property
    def is_true(self) -> bool:
        return self.status == "True"


def first_verdict(checks: Sequence[Check[T]], subject: T) -> Verdict:
    """Run the chain on `subject` and return the first verdict. The last check of a chain always returns one."""
    for check in checks:
        verdict = check(subject)
        if verdict is not None:
            return verdict
    raise AssertionError("the last check of a chain must return a verdict")


def with_verdicts(
    conditions: Any,
    verdicts: Mapping[str, Verdict],
    generation: int,
    now: str,
    model: type[Condition] = Condition,
) -> list[dict[str, Any]]:
    """Conditions of an old status, updated by `verdicts` (by condition type). `now` is RFC 3339.

    Entries that are not conditions are dropped; `conditions` may be any value that JSON can hold.
    """
    updated = [c for c in conditions if isinstance(c, dict)] if isinstance(conditions, list) else []
    for kind, verdict in verdicts.items():
        condition = model(
            type=kind,
            status=verdict.status,
            observed_generation=generation,
            reason=verdict.reason.value,
            message=verdict.message[:MESSAGE_LENGTH],
        )
        updated = set_condition(updated, condition, now)
    return updated


def set_condition(conditions: list[dict[str, Any]], new: Condition, now: str) -> list[dict[str, Any]]:
    """Replace the condition of the same type by `new`, or append it.

    The transition time changes only when the status does. `now` is RFC 3339. Entries that are not conditions are
    dropped.
    """
    valid = [c for c in conditions if isinstance(c, dict) and isinstance(c.get("type"), str)]
    old = find(valid, new.type)
    since = old.get("lastTransitionTime") if old is not None and old.get("status") == new.status else None
    entry = new.model_copy(
        update={
            "last_transition_time": since if isinstance(since, str) and since else now,
            "message": new.message[:MESSAGE_LENGTH],
        }
    ).dump()
    if old is None:
        return [*valid, entry]
    return [entry if c is old else c for c in valid]


def find(conditions: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """The condition of type `kind`, or None."""
    return next((c for c in conditions if isinstance(c, dict) and c.get("type") == kind), None)
