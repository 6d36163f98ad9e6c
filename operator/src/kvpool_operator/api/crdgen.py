"""Generator of the CRDs from the models.

`python -m kvpool_operator.api.crdgen --write` writes crds/ in the current directory (the root of the repository);
`--check` exits 1 if a file is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from kvpool_operator.api.model import GROUP, VERSION
from kvpool_operator.api.resources import POOL, RESOURCES
from kvpool_operator.api.structural import structural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_operator.api.resources import Resource

__all__ = ["crd", "files", "main", "render"]

FOLDER: Final = Path("crds")


def crd(resource: Resource = POOL) -> dict[str, Any]:
    """Return the CustomResourceDefinition of a kind."""
    root: dict[str, Any] = {
        "description": resource.description,
        "type": "object",
        "required": ["spec"] if resource.spec else [],
        "x-kubernetes-validations": [rule.schema() for rule in resource.rules],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{resource.kind}."},
            "metadata": _metadata(resource),
        },
    }
    if resource.spec is not None:
        root["properties"]["spec"] = structural(resource.spec.model_json_schema(mode="validation"))
        _append_defaults(root["properties"]["spec"])
    status = _optional(structural(resource.status.model_json_schema(mode="serialization")))
    _list_condition_types(status["properties"]["conditions"], resource.conditions)
    root["properties"]["status"] = status
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{resource.plural}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "kvpool", "app.kubernetes.io/part-of": "kvpool"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "shortNames": [resource.short],
                "categories": ["kvcache"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": n, "type": t, "jsonPath": path, "priority": priority}
                        for n, t, path, priority in resource.columns
                    ],
                    "schema": {"openAPIV3Schema": {k: v for k, v in root.items() if v}},
                }
            ],
        },
    }


def _metadata(resource: Resource) -> dict[str, Any]:
    """Return the schema of metadata: with a name where a rule reads it, so that the error names the field."""
    if any(rule.field_path == ".metadata.name" for rule in resource.rules):
        return {"type": "object", "properties": {"name": {"type": "string"}}}
    return {"type": "object"}


def _append_defaults(schema: dict[str, Any]) -> None:
    """Append the default of each plain field to its description: `kubectl explain` does not print defaults."""
    default = schema.get("default")
    if isinstance(default, (str, int)) and "description" in schema:
        text = str(default).lower() if isinstance(default, bool) else default
        schema["description"] += f" Default: {text}."
    for child in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
        _append_defaults(child)


def _list_condition_types(conditions: dict[str, Any], types: Mapping[str, str]) -> None:
    """Describe the condition types of this kind."""
    meanings = " ".join(f"{name}: {meaning}." for name, meaning in types.items())
    conditions["description"] += f" {meanings}"
    conditions["items"]["properties"]["type"]["description"] = f"Type of the condition: {', '.join(types)}."


def _optional(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a status: without defaults, and only the keys of list entries are required."""
    out = {k: v for k, v in schema.items() if k not in ("default", "required")}
    keys = schema.get("items", {}).get("required") if "x-kubernetes-list-map-keys" in schema else None
    if "properties" in schema:
        out["properties"] = {k: _optional(v) for k, v in schema["properties"].items()}
    if "items" in schema:
        out["items"] = _optional(schema["items"]) | ({"required": schema["x-kubernetes-list-map-keys"]} if keys else {})
    return out


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def render(manifest: dict[str, Any]) -> str:
    """Render YAML with the keys in insertion order."""
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def files() -> dict[str, str]:
    """Map the name of each file under crds/ to its text."""
    head = "# Generated from kvpool_operator.api by `make gen`.\n"
    crds = {f"{r.plural}.{GROUP}.yaml": head + render(crd(r)) for r in RESOURCES}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(crds),
    }
    return {**crds, "kustomization.yaml": head + render(kustomization)}


def main(argv: list[str]) -> int:
    if argv == ["--write"]:
        FOLDER.mkdir(exist_ok=True)
        for name, text in files().items():
            (FOLDER / name).write_text(text)
        return 0
    if argv == ["--check"]:
        stale = [n for n, text in files().items() if not (FOLDER / n).is_file() or (FOLDER / n).read_text() != text]
        for name in stale:
            print(f"{FOLDER / name} is stale: run `make gen` and commit the result", file=sys.stderr)
        return 1 if stale else 0
    print("usage: python -m kvpool_operator.api.crdgen --write | --check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
