"""Memory limits, resources and shared memory of an injected pod."""

import json
from typing import Any

import pytest
from op_injection import GIB, SGLANG, env, flags, injected, pod_of, skipped

from kvpool_operator.injection.init_resources import init_resources
from kvpool_operator.injection.skip import SkipReason

VLLM: dict[str, Any] = {"command": ["vllm", "serve", "m"]}


def limits(memory: str) -> dict[str, Any]:
    return {"resources": {"limits": {"memory": memory}}}


def host_tier(container: dict[str, Any]) -> int:
    given = flags(container).get("--kv-transfer-config") or env(container)["KVPOOL_VLLM_KV_TRANSFER_CONFIG"]
    return int(json.loads(given)["kv_connector_extra_config"]["cpu_bytes_to_use"])


def init_of(pod: dict[str, Any]) -> dict[str, Any]:
    (init,) = [c for c in pod["spec"]["initContainers"] if c["name"] == "kvpool-client"]
    return dict(init)


@pytest.mark.parametrize(
    ("container", "of_pod", "granted", "words"),
    [
        ({}, {}, 4 * GIB, ""),
        (limits("6Gi"), {}, 3 * GIB, "half of the memory limit of container c0"),
        ({}, limits("4Gi"), 2 * GIB, "half of the memory limit of the pod"),
        (limits("6Gi"), limits("4Gi"), 2 * GIB, "limit of the pod"),
        (limits("4Gi"), limits("6Gi"), 2 * GIB, "limit of container c0"),
        (limits("64Gi"), limits("64Gi"), 4 * GIB, ""),
    ],
)
def test_the_smaller_memory_limit_of_pod_and_container_bounds_the_host_tier(container, of_pod, granted, words):
    pod, warnings = injected(pod_of(VLLM | container, **of_pod))
    assert host_tier(pod["spec"]["containers"][0]) == granted
    assert (len(warnings) == 1 and words in warnings[0]) if words else warnings == []
    (shm,) = [v for v in pod["spec"]["volumes"] if v["name"] == "kvpool-shm"]
    assert shm["emptyDir"]["sizeLimit"] == f"{granted // 2**20 + 1024}Mi"


def test_the_pods_memory_limit_bounds_kvbms_host_tier():
    kvbm = '{"kv_connector":"DynamoConnector","kv_connector_module_path":"kvbm.vllm_integration.connector"}'
    pod, warnings = injected(pod_of(VLLM | {"args": ["--kv-transfer-config", kvbm]}, **limits("4Gi")))
    assert env(pod["spec"]["containers"][0])["DYN_KVBM_CPU_CACHE_GB"] == "2"
    assert "limit of the pod" in warnings[0]


def test_two_engines_share_the_memory_limit_of_their_pod_and_have_a_shared_memory_each():
    pod, warnings = injected(pod_of(VLLM, VLLM, **limits("8Gi")))
    first, second = pod["spec"]["containers"]
    assert host_tier(first) == host_tier(second) == 2 * GIB
    assert len(warnings) == 2
    assert "1/4 of the memory limit of the pod" in warnings[0]
    mounts = [{m["mountPath"]: m["name"] for m in c["volumeMounts"]} for c in (first, second)]
    assert [m["/dev/shm"] for m in mounts] == ["kvpool-shm", "kvpool-shm-2"]
    assert [v["name"] for v in pod["spec"]["volumes"]] == ["kvpool", "kvpool-shm", "kvpool-shm-2"]


@pytest.mark.parametrize(
    "resources",
    [
        {},
        {"requests": {"memory": "2Gi"}},
        {"requests": {"cpu": "1"}, "limits": {"memory": "4Gi"}},
        {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": "500m", "memory": "1Gi"}},
        {"limits": {"ephemeral-storage": "1Gi", "cpu": "1"}},
    ],
)
def test_the_init_container_has_the_resources_of_the_engine_so_that_it_costs_nothing(resources):
    pod, _ = injected(pod_of(VLLM | {"resources": resources}))
    assert init_of(pod)["resources"] == resources


def test_the_init_container_takes_no_device_and_no_exclusive_cpus():
    both = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1", "hugepages-2Mi": "1Gi"}
    assert init_resources({"resources": {"requests": both, "limits": both}}) == {
        "requests": {"cpu": "7999m", "memory": "64Gi"},
        "limits": {"cpu": "7999m", "memory": "64Gi"},
    }
    assert init_resources({"resources": {"limits": {"cpu": 8}}}) == {"limits": {"cpu": "7999m"}}
    shared = {"resources": {"requests": {"cpu": 8}, "limits": {"cpu": 16}}}
    assert init_resources(shared) == shared["resources"]


def test_shared_memory_is_added_only_to_engines_that_keep_their_host_tier_there():
    proxy = {"image": "envoyproxy/envoy"}
    pod, _ = injected(pod_of(proxy, {"command": SGLANG}))
    assert [v["name"] for v in pod["spec"]["volumes"]] == ["kvpool"]
    pod, _ = injected(pod_of(proxy, VLLM))
    assert "volumeMounts" not in pod["spec"]["containers"][0]


@pytest.mark.parametrize("mount", [{}, {"subPath": "a"}, {"subPathExpr": "$(POD)"}])
@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/", "/dev//shm"])
def test_a_shared_memory_of_the_user_stays_and_bounds_the_host_tier(mount, path):
    volume = {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}}
    mounted = {"volumeMounts": [{"name": "dshm", "mountPath": path} | mount]}
    pod, warnings = injected(pod_of(VLLM | mounted, volumes=[volume]))
    engine = pod["spec"]["containers"][0]
    assert engine["volumeMounts"][0] == mounted["volumeMounts"][0]
    assert [v["name"] for v in pod["spec"]["volumes"]] == ["dshm", "kvpool"]
    assert host_tier(engine) == 2 * GIB
    assert "limited by the pod's /dev/shm of 3072Mi" in warnings[0]


def test_an_engine_whose_shared_memory_is_read_only_is_left_alone():
    mounted = {"volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm", "readOnly": True}]}
    reason, message = skipped(pod_of(VLLM | mounted, volumes=[{"name": "dshm", "emptyDir": {}}]))
    assert reason is SkipReason.NAME_CONFLICT
    assert "read-only" in message


@pytest.mark.parametrize(
    ("runtime", "is_sandbox"), [("kata-qemu", True), ("gvisor", True), ("nvidia", False), ("", False)]
)
def test_a_runtime_that_passes_no_descriptors_is_named(runtime, is_sandbox):
    pod, warnings = injected(pod_of(VLLM, **({"runtimeClassName": runtime} if runtime else {})))
    noted = pod["metadata"]["annotations"].get("kvpool.dev/injection-warnings", "")
    assert any(f"runtime class {runtime}" in w for w in warnings) is is_sandbox
    assert ("every load misses" in noted) is is_sandbox


def test_warnings_are_an_annotation_of_the_pod_that_a_copy_without_them_loses():
    pod, warnings = injected(pod_of(VLLM, **limits("4Gi")))
    noted = pod["metadata"]["annotations"]["kvpool.dev/injection-warnings"]
    assert noted == "; ".join(warnings)
    copied = pod_of(VLLM)
    copied["metadata"]["annotations"]["kvpool.dev/injection-warnings"] = noted
    pod, warnings = injected(copied)
    assert warnings == []
    assert "kvpool.dev/injection-warnings" not in pod["metadata"]["annotations"]
