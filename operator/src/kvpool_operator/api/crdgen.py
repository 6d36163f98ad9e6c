"""The CRDs from the models.

`python -m kvpool_operator.api.crdgen --write` writes crds/ in the current directory (the repository's root);
`--check` exits 1 where what is there is stale. `crd()` and `render()` serve whoever needs the same object elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from kvpool_operator.api.resources import POOL, RESOURCES
from kvpool_operator.api.structural import structural
from kvpool_operator.api.v1alpha1 import GROUP, VERSION

if TYPE_CHECKING:
    from kvpool_operator.api.resources import Resource

__all__ = ["crd", "files", "main", "render"]

FOLDER: Final = Path("crds")


def crd(resource: Resource = POOL) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind; that of KVCachePool where none is named."""
    root: dict[str, Any] = {
        "description": resource.description,
        "type": "object",
        "required": ["spec"] if resource.spec else [],
        "x-kubernetes-validations": [rule.schema() for rule in resource.rules],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{resource.kind}."},
            "metadata": {"type": "object"},
        },
    }
    if resource.spec is not None:
        root["properties"]["spec"] = structural(resource.spec.model_json_schema(mode="validation"))
    root["properties"]["status"] = _optional(structural(resource.status.model_json_schema(mode="serialization")))
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


def _optional(schema: dict[str, Any]) -> dict[str, Any]:
    """A status is written by the operator alone: no defaults, and only what identifies a list's entry is required."""
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
    """YAML, keys in the order they were made."""
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def files() -> dict[str, str]:
    """File name -> text of everything under crds/."""
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
