"""Configures SGLang's hierarchical cache with the pool, on the parsed arguments of a server that starts.

Every way to start a server calls `ServerArgs.resolve_once` once, in the process that launches the others; they receive
the resolved record. The guard writes the settings of KVPOOL_SGLANG_HICACHE into the record before that, only where the
user left the default, and only if the pool will be used. If SGLang refuses the combination, the record gets its values
back and is resolved again as the user wrote it. A server never fails because of the guard.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
from typing import TYPE_CHECKING, Any, Final

from kvpool.engines.common.settings import read_object
from kvpool.engines.common.without_pool import report_without_pool

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DEFAULTS", "DEVICES", "VARIABLE", "blocker", "guard", "read_settings"]

_log = logging.getLogger("sglang.kvpool")  # under SGLang's own logger, so that the engine's log shows it

VARIABLE: Final = "KVPOOL_SGLANG_HICACHE"
_EXTRA: Final = "hicache_storage_backend_extra_config"
DEFAULTS: Final[dict[str, Any]] = {
    "page_size": 64,
    "hicache_mem_layout": "page_first",
    "hicache_storage_prefetch_policy": "timeout",  # bounds the time that a prefill waits for the storage
    _EXTRA: {
        "backend_name": "kvpool",
        "module_path": "kvpool.engines.sglang",
        "class_name": "PoolHiCache",
        "interface_v1": 1,
    },
}
"""Values of the settings that the variable leaves out. Names of SGLang's server arguments."""
DEVICES: Final = {"cuda"}
"""Devices (ROCm's is `cuda` too) between which and host memory SGLang copies pages."""
_OTHERS: Final = ("enable_lmcache", "enable_unified_cache_external_linker")
SPARE_BYTES: Final = 6 << 30
"""Host memory that the processes of one rank take until SGLang sizes its host pools."""


def guard(module: Any, text: str) -> None:
    """Wrap `ServerArgs.resolve_once` of the module sglang.srt.server_args. `text`: the variable's value."""
    record = module.ServerArgs
    original = inspect.getattr_static(record, "resolve_once", None)
    if original is None:
        _report_at_start(record)
        return

    @functools.wraps(original)
    def resolve_once(self: Any) -> None:
        if getattr(self, "_resolution_finished", False) or getattr(self, "_resolution_failed", False):
            original(self)
            return
        _resolve(self, original, text)

    record.resolve_once = resolve_once


def _report_at_start(record: Any) -> None:
    """An SGLang without the entry point: say so when a server's arguments are made."""
    made = record.__post_init__

    @functools.wraps(made)
    def post_init(self: Any) -> None:
        _without_pool("this SGLang resolves its arguments in another way; upgrade SGLang")
        made(self)

    record.__post_init__ = post_init


def _resolve(record: Any, original: Callable[[Any], None], text: str) -> None:
    try:
        settings = read_settings(text)
        reason = blocker(record) if settings is not None else f"{VARIABLE} is not valid"
        wanted = _unset(record, settings) if settings is not None and reason == "" else {}
        book = dict(record.__dict__)
    except Exception as e:
        _log.exception("kvpool: the arguments were not changed")
        settings, reason, wanted, book = None, f"the server's arguments could not be read: {type(e).__name__}", {}, {}
    if not wanted:
        if reason:
            _without_pool(reason)
        original(record)
        return
    before = {name: getattr(record, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(record, name, value)
        original(record)
        reason = _unused(record)
    except Exception as e:
        _log.warning("kvpool: SGLang refuses its hierarchical cache here: %s", e)
        reason = f"SGLang refuses its hierarchical cache with these arguments: {e}"
    if not reason:
        _log.info("kvpool: hierarchical cache with the pool: %s", ", ".join(sorted(wanted)))
        return
    _without_pool(reason)
    record.__dict__.clear()  # SGLang's notes of the resolution
    record.__dict__.update(book)
    for name, value in before.items():
        setattr(record, name, value)
    original(record)


def read_settings(text: str) -> dict[str, Any] | None:
    """Return the settings of the variable over the defaults; None if it is not valid."""
    given = read_object(text)
    if given is None:
        return None
    settings = {**DEFAULTS, **given}
    fits = all(name in DEFAULTS and isinstance(value, type(DEFAULTS[name])) for name, value in settings.items())
    return settings if fits and settings["page_size"] > 0 and not isinstance(settings["page_size"], bool) else None


def blocker(record: Any) -> str | None:
    """Return why a server with these arguments is not given the pool; None if the user configured the pool already."""
    backend = record.hicache_storage_backend
    extra = str(getattr(record, _EXTRA) or "")
    if backend == "dynamic" and "kvpool.engines.sglang" in extra:
        return None
    if backend is not None:
        return f"--hicache-storage-backend {backend} is configured"
    if extra:
        return "--hicache-storage-backend-extra-config is configured"
    other = next((name for name in _OTHERS if getattr(record, name, False)), None)
    if other is not None:
        return f"--{other.replace('_', '-')} is configured"
    if record.disable_radix_cache:
        return "--disable-radix-cache disables caching"
    if record.disaggregation_mode == "decode":
        return "a decode engine: SGLang's hierarchical cache runs in the prefill engines"
    if getattr(record, "encoder_only", False):
        return "an encoder has no KV cache"
    device = str(record.device or "").split(":")[0]
    if device and device not in DEVICES:
        return f"SGLang's hierarchical cache does not copy pages of the device {device}"
    return _probe() or _memory_problem(record)


def _probe() -> str:
    """Import the backend, in this process first: an import that fails in the scheduler would end the engine."""
    try:
        plugin = importlib.import_module("kvpool.engines.sglang.storage")
        importlib.import_module("sglang.srt.mem_cache.storage.backend_factory")
        return str(plugin.interface_problem())
    except Exception as e:
        _log.warning("kvpool: the storage backend cannot be imported: %s", e)
        return f"the storage backend cannot be imported: {type(e).__name__}"


def _memory_problem(record: Any) -> str:
    """SGLang sizes host pools by the free memory, and does not start if there is too little."""
    if record.enable_hierarchical_cache or record.hicache_size or record.hicache_ratio is not None:
        return ""  # the user's own decision
    if not hasattr(record, "hicache_host_memory_fraction"):
        return "this SGLang does not fit its host memory to the pod: set --hicache-size"
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes

    sized = "auto_size" in inspect.signature(host_memory_budget_bytes).parameters
    try:
        free = host_memory_budget_bytes(auto_size=True) if sized else host_memory_budget_bytes()
    except Exception as e:
        return f"SGLang cannot find the limit of the host memory: {type(e).__name__}"
    ranks = max(1, int(record.tp_size or 1) * int(record.pp_size or 1) // max(1, int(record.nnodes or 1)))
    if free < SPARE_BYTES * ranks:
        return f"{max(0, free) >> 30} GiB of host memory are free beyond SGLang's reserve: too little for {ranks} ranks"
    return ""


def _unset(record: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be written: settings that the user left at SGLang's default."""
    wanted = {"enable_hierarchical_cache": True, "hicache_storage_backend": "dynamic"}
    for name, value in settings.items():
        text = json.dumps(value, separators=(",", ":")) if name == _EXTRA else value
        if getattr(record, name) == _default(type(record), name):
            wanted[name] = text
    return {name: value for name, value in wanted.items() if getattr(record, name) != value}


def _default(record: type, name: str) -> Any:
    from sglang.srt.arg_groups.arg_utils import record_fields

    return next(field.default for field in record_fields(record) if field.name == name)


def _unused(record: Any) -> str:
    """Return why the resolved server would not use the storage; empty if it would."""
    from sglang.srt.arg_groups.overrides import resolving_view

    resolved = resolving_view(record)
    device = str(resolved.device or "").split(":")[0]
    if device not in DEVICES:
        return f"SGLang's hierarchical cache does not copy pages of the device {device}"
    if not resolved.enable_hierarchical_cache or resolved.hicache_storage_backend != "dynamic":
        return "SGLang disables its hierarchical cache for this model"
    if resolved.disable_radix_cache:
        return "SGLang disables caching for this model"
    return ""


def _without_pool(reason: str) -> None:
    _log.warning("kvpool: the engine runs without the pool: %s", reason)
    report_without_pool(reason, "sglang")
