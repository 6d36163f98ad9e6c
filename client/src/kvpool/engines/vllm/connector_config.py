"""How the pool's connector joins the KV transfer that a vLLM engine is already configured with. Pure; needs no vLLM.

The forms are those of vLLM's KVTransferConfig (vllm/config/kv_transfer.py): a connector, its role, and an extra
configuration. Settings of the user are kept in every case.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Combined", "NativeOffloading", "combine", "offloading_extra", "pool_tiers"]

OFFLOADING: Final = "OffloadingConnector"
MULTI: Final = "MultiConnector"
TIERING: Final = "TieringOffloadingSpec"
NATIVE_SPEC: Final = "CPUOffloadingSpec"  # what vLLM uses where no spec is named
WRAPPED: Final = frozenset({"NixlConnector", "NixlPullConnector", "NixlPushConnector"})
"""Connectors that are known to work in a MultiConnector beside the pool."""
_OF_ALL: Final = ("engine_id", "enable_permute_local_kv")  # MultiConnector passes these on to its parts
_CHUNK_SIZES: Final = ("block_size", "blocks_per_chunk")  # vLLM accepts one of them
_SPEC: Final = ("spec_name", "spec_module_path")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_NAME: Final = 64
_LMCACHE: Final = {
    "LMCacheMPConnector": "it uses an LMCache server: label the server's pod instead, this engine needs no change",
    "LMCacheConnectorV1": "it runs LMCache in its process: set the annotation kvpool.dev/engine to lmcache",
}


class NativeOffloading(NamedTuple):
    """vLLM's own offloading as configured outside of the connector (--kv-offloading-size and its environment)."""

    backend: str
    is_simple: bool  # VLLM_USE_SIMPLE_KV_OFFLOAD


class Combined(NamedTuple):
    """The configuration to use, None to leave the user's; and why the pool is not in it, empty if it is."""

    config: dict[str, Any] | None
    problem: str = ""


def combine(
    pool: Mapping[str, Any],
    user: Mapping[str, Any] | None,
    native: NativeOffloading | None = None,
    *,
    under_dynamo: bool = False,
) -> Combined:
    """Combine the pool's connector with that of the user (None: no connector).

    ValueError if `pool` is not a configuration of vLLM's OffloadingConnector.
    """
    if pool.get("kv_connector") != OFFLOADING or not isinstance(pool.get("kv_connector_extra_config", {}), dict):
        raise ValueError(f"the pool's connector is not a configuration of {OFFLOADING}")
    user = {key: value for key, value in (user or {}).items() if value is not None}
    name = user.get("kv_connector")
    if pool_tiers(user):
        return Combined(None)  # the user configured it
    if native is not None:
        return _beside_native(pool, user, native)
    if name is None:
        return Combined({**pool, **user})
    if name == OFFLOADING:
        return _with_tier(pool, user)
    if name in WRAPPED:
        return _beside_transfer(pool, user, under_dynamo=under_dynamo)
    if name == MULTI:
        return _in_multi(pool, user)
    return _left_alone(str(name))


def pool_tiers(config: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the entries of the pool's tier in a connector configuration, also inside a MultiConnector."""
    return _tiers_of(offloading_extra(config))


def offloading_extra(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the extra configuration that holds the pool's tier, {} if none does."""
    extra = (config or {}).get("kv_connector_extra_config")
    if not isinstance(extra, dict):
        return {}
    if _tiers_of(extra):
        return extra
    parts = [
        child.get("kv_connector_extra_config") for child in _list(extra.get("connectors")) if isinstance(child, dict)
    ]
    return next((part for part in parts if isinstance(part, dict) and _tiers_of(part)), {})


def _tiers_of(extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    tiers = _list(extra.get("secondary_tiers"))
    return [t for t in tiers if isinstance(t, dict) and str(t.get("module_path", "")).startswith("kvpool.")]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _beside_native(pool: Mapping[str, Any], user: dict[str, Any], native: NativeOffloading) -> Combined:
    # vLLM sets the connector, its role and cpu_bytes_to_use itself, and keeps what else is configured
    if native.backend != "native":
        return _left_alone(f"{native.backend} offloading")
    if native.is_simple:
        return _left_alone("SimpleCPUOffloadConnector")
    if user.get("kv_connector") not in (None, OFFLOADING):
        return _left_alone(str(user["kv_connector"]))
    return _with_tier(pool, {**user, "kv_connector": OFFLOADING, "kv_role": user.get("kv_role", "kv_both")})


def _with_tier(pool: Mapping[str, Any], user: dict[str, Any]) -> Combined:
    """Append the pool's tier to an OffloadingConnector; sizes and other settings of the user stay."""
    theirs, ours = user.get("kv_connector_extra_config") or {}, pool.get("kv_connector_extra_config", {})
    tiers = theirs.get("secondary_tiers", []) if isinstance(theirs, dict) else None
    if not isinstance(tiers, list) or not _list(ours.get("secondary_tiers")):
        return Combined(None, "the configuration of its OffloadingConnector cannot be combined with the pool's")
    spec = theirs.get("spec_name", NATIVE_SPEC)
    if spec not in (NATIVE_SPEC, TIERING, ours.get("spec_name")):
        return Combined(None, f"its OffloadingConnector uses {_name(spec)}, which has no secondary tiers of the pool")
    extra = {**ours, **theirs, "secondary_tiers": [*tiers, *ours["secondary_tiers"]]}
    source = ours if spec == NATIVE_SPEC else theirs
    for key in _SPEC:
        extra.pop(key, None)
        if key in source:
            extra[key] = source[key]
    if any(key in theirs for key in _CHUNK_SIZES):
        for key in _CHUNK_SIZES:
            if key not in theirs:
                extra.pop(key, None)
    return Combined({**user, "kv_connector_extra_config": extra})


def _beside_transfer(pool: Mapping[str, Any], user: dict[str, Any], *, under_dynamo: bool) -> Combined:
    """Put both into a MultiConnector.

    The user's connector stays first: MultiConnector loads a request from the first connector that has blocks, so a
    decode engine takes the prefill that was computed for it. The role of the whole is kv_both, because the pool loads
    and stores on every engine; the user's connector keeps its own.
    """
    if under_dynamo:
        return Combined(None, "Dynamo needs NixlConnector as the engine's only connector")
    part = {k: v for k, v in user.items() if k not in ("engine_id", "kv_load_failure_policy")}
    whole = {k: user[k] for k in _OF_ALL if k in user}
    return Combined(
        whole
        | {
            "kv_connector": MULTI,
            "kv_role": "kv_both",
            "kv_load_failure_policy": user.get("kv_load_failure_policy", "recompute"),
            "kv_connector_extra_config": {"connectors": [part, _part(pool)]},
        }
    )


def _in_multi(pool: Mapping[str, Any], user: dict[str, Any]) -> Combined:
    extra = user.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    if not isinstance(extra, dict) or not isinstance(children, list) or not all(isinstance(c, dict) for c in children):
        return _left_alone(MULTI)
    names = [str(child.get("kv_connector")) for child in children]
    foreign = [name for name in names if name not in (*WRAPPED, OFFLOADING)]
    if foreign:
        return _left_alone(foreign[0])
    if OFFLOADING in names:
        at = names.index(OFFLOADING)
        combined = _with_tier(pool, children[at])
        if combined.config is None:
            return combined
        children = [*children[:at], combined.config, *children[at + 1 :]]
    else:
        children = [*children, _part(pool)]
    return Combined({**user, "kv_role": "kv_both", "kv_connector_extra_config": {**extra, "connectors": children}})


def _part(pool: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in pool.items() if key not in ("engine_id", "kv_load_failure_policy")}


def _left_alone(name: str) -> Combined:
    return Combined(None, _LMCACHE.get(name, f"it already uses {_name(name)}, which cannot be combined with the pool"))


def _name(value: object) -> str:
    return _UNSAFE.sub("?", str(value)[:_MAX_NAME])
