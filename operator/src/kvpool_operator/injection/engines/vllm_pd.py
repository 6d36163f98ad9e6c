"""vLLM with disaggregated prefill: the pool next to the user's NixlConnector, in a MultiConnector.

The user must request it, because the wrapped connector is the user's. The NixlConnector stays first: MultiConnector
loads a request from the first connector that has blocks, so a decode pod takes the prefill that was computed for it,
and
the pool serves the remaining requests. Blocks are stored in both.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import ANNOTATION_ENGINE
from kvpool_operator.injection.command_line import Channel
from kvpool_operator.injection.connector import compact, escape_expansion
from kvpool_operator.injection.engines import vllm
from kvpool_operator.injection.flags import value_of
from kvpool_operator.injection.skip import Skip, SkipReason

if TYPE_CHECKING:
    from kvpool_operator.injection.context import InjectionContext

__all__ = ["inject", "wrap_connector"]

WRAPPED: Final = frozenset({"NixlConnector", "NixlPullConnector", "NixlPushConnector"})
_OF_ALL: Final = ("engine_id", "enable_permute_local_kv")


def inject(context: InjectionContext) -> list[str]:
    """Replace the value of --kv-transfer-config by a MultiConnector of the user's connector and the pool's."""
    connector, warnings = vllm.pool_connector(context)
    if not (context.is_reinvocation and "MultiConnector" in context.info.connectors):
        _wrap(context, connector)
    vllm.add_hashing(context)
    vllm.add_shm(context, connector)
    return warnings


def wrap_connector(user_connector: dict[str, Any], connector: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of both. MultiConnector passes engine_id to its parts, so it is set outside of them."""
    whole = {k: user_connector[k] for k in _OF_ALL if k in user_connector}
    part = {k: v for k, v in user_connector.items() if k not in ("engine_id", "kv_load_failure_policy")}
    return whole | {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": user_connector.get("kv_load_failure_policy", "recompute"),
        "kv_connector_extra_config": {
            "connectors": [part, {k: v for k, v in connector.items() if k != "kv_load_failure_policy"}]
        },
    }


def _wrap(context: InjectionContext, connector: dict[str, Any]) -> None:
    if context.info.launcher == "dynamo":
        raise _skipped_container(
            context,
            "Dynamo requires NixlConnector as the top-level connector and does not find it inside MultiConnector",
        )
    if context.info.channel is not Channel.ARGS:
        raise _skipped_container(context, f"its {vllm.CONNECTOR_ARG} is not a plain argument; write it as one")
    for name in ("args", "command"):
        argv: list[str] = context.container.get(name) or []
        found = value_of([str(w) for w in argv], vllm.CONNECTOR_ARG)
        if found is None:
            continue
        at, text = found
        # Kubernetes must expand $(NAME) in the user's connector, but not in the pool's
        whole = compact(
            wrap_connector(_user_connector(context, text), json.loads(escape_expansion(compact(connector))))
        )
        argv[at] = f"{vllm.CONNECTOR_ARG}={whole}" if argv[at].startswith("--") else whole
        return
    raise _skipped_container(
        context, f"there is no {vllm.CONNECTOR_ARG} with a NixlConnector; for an engine without it, write vllm"
    )


def _user_connector(context: InjectionContext, text: str) -> dict[str, Any]:
    try:
        user_connector = json.loads(text)
    except (ValueError, RecursionError):
        user_connector = None
    if not isinstance(user_connector, dict) or user_connector.get("kv_connector") not in WRAPPED:
        raise _skipped_container(
            context, f"only a {vllm.CONNECTOR_ARG} whose connector is NixlConnector can be wrapped"
        )
    return user_connector


def _skipped_container(context: InjectionContext, why: str) -> Skip:
    return Skip(
        SkipReason.CONNECTOR_PRESENT,
        f"container {context.container.get('name')} is not injected ({ANNOTATION_ENGINE}: vllm-pd): {why}",
    )
