"""Address and progress of operations on sidecars. Pure; `admin_client` sends the requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from kvpool_operator.errors import SidecarUnavailableError
from kvpool_operator.text import parse_count

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OperationProgress", "SidecarAddress"]

_COUNTS: Final = 32


@dataclass(frozen=True)
class SidecarAddress:
    """Destination of a request: the pod's address, and the node that its certificate must name."""

    node: str
    address: str


@dataclass(frozen=True)
class OperationProgress:
    """Progress of an operation on one node: `done` of `total` (0: unknown) in `unit`."""

    state: Literal["Running", "Succeeded", "Failed"]
    message: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: Any) -> OperationProgress:
        """SidecarUnavailableError for a response that no sidecar sends."""
        r = raw if isinstance(raw, dict) else {}
        state = r.get("state")
        if state not in ("Running", "Succeeded", "Failed"):
            raise SidecarUnavailableError("the response is invalid")
        p = r.get("progress")
        progress: dict[str, Any] = p if isinstance(p, dict) else {}
        c = r.get("counts")
        counts = list(c.items())[:_COUNTS] if isinstance(c, dict) else []
        return cls(
            state=state,
            message=str(r.get("message") or "")[:500],
            done=parse_count(progress.get("done")),
            total=parse_count(progress.get("total")),
            unit=str(progress.get("unit") or "")[:16],
            counts={str(k)[:64]: parse_count(v) for k, v in counts},
        )
