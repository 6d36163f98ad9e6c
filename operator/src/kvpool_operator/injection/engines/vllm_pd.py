"""Prefill and decode in different pods: the pool beside vLLM's NixlConnector, by its MultiConnector.

Only where the user asks for it, for the connector that is wrapped is theirs. It stays first: MultiConnector loads a
request from the first connector that offers anything, so a decode pod takes the prefill that was made for it, and
the pool serves what nobody has promised. Everything is stored in both.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import ANNOTATION_ENGINE
from kvpool_operator.injection.command_line import Channel
from kvpool_operator.injection.connector import compact, literal
from kvpool_operator.injection.engines import vllm
from kvpool_operator.injection.flags import value_of
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["add", "beside"]

WRAPPED: Final = frozenset({"NixlConnector", "NixlPullConnector", "NixlPushConnector"})
_OF_ALL: Final = ("engine_id", "enable_permute_local_kv")


def add(target: InjectionContext) -> list[str]:
    """Replace the value of --kv-transfer-config by a MultiConnector of the user's connector and the pool's."""
    ours, warnings = vllm.pool_connector(target)
    if not (target.again and "MultiConnector" in target.reading.connectors):
        _wrap(target, ours)
    vllm.add_hashing(target)
    vllm.add_shm(target, ours)
    return warnings


def beside(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The configuration of both. What MultiConnector gives its parts itself (engine_id) stands outside of them."""
    whole = {k: theirs[k] for k in _OF_ALL if k in theirs}
    part = {k: v for k, v in theirs.items() if k not in ("engine_id", "kv_load_failure_policy")}
    return whole | {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": theirs.get("kv_load_failure_policy", "recompute"),
        "kv_connector_extra_config": {
            "connectors": [part, {k: v for k, v in ours.items() if k != "kv_load_failure_policy"}]
        },
    }


def _wrap(target: InjectionContext, ours: dict[str, Any]) -> None:
    if target.reading.launcher == "dynamo":
        raise _skip(target, "Dynamo looks for NixlConnector itself and does not see it inside of another connector")
    if target.reading.channel is not Channel.ARGS:
        raise _skip(target, f"its {vllm.CONNECTOR_ARG} is not a plain argument; write it as one")
    for name in ("args", "command"):
        words: list[str] = target.container.get(name) or []
        found = value_of([str(w) for w in words], vllm.CONNECTOR_ARG)
        if found is None:
            continue
        at, text = found
        # $(NAME) in theirs is for Kubernetes to expand, in ours it is not
        whole = compact(beside(_theirs(target, text), json.loads(literal(compact(ours)))))
        words[at] = f"{vllm.CONNECTOR_ARG}={whole}" if words[at].startswith("--") else whole
        return
    raise _skip(target, f"there is no {vllm.CONNECTOR_ARG} with a NixlConnector; for a plain engine write vllm")


def _theirs(target: InjectionContext, text: str) -> dict[str, Any]:
    try:
        theirs = json.loads(text)
    except (ValueError, RecursionError):
        theirs = None
    if not isinstance(theirs, dict) or theirs.get("kv_connector") not in WRAPPED:
        raise _skip(target, f"only a {vllm.CONNECTOR_ARG} with a NixlConnector alone is wrapped")
    return theirs


def _skip(target: InjectionContext, why: str) -> Skip:
    return Skip(
        SkipReason.CONNECTOR_PRESENT,
        f"container {target.container.get('name')} stays as it is ({ANNOTATION_ENGINE}: vllm-pd): {why}",
    )
