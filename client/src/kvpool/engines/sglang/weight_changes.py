"""Evidence that an SGLang engine has new weights. Imports nothing of SGLang.

SGLang flushes its caches for many reasons and gives a storage none. After a change of weights the same tokens give
other bytes, so an engine must leave its namespace then, and should keep it otherwise. Weights change by calls of the
scheduler's weight updater (sglang/srt/managers/scheduler_components/weight_updater.py) and by remote calls of the
scheduler that are not known to be harmless. These are wrapped once in a process, before the scheduler takes references
to them: it creates its storage first.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["evidence_of", "is_watching", "watch"]

_log = logging.getLogger("sglang.kvpool")  # under SGLang's own logger, so that the engine's log shows it

_SCHEDULER: Final = "sglang.srt.managers.scheduler"
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater"
_MARK: Final = "_kvpool_watches_weights"
_HARMLESS: Final = frozenset(
    {
        "check_weights", "destroy_weights_update_group", "flush_cache_after_weight_update", "get_weights_by_name",
        "init_weights_update_group", "record_weight_version_after_update", "resume_memory_occupation",
        "save_remote_model", "save_sharded_model",
    }
)  # fmt: skip
"""Methods of the updater and remote calls of the scheduler that change no weights; another one may."""
_RELEASE: Final = "release_memory_occupation"
_REMOTE: Final = "handle_rpc_request"

_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_updaters = 0  # created since their class was wrapped


def watch(listener: Any, argument: Callable[[str], Any]) -> str:
    """Surround each call that may change weights by two of `listener`. Return why that is impossible, or "".

    The scheduler's thread calls `token = before_change()`, and afterwards `after_change(token, reason)`.
    `argument(name)` returns a server argument. The listener is referenced weakly. Never raises.
    """
    try:
        scheduler, updater = sys.modules[_SCHEDULER].Scheduler, sys.modules[_UPDATER].SchedulerWeightUpdaterManager
        if _MARK not in vars(updater):
            _wrap(scheduler, updater, argument)
    except (AttributeError, KeyError, TypeError) as e:
        return f"{type(e).__name__}: {e}"
    _listeners.add(listener)
    return ""


def is_watching() -> bool:
    """Whether every change of weights is seen: the scheduler's updater was created after its class was wrapped."""
    return _updaters > 0


def evidence_of(call: str, request: Any, argument: Callable[[str], Any]) -> str:
    """Return why this call means that weights may change, "" if it does not. Pure."""
    if call == _REMOTE:
        method = getattr(request, "method", None)
        return "" if method in _HARMLESS else "a remote call of the scheduler"
    if call == _RELEASE:
        tags = getattr(request, "tags", None)
        discards = argument("enable_memory_saver") is not False and argument("enable_weights_cpu_backup") is not True
        return "the weights were released" if discards and (not tags or "weights" in tags) else ""
    return "" if call in _HARMLESS else "the engine's weights were changed"


def _wrap(scheduler: Any, updater: Any, argument: Callable[[str], Any]) -> None:
    remote = getattr(scheduler, _REMOTE)
    calls = {
        name: method
        for name, method in vars(updater).items()
        if inspect.isfunction(method) and not name.startswith("_") and name not in _HARMLESS
    }
    if not any(name.startswith("update_weights") for name in calls):
        raise AttributeError("the weight updater has other methods")
    created = updater.__init__

    @functools.wraps(created)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        global _updaters
        created(self, *args, **kwargs)
        _updaters += 1

    for name, method in calls.items():
        setattr(updater, name, _watched(name, method, argument))
    setattr(scheduler, _REMOTE, _watched(_REMOTE, remote, argument))
    updater.__init__ = init
    setattr(updater, _MARK, True)


def _watched(name: str, method: Callable[..., Any], argument: Callable[[str], Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        reason, tokens = _begin(name, args[0] if args else kwargs.get("recv_req"), argument)
        try:
            return method(self, *args, **kwargs)
        finally:  # weights may have changed, although the call failed
            _end(reason, tokens)

    return watched


def _begin(name: str, request: Any, argument: Callable[[str], Any]) -> tuple[str, list[tuple[Any, Any]]]:
    try:
        reason = evidence_of(name, request, argument)
        return reason, [(listener, listener.before_change()) for listener in list(_listeners)] if reason else []
    except Exception:
        _log.exception("kvpool: a change of weights could not be judged")
        return "a call could not be judged", [(listener, None) for listener in list(_listeners)]


def _end(reason: str, tokens: list[tuple[Any, Any]]) -> None:
    for listener, token in tokens:
        try:
            listener.after_change(token, reason)
        except Exception:
            _log.exception("kvpool: a change of weights could not be handled")
