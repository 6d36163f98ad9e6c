"""What a pod asks for: its opt-in label and its kvpool.dev/* annotations."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from kvpool_operator.api.annotations import (
    ANNOTATION_CONNECTOR,
    ANNOTATION_CONTAINER,
    ANNOTATION_ENGINE,
    ANNOTATION_POOL,
    ENGINE_KINDS,
    LABEL_INJECT,
)
from kvpool_operator.injection.skip import Skip, SkipReason

__all__ = [
    "InjectionRequest",
    "opted_in",
    "parse_annotations",
]

ENGINES: Final = ("auto", *ENGINE_KINDS)
_POOL = re.compile(r"(?:([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)/)?([a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?)\Z")


@dataclass(frozen=True)
class InjectionRequest:
    """The annotations, checked. Empty strings: not given."""

    pool_namespace: str = ""
    pool_name: str = ""
    container: str = ""
    engine: str = "auto"
    connector_patch: dict[str, Any] | None = None


def opted_in(pod: dict[str, Any]) -> bool:
    """Whether the pod carries the opt-in label with the value "true"."""
    labels = (pod.get("metadata") or {}).get("labels") or {}
    return bool(labels.get(LABEL_INJECT) == "true")


def parse_annotations(pod: dict[str, Any]) -> InjectionRequest:
    """Read the annotations; Skip(bad-annotation) names the one that cannot be used."""
    notes: dict[str, str] = (pod.get("metadata") or {}).get("annotations") or {}
    pool = notes.get(ANNOTATION_POOL, "")
    match = _POOL.match(pool) if pool else None
    if pool and match is None:
        raise _bad(ANNOTATION_POOL, "write the name of a KVCachePool, or namespace/name")
    engine = notes.get(ANNOTATION_ENGINE, "auto")
    if engine not in ENGINES:
        raise _bad(ANNOTATION_ENGINE, f"write one of {', '.join(ENGINES)}")
    return InjectionRequest(
        pool_namespace=(match.group(1) or "") if match else "",
        pool_name=match.group(2) if match else "",
        container=notes.get(ANNOTATION_CONTAINER, ""),
        engine=engine,
        connector_patch=_connector_patch(notes.get(ANNOTATION_CONNECTOR)),
    )


def _connector_patch(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        patch = json.loads(text)
    except (ValueError, RecursionError):
        raise _bad(ANNOTATION_CONNECTOR, "it is not JSON; write a JSON merge patch, an object") from None
    if not isinstance(patch, dict):
        raise _bad(ANNOTATION_CONNECTOR, "a JSON merge patch for the connector configuration is an object")
    return patch


def _bad(annotation: str, what_to_do: str) -> Skip:
    return Skip(SkipReason.BAD_ANNOTATION, f"annotation {annotation} cannot be used: {what_to_do}")
