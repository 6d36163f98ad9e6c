"""Typed JSON schema from frozen dataclasses: doc fields, strict types, errors that name the field. Pure.

Unknown fields are ignored and missing ones take their default, so that newer writers can serve older readers.
"""

from __future__ import annotations

from dataclasses import MISSING, field, fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvpool.errors import ConfigError

__all__ = ["build", "doc", "require_known", "static_part"]


def doc(text: str, *, live: bool = False, **kw: Any) -> Any:
    """Define a dataclass field with its documentation. `live`: a running process applies a change without a restart."""
    return field(metadata={"doc": text, "live": live}, **kw)


def build(kind: Any, value: Any, path: str, where: str) -> Any:
    """Build `kind` (a dataclass, a tuple, a union with None or a plain type) from decoded JSON.

    Raises ConfigError with `path` (dotted field name) and `where` (file or variable) for a wrong type or a missing
    field.
    """
    if get_origin(kind) in (Union, UnionType):
        if value is None:
            return None
        kind = next(a for a in get_args(kind) if a is not type(None))
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{path}: must be a list", where=where)
        return tuple(build(get_args(kind)[0], v, f"{path}[{i}]", where) for i, v in enumerate(value))
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: must be an object", where=where)
        hints = get_type_hints(kind)
        make: Any = kind
        args = {}
        for f in fields(kind):
            if f.name in value:
                args[f.name] = build(hints[f.name], value[f.name], f"{path}.{f.name}", where)
            elif f.default is MISSING and f.default_factory is MISSING:
                raise ConfigError(f"{path}.{f.name} is missing", where=where)
        return make(**args)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{path}: must be {kind.__name__}, not {type(value).__name__}", where=where)
    return value


def require_known(*checks: tuple[str, str, tuple[str, ...]]) -> None:
    """Raise ConfigError for the first of these (name, value, known values) whose value is not known."""
    for name, value, known in checks:
        if value not in known:
            raise ConfigError(f"{name}: unknown {value!r}, known are {', '.join(known)}")


def static_part(value: Any) -> Any:
    """Drop the live fields: the rest, as JSON values, can change only by a restart."""
    if is_dataclass(value):
        return {f.name: static_part(getattr(value, f.name)) for f in fields(value) if not f.metadata["live"]}
    if isinstance(value, tuple):
        return [static_part(v) for v in value]
    return value
