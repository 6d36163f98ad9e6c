"""What a deleted pool with `deletionPolicy: Delete` needs for its last deed. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.desired.configmap import configmap
from kvpool_operator.desired.nfs import nfs_claims, nfs_volumes
from kvpool_operator.desired.wipe import wipe_daemonset

if TYPE_CHECKING:
    from kvpool_operator.desired.inputs import Inputs, Manifest

__all__ = ["build_cleanup"]


def build_cleanup(inputs: Inputs) -> list[Manifest]:
    """The wipe and what it reads, without an owner: a foreground deletion would take them away at once."""
    pool = inputs.pool
    wanted = [configmap(inputs), *nfs_volumes(pool), *nfs_claims(pool), wipe_daemonset(pool, inputs.env)]
    return [m | {"metadata": {k: v for k, v in m["metadata"].items() if k != "ownerReferences"}} for m in wanted]
