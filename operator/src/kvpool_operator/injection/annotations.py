"""Injection request of a pod: its opt-in label and its kvpool.dev/* annotations."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import (
    ANNOTATION_CONNECTOR,
    ANNOTATION_CONTAINER,
    ANNOTATION_ENGINE,
    ANNOTATION_POOL,
    ANNOTATION_SELECTED_BY,
    ENGINE_KINDS,
    LABEL_INJECT,
    OPT_OUT,
)
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "InjectionRequest",
    "opted_in",
    "opted_out",
    "parse_annotations",
    "parse_pool",
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
    opted_in: bool = True
    """The pod itself has the opt-in label. False: its namespace or a pool may select it."""
    labels: Mapping[str, str] = field(default_factory=dict)


def opted_in(pod: dict[str, Any]) -> bool:
    """Whether the pod has the opt-in label with the value "true", and not from the webhook."""
    metadata = pod.get("metadata") or {}
    by_label = (metadata.get("labels") or {}).get(LABEL_INJECT) == "true"
    return by_label and ANNOTATION_SELECTED_BY not in (metadata.get("annotations") or {})


def opted_out(pod: dict[str, Any]) -> bool:
    """Whether the label of the pod excludes it."""
    return ((pod.get("metadata") or {}).get("labels") or {}).get(LABEL_INJECT) in OPT_OUT


def parse_pool(pool: str) -> tuple[str, str]:
    """Parse `namespace/name` or `name` into namespace, or an empty string, and name. Raises Skip(bad-annotation)."""
    match = _POOL.match(pool)
    if match is None:
        raise _bad(ANNOTATION_POOL, "write the name of a KVCachePool, or namespace/name")
    return match.group(1) or "", match.group(2)


def parse_annotations(pod: dict[str, Any]) -> InjectionRequest:
    """Parse the annotations. Raises Skip(bad-annotation) that names the invalid one."""
    metadata = pod.get("metadata") or {}
    annotations: dict[str, str] = metadata.get("annotations") or {}
    pool = annotations.get(ANNOTATION_POOL, "")
    pool_namespace, pool_name = parse_pool(pool) if pool else ("", "")
    engine = annotations.get(ANNOTATION_ENGINE, "auto")
    if engine not in ENGINES:
        raise _bad(ANNOTATION_ENGINE, f"write one of {', '.join(ENGINES)}")
    return InjectionRequest(
        pool_namespace=pool_namespace,
        pool_name=pool_name,
        containers=tuple(n for n in re.split(r"[,\s]+", annotations.get(ANNOTATION_CONTAINER, "")) if n),
        engine=engine,
        connector_patch=_connector_patch(annotations.get(ANNOTATION_CONNECTOR)),
        opted_in=opted_in(pod),
        labels=metadata.get("labels") or {},
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
