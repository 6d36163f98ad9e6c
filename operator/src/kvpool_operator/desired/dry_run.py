"""What a pool with `mode: DryRun` would become, written into the ConfigMap NAME-plan. Pure; secrets are hidden."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml

from kvpool_operator.desired import names
from kvpool_operator.desired.labels import metadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Manifest

__all__ = ["HIDDEN", "hidden", "rendered_configmap"]

HIDDEN: Final = "(hidden)"
_MOST_TEXT: Final = 900 * 1024
"""A ConfigMap holds 1 MiB."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def rendered_configmap(pool: KVCachePool, wanted: Sequence[Manifest], changes: Mapping[str, Sequence[str]]) -> Manifest:
    """`changes`: names of objects by what would be done with them (create, change, keep, delete)."""
    text = yaml.dump_all(
        [hidden(m) for m in wanted], Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True, explicit_start=True
    )
    if len(text.encode()) > _MOST_TEXT:
        text = text.encode()[:_MOST_TEXT].decode(errors="ignore") + "\n# the rest does not fit into a ConfigMap\n"
    summary = "".join(f"{what} {name}\n" for what, some in changes.items() for name in some)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(pool, names.rendered(pool.metadata.name), "plan"),
        "data": {"manifests.yaml": text, "summary": summary},
    }


def hidden(manifest: Manifest) -> Manifest:
    """The manifest; of a Secret the keys alone."""
    if manifest["kind"] != "Secret":
        return manifest
    return manifest | {"data": dict.fromkeys(manifest.get("data") or {}, HIDDEN)}
