"""Injection request of a pod: its opt-in label and its kvpool.dev/* annotations."""

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
    """Validated annotations. An empty value means that the annotation is absent."""

    pool_namespace: str = ""
    pool_name: str = ""
    containers: tuple[str, ...] = ()
    engine: str = "auto"
    connector_patch: dict[str, Any] | None = None


def opted_in(pod: dict[str, Any]) -> bool:
    """Whether the pod has the opt-in label with the value "true"."""
    labels = (pod.get("metadata") or {}).get("labels") or {}
    return bool(labels.get(LABEL_INJECT) == "true")


def parse_annotations(pod: dict[str, Any]) -> InjectionRequest:
    """Parse the annotations. Raises Skip(bad-annotation) that names the invalid one."""
    annotations: dict[str, str] = (pod.get("metadata") or {}).get("annotations") or {}
    pool = annotations.get(ANNOTATION_POOL, "")
    match = _POOL.match(pool) if pool else None
    if pool and match is None:
        raise _bad(ANNOTATION_POOL, "write the name of a KVCachePool, or namespace/name")
    engine = annotations.get(ANNOTATION_ENGINE, "auto")
    if engine not in ENGINES:
        raise _bad(ANNOTATION_ENGINE, f"write one of {', '.join(ENGINES)}")
    return InjectionRequest(
        pool_namespace=(match.group(1) or "") if match else "",
        pool_name=match.group(2) if match else "",
        containers=tuple(n for n in re.split(r"[,\s]+", annotations.get(ANNOTATION_CONTAINER, "")) if n),
        engine=engine,
        connector_patch=_connector_patch(annotations.get(ANNOTATION_CONNECTOR)),
    )


def _connector_patch(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        patch = json.loads(text)
    except (ValueError, RecursionError):
        raise _bad(ANNOTATION_CONNECTOR, "the value is not JSON; write a JSON merge patch object") from None
    if not isinstance(patch, dict):
        raise _bad(ANNOTATION_CONNECTOR, "the value is not a JSON object; write a JSON merge patch object")
    return patch


def _bad(annotation: str, what_to_do: str) -> Skip:
    return Skip(SkipReason.BAD_ANNOTATION, f"annotation {annotation} is invalid: {what_to_do}")
