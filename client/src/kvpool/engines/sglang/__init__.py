"""SGLang plug-in. `kvpool.engines.sglang:PoolHiCache` is the public import path of the HiCache storage backend.

The backend is imported on first access, so that the plug-in's other modules work where no SGLang is installed.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = frozenset({"PoolHiCache", "last_stats"})


def __getattr__(name: str) -> Any:
    """Return a public name of `kvpool.engines.sglang.storage`. Raises ImportError where SGLang is missing or
    unknown."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("kvpool.engines.sglang.storage"), name)
