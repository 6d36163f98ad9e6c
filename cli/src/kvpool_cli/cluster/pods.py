"""The way of one pod to hits, step by step, and what its node says about misses. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool_cli.cluster.render import Check, section
from kvpool_cli.cluster.view import choose, pool_keys, pool_state
from kvpool_cli.errors import NotFoundError, UsageError
from kvpool_operator.api.findings.codes import Code
from kvpool_operator.diagnosis.finding import make
from kvpool_operator.diagnosis.injection import code_of_skip, suggest_pool

if TYPE_CHECKING:
    from kvpool_cli.cluster.documents import Documents
    from kvpool_cli.cluster.view import PoolState
    from kvpool_operator.diagnosis import PoolFinding

_STEPS = ("selected", "injected", "connected", "shares blocks", "hits")


@dataclass(frozen=True)
class PodState:
    """Checks of one pod until the first that fails, and the findings that explain it."""

    pod: str
    pool: str
    checks: tuple[Check, ...]
    findings: tuple[PoolFinding, ...]
    misses: dict[str, int]
    """Tokens of its model that the node did not find in the last hour, by reason."""
    digests: tuple[str, ...] = ()


def pod_name(text: str, namespace: str) -> tuple[str, str]:
    """Return namespace and name of `pod/NAMESPACE/NAME`, `NAMESPACE/NAME` or `NAME`. Raises UsageError."""
    parts = text.removeprefix("pod/").split("/")
    if len(parts) > 2 or not all(parts):
        raise UsageError(f"{text!r} is not pod/NAMESPACE/NAME")
    return (parts[0], parts[1]) if len(parts) == 2 else (namespace, parts[0])


def pod_state(documents: Documents, namespace: str, name: str) -> PodState:
    """Check one pod. Raises NotFoundError if no pod of that name has opted in."""
    full = f"{namespace}/{name}"
    pod = next((p for p in documents.of("engine_pods") if _full(p) == full), None)
    if pod is None:
        raise NotFoundError(
            f"no pod {full} has the label kvpool.dev/inject: move the label to the pod template [KVP0101]"
        )
    notes = section(pod, "metadata", "annotations")
    wanted = str(notes.get("kvpool.dev/pool") or "")
    key = _pool_of(documents, wanted, namespace)
    if not key:
        return _unknown_pool(documents, full, wanted)
    state = pool_state(documents, key)
    own = tuple(f for f in state.findings if f.subject == f"Pod {full}")
    checks = [Check("ok", f"selects the pool {key}", "annotation kvpool.dev/pool")]
    skip = str(notes.get("kvpool.dev/skip-reason") or "")
    if "kvpool.dev/injected" not in notes:
        code = code_of_skip(skip) if skip else Code.POD_NOT_INJECTED
        found = own or (make(code, f"Pod {full}", skip or "the pod was created without the pool"),)
        checks.append(Check("FAIL", f"not injected: {skip or 'the webhook did not see the pod'}", "annotations"))
        return PodState(full, key, _with_skipped(checks), found, {})
    engine = str(notes.get("kvpool.dev/injected-engine") or "none")
    checks.append(Check("ok", f"injected, engine {engine}", "annotation kvpool.dev/injected"))
    return _after_injection(state, pod, full, own, checks)


def _after_injection(
    state: PoolState, pod: dict[str, Any], full: str, own: tuple[PoolFinding, ...], checks: list[Check]
) -> PodState:
    uid, node = str(pod["metadata"].get("uid")), str(section(pod, "spec").get("nodeName") or "")
    report = next((s.report for s in state.snapshot.sidecars if s.node == node), None)
    if state.missing_rights and not own:
        text = f"connection: not read, you have no right to {'; '.join(state.missing_rights)}"
        about = tuple(f for f in state.findings if f.subject == f"KVCachePool {state.key}")
        return PodState(full, state.key, _with_skipped([*checks, Check("skip", text)]), about, {})
    if report is None or uid not in report.connected_pods:
        if own:
            why = own[0].summary
        elif report is None:
            why = f"no sidecar of the pool answers on node {node or '(none)'}"
        else:
            why = "not connected yet; a pod counts as silent 2 minutes after it became Ready"
        checks.append(Check("FAIL" if own or report is None else "warn", f"connection: {why}", f"/status of {node}"))
        on_node = tuple(f for f in state.findings if f.subject == f"Node {node}")
        return PodState(full, state.key, _with_skipped(checks), own or on_node, {})
    checks.append(Check("ok", f"connected to the sidecar on {node}", f"/status of {node}"))
    fingerprints = [f for f in report.fingerprints if any(p.uid == uid for p in f.pods)]
    models = {f.model for f in fingerprints}
    namespace = full.partition("/")[0]
    apart = tuple(f for f in state.findings if f.subject in {f"Model {namespace}/{model}" for model in models})
    state_of_sharing = Check("FAIL", apart[0].summary, "fingerprints") if apart else Check("ok", "shares blocks")
    checks.append(state_of_sharing)
    misses: dict[str, int] = {}
    asked = found = 0
    for model in models:
        tokens = report.cache.models.get(model, {}).get("1h")
        if tokens is not None:
            asked, found = asked + tokens.asked, found + tokens.found
            for reason, n in tokens.misses.items():
                misses[reason] = misses.get(reason, 0) + n
    checks.append(_hits(asked, found, node))
    about_pool = tuple(f for f in state.findings if f.subject in (f"KVCachePool {state.key}", f"Node {node}"))
    about_models = tuple(f for f in state.findings if f.subject in {f"Model {model}" for model in models})
    digests = tuple(f.digest for f in fingerprints)
    return PodState(full, state.key, tuple(checks), own + apart + about_models + about_pool, misses, digests)


def _hits(asked: int, found: int, node: str) -> Check:
    where = f"models of the pod on {node}, last hour"
    if not asked:
        return Check("skip", "hits: no prompt was requested in the last hour", where)
    state = "ok" if found else "FAIL"
    return Check(state, f"hits: {found} of {asked} tokens were found", where)  # type: ignore[arg-type]


def _with_skipped(checks: list[Check]) -> tuple[Check, ...]:
    left = ", ".join(_STEPS[len(checks) :])
    return (*checks, Check("skip", f"{left}: not reached")) if left else tuple(checks)


def _pool_of(documents: Documents, wanted: str, namespace: str) -> str:
    try:
        return choose(documents, wanted, namespace)[0]
    except (NotFoundError, UsageError):
        return ""


def _unknown_pool(documents: Documents, full: str, wanted: str) -> PodState:
    hint = suggest_pool(wanted, pool_keys(documents))
    text = f"there is no KVCachePool {wanted}" + (f"; did you mean {hint}?" if hint else "")
    fix = f"set the annotation kvpool.dev/pool of the pod template to {hint}" if hint else ""
    finding = make(Code.POOL_NOT_FOUND, f"Pod {full}", text, fix=fix)
    return PodState(full, "", _with_skipped([Check("FAIL", text, "annotation kvpool.dev/pool")]), (finding,), {})


def _full(pod: dict[str, Any]) -> str:
    return f"{pod['metadata'].get('namespace')}/{pod['metadata'].get('name')}"
