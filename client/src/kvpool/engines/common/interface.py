"""Comparison of an engine's interface with what a plug-in was written for. Pure: it reads classes, never versions."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["difference", "strict"]


def difference(
    base: type, plugin: type, methods: Iterable[str], fields: Mapping[str, tuple[type, Iterable[str]]]
) -> str:
    """Return the first reason why `plugin` cannot stand in for `base`; empty if there is none.

    `methods`: methods of `base` that the engine calls. `fields`: by name, a class that is read or created and its
    fields. An abstract method that the plug-in lacks is a reason; a new method that is not abstract is none.
    """
    absent = sorted(getattr(plugin, "__abstractmethods__", ()))
    if absent:
        return f"{base.__name__}.{absent[0]} is new and abstract"
    for name in methods:
        theirs = getattr(base, name, None)
        if theirs is None:
            return f"{base.__name__}.{name} is missing"
        if not _accepts(getattr(plugin, name), theirs):
            return f"{base.__name__}.{name} has other parameters"
    for name, (kind, wanted) in fields.items():
        known = _fields(kind)
        lacking = [field for field in wanted if known is not None and field not in known]
        if lacking:
            return f"{name}.{lacking[0]} is missing"
    return ""


def strict(environment: Mapping[str, str]) -> bool:
    """Whether KVPOOL_ENGINE_STRICT refuses releases that are not tested."""
    return environment.get("KVPOOL_ENGINE_STRICT", "") == "1"


def _accepts(ours: Any, theirs: Any) -> bool:
    """Whether each call that fits `theirs` fits `ours`: by place and by name."""
    mine = list(inspect.signature(ours).parameters.values())
    kinds = {p.kind for p in mine}
    names = [p.name for p in mine if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wanted = list(inspect.signature(theirs).parameters.values())
    for place, parameter in enumerate(wanted):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            fits = parameter.name in {p.name for p in mine} or parameter.VAR_KEYWORD in kinds
        elif place < len(names):
            fits = place == 0 or names[place] == parameter.name
        else:
            fits = parameter.VAR_POSITIONAL in kinds and parameter.VAR_KEYWORD in kinds
        if not fits:
            return False
    required = [p for p in mine if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = [p for p in wanted if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(required) <= len(given)


def _fields(kind: Any) -> set[str] | None:
    """Return the names of a class's fields or properties; None where a class does not declare any."""
    names = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    names |= set(getattr(kind, "__struct_fields__", ())) | set(getattr(kind, "_fields", ()))
    names |= set(getattr(kind, "__members__", ()))  # an enumeration
    names |= {name for name in dir(kind) if not name.startswith("__")}
    return names or None
