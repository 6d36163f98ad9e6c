"""Conditions as Kubernetes does them: one per type, with the generation it speaks of and the time it last flipped."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

__all__ = ["Condition", "find", "set_condition"]

MESSAGE_LENGTH = 1024


class Condition(BaseModel):
    """One aspect of the state of an object."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True, frozen=True
    )

    type: Annotated[str, Field(max_length=64)]
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
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


def set_condition(conditions: list[dict[str, Any]], new: Condition, now: str) -> list[dict[str, Any]]:
    """`conditions` with `new` in the place of the one of its type. The transition time moves only when status does.

    Pure. `now` is RFC 3339. Entries that are not conditions are dropped.
    """
    kept = [c for c in conditions if isinstance(c, dict) and isinstance(c.get("type"), str)]
    old = find(kept, new.type)
    since = old.get("lastTransitionTime") if old is not None and old.get("status") == new.status else None
    entry = new.model_copy(
        update={
            "last_transition_time": since if isinstance(since, str) and since else now,
            "message": new.message[:MESSAGE_LENGTH],
        }
    ).dump()
    if old is None:
        return [*kept, entry]
    return [entry if c is old else c for c in kept]


def find(conditions: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """The condition of type `kind`, if there is one."""
    return next((c for c in conditions if isinstance(c, dict) and c.get("type") == kind), None)
