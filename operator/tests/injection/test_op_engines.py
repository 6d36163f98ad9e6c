"""Each family of engines: what is added, what of the user's stays, when a pod is left alone, and the examples."""

from __future__ import annotations

import json
import os
from typing import Any

import kubernetes_validate
import pytest
import yaml
from op_injection import (
    EXAMPLES,
    GOLDEN,
    KVBM,
    NIXL,
    ROOT,
    SGLANG,
    env,
    family,
    injected,
    pod_of,
    skipped,
)

from kvpool_operator.injection.annotations import ENGINES
from kvpool_operator.injection.engines import INJECTORS
from kvpool_operator.injection.mutator import is_injected, mark_skipped
from kvpool_operator.injection.skip import Skip, SkipReason


def test_every_value_of_the_annotation_has_a_family():
    assert set(ENGINES) == {*INJECTORS, "auto"}


# -- the examples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_examples_pods_are_as_reviewed(name: str):
    rendered = []
    for manifest in yaml.safe_load_all((ROOT / "examples" / f"{name}.yaml").read_text()):
        kubernetes_validate.validate(manifest, "1.34", strict=True)
        if manifest["kind"] != "Deployment":
            continue
        template = manifest["spec"]["template"]
        metadata = template["metadata"] | {"name": manifest["metadata"]["name"]}
        rendered.append(injected({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata})[0])
    assert rendered
    text = "".join(f"---\n{yaml.safe_dump(pod, sort_keys=True, width=118)}" for pod in rendered)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("KVPOOL_WRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text, f"{path} differs: look at the change, then `make golden`"


def test_there_is_no_golden_pod_without_an_example():
    assert {p.stem for p in GOLDEN.glob("*.yaml")} == set(EXAMPLES)


# -- SGLang -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "container",
    [
        {"command": SGLANG},
        {"command": SGLANG[:3], "args": SGLANG[3:]},
        {"command": ["sglang", "serve", "--model-path", "m"]},
        {"command": ["/opt/venv/bin/sglang", "serve"], "args": ["--model-path=m"]},
        {"command": ["tini", "--", *SGLANG]},
        {"command": ["python3", "-m", "dynamo.sglang", "--model-path", "m"]},
        {"command": ["python3", "/sgl-workspace/sglang/launch_server.py", "--model-path", "m"]},
    ],
)
def test_sglang_gets_the_pool_as_its_storage(container: dict[str, Any]):
    pod, warnings = injected(pod_of(container))
    (changed,) = pod["spec"]["containers"]
    assert {k: changed.get(k) for k in ("command", "args")} == {k: container.get(k) for k in ("command", "args")}
    assert json.loads(env(changed)["KVPOOL_SGLANG_HICACHE"]) == {
        "page_size": 64,
        "hicache_mem_layout": "page_first",
        "hicache_storage_prefetch_policy": "timeout",
        "hicache_storage_backend_extra_config": {
            "backend_name": "kvpool",
            "module_path": "kvpool.engines.sglang",
            "class_name": "PoolHiCache",
            "interface_v1": 1,
        },
    }
    assert family(pod) == "sglang"
    assert env(changed)["PYTHONPATH"] == "/run/kvpool/client"
    assert [v["name"] for v in pod["spec"]["volumes"]] == ["kvpool"]
    assert warnings == []


def test_sglang_whose_command_line_has_the_pool_gets_the_client():
    extra = '{"backend_name":"kvpool","module_path":"kvpool.engines.sglang","class_name":"PoolHiCache"}'
    given = ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", extra]
    pod, _ = injected(pod_of({"command": [*SGLANG, *given]}))
    assert family(pod) == "sglang"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--hicache-storage-backend", "file"], SkipReason.CONNECTOR_PRESENT),
        (["--hicache-storage-backend=mooncake"], SkipReason.CONNECTOR_PRESENT),
        (["--hicache-storage-backend-extra-config", "@/etc/hicache.json"], SkipReason.CONNECTOR_PRESENT),
        (["--enable-lmcache"], SkipReason.CONNECTOR_PRESENT),
        (["--enable-unified-cache-external-linker"], SkipReason.CONNECTOR_PRESENT),
        (["--disable-radix-cache"], SkipReason.UNSUPPORTED_ENGINE),
        (["--disaggregation-mode", "decode"], SkipReason.UNSUPPORTED_ENGINE),
        (["--disaggregation-mode=decode"], SkipReason.UNSUPPORTED_ENGINE),
    ],
)
def test_an_sglang_that_is_left_alone(given: list[str], reason: SkipReason):
    found, message = skipped(pod_of({"command": [*SGLANG, *given]}))
    assert found is reason
    assert "c0" in message


def test_an_sglang_that_prefills_for_others_gets_the_pool():
    pod, _ = injected(pod_of({"command": [*SGLANG, "--disaggregation-mode", "prefill"]}))
    assert family(pod) == "sglang"


@pytest.mark.parametrize(
    "container",
    [
        {"command": [*SGLANG, "--config", "/etc/sglang.yaml"]},
        {"command": ["sh", "-c", "exec python3 -m sglang.launch_server --model-path m"]},
        {"command": ["sh", "-c", "sglang serve m $( [ -n $X ] && echo --hicache-storage-backend file )"]},
    ],
)
def test_what_a_file_or_a_shell_decides_is_left_to_the_guard_in_the_engine(container: dict[str, Any]):
    pod, _ = injected(pod_of(container))
    assert "KVPOOL_SGLANG_HICACHE" in env(pod["spec"]["containers"][0])


def test_a_script_gets_the_variable_if_the_user_names_the_engine():
    container = {"command": ["/start.sh"]}
    assert skipped(pod_of(container))[0] is SkipReason.UNSUPPORTED_ENGINE
    pod, warnings = injected(pod_of(container, engine="sglang"))
    assert "KVPOOL_SGLANG_HICACHE" in env(pod["spec"]["containers"][0])
    assert warnings == []


# -- LMCache ----------------------------------------------------------------------------------------------------------

ENGINE_OF_SERVER = {
    "command": ["vllm", "serve", "m"],
    "args": ["--kv-transfer-config", '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}'],
}


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["lmcache", "server", "--port", "5555"]},
        {"command": ["/venv/bin/lmcache"], "args": ["server"]},
        {"command": ["python3", "-m", "lmcache.v1.multiprocess.server"]},
        {"command": ["python3", "-m", "lmcache.v1.multiprocess.http_server", "--port", "5555"]},
        {"command": ["/opt/venv/bin/python3", "-m", "lmcache.v1.multiprocess.server"], "args": ["--port", "5555"]},
        {"command": ["sh", "-c", "exec lmcache server --port $PORT"]},
        {"command": ["lmcache", "server", "--l2-adapter", '{"type":"fs"}']},
    ],
)
def test_an_lmcache_server_gets_the_pool_as_its_second_level(container: dict[str, Any]):
    pod, _ = injected(pod_of(ENGINE_OF_SERVER, container))
    engine, server = pod["spec"]["containers"]
    assert engine == pod_of(ENGINE_OF_SERVER)["spec"]["containers"][0], "the engine beside it was changed"
    assert server["command"] == container["command"]
    assert server.get("args") == container.get("args")
    assert json.loads(env(server)["KVPOOL_LMCACHE_L2"]) == {
        "type": "plugin",
        "module_path": "kvpool.engines.lmcache_mp",
        "class_name": "PoolL2Adapter",
        "adapter_params": {},
        "shared": True,
    }
    assert env(server)["PYTHONHASHSEED"] == "0"
    assert family(pod) == "lmcache"


def test_an_engine_of_an_lmcache_server_elsewhere_is_told_what_to_do():
    reason, message = skipped(pod_of(ENGINE_OF_SERVER))
    assert reason is SkipReason.CONNECTOR_PRESENT
    assert "label the pod of the server" in message


IN_PROCESS = {
    "command": ["vllm", "serve", "m"],
    "args": ["--kv-transfer-config", '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'],
}


@pytest.mark.parametrize("engine", ["", "lmcache"])
def test_lmcache_in_the_engines_process_gets_the_pool_as_remote_storage(engine: str):
    pod, warnings = injected(pod_of(IN_PROCESS, engine=engine))
    assert family(pod) == "lmcache"
    (container,) = pod["spec"]["containers"]
    assert container["args"] == IN_PROCESS["args"]
    found = env(container)
    assert found["LMCACHE_REMOTE_STORAGE_PLUGINS"] == "kvpool"
    assert json.loads(found["LMCACHE_EXTRA_CONFIG"]) == {
        "remote_storage_plugin.kvpool.module_path": "kvpool.engines.lmcache_remote",
        "remote_storage_plugin.kvpool.class_name": "PoolConnectorAdapter",
    }
    assert found["LMCACHE_PRE_CACHING_HASH_ALGORITHM"] == "sha256_cbor"
    assert "cache_salt" in warnings[0]


@pytest.mark.parametrize("name", ["LMCACHE_CONFIG_FILE", "LMCACHE_REMOTE_URL", "LMCACHE_EXTRA_CONFIG"])
def test_lmcache_that_is_configured_already_is_left_alone(name: str):
    reason, message = skipped(pod_of(IN_PROCESS | {"env": [{"name": name, "value": "x"}]}, engine="lmcache"))
    assert reason is SkipReason.CONNECTOR_PRESENT
    assert name in message


@pytest.mark.parametrize(
    ("name", "value", "is_skipped"),
    [
        ("LMCACHE_ENABLE_PD", "True", True),
        ("LMCACHE_ENABLE_PD", "false", False),
        ("LMCACHE_ENABLE_NIXL", "1", True),
        ("LMCACHE_ENABLE_SCHEDULER_BYPASS_LOOKUP", "true", True),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "0", True),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "$(SIZE)", True),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "4.5", False),
    ],
)
def test_lmcache_that_would_not_start_with_a_remote_storage_is_left_alone(name: str, value: str, is_skipped: bool):
    pod = pod_of(IN_PROCESS | {"env": [{"name": name, "value": value}]})
    if not is_skipped:
        injected(pod)
        return
    reason, message = skipped(pod)
    assert reason is SkipReason.CONNECTOR_PRESENT
    assert name in message


def test_an_old_lmcache_inside_vllm_is_injected_only_if_the_user_names_it():
    old = IN_PROCESS | {"image": "lmcache/vllm-openai:v0.3.9post2"}
    reason, message = skipped(pod_of(old))
    assert reason is SkipReason.UNSUPPORTED_ENGINE
    assert "LMCache 0.3.9 by its image tag" in message
    assert family(injected(pod_of(old, engine="lmcache"))[0]) == "lmcache"
    assert family(injected(pod_of(IN_PROCESS | {"image": "lmcache/vllm-openai:v0.5.6"}))[0]) == "lmcache"


def test_lmcache_in_shell_text_is_in_process_only_if_the_user_names_it():
    text = {"command": ["sh", "-c", " ".join([*IN_PROCESS["command"], *IN_PROCESS["args"]])]}
    assert family(injected(pod_of(text))[0]) == "vllm"
    assert family(injected(pod_of(text, engine="lmcache"))[0]) == "lmcache"


def test_lmcache_where_there_is_none():
    assert skipped(pod_of({"command": ["vllm", "serve", "m"]}, engine="lmcache"))[0] is SkipReason.UNSUPPORTED_ENGINE


# -- Dynamo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["python3", "-m", "dynamo.vllm", "--kv-transfer-config", KVBM]},
        {"command": ["sh", "-c", f"python3 -m dynamo.vllm --kv-transfer-config '{KVBM}'"]},
        {"command": ["vllm", "serve", "m", f"--kv-transfer-config={KVBM}"]},
        {"command": ["python3", "-m", "dynamo.trtllm", "--connector", "kvbm"]},
    ],
)
def test_kvbm_gets_room_on_its_node_and_nothing_else(container: dict[str, Any]):
    pod, warnings = injected(pod_of(container))
    (changed,) = pod["spec"]["containers"]
    assert {k: changed.get(k) for k in ("command", "args")} == {"command": container["command"], "args": None}
    assert env(changed) == {
        "DYN_KVBM_CPU_CACHE_GB": "4",
        "DYN_KVBM_DISK_CACHE_GB": "16",
        "DYN_KVBM_DISK_CACHE_DIR": "/var/lib/kvpool-kvbm",
    }
    assert pod["spec"]["volumes"] == [{"name": "kvpool-kvbm", "emptyDir": {"sizeLimit": "17408Mi"}}]
    assert "initContainers" not in pod["spec"]
    assert family(pod) == "dynamo"
    assert "no remote tier" in warnings[-1]


def test_kvbms_own_settings_stay():
    command = ["python3", "-m", "dynamo.vllm", "--kv-transfer-config", KVBM]
    mine = [{"name": "DYN_KVBM_DISK_CACHE_DIR", "value": "/nvme"}, {"name": "DYN_KVBM_CPU_CACHE_GB", "value": "100"}]
    pod, _ = injected(pod_of({"command": command, "env": mine}))
    assert pod["spec"]["containers"][0]["env"] == mine
    assert "volumes" not in pod["spec"]
    mounted = {"command": command, "volumeMounts": [{"name": "nvme", "mountPath": "/var/lib/kvpool-kvbm"}]}
    pod, _ = injected(pod_of(mounted, volumes=[{"name": "nvme", "emptyDir": {}}]))
    assert [v["name"] for v in pod["spec"]["volumes"]] == ["nvme"]
    blocks = [{"name": f"DYN_KVBM_{t}_CACHE_OVERRIDE_NUM_BLOCKS", "value": "9"} for t in ("CPU", "DISK")]
    pod, _ = injected(pod_of({"command": command, "env": blocks}))
    assert pod["spec"]["containers"][0]["env"] == blocks


def test_kvbms_host_tier_never_outgrows_the_containers_memory():
    container = {
        "command": ["python3", "-m", "dynamo.vllm", "--kv-transfer-config", KVBM],
        "resources": {"limits": {"memory": "6Gi"}},
    }
    pod, warnings = injected(pod_of(container))
    assert env(pod["spec"]["containers"][0])["DYN_KVBM_CPU_CACHE_GB"] == "3"
    assert "memory limit" in warnings[0]


def test_kvbm_is_not_added_to_a_command_line():
    plain = {"command": ["python3", "-m", "dynamo.vllm", "--model", "m"]}
    reason, message = skipped(pod_of(plain, engine="dynamo"))
    assert reason is SkipReason.COMMAND_NOT_EXTENDABLE
    assert "DynamoConnector" in message
    other = {"command": ["vllm", "serve", "m", "--kv-transfer-config", NIXL]}
    assert skipped(pod_of(other, engine="dynamo"))[0] is SkipReason.CONNECTOR_PRESENT


def test_dynamo_with_vllm_is_injected_as_any_vllm():
    pod, _ = injected(pod_of({"command": ["python3", "-m", "dynamo.vllm", "--model", "m"]}))
    assert family(pod) == "vllm"
    connector = json.loads(env(pod["spec"]["containers"][0])["KVPOOL_VLLM_KV_TRANSFER_CONFIG"])
    assert connector["kv_connector"] == "OffloadingConnector"


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["python3", "-m", "dynamo.trtllm", "--model", "m"]},
        {"image": "nvcr.io/nvidia/tensorrt-llm/release:1.2.0", "command": ["trtllm-serve", "m"]},
    ],
)
def test_tensorrt_llm_is_skipped_with_the_alternative(container: dict[str, Any]):
    reason, message = skipped(pod_of(container))
    assert reason is SkipReason.UNSUPPORTED_ENGINE
    assert "TensorRT-LLM" in message
    assert "LMCache server" in message


def test_a_copied_annotation_does_not_pass_for_an_injected_pod():
    pod = pod_of({"command": ["sleep", "1"]})
    pod["metadata"]["annotations"] |= {"kvpool.dev/injected": "x", "kvpool.dev/injected-engine": "dynamo"}
    assert not is_injected(pod)
    marked = mark_skipped(pod, Skip(SkipReason.UNSUPPORTED_ENGINE, "none"))
    assert "kvpool.dev/injected-engine" not in marked["metadata"]["annotations"]
