"""Which specs the API server takes and refuses, and that a refusal says what to write. Dry runs: nothing is created."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from api import POOLS, ApiError, until
from conftest import SYSTEM

if TYPE_CHECKING:
    from api import Api

QUERY = "?fieldValidation=Strict&dryRun=All"
SERVER = "give the name or address of a storage server"
OPTION = "give one known NFS option"
PORT = "choose another port"
HOME = "/home"


def pool(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCachePool",
        "metadata": {"name": "checked", "namespace": SYSTEM},
        "spec": {"tiers": [{"name": "nvme", "local": {"path": "/mnt/nvme/kv", "capacity": "10Gi"}}], **spec},
    }


def local(**changes: Any) -> dict[str, Any]:
    made = pool()
    made["spec"]["tiers"][0]["local"] |= changes
    return made


def tiers(second: dict[str, Any]) -> dict[str, Any]:
    made = pool()
    made["spec"]["tiers"].append({"name": "far", **second})
    return made


def nfs(**changes: Any) -> dict[str, Any]:
    share = {"server": "nas.example", "path": "/exports/kv", **changes}
    return tiers({"shared": {"nfs": share, "capacity": "1Ti"}})


def bucket(**changes: Any) -> dict[str, Any]:
    return tiers({"objectStore": {"url": "s3://bucket/kv", "capacity": "1Ti", **changes}})


def selector(expression: dict[str, Any]) -> dict[str, Any]:
    return pool(nodes={"selector": {"matchExpressions": [expression]}})


def external(**changes: Any) -> dict[str, Any]:
    return pool(index={"external": {"urlSecretRef": {"name": "redis"}, **changes}})


def tenant(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kvpool.dev/v1alpha1",
        "kind": "KVCacheTenant",
        "metadata": {"name": "checked", "namespace": SYSTEM},
        "spec": {"poolRef": {"name": "chat"}, "members": {"namespaces": ["team-a"]}, **spec},
    }


def named(name: str) -> dict[str, Any]:
    made = copy.deepcopy(pool())
    made["metadata"]["name"] = name
    return made


def rdma(**resource: Any) -> dict[str, Any]:
    return pool(transport={"rdma": {"resources": [resource]}})


ACCEPTED: dict[str, dict[str, Any]] = {
    "minimal": pool(),
    "var_mnt": local(path="/var/mnt/nvme0/kv"),
    "var_lib_kvpool": local(path="/var/lib/kvpool/chat"),
    "srv": local(path="/srv/kv"),
    "data": local(path="/data/kv"),
    "capacity_as_number": local(capacity=1 << 40),
    "smallest_capacity": {
        **local(capacity="64Mi"),
        "spec": {**local(capacity="64Mi")["spec"], "cache": {"maxBlockSize": "64Mi"}},
    },
    "reserve_percent": local(reserveFree="10%"),
    "reserve_bytes": local(reserveFree="50Gi"),
    "no_reserve": local(reserveFree="0%"),
    "nfs_name": nfs(),
    "nfs_address": nfs(server="10.0.0.9"),
    "nfs_ipv6": nfs(server="fd00::9"),
    "nfs_rdma": nfs(mountOptions=["soft", "timeo=30", "proto=rdma", "port=20049", "vers=4.2"]),
    "nfs_krb5": nfs(mountOptions=["softerr", "sec=krb5p", "nconnect=8", "xprtsec=mtls"]),
    "minio": bucket(endpoint="http://minio.storage:9000"),
    "minio_https": bucket(endpoint="https://s3.example.com"),
    "minio_address": bucket(endpoint="http://192.168.1.10:9000"),
    "bucket_secret": bucket(secretRef={"name": "bucket-key"}),
    "azure": bucket(url="abfs://container/prefix"),
    "node_labels": pool(nodes={"selector": {"matchLabels": {"node.example/pool": "gpu", "plain": ""}}}),
    "node_expression": selector({"key": "a", "operator": "In", "values": ["b"]}),
    "node_exists": selector({"key": "a.example/b", "operator": "Exists"}),
    "tolerate_all": pool(nodes={"tolerations": [{"operator": "Exists"}]}),
    "tolerate_gpu": pool(
        nodes={"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]}
    ),
    "tolerate_value": pool(nodes={"tolerations": [{"key": "team", "value": "a"}]}),
    "priority": pool(nodes={"priorityClassName": "kvpool"}),
    "rdma_device": rdma(name="rdma/hca_shared_devices_a"),
    "rdma_vf": rdma(name="nvidia.com/hostdev", count=4),
    "external_index": external(passwordSecretRef={"name": "redis", "key": "redis_password.txt"}),
    "equal_deadlines": pool(failOpen={"lookupDeadline": "100ms", "loadDeadline": "100ms"}),
    "port": pool(transport={"port": 10300}),
    "tenant": tenant(),
    "tenant_star": tenant(sharing={"readers": ["*"]}),
    "tenant_reader": tenant(sharing={"readers": ["team-b.eu"]}),
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"path {path}": (local(path=path), "choose a directory for this pool alone")
        for path in (
            f"{HOME}/alice",
            f"{HOME}/alice/.ssh",
            "/opt/cni/bin",
            "/var/spool/cron",
            "/var/spool/cron/crontabs",
            "/var/lib/postgresql/data",
            "/var/lib/mysql",
            "/var/lib/rook",
            "/var/lib/longhorn",
            "/var/lib/k0s",
            "/var/lib/crio",
            "/var/lib/calico",
            "/var/lib/cilium",
            "/var/lib/libvirt",
            "/var/lib/cloud",
            "/var/lib/NetworkManager",
            "/var/lib/minikube",
            "/var/log/pods",
            "/host/etc",
            "/efi",
            "/nix/store",
            "/var/snap/microk8s",
            "/mnt",
            "/data",
            "/srv",
            "/var/mnt",
        )
    },
    "shared path": (tiers({"shared": {"hostPath": {"path": f"{HOME}/bob"}, "capacity": "1Ti"}}), "choose a directory"),
    **{
        f"NFS server {server}": (nfs(server=server), SERVER)
        for server in (
            "localhost",
            "LOCALHOST",
            "127.0.0.1",
            "127.1",
            "0.0.0.0",
            "169.254.169.254",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "metadata.google.internal",
            "kubernetes.default.svc",
            "0::1",
            "fe80::1",
            "224.0.0.1",
            "100.100.100.200",
            "168.63.129.16",
            "a.localhost",
            "fd00:ec2::254",
        )
    },
    "NFS server in brackets": (nfs(server="[fd00::9]"), "fd00::9, without brackets"),
    **{
        f"endpoint {url}": (bucket(endpoint=url), SERVER)
        for url in (
            "http://169.254.169.254",
            "http://metadata.google.internal",
            "http://127.0.0.1:6443",
            "https://localhost",
            "https://kubernetes.default.svc",
            "https://kubernetes.default.svc.cluster.local:443",
            "http://0x7f.1",
            "http://2852039166",
        )
    },
    "endpoint with port 99999": (bucket(endpoint="http://minio:99999"), "a port up to 65535"),
    "endpoint with port 0": (bucket(endpoint="http://minio:0"), "a port up to 65535"),
    "endpoint of IPv6": (bucket(endpoint="http://[fd00::9]:9000"), "a host name for an IPv6 address"),
    "azure account": (bucket(url="abfs://container@account/kv"), "abfs://container/prefix"),
    **{
        f"NFS option {option!r}": (nfs(mountOptions=["soft", option]), OPTION)
        for option in (
            "hard",
            "exec",
            "suid",
            "dev",
            "context=system_u:object_r:etc_t:s0",
            "a\nb",
            "sec=none",
            "bind",
            "soft,exec,suid",
            "port=99999",
            "addr=127.0.0.1",
            "user=root",
            "timeo=30 ",
            "remount",
        )
    },
    "label value": (pool(nodes={"selector": {"matchLabels": {"a": "b\nc"}}}), "give a label value"),
    "In without values": (selector({"key": "a", "operator": "In"}), "give values together with operator In"),
    "Exists with values": (selector({"key": "a", "operator": "Exists", "values": ["b"]}), "give values together"),
    "key of an expression": (selector({"key": "a b", "operator": "Exists"}), "give a label key"),
    "toleration without key": (pool(nodes={"tolerations": [{"value": "a"}]}), "give the key of the taint"),
    "toleration with value": (
        pool(nodes={"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}),
        "leave out value",
    ),
    "priority class": (pool(nodes={"priorityClassName": "ß"}), "give the name of a PriorityClass"),
    **{
        f"Secret {name}": (bucket(secretRef={"name": name}), "give the name of an object")
        for name in ("../x", "kube-system/x", "My_Secret")
    },
    "key of a Secret": (external(passwordSecretRef={"name": "a", "key": "../../token"}), "give a key of the Secret"),
    "dots as a key": (external(passwordSecretRef={"name": "a", "key": ".."}), "give a key of the Secret"),
    **{f"port {port}": (pool(transport={"port": port}), PORT) for port in (7422, 10250, 10255)},
    "GPU": (rdma(name="nvidia.com/gpu", count=8), "name a network device"),
    "GPU slice": (rdma(name="nvidia.com/mig-1g.5gb"), "name a network device"),
    "resource of Kubernetes": (rdma(name="kubernetes.io/x"), "name a network device"),
    "many devices": (rdma(name="rdma/hca", count=99), "less than or equal to 16"),
    "deadlines": (pool(failOpen={"lookupDeadline": "1s", "loadDeadline": "1ms"}), "at most loadDeadline"),
    "block above tier": (
        {**local(capacity="64Mi"), "spec": {**local(capacity="64Mi")["spec"], "cache": {"maxBlockSize": "1Gi"}}},
        "at most the capacity of each local tier",
    ),
    "reserve of five bytes": (local(reserveFree="5"), "give reserveFree as a percentage"),
    "reserve of an exbibyte": (local(reserveFree="1Ei"), "give reserveFree as a percentage"),
    "tiny capacity": (local(capacity="10Mi"), "give a capacity from 64Mi"),
    "host memory": (pool(injection={"vllm": {"hostMemory": "16Ti"}}), "give hostMemory from 16Mi to 4Ti"),
    "field of a tier": (tiers({"local": {"path": "/mnt/b", "capacity": "1Gi"}, "hostNetwork": True}), "unknown field"),
    "unknown kind of tier": (tiers({"disk": {"path": "/mnt/b"}}), "unknown field"),
    "member A B": (tenant(members={"namespaces": ["A B"]}), "give the name of a namespace"),
    "member *": (tenant(members={"namespaces": ["*"]}), "give the name of a namespace"),
    "pool of another namespace": (tenant(poolRef={"name": "y/x"}), "give the name of a KVCachePool"),
    "reader": (tenant(sharing={"readers": ["ü/.."]}), "give a reader as the name of a KVCacheTenant"),
    "pool name": (named("chat.v1"), "metadata.name"),
    "capacity True": (local(capacity=True), "must be of type"),
    "capacity 1.5": (local(capacity=1.5), "must be of type"),
}


@pytest.mark.usefixtures("rights")  # with them, the chart's admission policies are installed
@pytest.mark.parametrize("path", ["/opt/kv", "/scratch/kv", "/var/lib/app/kv", "/mntx/kv"])
def test_a_directory_that_the_administrator_does_not_allow_is_refused(api: Api, path: str):
    until("the policy applies", lambda: "sidecar.allowedPaths" in answer(api, local(path=path)))
    assert answer(api, ACCEPTED["minimal"]) == ""


def answer(api: Api, manifest: dict[str, Any]) -> str:
    """What the API server says; empty if it takes it."""
    plural = "kvcachetenants" if manifest["kind"] == "KVCacheTenant" else "kvcachepools"
    try:
        api.call("POST", f"{POOLS}/namespaces/{SYSTEM}/{plural}{QUERY}", manifest)
    except ApiError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_reasonable_spec_is_accepted(api: Api, case: str):
    assert answer(api, ACCEPTED[case]) == ""


@pytest.mark.parametrize("case", REFUSED)
def test_a_spec_that_cannot_work_or_reaches_too_far_is_refused_with_a_sentence(api: Api, case: str):
    manifest, words = REFUSED[case]
    said = answer(api, manifest)
    assert words in said, said[:600]
    assert '<nil>: Invalid value: "object"' not in said
    assert "anyOf" not in said
