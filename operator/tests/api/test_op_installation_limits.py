"""What the administrator allows pools: directories of nodes and hosts."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool_operator.api.addresses import mount_options
from kvpool_operator.api.installation_limits import InstallationLimits
from kvpool_operator.api.v1alpha1 import KVCachePool
from kvpool_operator.errors import InvalidPoolError
from kvpool_operator.settings import read_settings

REQUIRED = {"KVPOOL_NAMESPACE": "kvpool-system", "KVPOOL_SIDECAR_IMAGE": "kvpool-sidecar"}


def pool(path: str = "/mnt/nvme/kv", second: dict[str, Any] | None = None) -> KVCachePool:
    tiers: list[dict[str, Any]] = [{"name": "nvme", "local": {"path": path, "capacity": "10Gi"}}]
    if second is not None:
        tiers.append({"name": "far", **second})
    return KVCachePool.parse({"metadata": {"name": "chat"}, "spec": {"tiers": tiers}})


@pytest.mark.parametrize("path", ["/mnt/a", "/var/mnt/a/b", "/srv/kv", "/data/kv", "/var/lib/kvpool/chat"])
def test_a_directory_below_an_allowed_one_is_accepted(path: str):
    InstallationLimits().check(pool(path))


@pytest.mark.parametrize("path", ["/opt/kv", "/mntx/kv", "/var/lib/kvpool2/kv", "/var/lib/app", "/scratch/kv"])
def test_another_directory_is_refused_with_what_to_do(path: str):
    with pytest.raises(
        InvalidPoolError, match=r"tiers\[0\].local.path: choose a directory below .* sidecar.allowedPaths"
    ):
        InstallationLimits().check(pool(path))


def test_a_shared_directory_is_checked_too():
    shared = {"shared": {"hostPath": {"path": "/scratch/kv"}, "capacity": "1Ti"}}
    with pytest.raises(InvalidPoolError, match=r"tiers\[1\].shared.hostPath.path"):
        InstallationLimits().check(pool(second=shared))


@pytest.mark.parametrize(
    "tier",
    [
        {"shared": {"nfs": {"server": "10.96.0.1", "path": "/kv"}, "capacity": "1Ti"}},
        {"objectStore": {"url": "s3://bucket/kv", "endpoint": "https://10.96.0.1:443", "capacity": "1Ti"}},
        {"objectStore": {"url": "s3://bucket/kv", "endpoint": "https://10.96.0.1", "capacity": "1Ti"}},
    ],
)
def test_the_address_of_the_kubernetes_api_is_no_storage_server(tier: dict[str, Any]):
    limits = read_settings([], {**REQUIRED, "KUBERNETES_SERVICE_HOST": "10.96.0.1", "KVPOOL_NFS": "true"}).env.limits
    with pytest.raises(InvalidPoolError, match="not of the Kubernetes API"):
        limits.check(pool(second=tier))
    InstallationLimits().check(pool(second=tier))


def test_the_administrator_extends_the_list():
    limits = read_settings([], {**REQUIRED, "KVPOOL_ALLOWED_PATHS": "/scratch/, /mnt"}).env.limits
    assert limits.allowed_paths == ("/scratch", "/mnt")
    limits.check(pool("/scratch/kv"))


def test_label_keys_of_a_map_are_checked():
    spec = pool().spec.model_dump(by_alias=True, exclude_none=True)
    spec["nodes"]["selector"] = {"matchLabels": {"a b": "c"}}
    with pytest.raises(InvalidPoolError, match="give label keys such as pool"):
        KVCachePool.parse({"metadata": {"name": "chat"}, "spec": spec})


def test_a_mount_never_blocks_for_ever_and_never_has_devices_or_programs():
    assert mount_options(["vers=4.2"]) == ["vers=4.2", "soft", "nosuid", "nodev", "noexec"]
    assert mount_options(["softerr", "nodev"]) == ["softerr", "nodev", "nosuid", "noexec"]


def test_nfs_is_refused_where_the_operator_may_not_create_volumes():
    nfs = {"shared": {"nfs": {"server": "10.0.0.9", "path": "/kv"}, "capacity": "1Ti"}}
    InstallationLimits().check(pool(second=nfs))
    with pytest.raises(InvalidPoolError, match=r"tiers\[1\].shared.nfs: NFS tiers are off .* sidecar.nfs.enabled"):
        InstallationLimits(nfs=False).check(pool(second=nfs))
    assert read_settings([], REQUIRED).env.limits.nfs is False
    assert read_settings([], REQUIRED | {"KVPOOL_NFS": "true"}).env.limits.nfs is True
