"""A deleted pool's last DaemonSet: on every node it removes the pool's blocks, and is Ready when they are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_operator.desired import names
from kvpool_operator.desired.labels import labels, metadata, selector
from kvpool_operator.desired.podparts import (
    CONFIG_FILE,
    CONFIG_MOUNT,
    container,
    placement,
    pull_secrets,
    resources,
    security,
    tier_mounts,
    tier_volumes,
)

if TYPE_CHECKING:
    from kvpool_operator.api.v1alpha1 import KVCachePool
    from kvpool_operator.desired.env import Env, Manifest

__all__ = ["wipe_daemonset"]


def wipe_daemonset(pool: KVCachePool, env: Env) -> Manifest:
    """On the same nodes as the sidecars, whose ConfigMap says where the blocks are."""
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
                            resources=small,
                            securityContext=security(),
                            volumeMounts=[CONFIG_MOUNT, *tier_mounts(pool)],
                        )
                    ],
                    "containers": [
                        container(env, "done", "sleep", "infinity", resources=small, securityContext=security())
                    ],
                    "volumes": [
                        *tier_volumes(pool),
                        {"name": "config", "configMap": {"name": names.config(pool.metadata.name)}},
                    ],
                },
            },
        },
    }
