"""`kvpool-operator explain-injection`: what the webhook decides about pods in a file, without a cluster.

The decision is that of `webhook.review`, with one pool. Nothing is read but the files, and nothing is changed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from kvpool_operator.api.annotations import (
    ANNOTATION_INJECTED_ENGINE,
    ANNOTATION_POOL,
    ANNOTATION_SKIP_REASON,
    LABEL_INJECT,
)
from kvpool_operator.api.v1alpha1 import API_VERSION, GROUP, KIND, KVCachePool
from kvpool_operator.errors import InvalidPoolError
from kvpool_operator.injection.annotations import parse_annotations, parse_pool
from kvpool_operator.injection.pool_selection import NamespaceView
from kvpool_operator.injection.skip import Skip
from kvpool_operator.k8s.json_patch import apply
from kvpool_operator.webhook.pod_templates import Document, PodTemplate, read_documents
from kvpool_operator.webhook.pool_cache import PoolCache
from kvpool_operator.webhook.review import InjectorConfig, review_pod

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["build_parser", "explain", "main"]

_DECIDE_S: Final = 30.0
_DESCRIPTION: Final = """Explain what the webhook decides about pods, without a cluster.

Reads a Pod, or any object with pod templates (Deployment, StatefulSet, Job, LeaderWorkerSet, RayCluster,
LLMInferenceService and others), several documents, or a List, as YAML or JSON. Prints one JSON object."""
_EPILOG: Final = """output:
  {"pool": "namespace/name", "items": [ITEM, ...], "ignored": [{"kind", "name"}, ...]}

  Each ITEM is one pod or pod template:
    kind, name, namespace  of the object in the file
    path        of the template in that object; empty for a Pod
    requested   whether the pod has the label kvpool.dev/inject: "true"; without it, the pod is evaluated as if it had,
                but with --namespace-labels, or a pool with a selector, as it is
    decision    injected, skipped, or not-requested (the pod is excluded, or nothing selects it)
    engine      engine kind, if injected
    container   the first injected container, containers: all of them
    reason      of a skipped pod, as in the annotation kvpool.dev/skip-reason, for example connector-present
    message     the sentence of that reason, with the action to take
    warnings    what kubectl would print
    pod         the pod as the webhook would change it

  "ignored" has objects without a pod template.

exit status:
  0  every document was read and every pod was evaluated, whatever the decisions
  1  some document could not be read, or some template is none that an API server accepts (reason malformed)
  2  wrong usage, or a file cannot be read
  3  with --exit-code: some pod is skipped

examples:
  kvpool-operator explain-injection -f deployment.yaml
  helm template stack vllm/vllm-stack -f values.yaml | kvpool-operator explain-injection -f - --pool pool.yaml
  kvpool-operator explain-injection -f pod.yaml | jq -r '.items[] | [.name, .decision, .message] | @tsv'
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="kvpool-operator explain-injection",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-f", "--filename", required=True, metavar="FILE", help="file with pods; - for standard input")
    parser.add_argument("--pool", metavar="FILE", help="file with a KVCachePool; without it, a minimal pool is assumed")
    parser.add_argument("--namespace", default="default", help="namespace of pods whose object names none")
    for what in ("labels", "annotations"):
        parser.add_argument(
            f"--namespace-{what}",
            type=_pairs,
            default={},
            metavar="KEY=VALUE,...",
            help=f"{what} of the namespace of the pods",
        )
    parser.add_argument("--sidecar-image", default="", help="image of the init container; empty: that of this release")
    parser.add_argument("--exit-code", action="store_true", help="exit with status 3 if some pod is skipped")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """`kvpool-operator explain-injection`: the exit status of the process."""
    args = build_parser().parse_args(argv)
    try:
        documents = read_documents(_read(args.filename))
        pool = _read_pool(args.pool) if args.pool else None
    except (OSError, ValueError) as e:
        print(f"kvpool-operator explain-injection: {e}", file=sys.stderr)
        return 2
    if not any(d.templates or d.problem for d in documents):
        print(f"kvpool-operator explain-injection: {args.filename} has no pod and no pod template", file=sys.stderr)
    namespace = NamespaceView(args.namespace_labels, args.namespace_annotations)
    result = asyncio.run(explain(documents, pool, args.namespace, args.sidecar_image, namespace))
    json.dump(result, sys.stdout, indent=1, ensure_ascii=False)
    print()
    if any(item["reason"] == "malformed" for item in result["items"]):
        return 1
    return 3 if args.exit_code and any(item["decision"] == "skipped" for item in result["items"]) else 0


async def explain(
    documents: Sequence[Document],
    pool: dict[str, Any] | None,
    namespace: str = "default",
    sidecar_image: str = "",
    view: NamespaceView | None = None,
) -> dict[str, Any]:
    """Return the decisions about all pods of the documents, in the form that `--help` describes.

    `pool`: a KVCachePool as JSON. None: a minimal pool, whose name is what the pod, or its namespace, requests. `view`:
    labels and annotations of every namespace.
    """
    view = view or NamespaceView()
    config = InjectorConfig(sidecar_image or f"kvpool-sidecar:{metadata.version('kvpool-operator')}")
    items = []
    for document in documents:
        if document.problem:
            items.append(_item(document, PodTemplate("", {}), decision="skipped", message=document.problem))
        where = document.namespace or namespace
        items += [await _explain(document, template, pool, where, view, config) for template in document.templates]
    return {
        "pool": _key(pool) if pool else "",
        "items": items,
        "ignored": [{"kind": d.kind, "name": d.name} for d in documents if not d.templates and not d.problem],
    }


async def _explain(
    document: Document,
    template: PodTemplate,
    pool: dict[str, Any] | None,
    namespace: str,
    view: NamespaceView,
    config: InjectorConfig,
) -> dict[str, Any]:
    if template.problem:
        return _item(document, template, decision="skipped", message=template.problem, pod=template.pod)
    selects = bool(pool and (pool["spec"].get("injection") or {}).get("selector"))
    pod, requested = _requesting(template.pod, is_assumed=not view.labels and not selects)
    annotations = pod["metadata"].get("annotations") or {}
    invalid = [k for k, v in annotations.items() if k.startswith(f"{GROUP}/") and not isinstance(v, str)]
    if invalid:
        malformed = replace(template, problem=f"annotation {invalid[0]} is not a string")
        return _item(document, malformed, requested=requested, decision="skipped", message=malformed.problem, pod=pod)
    review = {"request": {"uid": "explain", "operation": "CREATE", "kind": {"kind": "Pod"}, "namespace": namespace}}
    review["request"]["object"] = pod
    cache = PoolCache(_OnePool(pool or _minimal_pool(pod, view), view))
    answer = await review_pod(review, cache.resolve, config, timeout_s=_DECIDE_S)
    response = answer.review["response"]
    patch = json.loads(base64.b64decode(response["patch"])) if "patch" in response else []
    changed = apply(pod, patch)
    annotations = (changed.get("metadata") or {}).get("annotations") or {}
    reason, _, message = str(annotations.get(ANNOTATION_SKIP_REASON, "")).partition(": ")
    if answer.outcome in ("injected", "unchanged"):
        outcome = {"decision": "injected", "engine": annotations.get(ANNOTATION_INJECTED_ENGINE, "")}
    elif answer.outcome == "ignored":
        outcome = {
            "decision": "not-requested",
            "message": f"the label {LABEL_INJECT} excludes the pod, or nothing selects it",
        }
    else:
        outcome = {"decision": "skipped", "reason": reason or answer.outcome, "message": message}
    warnings = [w.removeprefix("kvpool: ") for w in response.get("warnings", [])]
    if outcome["decision"] == "skipped":  # the first warning repeats the reason
        warnings = warnings[1:]
    warnings += template.warnings
    names = _changed_containers(pod, changed)
    return _item(document, template, requested=requested, containers=names, warnings=warnings, pod=changed, **outcome)


def _item(document: Document, template: PodTemplate, **found: Any) -> dict[str, Any]:
    """Return one item; every key is always present."""
    names = found.get("containers", [])
    is_malformed = bool(document.problem or template.problem)
    return {
        "kind": document.kind,
        "name": document.name,
        "namespace": document.namespace,
        "path": template.path,
        "requested": found.get("requested", False),
        "decision": found["decision"],
        "engine": found.get("engine", ""),
        "container": names[0] if names else "",
        "containers": names,
        "reason": "malformed" if is_malformed else found.get("reason", ""),
        "message": found.get("message", ""),
        "warnings": found.get("warnings", []),
        "pod": found.get("pod"),
    }


def _requesting(pod: dict[str, Any], *, is_assumed: bool) -> tuple[dict[str, Any], bool]:
    """Return the pod, and whether it requested the pool.

    `is_assumed`: it gets the opt-in label, unless it has that label with some value.
    """
    labels = pod["metadata"].get("labels") or {}
    if LABEL_INJECT in labels or not is_assumed:
        return pod, labels.get(LABEL_INJECT) == "true"
    return {**pod, "metadata": {**pod["metadata"], "labels": {**labels, LABEL_INJECT: "true"}}}, False


def _changed_containers(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of containers that the webhook changed, or changed earlier."""
    found = []
    for section in ("containers", "initContainers"):
        old = {c.get("name"): c for c in before["spec"].get(section) or []}
        found += [
            str(c.get("name"))
            for c in after["spec"].get(section) or []
            if c.get("name") in old and (c != old[c.get("name")] or _is_injected(c))
        ]
    return found


def _is_injected(container: dict[str, Any]) -> bool:
    names = {str(e.get("name")) for e in container.get("env") or []}
    return "KVPOOL_CLIENT_CONFIG" in names


class _OnePool:
    """The only pool, as a `PoolReader`."""

    def __init__(self, pool: dict[str, Any], view: NamespaceView) -> None:
        self._pool = pool
        self._view = view

    async def list_pools(self) -> list[dict[str, Any]]:
        return [self._pool]

    async def read_namespace(self, name: str) -> NamespaceView:
        return NamespaceView({"kubernetes.io/metadata.name": name, **self._view.labels}, self._view.annotations)


def _minimal_pool(pod: dict[str, Any], view: NamespaceView) -> dict[str, Any]:
    """Return a pool for all namespaces, of the name that the pod, or its namespace, requests."""
    namespace, name = "kvpool-system", "pool"
    try:
        request = parse_annotations(pod)
        named = view.annotations.get(ANNOTATION_POOL, "")
        of_namespace = parse_pool(named) if named and not request.pool_name else ("", "")
        namespace = request.pool_namespace or of_namespace[0] or namespace
        name = request.pool_name or of_namespace[1] or name
    except Skip:
        pass  # the review reports the invalid annotation
    tier = {"name": "nvme", "local": {"path": "/mnt/nvme/kvpool", "capacity": "100Gi"}}
    return _ready(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"tiers": [tier]},
        }
    )


def _ready(pool: dict[str, Any]) -> dict[str, Any]:
    """Return the pool as a Ready one, unless it has a status."""
    return {"status": {"conditions": [{"type": "Ready", "status": "True"}]}, **pool}


def _pairs(text: str) -> dict[str, str]:
    """Parse `key=value,key=value`. ArgumentTypeError without a key or an equals sign."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if not all(key and equals for key, equals, _ in pairs):
        raise argparse.ArgumentTypeError("write KEY=VALUE, separated by commas")
    return {key: value for key, _, value in pairs}


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8 text") from None


def _read_pool(name: str) -> dict[str, Any]:
    """Return the first KVCachePool of a file. Raises ValueError if there is none, or if it is invalid."""
    try:
        found = [d for d in yaml.safe_load_all(_read(name)) if isinstance(d, dict) and d.get("kind") == KIND]
    except (yaml.YAMLError, RecursionError):
        raise ValueError(f"{name} is not valid YAML") from None
    if not found:
        raise ValueError(f"{name} has no {KIND}")
    pool = dict(found[0])
    pool["metadata"] = {"namespace": "default", **(pool.get("metadata") or {})}
    try:
        KVCachePool.parse(pool)
    except InvalidPoolError as e:
        raise ValueError(f"the {KIND} of {name} is invalid: {e}") from None
    return _ready(pool)


def _key(pool: dict[str, Any]) -> str:
    return f"{pool['metadata']['namespace']}/{pool['metadata'].get('name')}"
