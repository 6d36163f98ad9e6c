"""Generate docs/reference/chart-values.md, and descriptions in values.schema.json, from comments in values.yaml.

`--write` writes the files, `--check` exits 1 if one is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
VALUES = ROOT / "charts" / "kvpool" / "values.yaml"
SCHEMA = ROOT / "charts" / "kvpool" / "values.schema.json"
PAGE = ROOT / "docs" / "reference" / "chart-values.md"
_LINE = re.compile(r"( *)([A-Za-z0-9]+):(.*)")


class Value(NamedTuple):
    """A key of values.yaml with its comment."""

    path: tuple[str, ...]
    comment: str
    is_section: bool
    """It has children with comments of their own."""


def read_values(text: str) -> list[Value]:
    """Return the keys that have a comment. A blank line ends a comment that belongs to no key."""
    found: list[tuple[tuple[str, ...], str]] = []
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if line.strip().startswith("#"):
            comment.append(line.strip()[1:].strip())
            continue
        if match := _LINE.match(line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if comment:
                found.append((tuple(path), " ".join(comment)))
        comment = []
    parents = {path[:n] for path, _ in found for n in range(1, len(path))}
    return [Value(path, text, path in parents) for path, text in found]


def page(values: list[Value], defaults: dict[str, Any]) -> str:
    """Render the Markdown page: a section for each top-level key."""
    parts = [
        "# Chart values\n\n<!-- Generated from charts/kvpool/values.yaml by `make gen`. Do not edit. -->\n\n"
        "Values of the chart `charts/kvpool`. The chart rejects values that are not listed here.\n"
    ]
    for top in defaults:
        mine = [v for v in values if v.path[0] == top]
        intro = next((f"\n{v.comment}\n" for v in mine if v.path == (top,)), "")
        parts.append(f"\n## {top}\n{intro}\n| value | default | description |\n| --- | --- | --- |\n")
        for value in mine:
            if not value.is_section:
                default = json.dumps(_lookup(defaults, value.path))
                parts.append(f"| `{'.'.join(value.path)}` | `{default}` | {_escape(value.comment)} |\n")
    return "".join(parts)


def with_descriptions(schema: dict[str, Any], values: list[Value]) -> dict[str, Any]:
    """Return the schema with the description of each key. A reference is wrapped, because it allows no other
    keyword."""
    for value in values:
        parent, node = schema, schema
        for name in value.path:
            parent, node = node.get("properties", {}), node.get("properties", {}).get(name, {})
        if not node:
            continue  # below a shared definition
        if "$ref" in node:
            parent[value.path[-1]] = node = {"allOf": [{"$ref": node["$ref"]}]}
        node.pop("description", None)
        parent[value.path[-1]] = {"description": value.comment, **node}
    return schema


def _lookup(defaults: dict[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = defaults
    for name in path:
        found = found[name]
    return found


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(argv: list[str]) -> int:
    text = VALUES.read_text()
    values = read_values(text)
    wanted = {
        PAGE: page(values, yaml.safe_load(text)),
        SCHEMA: json.dumps(with_descriptions(json.loads(SCHEMA.read_text()), values), indent=2) + "\n",
    }
    if argv == ["--write"]:
        for path, content in wanted.items():
            path.write_text(content)
        return 0
    if argv == ["--check"]:
        stale = [path for path, content in wanted.items() if not path.is_file() or path.read_text() != content]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run `make gen` and commit the result", file=sys.stderr)
        return 1 if stale else 0
    print("usage: python docs/generate/chart_values.py --write | --check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
