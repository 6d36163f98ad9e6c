"""Words of one code of a finding. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_operator.api.reasons import EventReason, Reason

__all__ = ["Row", "Severity"]


class Severity(StrEnum):
    """Error: the pool or an engine does not work as configured. Warning: hits are lost. Info: worth knowing."""

    ERROR = "Error"
    WARNING = "Warning"
    INFO = "Info"

    @property
    def rank(self) -> int:
        """0 for the most severe."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Row:
    """One row of the table. `reasons`: of conditions and Events that the code explains."""

    code: str
    severity: Severity
    heading: str
    cause: str
    effect: str
    fix: str
    reasons: tuple[Reason | EventReason, ...] = ()
