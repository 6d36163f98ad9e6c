"""Admission of pods (admission.k8s.io/v1). Every pod is allowed: a cache must not prevent pods from starting."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kvpool_operator.injection.annotations import InjectionRequest, opted_in, opted_out, parse_annotations
from kvpool_operator.injection.client_image import blocked_namespaces
from kvpool_operator.injection.connector import client_config
from kvpool_operator.injection.engine_containers import has_engine
from kvpool_operator.injection.mutator import Injected, InjectionSettings, inject, mark_skipped
from kvpool_operator.injection.pool_selection import mark_selected
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s import json_patch
from kvpool_operator.times import rfc3339
from kvpool_operator.webhook.pool_cache import PoolView

__all__ = ["InjectorConfig", "Resolver", "ReviewResponse", "review_pod"]

log = logging.getLogger(__name__)

Resolver = Callable[[InjectionRequest, str], Awaitable[PoolView | None]]
"""Returns None for a pod that nothing selects."""
WARNING_LENGTH: Final = 250  # the API server cuts each warning at 256


@dataclass(frozen=True)
class InjectorConfig:
    """Settings of the installation for injected pods."""

    sidecar_image: str
    image_pull_policy: str = "IfNotPresent"


@dataclass(frozen=True)
class ReviewResponse:
    """AdmissionReview response and its metrics label: injected, unchanged, ignored or a SkipReason."""

    review: dict[str, Any]
    outcome: str


async def review_pod(review: Any, resolve: Resolver, config: InjectorConfig, *, timeout_s: float) -> ReviewResponse:
    """Review one pod within `timeout_s`. ValueError if the request is not a valid AdmissionReview."""
    request = review.get("request") if isinstance(review, dict) else None
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise ValueError("request.uid is missing")  # noqa: TRY004  a malformed document, whatever its types
    pod = request.get("object")
    if not _is_new_pod(request) or not isinstance(pod, dict) or opted_out(pod):
        return _respond(request, "ignored", pod, pod, [])
    namespace = str(request.get("namespace") or "")
    try:
        async with asyncio.timeout(timeout_s):
            return await _inject(request, pod, namespace, resolve, config)
    except Skip as skip:
        if skip.selected_by == "namespace" and not has_engine(pod):
            return _respond(request, "ignored", pod, pod, [])
        return _skip(request, pod, skip)
    except TimeoutError:
        log.warning(
            "namespace=%s: no decision within %.1f s; the pod is admitted without injection", namespace, timeout_s
        )
        return _skip(request, pod, Skip(SkipReason.NOT_READY, "the pools could not be read in time; recreate the pod"))
    except Exception:
        log.exception("namespace=%s: injection failed; the pod is admitted without injection", namespace)
        return _skip(
            request, pod, Skip(SkipReason.INTERNAL_ERROR, "injection failed; see the log of the kvpool webhook")
        )


async def _inject(
    request: dict[str, Any], pod: dict[str, Any], namespace: str, resolve: Resolver, config: InjectorConfig
) -> ReviewResponse:
    injection_request = parse_annotations(pod)
    pool = await resolve(injection_request, namespace)
    if pool is None:
        return _respond(request, "ignored", pod, pod, [])
    try:
        _require_image(pool, namespace, config.sidecar_image)
        injected = _injected(pod, injection_request, pool, config)
    except Skip as skip:
        skip.selected_by = pool.selected_by
        raise
    warnings = injected.warnings
    if not pool.ready:
        warnings = [*warnings, f"pool {pool.key} is not Ready yet; until it is, every lookup of the engine misses"]
    mark_selected(injected.pod, pool.selected_by)
    return _respond(request, "injected", pod, injected.pod, warnings)


def _require_image(pool: PoolView, namespace: str, image: str) -> None:
    """Raise Skip if a pod of the namespace waits, or waited lately, for an image that its node cannot pull."""
    if namespace in blocked_namespaces(pool.status, image, rfc3339(datetime.now(UTC))):
        raise Skip(
            SkipReason.CLIENT_IMAGE_UNAVAILABLE,
            f"nodes could not pull the client's image {image} for namespace {namespace}; the engine starts without "
            "the pool; make the image available, for example by imagePullSecrets, and recreate the pod after an hour",
        )


def _injected(
    pod: dict[str, Any], injection_request: InjectionRequest, pool: PoolView, config: InjectorConfig
) -> Injected:
    return inject(
        pod,
        injection_request,
        InjectionSettings(
            pool=pool.key,
            block_tokens=pool.block_tokens,
            host_memory_bytes=pool.host_memory_bytes,
            client_config=client_config(pool.client),
            sidecar_image=config.sidecar_image,
            image_pull_policy=config.image_pull_policy,
            kvbm_host_bytes=pool.kvbm_host_bytes,
            kvbm_disk_bytes=pool.kvbm_disk_bytes,
        ),
    )


def _skip(request: dict[str, Any], pod: dict[str, Any], skip: Skip) -> ReviewResponse:
    try:
        # without the namespace and the pools it is not known whether something selects a pod without a label
        is_unknown = skip.reason in (SkipReason.NOT_READY, SkipReason.INTERNAL_ERROR) and not opted_in(pod)
        marked = pod if is_unknown else mark_skipped(pod, skip)
        if marked is not pod:
            mark_selected(marked, skip.selected_by)
    except Exception:  # the metadata of the pod cannot be annotated
        log.exception("the reason %s cannot be written to the pod", skip.reason)
        marked = pod
    return _respond(request, skip.reason.value, pod, marked, [f"not injected: {skip}"])


def _is_new_pod(request: dict[str, Any]) -> bool:
    kind = request.get("kind") or {}
    return (
        request.get("operation") == "CREATE"
        and (kind.get("group") or "") == ""
        and kind.get("kind") == "Pod"
        and not request.get("subResource")
    )


def _respond(request: dict[str, Any], outcome: str, before: Any, after: Any, warnings: list[str]) -> ReviewResponse:
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    patch = json_patch.diff(before, after)
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(patch, separators=(",", ":")).encode()).decode()
    elif outcome == "injected":
        outcome = "unchanged"
    if warnings:
        response["warnings"] = [f"kvpool: {w}"[:WARNING_LENGTH] for w in warnings]
    return ReviewResponse(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}, outcome
    )
