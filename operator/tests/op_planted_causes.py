"""Twenty causes of missing hits, each as a change of the documents of a healthy pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from op_diagnosis_world import UNIX, World, engine_pod

from kvpool_operator.diagnosis import ClusterObjects

if TYPE_CHECKING:
    from collections.abc import Callable


DENY_ALL = {
    "kind": "NetworkPolicy",
    "metadata": {"name": "deny-all", "namespace": "kvpool-system"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
}


def replica_set(**resources: Any) -> dict[str, Any]:
    container = {"name": "vllm", "resources": resources}
    labels = {"kvpool.dev/inject": "true"}
    return {
        "kind": "ReplicaSet",
        "metadata": {"namespace": "team-a", "name": "vllm-7d9c"},
        "spec": {"replicas": 1, "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}}},
        "status": {"replicas": 0},
    }


def hash_seeds(w: World) -> None:
    w.set_fingerprint("node-1", hash_seed="6b86b273")


def data_types(w: World) -> None:
    w.set_fingerprint("node-1", kv_dtype="77ab0000", sizes__tp_size="d4735e3a")


def not_injected(w: World) -> None:
    pod = engine_pod("late", "node-0")
    for note in ("kvpool.dev/injected", "kvpool.dev/injected-engine"):
        del pod["metadata"]["annotations"][note]
    w.pods.append(pod)


def protocol_versions(w: World) -> None:
    w.disconnect("node-1")
    w.statuses["node-1"]["refused"] = {"protocol": 12}


def chunk_sizes(w: World) -> None:
    w.set_fingerprint("node-1", blocks_per_chunk="4a44dc15", block_bytes="00000000")


def short_ttl(w: World) -> None:
    w.set_misses("node-0", expired=60_000)


def unreachable_peer(w: World) -> None:
    row = {"node": "node-1", "state": "unreachable", "reason": "timeout"}
    w.statuses["node-0"]["reachability"] |= {"reachable": 0, "unreachable": 1, "rows": [row]}


def namespace_denied(w: World) -> None:
    w.snapshot["allowed_namespaces"] = ("kvpool-system", "team-b")


def thrash(w: World) -> None:
    w.set_misses("node-0", evicted_capacity=70_000)


def slow_loads(w: World) -> None:
    w.set_misses("node-0", slower_than_compute=90_000)


def deny_all(w: World) -> None:
    w.cluster = ClusterObjects(network_policies=(DENY_ALL,))


def label_on_deployment(w: World) -> None:
    deployment = replica_set()
    deployment |= {
        "kind": "Deployment",
        "metadata": {"namespace": "team-a", "name": "vllm", "labels": {"kvpool.dev/inject": "true"}},
    }
    deployment["spec"]["template"]["metadata"]["labels"] = {"app": "vllm"}
    w.cluster = ClusterObjects(workloads=(deployment,))


def mistyped_pool(w: World) -> None:
    orphan = ("team-a/vllm-0", "kvpool-system/chatt")
    w.cluster = ClusterObjects(orphans=(orphan,), pools=("kvpool-system/chat", "kvpool-system/batch"))


def refused_plug_in(w: World) -> None:
    w.disconnect("node-1")
    problem = "kvpool.engines.vllm does not work with this vLLM: JobResult is missing"
    w.statuses["node-1"]["engine_problems"] = [{"uid": "uid-y", "problem": problem}]


def limit_range(w: World) -> None:
    message = 'pods "vllm-7d9c-" is forbidden: maximum memory usage per Container is 8Gi, but limit is 64Gi'
    about = {"kind": "ReplicaSet", "namespace": "team-a", "name": "vllm-7d9c"}
    limit = {"type": "Container", "max": {"memory": "8Gi"}}
    w.cluster = ClusterObjects(
        workloads=(replica_set(limits={"memory": "64Gi"}),),
        events=({"reason": "FailedCreate", "involvedObject": about, "message": message},),
        limit_ranges=({"metadata": {"name": "small", "namespace": "team-a"}, "spec": {"limits": [limit]}},),
    )


def wrong_mount(w: World) -> None:
    advice = "mount a drive there, or set dedicatedFilesystem to Ignore if this is intended"
    message = "the directory is on the node's own file system (ext4 on /dev/sda1)"
    found = {"node": "node-1", "check": "RootFilesystem", "level": "Fail", "tier": "nvme", "message": message}
    w.preflight.append({**found, "advice": advice})


def skewed_clock(w: World) -> None:
    w.statuses["node-2"] = {**w.statuses["node-0"], "node": "node-2", "fingerprints": [], "connected_pods": []}
    w.statuses["node-1"]["time"] = UNIX + 600


def failing_drive(w: World) -> None:
    w.statuses["node-1"]["drives"] = {"nvme": "failing"}


def full_index(w: World) -> None:
    w.statuses["node-1"]["index"]["full"] = True


def tenant_over_quota(w: World) -> None:
    w.tenants.append(
        {
            "apiVersion": "kvpool.dev/v1alpha1",
            "kind": "KVCacheTenant",
            "metadata": {"name": "batch", "namespace": "kvpool-system", "uid": "t1"},
            "spec": {
                "poolRef": {"name": "chat"},
                "members": {"namespaces": ["team-a"]},
                "quota": {"capacity": "1Gi"},
            },
            "status": {"tag": "ab12"},
        }
    )
    w.statuses["node-0"]["tenants"] = {"ab12": {"used_bytes": 2**30 - 2**20, "blocks": 31, "over_quota": 400}}


PLANTED: dict[str, tuple[Callable[[World], None], str, str, str]] = {
    "hash seeds differ": (hash_seeds, "KVP0201", "Model team-a/llama", "PYTHONHASHSEED"),
    "data type and parallel size differ": (data_types, "KVP0202", "Model team-a/llama", "kv_dtype, sizes.tp_size"),
    "a pod was not injected": (not_injected, "KVP0102", "Pod team-a/late", "Recreate the pod"),
    "client and sidecar differ in version": (protocol_versions, "KVP0303", "Pod team-a/y", "Recreate the pod"),
    "chunk sizes differ": (chunk_sizes, "KVP0203", "Model team-a/llama", "same block size and chunk size"),
    "blocks expire": (short_ttl, "KVP0502", "KVCachePool kvpool-system/chat", "spec.cache.ttl"),
    "a peer is unreachable": (unreachable_peer, "KVP0402", "KVCachePool kvpool-system/chat", "TCP 7421"),
    "a namespace is not admitted": (namespace_denied, "KVP0106", "Pod team-a/x", "allowedNamespaces"),
    "the tier thrashes": (thrash, "KVP0501", "KVCachePool kvpool-system/chat", "capacity"),
    "loads are slower than computing": (slow_loads, "KVP0504", "KVCachePool kvpool-system/chat", "faster drives"),
    "a policy denies all": (deny_all, "KVP0403", "KVCachePool kvpool-system/chat", "TCP 7421"),
    "the label is on the Deployment": (
        label_on_deployment,
        "KVP0101",
        "Deployment team-a/vllm",
        "spec.template.metadata.labels",
    ),
    "the pool's name is mistyped": (mistyped_pool, "KVP0104", "Pod team-a/vllm-0", "to kvpool-system/chat"),
    "the engine refused the plug-in": (refused_plug_in, "KVP0301", "Pod team-a/y", "supported version"),
    "a LimitRange rejects the pods": (limit_range, "KVP0108", "ReplicaSet team-a/vllm-7d9c", "LimitRange small"),
    "the drive is not mounted": (wrong_mount, "KVP0602", "Node node-1", "mount a drive there"),
    "a clock is wrong": (skewed_clock, "KVP0404", "Node node-1", "by NTP"),
    "a drive errs": (failing_drive, "KVP0601", "KVCachePool kvpool-system/chat", "Replace or repair"),
    "the index is full": (full_index, "KVP0703", "KVCachePool kvpool-system/chat", "maxMemory"),
    "a tenant is over its quota": (
        tenant_over_quota,
        "KVP0503",
        "KVCacheTenant kvpool-system/batch",
        "spec.quota.capacity of KVCacheTenant batch",
    ),
}
