"""Wipe of a deleted pool with `deletionPolicy: Delete`: a DaemonSet that removes the blocks from every node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.desired import names
from kvpool_operator.desired.configmap import configmap
from kvpool_operator.desired.nfs import nfs_claims, nfs_volumes
from kvpool_operator.desired.pod_template import (
    CONFIG_FILE,
    CONFIG_MOUNT,
    container,
    object_store_env,
    object_store_mounts,
    object_store_volumes,
    placement,
    resources,
    security,
    tier_mounts,
    tier_volumes,
    workload,
)
from kvpool_operator.desired.users import server_user

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import Inputs, InstallationConfig, Manifest

__all__ = ["build_cleanup", "wipe_daemonset"]


def build_cleanup(inputs: Inputs) -> list[Manifest]:
    """Return the wipe and the objects that it reads.

    They have no owner reference, because the foreground deletion of the pool would delete them immediately.
    """
    pool = inputs.pool
    manifests = [configmap(inputs), *nfs_volumes(pool), *nfs_claims(pool), wipe_daemonset(pool, inputs.env)]
    return [m | {"metadata": {k: v for k, v in m["metadata"].items() if k != "ownerReferences"}} for m in manifests]


def wipe_daemonset(pool: KVCachePool, env: InstallationConfig) -> Manifest:
    """Return the DaemonSet, on the nodes of the sidecars. A pod is Ready when the blocks of its node are removed."""
    env_of_objects = object_store_env(pool)
    small = resources("10m", "64Mi", "256Mi")
    return workload(
        "DaemonSet",
        pool,
        env,
        name=names.wipe(pool.metadata.name),
        component="wipe",
        pod={
            **placement(pool),
            "terminationGracePeriodSeconds": 0,
            "initContainers": [
                container(
                    env,
                    "wipe",
                    *("kvpool-sidecar", "wipe", "--config", CONFIG_FILE),
                    **({"env": env_of_objects} if env_of_objects else {}),
                    resources=small,
                    securityContext=security(server_user(pool)),
                    volumeMounts=[CONFIG_MOUNT, *tier_mounts(pool), *object_store_mounts(pool)],
                )
            ],
            "containers": [
                container(
                    env, "done", "sleep", "infinity", resources=small, securityContext=security(server_user(pool))
                )
            ],
            "volumes": [
                *tier_volumes(pool),
                *object_store_volumes(pool),
                {"name": "config", "configMap": {"name": names.config(pool.metadata.name)}},
            ],
        },
    )
