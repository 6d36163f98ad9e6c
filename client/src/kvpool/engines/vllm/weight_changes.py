"""Evidence that a vLLM engine has new weights. Needs no vLLM to be imported.

vLLM resets its caches for many reasons (sleep, pause, release of memory) and gives a tier no reason. After a change of
weights the same tokens give other bytes, so an engine must leave its namespace then, and should keep it otherwise.
Evidence are the calls of vLLM's EngineCore (vllm/v1/engine/core.py) through which weights change: a remote call on the
workers that is not known to be harmless, `sleep` of level 2, which discards the weights, `wake_up` of the weights
alone, which precedes their update, and an explicit reset of the connector's cache. These are wrapped once in a process.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["evidence_of", "has_foreign_workers", "watch"]

_log = logging.getLogger("vllm.kvpool")
_MARK: Final = "_kvpool_watches_weights"
_METHODS: Final = ("collective_rpc", "sleep", "wake_up", "reset_prefix_cache")
_OPTIONAL: Final = ("set_weight_version",)
_OWN_RESET: Final = "_reset_caches"  # vLLM's, for a pause or sleep
_HARMLESS_CALLS: Final = frozenset(
    {
        "add_lora", "check_health", "checkpoint_prepare", "checkpoint_restore", "compute_weight_checksums",
        "execute_dummy_batch", "get_model_inspection", "list_loras", "pin_lora", "profile", "remove_lora",
        "reset_encoder_cache", "reset_mm_cache", "save_sharded_state", "save_tensorized_model", "sleep",
        "synchronize_device", "update_max_model_len", "wake_up",
    }
)  # fmt: skip
"""Remote calls on workers that change no weights of the model; another one may."""
_OWN_EXECUTORS: Final = (None, "mp", "ray", "uni")

_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_resetting = threading.local()


def watch(listener: Any) -> str:
    """Call `listener.weights_may_change(reason)` at each evidence. Return why that is impossible, or "". Never raises.

    The listener is referenced weakly and called by the thread of vLLM's engine.
    """
    try:
        from vllm.v1.engine.core import EngineCore

        if _MARK not in vars(EngineCore):
            found = {name: getattr(EngineCore, name) for name in (*_METHODS, _OWN_RESET)}
            found |= {name: getattr(EngineCore, name) for name in _OPTIONAL if hasattr(EngineCore, name)}
            for name, method in found.items():
                setattr(EngineCore, name, _own_reset(method) if name == _OWN_RESET else _watched(name, method))
            setattr(EngineCore, _MARK, True)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    _listeners.add(listener)
    return ""


def evidence_of(call: str, *args: Any, **kwargs: Any) -> str:
    """Return why this call of EngineCore means that weights may change, "" if it does not. Pure."""
    if call == "collective_rpc":
        method = kwargs.get("method", args[0] if args else None)
        return "" if isinstance(method, str) and method in _HARMLESS_CALLS else "a call on the workers"
    if call == "sleep":
        level = kwargs.get("level", args[0] if args else 1)
        return "" if level in (0, 1) else "sleep discards the weights"
    if call == "wake_up":
        tags = kwargs.get("tags", args[0] if args else None)
        return "the weights alone wake up" if tags and "weights" in tags and "kv_cache" not in tags else ""
    if call == "reset_prefix_cache":
        wanted = kwargs.get("reset_connector", args[1] if len(args) > 1 else False)
        return "the connector's cache was reset" if wanted else ""
    return "a new version of the weights" if call == "set_weight_version" else ""


def has_foreign_workers(engine_config: Any) -> bool:
    """Whether the workers belong to another program, which may change weights without a call.

    `engine_config`: a VllmConfig.
    """
    parallel = getattr(engine_config, "parallel_config", None)
    return getattr(parallel, "distributed_executor_backend", None) not in _OWN_EXECUTORS


def _own_reset(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def resets(self: Any, *args: Any, **kwargs: Any) -> Any:
        _resetting.active = True
        try:
            return method(self, *args, **kwargs)
        finally:
            _resetting.active = False

    return resets


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            reason = evidence_of(name, *args, **kwargs)
            if reason and not (name == "reset_prefix_cache" and getattr(_resetting, "active", False)):
                for listener in list(_listeners):
                    listener.weights_may_change(reason)
        except Exception:
            _log.exception("kvpool: a change of weights could not be handled")
        return method(self, *args, **kwargs)

    return watched
