"""ConfigMap with pool.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.desired import names
from kvpool_operator.desired.labels import metadata

if TYPE_CHECKING:
    from kvpool_operator.desired.inputs import Inputs, Manifest

__all__ = ["configmap"]


def configmap(inputs: Inputs) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(inputs.pool, names.config(inputs.pool.metadata.name), "config"),
        "data": {"pool.json": inputs.config.text},
    }
