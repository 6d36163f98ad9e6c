"""Analyzes manifests before they are applied, with the webhook's own decision about each pod template."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvpool_operator.api.annotations import ANNOTATION_POOL, LABEL_INJECT, OPT_OUT
from kvpool_operator.api.findings.codes import Code
from kvpool_operator.api.findings.row import Severity
from kvpool_operator.diagnosis.finding import make, ranked
from kvpool_operator.diagnosis.injection import code_of_skip, fix_of_skip, suggest_pool
from kvpool_operator.injection.pool_selection import NamespaceView
from kvpool_operator.webhook.explain import explain
from kvpool_operator.webhook.pod_templates import read_documents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool_operator.diagnosis import PoolFinding
    from kvpool_operator.webhook.pod_templates import Document

Manifest = dict[str, Any]


def analyze(
    text: str, pools: Sequence[Manifest], namespaces: Mapping[str, Manifest], namespace: str
) -> tuple[tuple[PoolFinding, ...], int]:
    """Return the findings, and the number of pod templates that take part.

    `pools`: of the cluster, or of a file; empty: a pool is assumed. `namespaces`: by name. `namespace`: of objects that
    name none. Raises ValueError if the text is too long.
    """
    found: list[PoolFinding] = []
    count = 0
    for document in read_documents(text):
        where = document.namespace or namespace
        results, taking_part = _document(document, where, pools, namespaces.get(where, {}))
        found += results
        count += taking_part
    return ranked(found), count


def _document(
    document: Document, where: str, pools: Sequence[Manifest], namespace: Manifest
) -> tuple[list[PoolFinding], int]:
    subject = f"{document.kind or 'Document'} {where}/{document.name or '(unnamed)'}"
    if document.problem:
        return [make(Code.POD_SKIPPED, subject, document.problem, fix="correct the file")], 0
    found: list[PoolFinding] = []
    view = NamespaceView(*(namespace.get("metadata", {}).get(key) or {} for key in ("labels", "annotations")))
    taking_part = 0
    for template in document.templates:
        labels = template.pod["metadata"].get("labels") or {}
        if LABEL_INJECT not in labels and document.labels.get(LABEL_INJECT) == "true" and document.kind != "Pod":
            text = f"label {LABEL_INJECT} is on the {document.kind}; it belongs on its pod template"
            found.append(make(Code.LABEL_ON_WORKLOAD, subject, text))
        selects = [p for p in pools if (p["spec"].get("injection") or {}).get("selector")]
        opted = labels.get(LABEL_INJECT) == "true"
        if labels.get(LABEL_INJECT) in OPT_OUT or not (opted or selects or LABEL_INJECT in view.labels):
            continue
        pool, problem = _pool_of(template.pod, pools, where, view, subject)
        if problem is not None:
            found.append(problem)
            continue
        one = type(document)(document.kind, document.name, where, (template,), labels=document.labels)
        (item,) = asyncio.run(explain([one], pool, where, view=view))["items"]
        taking_part += item["decision"] == "injected"
        found += _of_item(item, subject)
    return found, taking_part


def _pool_of(
    pod: Manifest, pools: Sequence[Manifest], where: str, view: NamespaceView, subject: str
) -> tuple[Manifest | None, PoolFinding | None]:
    """The pool that the pod names, or the only one; a finding if there is none of that name."""
    annotations = pod["metadata"].get("annotations") or {}
    wanted = str(annotations.get(ANNOTATION_POOL) or view.annotations.get(ANNOTATION_POOL) or "")
    keys = {f"{p['metadata'].get('namespace', 'default')}/{p['metadata']['name']}": p for p in pools}
    if not pools:
        return None, None
    if not wanted:
        own = [p for key, p in keys.items() if key.startswith(f"{where}/")]
        return (own or list(keys.values()))[0], None
    named = [p for key, p in keys.items() if wanted in (key, key.partition("/")[2])]
    if named:
        return named[0], None
    hint = suggest_pool(wanted, list(keys))
    text = f"no pool {wanted!r}" + (f"; did you mean {hint!r}?" if hint else "")
    fix = f"set the annotation {ANNOTATION_POOL} of the pod template to {hint}" if hint else ""
    return None, make(Code.POOL_NOT_FOUND, subject, text, fix=fix)


def _of_item(item: Manifest, subject: str) -> list[PoolFinding]:
    found = []
    if item["decision"] == "skipped":
        skip = f"{item['reason']}: {item['message']}"
        found.append(make(code_of_skip(skip), subject, skip, fix=fix_of_skip(skip)))
    found += [make(Code.INJECTION_LIMITED, subject, text, severity=Severity.INFO) for text in item["warnings"][:1]]
    return found
