"""Generate docs/reference/api.md and docs/reference/annotations.md from the CRDs and the table of metadata keys.

`--write` writes the pages, `--check` exits 1 if one is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvpool_operator.api.annotations import METADATA_KEYS
from kvpool_operator.api.crdgen import crd
from kvpool_operator.api.model import API_VERSION
from kvpool_operator.api.resources import RESOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpool_operator.api.resources import Resource

__all__ = ["main", "pages"]

FOLDER: Final = Path(__file__).resolve().parents[1] / "reference"
_NOTE: Final = "<!-- Generated from kvpool_operator.api by `make gen`. Do not edit. -->\n"
_SELECTORS: Final = ("matchExpressions", "matchLabels")
"""Fields of every label selector. The reference describes them once."""


def pages() -> dict[str, str]:
    """Map the name of each page to its text."""
    return {"api.md": _api(), "annotations.md": _annotations()}


def _api() -> str:
    links = "\n".join(f"- [{r.kind}](#{r.kind.lower()}) (`{r.short}`)" for r in RESOURCES)
    intro = (
        f"# API reference\n\n{_NOTE}\nAll kinds belong to `{API_VERSION}` and are namespaced. `kubectl explain "
        "<kind>.spec` prints the same descriptions.\n\n"
        "Label selectors have the fields of Kubernetes: `matchLabels` and `matchExpressions`.\n"
    )
    return "\n".join([intro, f"{links}\n", *map(_kind, RESOURCES)])


def _kind(resource: Resource) -> str:
    schema = crd(resource)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = [f"## {resource.kind}\n", f"{resource.description}\n"]
    parts += [f"Validation: {rule['message']}.\n" for rule in schema.get("x-kubernetes-validations", [])]
    for name in ("spec", "status"):
        if name not in schema["properties"]:
            continue
        rows = list(_fields(schema["properties"][name], name))
        columns = ("field", "type", "default", "description") if name == "spec" else ("field", "type", "description")
        parts.append(f"### {resource.kind} {name}\n")
        parts.append(_table(columns, [[row[c] for c in columns] for row in rows]))
    types = [[f"`{name}`", f"{meaning[0].upper()}{meaning[1:]}."] for name, meaning in resource.conditions.items()]
    parts += [f"### {resource.kind} conditions\n", _table(("type", "True means"), types)]
    return "\n".join(parts)


def _fields(schema: dict[str, Any], path: str) -> Iterator[dict[str, str]]:
    required = schema.get("required", [])
    for name, child in schema.get("properties", {}).items():
        if name in _SELECTORS or name == "conditions":
            continue
        here = f"{path}.{name}"
        default = child.get("default", ...)
        text = child.get("description", "")
        if not isinstance(default, (dict, list)) and default is not ...:
            text = text.removesuffix(f" Default: {_plain(default)}.")
        yield {
            "field": f"`{here}`",
            "type": _type(child),
            "default": "required"
            if name in required
            else ""
            if default in (..., {}) or isinstance(default, dict)
            else f"`{_plain(default)}`",
            "description": " ".join([text, *_validations(child)]),
        }
        yield from _fields(child.get("items", child), f"{here}[]" if "items" in child else here)


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(f"`{v}`" for v in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if schema.get("type") == "array":
        return f"list of {schema['items'].get('type', 'value')}s"
    if "additionalProperties" in schema and isinstance(schema["additionalProperties"], dict):
        return f"map of {schema['additionalProperties'].get('type', 'value')}s"
    return str(schema.get("type", ""))


def _validations(schema: dict[str, Any]) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        yield f"Range: {low} to {high}."
    if schema.get("type") == "array" and "maxItems" in schema:
        yield f"At most {schema['maxItems']} entries."
    messages = [r["message"] for r in schema.get("x-kubernetes-validations", [])]
    if messages:
        yield "Validation: " + "; ".join(messages) + "."


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(_escape(cell) for cell in line) + " |\n" for line in lines)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("'*'", "`'*'`")


def _annotations() -> str:
    parts = [f"# Labels, annotations, and finalizers\n\n{_NOTE}"]
    titles = {
        "user": "## Set by users\n",
        "webhook": "## Set by the webhook\n",
        "operator": "## Set by the operator\n\nDo not change these.\n",
    }
    for writer, title in titles.items():
        rows = [[f"`{k.key}`", k.kind, k.on, k.description] for k in METADATA_KEYS if k.set_by == writer]
        parts += [title, _table(("name", "kind", "object", "meaning"), rows)]
    return "\n".join(parts)


def main(argv: list[str]) -> int:
    """Write the pages, or check that they are fresh."""
    if argv == ["--write"]:
        for name, text in pages().items():
            (FOLDER / name).write_text(text)
        return 0
    if argv == ["--check"]:
        stale = [n for n, text in pages().items() if not (FOLDER / n).is_file() or (FOLDER / n).read_text() != text]
        for name in stale:
            print(f"docs/reference/{name} is stale: run `make gen` and commit the result", file=sys.stderr)
        return 1 if stale else 0
    print("usage: python docs/generate/api.py --write | --check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
