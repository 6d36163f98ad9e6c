"""vLLM plug-in: the only channel by which an engine gets the pool's connector. It never keeps an engine from starting.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). If the environment variable
KVPOOL_VLLM_KV_TRANSFER_CONFIG holds a connector configuration, it is combined with what the user configured (module
connector_config); the prefix hash becomes `sha256_cbor`, the one that is the same in every process and version of
Python, unless the user chose another. Before that, everything is probed that vLLM would raise for later. Whatever is
missing or fails, the engine starts as if there were no pool, and one sentence is reported.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from typing import Any

from kvpool.engines.vllm.connector_config import Combined, NativeOffloading, combine, offloading_extra

__all__ = ["CONNECTOR_ENV", "register", "wrap"]

CONNECTOR_ENV = "KVPOOL_VLLM_KV_TRANSFER_CONFIG"
_log = logging.getLogger("vllm.kvpool")
_DEFAULT_HASH = "sha256"
_SHARED_HASH = "sha256_cbor"
_SHM = "/dev/shm"  # noqa: S108  where vLLM keeps its host tier
_GIB, _MIB = 1 << 30, 1 << 20
_MAX_TEXT = 1 << 20  # characters of a connector configuration


def register() -> None:
    """Called by vLLM, maybe several times in a process. Never raises."""
    if not os.environ.get(CONNECTOR_ENV):
        return
    try:
        from vllm.engine.arg_utils import EngineArgs

        wrap(EngineArgs)
    except Exception as e:
        _off(f"the connector could not be set up: {type(e).__name__}: {e}")
    try:
        from kvpool.engines.vllm.chunk_size import accept_any_block_size

        accept_any_block_size()
    except Exception as e:
        _log.debug("kvpool: %s: %s", type(e).__name__, e)


def wrap(engine_args: Any) -> None:
    """Wrap `engine_args.create_engine_config` so that it sets the connector first, and works without it if need be."""
    original = engine_args.create_engine_config
    if getattr(original, "_kvpool", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(self))
        try:
            problem, is_set = fill_in(self, os.environ.get(CONNECTOR_ENV, ""))
        except Exception as e:
            problem, is_set = f"{CONNECTOR_ENV} cannot be used: {type(e).__name__}: {e}", False
        if is_set:
            try:
                config = original(self, *args, **kwargs)
                problem = _model_problem(config)
                if not problem:
                    return config
            except Exception as e:
                problem = f"vLLM refuses the pool's connector: {type(e).__name__}: {e}"
        vars(self).clear()
        vars(self).update(before)
        config = original(self, *args, **kwargs)
        if problem:
            _off(problem)
        return config

    create_engine_config._kvpool = True  # type: ignore[attr-defined]
    engine_args.create_engine_config = create_engine_config


def fill_in(args: Any, text: str) -> tuple[str, bool]:
    """Set the connector in `args` (vLLM's EngineArgs). Return why the pool is off, and whether a connector was set.

    Both are empty if there is nothing to do. Raises for a configuration that is not valid.
    """
    if not text:
        return "", False
    if len(text) > _MAX_TEXT:
        return f"{CONNECTOR_ENV} is longer than {_MAX_TEXT} characters", False
    combined = _combined(args, json.loads(text))
    if combined.config is None:
        return combined.problem, False
    problem = _engine_problem(args, offloading_extra(combined.config))
    if problem:
        return problem, False
    from vllm.config import KVTransferConfig

    from kvpool.engines.vllm import interface

    connector = KVTransferConfig(**combined.config)
    problem = interface.connector_problem(connector)
    if problem:
        return problem, False
    args.kv_transfer_config = connector
    if args.prefix_caching_hash_algo == _DEFAULT_HASH:
        args.prefix_caching_hash_algo = _SHARED_HASH
    return "", True


def _combined(args: Any, pool: Any) -> Combined:
    if not isinstance(pool, dict):
        raise TypeError("the pool's connector is not a JSON object")
    under_dynamo = "dynamo.vllm" in sys.modules or "dynamo.llm" in sys.modules
    return combine(pool, _user_config(args), _native(args), under_dynamo=under_dynamo)


def _user_config(args: Any) -> dict[str, Any] | None:
    """Return what the user set of the KVTransferConfig, None if there is none."""
    config = getattr(args, "kv_transfer_config", None)
    if config is None or isinstance(config, dict):
        return config
    defaults = vars(type(config)())
    return {name: value for name, value in vars(config).items() if name not in defaults or value != defaults[name]}


def _native(args: Any) -> NativeOffloading | None:
    if getattr(args, "kv_offloading_size", None) is None:
        return None
    from vllm import envs

    is_simple = bool(getattr(envs, "VLLM_USE_SIMPLE_KV_OFFLOAD", False))
    return NativeOffloading(str(getattr(args, "kv_offloading_backend", "native")), is_simple)


def _engine_problem(args: Any, extra: dict[str, Any]) -> str:
    """Return why this engine cannot use the pool, empty if it can. `extra`: holds the pool's tier."""
    import vllm

    from kvpool.engines.vllm import interface

    if not extra:
        return ""  # the pool's connector was patched to one without the tier
    return (
        interface.strict_problem(str(getattr(vllm, "__version__", "")))
        or interface.interface_problem()
        or interface.platform_problem(extra)
        or interface.tier_problem(extra)
        or _memory_problem(args, extra)
    )


def _memory_problem(args: Any, extra: dict[str, Any]) -> str:
    """Return whether vLLM's host tier does not fit; vLLM does not start then."""
    native = getattr(args, "kv_offloading_size", None)
    size = native * _GIB if native is not None else int(extra.get("cpu_bytes_to_use", 0))
    needed = int(size) * _engines_here(args)
    try:
        room = os.statvfs(_SHM)
    except OSError as e:
        return f"{_SHM} cannot be used: {e.strerror}"
    free = room.f_bavail * room.f_frsize
    if needed <= free:
        return ""
    return f"vLLM's host tier needs {needed // _MIB} MiB in {_SHM}, where {free // _MIB} MiB are free"


def _engines_here(args: Any) -> int:
    """Return the number of data-parallel engines in this container; each has a host tier."""
    if getattr(args, "data_parallel_rank", None) is not None or getattr(args, "data_parallel_external_lb", False):
        return 1
    local = getattr(args, "data_parallel_size_local", None)
    return max(1, int(local if local is not None else getattr(args, "data_parallel_size", 1) or 1))


def _model_problem(config: Any) -> str:
    """Return why the connector would fail with this model, empty if it would not. `config`: a VllmConfig."""
    model = getattr(config, "model_config", None)
    if getattr(model, "runner_type", "generate") != "generate":
        return "the model generates no tokens, so it has no KV cache to share"
    if getattr(model, "is_attention_free", False):
        return "the model has no attention, so it has no KV cache to share"
    return ""


def _off(problem: str) -> None:
    _log.warning("kvpool: the engine runs without the pool: %s", problem)
    try:
        # imported here: vLLM loads this module in each of its processes
        from kvpool.engines.common.without_pool import report_without_pool

        report_without_pool(problem, "vllm")
    except Exception as e:  # a damaged client must not keep the engine from starting
        _log.debug("kvpool: the sentence cannot be reported: %s", e)
