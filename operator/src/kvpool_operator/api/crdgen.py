"""The CRD from the models.

`python -m kvpool_operator.api.crdgen --write` writes crds/ in the current directory (the repository's root);
`--check` exits 1 where what is there is stale. `crd()` and `render()` serve whoever needs the same object elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import yaml

from kvpool_operator.api.fields import POOL_NAME
from kvpool_operator.api.structural import structural
from kvpool_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION, PoolSpec
from kvpool_operator.api.v1alpha1_status import PoolStatus

__all__ = ["crd", "files", "main", "render"]

FOLDER: Final = Path("crds")

_COLUMNS: Final = (
    ("Phase", "string", ".status.phase", 0),
    ("Nodes", "string", ".status.nodes.summary", 0),
    ("Capacity", "string", ".status.capacity.total", 0),
    ("Used", "string", ".status.capacity.used", 0),
    ("Hits", "string", ".status.cache.hitRate", 0),
    ("Pods", "integer", ".status.pods.injected", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 1),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
    ("Index", "string", ".status.index.connected", 1),
    ("Transport", "string", ".status.transport.effective", 1),
)


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition of KVCachePool."""
    root = {
        "description": "KVCachePool makes the drives of a cluster's nodes, and its shared file system, one pool of KV "
        "cache blocks for inference engines. The pool may lose any block at any time; it never returns wrong bytes, "
        "never crosses a tenant, and never makes an engine wait past its deadline.",
        "type": "object",
        "required": ["spec"],
        "x-kubernetes-validations": [POOL_NAME.schema()],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{KIND}."},
            "metadata": {"type": "object"},
            "spec": structural(PoolSpec.model_json_schema(mode="validation")),
            "status": _optional(structural(PoolStatus.model_json_schema(mode="serialization"))),
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURAL}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "kvpool", "app.kubernetes.io/part-of": "kvpool"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["kvp"],
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
                        for n, t, path, priority in _COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": root},
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
    name = f"{PLURAL}.{GROUP}.yaml"
    head = "# Generated from kvpool_operator.api.v1alpha1 by `make gen`.\n"
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [name],
    }
    return {name: head + render(crd()), "kustomization.yaml": head + render(kustomization)}


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
