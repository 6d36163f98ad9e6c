"""JSON patch (RFC 6902) between two documents: only the differences."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["apply", "diff"]


def diff(before: Any, after: Any, path: str = "") -> list[dict[str, Any]]:
    """Operations that turn `before` into `after`.

    Lists are compared by position, because additions are appended; but for one named object that was inserted.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        return _objects(before, after, path)
    if isinstance(before, list) and isinstance(after, list):
        return _lists(before, after, path)
    # True == 1 in Python, not in JSON
    if type(before) is type(after) and before == after:
        return []
    return [{"op": "replace", "path": path, "value": after}]


def _objects(before: dict[str, Any], after: dict[str, Any], path: str) -> list[dict[str, Any]]:
    ops: list[dict[str, Any]] = [{"op": "remove", "path": _at(path, n)} for n in before if n not in after]
    for name, value in after.items():
        if name in before:
            ops += diff(before[name], value, _at(path, name))
        else:
            ops.append({"op": "add", "path": _at(path, name), "value": value})
    return ops


def _lists(before: list[Any], after: list[Any], path: str) -> list[dict[str, Any]]:
    ops: list[dict[str, Any]] = []
    inserted = _inserted(before, after)
    if inserted is not None:
        ops.append({"op": "add", "path": _at(path, str(inserted)), "value": after[inserted]})
        before = [*before[:inserted], after[inserted], *before[inserted:]]
    shared = min(len(before), len(after))
    for i in range(shared):
        ops += diff(before[i], after[i], _at(path, str(i)))
    ops += [{"op": "remove", "path": _at(path, str(i))} for i in reversed(range(shared, len(before)))]
    ops += [{"op": "add", "path": _at(path, "-"), "value": value} for value in after[shared:]]
    return ops


def _inserted(before: list[Any], after: list[Any]) -> int | None:
    """Return the index of the one object of `after` that is not in `before`, judged by `name`."""
    old, new = ([o.get("name") if isinstance(o, dict) else None for o in part] for part in (before, after))
    if len(new) != len(old) + 1 or None in new:
        return None
    at = next((i for i, name in enumerate(old) if name != new[i]), len(old))
    return at if at < len(old) and new[at + 1 :] == old[at:] else None


def _at(path: str, name: str) -> str:
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"


def apply(document: Any, patch: list[dict[str, Any]]) -> Any:
    """Return a copy of the document with the operations `add`, `remove` and `replace` applied, as `diff` returns them.

    Raises LookupError or ValueError if the patch does not fit.
    """
    whole = {"": copy.deepcopy(document)}
    for op in patch:
        *parents, last = [_name(part) for part in op["path"].split("/")]
        target: Any = whole
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if op["op"] == "remove":
            del target[int(last) if isinstance(target, list) else last]
        elif isinstance(target, list) and op["op"] == "add":
            target.insert(len(target) if last == "-" else int(last), copy.deepcopy(op["value"]))
        else:
            target[int(last) if isinstance(target, list) else last] = copy.deepcopy(op["value"])
    return whole[""]


def _name(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")
