"""ConfigMap NAME-plan of a pool with `mode: DryRun`: the planned manifests, with redacted Secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml

from kvpool_operator.desired import names
from kvpool_operator.desired.labels import metadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Manifest

__all__ = ["HIDDEN", "dry_run_configmap", "redact"]

HIDDEN: Final = "(hidden)"
_MAX_BYTES: Final = 900 * 1024
"""The limit of a ConfigMap is 1 MiB."""


class _PlanDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_PlanDumper.add_representer(str, _PlanDumper.represent_text)


def dry_run_configmap(pool: KVCachePool, wanted: Sequence[Manifest], changes: Mapping[str, Sequence[str]]) -> Manifest:
    """Return the ConfigMap. `changes`: object names by planned action (create, change, keep, delete)."""
    text = yaml.dump_all(
        [redact(m) for m in wanted],
        Dumper=_PlanDumper,
        sort_keys=False,
        width=110,
        allow_unicode=True,
        explicit_start=True,
    )
    if len(text.encode()) > _MAX_BYTES:
        text = (
            text.encode()[:_MAX_BYTES].decode(errors="ignore")
            + "\n# truncated: the rest exceeds the size of a ConfigMap\n"
        )
    summary = "".join(f"{what} {name}\n" for what, some in changes.items() for name in some)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(pool, names.plan(pool.metadata.name), "plan"),
        "data": {"manifests.yaml": text, "summary": summary},
    }


def redact(manifest: Manifest) -> Manifest:
    """Return the manifest; the values of a Secret are replaced."""
    if manifest["kind"] != "Secret":
        return manifest
    return manifest | {"data": dict.fromkeys(manifest.get("data") or {}, HIDDEN)}
