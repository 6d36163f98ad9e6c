"""vLLM plug-in. `kvpool.engines.vllm:PoolTier` is the public import path of the secondary tier.

The tier is imported on first access, so that the plug-in's other modules work where no vLLM is installed.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = frozenset({"PoolTier", "last_stats"})


def __getattr__(name: str) -> Any:
    """Return a public name of the module `tier`. Raises ImportError where the engine is missing or unknown."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("kvpool.engines.vllm.tier"), name)
