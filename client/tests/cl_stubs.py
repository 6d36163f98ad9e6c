"""Modules that are not installed, made up for the time of a test."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def stubs(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Inside, importing a name of `modules` gives a module with these contents."""
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
