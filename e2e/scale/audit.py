"""What the API server wrote down of the operator's requests, counted. Pure but for reading the file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

USER = "system:serviceaccount:kvpool-system:kvpool-operator"
POLICY = f"""
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted]
rules:
- {{level: Metadata, users: ["{USER}"]}}
- {{level: None}}
"""


@dataclass(frozen=True)
class Request:
    """One request of the operator; `at`: seconds since 1970 when it was received."""

    at: float
    verb: str
    resource: str
    code: int


def requests(log: Path) -> Iterator[Request]:
    """All of them, watches apart: one stands open for minutes and is written down when it ends."""
    with log.open() as lines:
        for line in lines:
            event = json.loads(line)
            if event["verb"] == "watch":
                continue
            about = event.get("objectRef") or {}
            resource = "/".join(p for p in (about.get("resource"), about.get("subresource")) if p)
            at = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
            yield Request(at, event["verb"], resource, (event.get("responseStatus") or {}).get("code", 0))


def rates(found: Iterable[Request], start: float, end: float) -> dict[str, Any]:
    """Requests between two moments: a second in the mean, in the busiest ten seconds, in the busiest second."""
    inside = [r for r in found if start <= r.at < end]
    seconds = max(end - start, 1e-9)
    by_second = Counter(int(r.at - start) for r in inside)
    by_ten = Counter(int((r.at - start) / 10) for r in inside)
    writes = sum(r.verb not in ("get", "list") for r in inside)
    return {
        "seconds": round(seconds, 1),
        "requests": len(inside),
        "per_second": round(len(inside) / seconds, 1),
        "busiest_10_s_per_second": round(max(by_ten.values(), default=0) / 10, 1),
        "busiest_second": max(by_second.values(), default=0),
        "writes_per_second": round(writes / seconds, 1),
        "refused": dict(Counter(str(r.code) for r in inside if r.code >= 400 and r.code != 404)),
        "most": dict(Counter(f"{r.verb} {r.resource}" for r in inside).most_common(6)),
    }
