"""A deleted pool's last DaemonSet: on every node it removes the pool's blocks, and is Ready when they are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.desired import names
from kvpool_operator.desired.labels import labels, metadata, selector
from kvpool_operator.desired.pod_template import (
    CONFIG_FILE,
    CONFIG_MOUNT,
    container,
    object_store_env,
    object_store_mounts,
    object_store_volumes,
    placement,
    pull_secrets,
    resources,
    security,
    tier_mounts,
    tier_volumes,
)

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.inputs import InstallationConfig, Manifest

__all__ = ["wipe_daemonset"]


def wipe_daemonset(pool: KVCachePool, env: InstallationConfig) -> Manifest:
    """On the same nodes as the sidecars, whose ConfigMap says where the blocks are."""
    env_of_objects = object_store_env(pool)
    small = resources("10m", "64Mi", "256Mi")
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata(pool, names.wipe(pool.metadata.name), "wipe"),
        "spec": {
            "selector": {"matchLabels": selector(pool, "wipe")},
            "template": {
                "metadata": {"labels": labels(pool.metadata.name, "wipe")},
                "spec": {
                    **placement(pool),
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 0,
                    "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                    **pull_secrets(env),
                    "initContainers": [
                        container(
                            env,
                            "wipe",
                            *("kvpool-sidecar", "wipe", "--config", CONFIG_FILE),
                            **({"env": env_of_objects} if env_of_objects else {}),
                            resources=small,
                            securityContext=security(),
                            volumeMounts=[CONFIG_MOUNT, *tier_mounts(pool), *object_store_mounts(pool)],
                        )
                    ],
                    "containers": [
                        container(env, "done", "sleep", "infinity", resources=small, securityContext=security())
                    ],
                    "volumes": [
                        *tier_volumes(pool),
                        *object_store_volumes(pool),
                        {"name": "config", "configMap": {"name": names.config(pool.metadata.name)}},
                    ],
                },
            },
        },
    }
