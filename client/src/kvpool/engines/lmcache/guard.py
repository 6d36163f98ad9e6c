"""Gives LMCache's server the pool as an L2 adapter, on the parsed arguments.

`lmcache server`, its module and its HTTP server take `parse_args_to_config` from lmcache.v1.distributed.config, which
the guard wraps. LMCache allows several adapters: the user's own are kept, in front. A server never fails because of the
guard: an adapter that cannot be imported, created or configured is left out.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import sys
from typing import TYPE_CHECKING, Any, Final

from kvpool.engines.common.settings import read_object
from kvpool.engines.common.without_pool import report_without_pool

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ADAPTER", "VARIABLE", "guard", "read_adapter"]

_log = logging.getLogger("lmcache.kvpool")  # under LMCache's own logger, so that the server's log shows it

VARIABLE: Final = "KVPOOL_LMCACHE_L2"
ADAPTER: Final[dict[str, Any]] = {
    "type": "plugin",
    "module_path": "kvpool.engines.lmcache_mp",
    "class_name": "PoolL2Adapter",
    "adapter_params": {},
    "shared": True,
}
"""Keys that the variable leaves out. As in LMCache's --l2-adapter."""
_MODULES: Final = ("kvpool.engines.lmcache_mp", "kvpool.engines.lmcache.l2_adapter")
_POLICY_FLAG: Final = "--l2-prefetch-policy"


def guard(module: Any, text: str) -> None:
    """Wrap `parse_args_to_config` of the module lmcache.v1.distributed.config. `text`: the variable's value."""
    original: Callable[[Any], Any] | None = getattr(module, "parse_args_to_config", None)
    if original is None:
        _without_pool("this LMCache reads its arguments in another way")
        return

    @functools.wraps(original)
    def parse_args_to_config(args: Any, *more: Any, **named: Any) -> Any:
        before = _give(args, text)
        try:
            return original(args, *more, **named)
        except Exception as e:
            if not before:
                raise
            vars(args).update(before)
            config = original(args, *more, **named)  # the user's own mistake is raised here
            _without_pool(f"LMCache refuses the adapter with these arguments: {e}")
            return config

    module.parse_args_to_config = parse_args_to_config


def read_adapter(text: str) -> dict[str, Any] | None:
    """Return the adapter of the variable over the defaults; None if it is not valid."""
    given = read_object(text)
    if given is None:
        return None
    adapter = {**ADAPTER, **given}
    fits = adapter["type"] == "plugin" and adapter["module_path"] in _MODULES and "serde" not in adapter
    fits = fits and adapter["class_name"] == ADAPTER["class_name"] and isinstance(adapter["adapter_params"], dict)
    return adapter if fits else None


def _give(args: Any, text: str) -> dict[str, Any]:
    """Add the adapter to the parsed arguments. Return what they were; empty if nothing was changed."""
    try:
        adapters = list(args.l2_adapter or [])
        if any(module in adapter for adapter in adapters for module in _MODULES):
            return {}  # configured by the user
        adapter = read_adapter(text)
        reason = f"{VARIABLE} is not valid" if adapter is None else _probe(adapter["adapter_params"])
        if reason or adapter is None:
            _without_pool(reason)
            return {}
        before = {"l2_adapter": args.l2_adapter}
        is_default = not any(flag.split("=")[0] == _POLICY_FLAG for flag in sys.argv)
        if not adapters and is_default and getattr(args, "l2_prefetch_policy", None) == "default":
            before["l2_prefetch_policy"] = args.l2_prefetch_policy
            args.l2_prefetch_policy = "retain"  # fetched chunks stay in the memory of the server
        args.l2_adapter = [*adapters, json.dumps(adapter, separators=(",", ":"))]
    except Exception as e:
        _log.exception("kvpool: the arguments were not changed")
        _without_pool(f"the server's arguments could not be read: {type(e).__name__}")
        return {}
    _log.info("kvpool: the pool is L2 adapter %d of this server", len(adapters) + 1)
    return before


def _probe(params: dict[str, Any]) -> str:
    """Create the adapter once, here: one that cannot be created would end the server."""
    try:
        plugin = importlib.import_module("kvpool.engines.lmcache.l2_adapter")
        if problem := plugin.interface_problem():
            return str(problem)
        plugin.PoolL2Adapter(params).close()
    except Exception as e:
        _log.warning("kvpool: the adapter cannot be created: %s", e)
        return f"the adapter cannot be created: {type(e).__name__}"
    return ""


def _without_pool(reason: str) -> None:
    _log.warning("kvpool: the server runs without the pool: %s", reason)
    report_without_pool(reason, "lmcache")
