"""vLLM plug-in: configures the connector of an engine whose command line is a shell script that must not be edited.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). If the environment variable
KVPOOL_VLLM_KV_TRANSFER_CONFIG holds a connector configuration and the user has configured neither a connector nor
vLLM's own offloading, it is used; the prefix hash becomes `sha256_cbor`, the one that is the same in every process and
version of Python, unless the user chose another. User settings win; whatever fails is logged and changes nothing. So
does a vLLM that the client's tier does not know: that engine runs without the pool, instead of not at all.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
from typing import Any

from kvpool.engines.tested_versions import is_tested_release

__all__ = ["CONNECTOR_ENV", "register"]

CONNECTOR_ENV = "KVPOOL_VLLM_KV_TRANSFER_CONFIG"
_log = logging.getLogger("vllm.kvpool")
_DEFAULT_HASH = "sha256"
_SHARED_HASH = "sha256_cbor"


def register() -> None:
    """Called by vLLM, maybe several times in a process. Never raises."""
    if not os.environ.get(CONNECTOR_ENV):
        return
    try:
        from vllm.engine.arg_utils import EngineArgs

        wrap(EngineArgs)
    except Exception:
        _log.exception("kvpool: the connector could not be set up; the engine runs without the pool")
        _report("the connector could not be set up; see the engine's log")


def wrap(engine_args: Any) -> None:
    """Wrap `engine_args.create_engine_config` so that it sets the connector first."""
    original = engine_args.create_engine_config
    if getattr(original, "_kvpool", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            fill_in(self, os.environ.get(CONNECTOR_ENV, ""))
        except Exception:
            _log.exception("kvpool: %s cannot be used; the engine runs without the pool", CONNECTOR_ENV)
            _report(f"{CONNECTOR_ENV} cannot be used; see the engine's log")
        return original(self, *args, **kwargs)

    create_engine_config._kvpool = True  # type: ignore[attr-defined]
    engine_args.create_engine_config = create_engine_config


def fill_in(args: Any, text: str) -> bool:
    """Set the connector in `args` unless the user has one. Return True if set. Raises for an invalid configuration."""
    if not text:
        return False
    if args.kv_transfer_config is not None or getattr(args, "kv_offloading_size", None) is not None:
        _log.info("kvpool: the engine already has a KV connector; %s is ignored", CONNECTOR_ENV)
        _report("the engine already has a KV connector or its own offloading")
        return False
    config = json.loads(text)
    problem = _unknown(config)
    if problem:
        _log.error("kvpool: the engine runs without the pool: %s", problem)
        _report(problem)
        return False
    from vllm.config import KVTransferConfig

    args.kv_transfer_config = KVTransferConfig(**config)
    if args.prefix_caching_hash_algo == _DEFAULT_HASH:
        args.prefix_caching_hash_algo = _SHARED_HASH
    return True


def _report(problem: str) -> None:
    # imported here: vLLM loads this module in each of its processes
    from kvpool.engines.common.without_pool import report_without_pool

    report_without_pool(problem, "vllm")


def _unknown(config: dict[str, Any]) -> str:
    """Return why the pool's tier cannot work in this vLLM; empty if it can, or if none is configured."""
    tiers = (config.get("kv_connector_extra_config") or {}).get("secondary_tiers") or []
    for name in (str(tier.get("module_path", "")) for tier in tiers):
        if not name.startswith("kvpool."):
            continue
        try:
            getattr(importlib.import_module(name), "PoolTier")  # noqa: B009  the access imports the tier
        except ImportError as e:
            return str(e)
        import vllm

        if not is_tested_release("vllm", tuple(vllm.__version_tuple__[:2])):
            return f"{name} does not support vLLM {vllm.__version__}"
    return ""
