"""Findings about pods before their engine runs: not selected, not injected, skipped, rejected. Pure."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import ANNOTATION_POOL, LABEL_INJECT
from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.quantity import to_bytes, to_milli
from kvpool_operator.diagnosis.finding import make
from kvpool_operator.injection.skip import SkipReason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from kvpool_operator.diagnosis.finding import PoolFinding
    from kvpool_operator.diagnosis.observed import Observed
    from kvpool_operator.observe.engine_pods import EnginePod

__all__ = [
    "code_of_skip",
    "fix_of_skip",
    "labels_on_workloads",
    "pods_not_served",
    "pods_of_unknown_pools",
    "rejected_pods",
    "suggest_pool",
]

_MAX_OWNERS: Final = 32
_CODES: Final = {
    SkipReason.POOL_NOT_FOUND: Code.POOL_NOT_FOUND,
    SkipReason.NAMESPACE_NOT_ALLOWED: Code.NAMESPACE_NOT_ALLOWED,
    SkipReason.INJECTION_DISABLED: Code.INJECTION_DISABLED,
    SkipReason.CLIENT_IMAGE_UNAVAILABLE: Code.CLIENT_IMAGE_UNAVAILABLE,
}
_FIXES: Final = {
    SkipReason.BAD_ANNOTATION: "correct the annotation that the message names, and recreate the pod",
    SkipReason.POOL_AMBIGUOUS: f"set the annotation {ANNOTATION_POOL} to one of the pools, and recreate the pod",
    SkipReason.CONTAINER_NOT_FOUND: "set the annotation kvpool.dev/container to the engine's container",
    SkipReason.UNSUPPORTED_ENGINE: "set the annotation kvpool.dev/engine, or remove the opt-in label",
    SkipReason.CONNECTOR_PRESENT: "remove the engine's own KV connector, or add KVPool to it by hand",
    SkipReason.COMMAND_NOT_EXTENDABLE: "start the engine by command and args, not by a shell line",
    SkipReason.NAME_CONFLICT: "rename the pod's volume or container kvpool",
    SkipReason.USER_RESERVED: "run the engine as a user that the sidecars do not have",
    SkipReason.CLIENT_IMAGE_UNAVAILABLE: "make the image available to the namespace; recreate the pod after an hour",
    SkipReason.NOT_READY: "recreate the pod: the webhook was starting",
    SkipReason.INTERNAL_ERROR: "recreate the pod; report the message if it repeats",
}


def pods_not_served(i: Observed) -> Iterator[PoolFinding]:
    """One finding for each code and owner: pods of one ReplicaSet have the same fault."""
    seen: set[tuple[Code, str]] = set()
    for pod in i.snapshot.engines.pods:
        found = None if pod.leaving else _about(pod, i)
        if found is None:
            continue
        owner = pod.owner.uid if pod.owner is not None else pod.uid
        if (found.code, owner) not in seen and len(seen) < _MAX_OWNERS:
            seen.add((found.code, owner))
            yield found


def _about(pod: EnginePod, i: Observed) -> PoolFinding | None:
    subject = f"Pod {pod.full_name}"
    if pod.state == "skipped":
        word, _, sentence = pod.skip.partition(": ")
        reason = SkipReason(word) if word in set(SkipReason) else None
        return make(
            code_of_skip(pod.skip),
            subject,
            f"skipped ({word}): {sentence}",
            fix=_FIXES.get(reason, "") if reason else "",
        )
    if pod.waits_for_image:
        return make(Code.CLIENT_IMAGE_UNAVAILABLE, subject, f"the node cannot pull {pod.waits_for_image}")
    if pod.state == "not_injected":
        return make(Code.POD_NOT_INJECTED, subject, "the pod opted in and was created without the pool")
    allowed = i.snapshot.allowed_namespaces
    if "*" not in allowed and pod.namespace not in allowed:
        summary = f"the pod was injected, and {i.pool.key} does not admit namespace {pod.namespace}"
        return make(Code.NAMESPACE_NOT_ALLOWED, subject, summary)
    if pod.outdated:
        return make(Code.CLIENT_OUTDATED, subject, f"the pod has an older {pod.outdated} of the pool")
    if pod.warnings:
        return make(Code.INJECTION_LIMITED, subject, pod.warnings)
    return None


def code_of_skip(skip: str) -> Code:
    """The code of a skipped pod, from its annotation: the reason, a colon, and a sentence."""
    word = skip.partition(": ")[0]
    return _CODES.get(SkipReason(word), Code.POD_SKIPPED) if word in set(SkipReason) else Code.POD_SKIPPED


def fix_of_skip(skip: str) -> str:
    """What to do about a skipped pod; empty: what the code says."""
    word = skip.partition(": ")[0]
    return _FIXES.get(SkipReason(word), "") if word in set(SkipReason) else ""


def labels_on_workloads(i: Observed) -> Iterator[PoolFinding]:
    """Workloads with the opt-in label on themselves and not on their pod template."""
    for workload in i.cluster.workloads:
        metadata = workload.get("metadata") or {}
        template = (workload.get("spec") or {}).get("template") or {}
        inside = ((template.get("metadata") or {}).get("labels") or {}) if isinstance(template, dict) else {}
        if (metadata.get("labels") or {}).get(LABEL_INJECT) == "true" and LABEL_INJECT not in inside and template:
            subject = f"{workload.get('kind')} {metadata.get('namespace')}/{metadata.get('name')}"
            yield make(
                Code.LABEL_ON_WORKLOAD,
                subject,
                f"label {LABEL_INJECT} is on the {workload.get('kind')}; its pods have no such label",
            )


def pods_of_unknown_pools(i: Observed) -> Iterator[PoolFinding]:
    """Pods that opted in to a pool that does not exist, with the pool that they probably mean."""
    for pod, wanted in i.cluster.orphans:
        hint = suggest_pool(wanted, i.cluster.pools)
        fix = f"set the annotation {ANNOTATION_POOL} of the pod template to {hint}" if hint else ""
        meant = f"; did you mean {hint}?" if hint else ""
        yield make(Code.POOL_NOT_FOUND, f"Pod {pod}", f"there is no KVCachePool {wanted}{meant}", fix=fix)


def suggest_pool(wanted: str, pools: Collection[str]) -> str:
    """The pool with the most similar name; empty if none is similar."""
    names = {pool: pool for pool in pools} | {pool.partition("/")[2]: pool for pool in pools}
    found = get_close_matches(wanted, sorted(names), n=1, cutoff=0.6)
    return names[found[0]] if found else ""


def rejected_pods(i: Observed) -> Iterator[PoolFinding]:
    """Workloads with a template that opts in, or of the pool, whose pods the API server rejects."""
    opted = {_key(w): w for w in i.cluster.workloads if _opts_in(w)}
    seen = set()
    for event in i.cluster.events:
        about = event.get("involvedObject") or {}
        key = (about.get("kind"), about.get("namespace"), about.get("name"))
        if event.get("reason") != "FailedCreate" or key not in opted or key in seen or _is_complete(opted[key]):
            continue
        seen.add(key)
        limits = list(_violations(opted[key], i.cluster.limit_ranges))
        fix = f"change {limits[0]}" if limits else ""
        message = str(event.get("message") or "")
        subject = f"{key[0]} {key[1]}/{key[2]}"
        yield make(Code.PODS_REJECTED, subject, f"the API server rejects its pods: {message}", fix=fix)


def _key(workload: dict[str, Any]) -> tuple[Any, Any, Any]:
    metadata = workload.get("metadata") or {}
    return workload.get("kind"), metadata.get("namespace"), metadata.get("name")


def _opts_in(workload: dict[str, Any]) -> bool:
    template = (workload.get("spec") or {}).get("template") or {}
    return ((template.get("metadata") or {}).get("labels") or {}).get(LABEL_INJECT) == "true"


def _is_complete(workload: dict[str, Any]) -> bool:
    """Whether it has its pods: then the rejection is over."""
    spec, status = workload.get("spec") or {}, workload.get("status") or {}
    if workload.get("kind") == "DaemonSet":
        return bool((status.get("currentNumberScheduled") or 0) >= (status.get("desiredNumberScheduled") or 0))
    if workload.get("kind") == "Job":
        return bool(status.get("active") or status.get("succeeded"))
    wanted = spec.get("replicas", 1)
    return bool(isinstance(wanted, int) and (status.get("replicas") or 0) >= wanted)


def _violations(workload: dict[str, Any], limit_ranges: Collection[dict[str, Any]]) -> Iterator[str]:
    """LimitRanges whose maximum a container of the template exceeds."""
    namespace = (workload.get("metadata") or {}).get("namespace")
    pod = ((workload.get("spec") or {}).get("template") or {}).get("spec") or {}
    for limit_range in limit_ranges:
        metadata = limit_range.get("metadata") or {}
        if metadata.get("namespace") != namespace:
            continue
        for limit in (limit_range.get("spec") or {}).get("limits") or []:
            for container in [*(pod.get("containers") or []), *(pod.get("initContainers") or [])]:
                for resource in _exceeded(container, limit):
                    yield (
                        f"the maximum of {resource} in LimitRange {metadata.get('name')}, "
                        f"or the limit of container {container.get('name')}"
                    )


def _exceeded(container: dict[str, Any], limit: dict[str, Any]) -> Iterator[str]:
    if limit.get("type") != "Container":
        return
    resources = container.get("resources") or {}
    for name, most in (limit.get("max") or {}).items():
        read = to_milli if name == "cpu" else to_bytes
        for part in ("limits", "requests"):
            given = (resources.get(part) or {}).get(name)
            try:
                exceeds = given is not None and read(str(given)) > read(str(most))
            except ValueError:
                continue
            if exceeds:
                yield str(name)
                break
