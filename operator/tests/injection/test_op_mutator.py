"""Pod -> pod: what is added, what of the user's stays, and that a second pass changes nothing."""

import copy
import json

import jsonpatch as reference
import kubernetes_validate
import pytest

from kvpool.config import ClientConfig, loads
from kvpool_operator.injection.annotations import parse_annotations
from kvpool_operator.injection.connector import client_config
from kvpool_operator.injection.mutator import InjectionSettings, inject, is_injected, mark_skipped
from kvpool_operator.injection.skip import Skip, SkipReason
from kvpool_operator.k8s.json_patch import diff

GIB = 2**30
INJECTION = InjectionSettings(
    pool="kvpool-system/chat",
    block_tokens=256,
    host_memory_bytes=4 * GIB,
    client_config=client_config(ClientConfig(pool="kvpool-system/chat")),
    sidecar_image="kvpool-sidecar:0.1.0",
)


def a_pod(container=None, annotations=None, **spec):
    engine = {"name": "engine", "image": "python:3.11", "command": ["vllm", "serve", "m"]} | (container or {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "e",
            "labels": {"kvpool.dev/inject": "true"},
            "annotations": {"kvpool.dev/pool": "chat"} | (annotations or {}),
        },
        "spec": {"containers": [engine]} | spec,
    }


def injected(pod):
    before = copy.deepcopy(pod)
    result = inject(pod, parse_annotations(pod), INJECTION)
    assert pod == before, "the input was changed"
    kubernetes_validate.validate(result.pod, "1.34", strict=True)
    assert reference.apply_patch(pod, diff(pod, result.pod)) == result.pod
    again = inject(result.pod, parse_annotations(result.pod), INJECTION)
    assert diff(result.pod, again.pod) == [], "a second pass changes the pod"
    assert again.warnings == []
    return result


def skipped(pod):
    with pytest.raises(Skip) as e:
        inject(pod, parse_annotations(pod), INJECTION)
    assert e.value.message
    return e.value.reason


def env_of(pod, index=0):
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in pod["spec"]["containers"][index].get("env", [])}


def connector_of(pod):
    return json.loads(env_of(pod)["KVPOOL_VLLM_KV_TRANSFER_CONFIG"])


def test_a_bare_pod_gets_everything():
    pod = injected(a_pod()).pod
    spec, engine = pod["spec"], pod["spec"]["containers"][0]
    assert spec["volumes"] == [
        {"name": "kvpool", "emptyDir": {}},
        {"name": "kvpool-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "5120Mi"}},
    ]
    assert engine["volumeMounts"] == [
        {"name": "kvpool", "mountPath": "/run/kvpool", "readOnly": True},
        {"name": "kvpool-shm", "mountPath": "/dev/shm"},
    ]
    assert engine["command"] == ["vllm", "serve", "m"]
    assert "args" not in engine
    assert connector_of(pod) == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 4 * GIB,
            "block_size": 256,
            "offload_prompt_only": False,
            "secondary_tiers": [{"type": "PoolTier", "module_path": "kvpool.engines.vllm"}],
        },
    }
    env = env_of(pod)
    assert env["PYTHONPATH"] == "/run/kvpool/client"
    assert env["PYTHONHASHSEED"] == "0"
    assert loads(ClientConfig, env["KVPOOL_CLIENT_CONFIG"]) == ClientConfig(pool="kvpool-system/chat")
    notes = pod["metadata"]["annotations"]
    assert notes["kvpool.dev/pool"] == "kvpool-system/chat"
    assert len(notes["kvpool.dev/injected"]) == 16


def test_the_init_container_is_restricted_and_keeps_a_guaranteed_pod_guaranteed():
    same = {"cpu": "500m", "memory": "1Gi"}
    (init,) = injected(a_pod({"resources": {"requests": same, "limits": same}})).pod["spec"]["initContainers"]
    assert init["name"] == "kvpool-client"
    assert init["command"] == ["kvpool-sidecar", "install-client", "/run/kvpool/client"]
    assert init["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert init["resources"] == {"requests": same, "limits": same}


def test_a_pod_that_runs_as_root_does_not_make_the_init_container_fail():
    (init,) = injected(a_pod(securityContext={"runAsUser": 0})).pod["spec"]["initContainers"]
    assert init["securityContext"]["runAsUser"] == 65532


def test_shell_text_is_never_edited():
    container = {"command": ["sh", "-c"], "args": ["exec vllm serve m"]}
    pod = injected(a_pod(container)).pod
    assert pod["spec"]["containers"][0]["args"] == ["exec vllm serve m"]
    connector = json.loads(env_of(pod)["KVPOOL_VLLM_KV_TRANSFER_CONFIG"])
    assert connector["kv_connector_extra_config"]["block_size"] == 256


def test_what_the_user_set_stays():
    container = {
        "env": [
            {"name": "PYTHONPATH", "value": "/mine:/yours"},
            {"name": "PYTHONHASHSEED", "value": "7"},
            {"name": "KVPOOL_CLIENT_CONFIG", "value": "{}"},
        ],
        "args": ["--prefix-caching-hash-algo", "xxhash"],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm/"}],
    }
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    pod = injected(a_pod(container, volumes=volumes)).pod
    assert list(env_of(pod))[:3] == ["PYTHONPATH", "PYTHONHASHSEED", "KVPOOL_CLIENT_CONFIG"]
    assert list(env_of(pod).values())[:3] == ["/run/kvpool/client:/mine:/yours", "7", "{}"]
    assert pod["spec"]["containers"][0]["args"] == ["--prefix-caching-hash-algo", "xxhash"]
    assert [v["name"] for v in pod["spec"]["volumes"]] == ["shm", "kvpool"]


def test_a_pythonpath_by_reference_is_kept_by_reference():
    source = {"configMapKeyRef": {"name": "paths", "key": "python"}}
    pod = injected(a_pod({"env": [{"name": "PYTHONPATH", "valueFrom": source}]})).pod
    env = pod["spec"]["containers"][0]["env"]
    assert env[0] == {"name": "KVPOOL_USER_PYTHONPATH", "valueFrom": source}
    assert env[1] == {"name": "PYTHONPATH", "value": "/run/kvpool/client:$(KVPOOL_USER_PYTHONPATH)"}


def test_a_connector_that_cannot_be_combined_is_a_reason_to_skip():
    container = {"args": ["--kv-transfer-config", '{"kv_connector": "MooncakeConnector"}']}
    assert skipped(a_pod(container)) is SkipReason.CONNECTOR_PRESENT
    assert skipped(a_pod(container, {"kvpool.dev/engine": "vllm"})) is SkipReason.CONNECTOR_PRESENT


def test_engine_none_brings_the_client_only():
    container = {"args": ["--kv-transfer-config", "{}"]}
    pod = injected(a_pod(container, {"kvpool.dev/engine": "none"})).pod
    assert pod["spec"]["containers"][0]["args"] == container["args"]
    assert set(env_of(pod)) == {"PYTHONPATH", "KVPOOL_CLIENT_CONFIG"}
    assert [v["name"] for v in pod["spec"]["volumes"]] == ["kvpool"]


def test_the_merge_patch_comes_last_and_sizes_shared_memory():
    patch = {
        "kv_connector_extra_config": {"cpu_bytes_to_use": GIB, "spec_name": "CpuSpec", "offload_prompt_only": None}
    }
    pod = injected(a_pod(annotations={"kvpool.dev/connector-config": json.dumps(patch)})).pod
    extra = connector_of(pod)["kv_connector_extra_config"]
    assert extra["spec_name"] == "CpuSpec"
    assert extra["block_size"] == 256
    assert "offload_prompt_only" not in extra
    assert pod["spec"]["volumes"][1]["emptyDir"]["sizeLimit"] == "2048Mi"


def test_kubernetes_expands_nothing_inside_the_connector():
    pod = injected(a_pod(annotations={"kvpool.dev/connector-config": '{"x": "$(HOME)"}'})).pod
    assert '"$$(HOME)"' in env_of(pod)["KVPOOL_VLLM_KV_TRANSFER_CONFIG"]


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        ("kvpool.dev/pool", "Not A Name"),
        ("kvpool.dev/pool", "a/b/c"),
        ("kvpool.dev/pool", "../x"),
        ("kvpool.dev/engine", "tgi"),
        ("kvpool.dev/connector-config", "{"),
        ("kvpool.dev/connector-config", "[]"),
        ("kvpool.dev/connector-config", "[" * 100_000),
    ],
)
def test_bad_annotations_are_named(annotation, value):
    with pytest.raises(Skip, match=annotation) as e:
        parse_annotations(a_pod(annotations={annotation: value}))
    assert e.value.reason is SkipReason.BAD_ANNOTATION


def test_the_engine_is_found_among_containers():
    proxy = {"name": "proxy", "image": "envoyproxy/envoy"}
    pod = a_pod()
    pod["spec"]["containers"].insert(0, proxy)
    result = injected(pod).pod
    assert result["spec"]["containers"][0] == proxy
    assert "KVPOOL_VLLM_KV_TRANSFER_CONFIG" in env_of(result, 1)


def test_the_container_annotation_decides():
    pod = a_pod(annotations={"kvpool.dev/container": "second"})
    pod["spec"]["containers"].append({"name": "second", "image": "x", "command": ["vllm", "serve", "n"]})
    result = injected(pod).pod
    assert "env" not in result["spec"]["containers"][0]
    assert "KVPOOL_VLLM_KV_TRANSFER_CONFIG" in env_of(result, 1)
    missing = a_pod(annotations={"kvpool.dev/container": "third"})
    assert skipped(missing) is SkipReason.CONTAINER_NOT_FOUND


def test_an_unknown_command_needs_a_word_of_the_user():
    container = {"command": ["/start.sh"]}
    assert skipped(a_pod(container)) is SkipReason.UNSUPPORTED_ENGINE
    pod = injected(a_pod(container, {"kvpool.dev/engine": "vllm"})).pod
    assert "args" not in pod["spec"]["containers"][0]
    assert "KVPOOL_VLLM_KV_TRANSFER_CONFIG" in env_of(pod)


@pytest.mark.parametrize(
    "pod",
    [
        a_pod(volumes=[{"name": "kvpool", "hostPath": {"path": "/x"}}]),
        a_pod({"volumeMounts": [{"name": "x", "mountPath": "/run/kvpool/"}]}, volumes=[{"name": "x", "emptyDir": {}}]),
        a_pod(initContainers=[{"name": "kvpool-client", "image": "mine"}]),
        a_pod(volumes=[{"name": "kvpool-shm", "emptyDir": {}}]),
    ],
)
def test_names_of_ours_that_are_taken(pod):
    assert skipped(pod) is SkipReason.NAME_CONFLICT


def test_windows_is_not_served():
    assert skipped(a_pod(os={"name": "windows"})) is SkipReason.UNSUPPORTED_ENGINE


def test_host_ipc_brings_its_own_shared_memory():
    assert [v["name"] for v in injected(a_pod(hostIPC=True)).pod["spec"]["volumes"]] == ["kvpool"]


def test_the_host_tier_never_outgrows_the_containers_memory():
    result = injected(a_pod({"resources": {"limits": {"memory": "6Gi"}}}))
    assert connector_of(result.pod)["kv_connector_extra_config"]["cpu_bytes_to_use"] == 3 * GIB
    assert "memory limit" in result.warnings[0]


def test_the_host_tier_never_outgrows_the_users_shared_memory():
    result = injected(
        a_pod(
            {"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]},
            volumes=[{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}}],
        )
    )
    assert connector_of(result.pod)["kv_connector_extra_config"]["cpu_bytes_to_use"] == 2 * GIB
    assert "/dev/shm" in result.warnings[0]


def test_the_digest_tells_what_was_injected():
    one = injected(a_pod()).pod["metadata"]["annotations"]["kvpool.dev/injected"]
    same = injected(a_pod()).pod["metadata"]["annotations"]["kvpool.dev/injected"]
    other = injected(a_pod(annotations={"kvpool.dev/connector-config": '{"x": 1}'}))
    assert one == same != other.pod["metadata"]["annotations"]["kvpool.dev/injected"]


def test_a_skipped_pod_says_why_and_a_later_pass_takes_the_reason_back():
    pod = a_pod({"command": ["sleep", "1"]}, {"kvpool.dev/injected": "copied"})
    marked = mark_skipped(pod, Skip(SkipReason.UNSUPPORTED_ENGINE, "no engine"))
    assert marked["metadata"]["annotations"] == {
        "kvpool.dev/pool": "chat",
        "kvpool.dev/skip-reason": "unsupported-engine: no engine",
    }
    marked["spec"]["containers"].append({"name": "late", "image": "x", "command": ["vllm", "serve", "m"]})
    assert "kvpool.dev/skip-reason" not in injected(marked).pod["metadata"]["annotations"]


def test_an_injected_pod_stays_injected_whatever_a_later_pass_decides():
    pod = injected(a_pod()).pod
    assert is_injected(pod)
    assert mark_skipped(pod, Skip(SkipReason.POOL_NOT_FOUND, "gone")) == pod


def test_null_lists_and_maps_are_read_as_absent():
    pod = a_pod({"args": None, "env": None, "volumeMounts": None}, volumes=None, initContainers=None)
    result = inject(pod, parse_annotations(pod), INJECTION)
    assert is_injected(result.pod)
