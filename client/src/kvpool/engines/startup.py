"""Import hooks that configure SGLang and LMCache in an injected container, without arguments.

`sitecustomize` calls `install`. A hook runs once, after the engine's own module was executed, so it sees the functions
that the engine's other modules take from there. A process that imports none of the modules pays one dictionary lookup
per import. No hook raises into an import.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

__all__ = ["HOOKS", "install"]

_log = logging.getLogger("kvpool")

HOOKS: Final = {
    "sglang.srt.server_args": ("KVPOOL_SGLANG_HICACHE", "kvpool.engines.sglang.guard"),
    "lmcache.v1.distributed.config": ("KVPOOL_LMCACHE_L2", "kvpool.engines.lmcache.guard"),
}
"""By the engine's module: the variable that configures its hook, and the module with `guard(module, text)`."""


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Install the hooks whose variable is set and not empty. A second call changes nothing."""
    wanted = {
        name: (environment[variable], hook) for name, (variable, hook) in HOOKS.items() if environment.get(variable)
    }
    if wanted and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(wanted))


class _Finder:
    """Meta path finder: lets the others find a module, and replaces its loader."""

    def __init__(self, wanted: dict[str, tuple[str, str]]) -> None:
        self._wanted = wanted

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return None for all modules but the wanted ones."""
        wanted = self._wanted.get(name)
        if wanted is None:
            return None
        for finder in sys.meta_path:
            find = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, *wanted)
                return spec
        return None


class _Loader:
    """The module's own loader; `exec_module` runs the hook afterwards."""

    def __init__(self, loader: Any, text: str, hook: str) -> None:
        self._loader, self._text, self._hook = loader, text, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        """As the module's own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module; raises what the module raises, never what the hook raises."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            importlib.import_module(self._hook).guard(module, self._text)
        except Exception as e:
            _log.exception("kvpool: the engine starts without the pool")
            _report(f"the engine could not be configured: {type(e).__name__}", self._hook)


def _report(problem: str, hook: str) -> None:
    try:
        from kvpool.engines.common.without_pool import report_without_pool

        report_without_pool(problem, hook.split(".")[2])
    except Exception:
        _log.exception("kvpool: the problem was not reported")
