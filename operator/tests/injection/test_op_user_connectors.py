"""vLLM with a connector of the user: what is left to the plug-in in the engine, and what is skipped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from op_injection import NIXL, env, family, injected, pod_of, skipped

from kvpool_operator.injection.skip import SkipReason

TIERING = (
    '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":'
    '{"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":21474836480}}'
)
MULTI = '{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[%s]}}'
SERVE = ["vllm", "serve", "m"]


def vllm_with(*words: str, engine: str = "", **container: Any) -> dict[str, Any]:
    return pod_of({"command": SERVE, "args": list(words), **container}, engine=engine)


@pytest.mark.parametrize("engine", ["", "vllm", "vllm-pd"])
@pytest.mark.parametrize(
    "words",
    [
        ["--kv-transfer-config", NIXL],
        [f"--kv-transfer-config={NIXL}"],
        ["--kv_transfer_config", NIXL],
        ["--kv-transfer-config.kv_connector", "NixlConnector", "--kv-transfer-config.kv_role=kv_both"],
        ["--kv-transfer-config", TIERING],
        ["--kv-transfer-config", MULTI % NIXL],
        ["--kv-offloading-size", "20"],
        ["--kv-transfer-config", "{"],
        ["--kv-transfer-config", "[" * 100_000],
    ],
)
def test_a_connector_that_the_plug_in_can_combine_is_injected_and_stays(words: list[str], engine: str):
    pod, warnings = injected(vllm_with(*words, "--port", "8000", engine=engine))
    (container,) = pod["spec"]["containers"]
    assert (container["command"], container["args"]) == (SERVE, [*words, "--port", "8000"])
    connector = json.loads(env(container)["KVPOOL_VLLM_KV_TRANSFER_CONFIG"])
    assert connector["kv_connector_extra_config"]["secondary_tiers"][0]["type"] == "PoolTier"
    assert family(pod) == (engine or "vllm")
    assert warnings == []


@pytest.mark.parametrize("engine", ["", "vllm", "vllm-pd"])
@pytest.mark.parametrize(
    ("value", "found"),
    [
        ('{"kv_connector":"MooncakeConnector","kv_role":"kv_both"}', "MooncakeConnector"),
        (MULTI % '{"kv_connector":"P2pNcclConnector"}', "P2pNcclConnector"),
        ('{"kv_connector":"LMCacheMPConnector"}', "label the pod of the server"),
        (TIERING.replace("Tiering", "SharedStorage"), "SharedStorageOffloadingSpec"),
    ],
)
def test_a_connector_in_arguments_that_cannot_be_combined_is_skipped(value: str, found: str, engine: str):
    reason, message = skipped(vllm_with("--kv-transfer-config", value, engine=engine))
    assert reason is SkipReason.CONNECTOR_PRESENT
    assert found in message


def test_dynamo_needs_nixl_alone():
    pod = pod_of({"command": ["python3", "-m", "dynamo.vllm", "--kv-transfer-config", NIXL]})
    reason, message = skipped(pod)
    assert reason is SkipReason.CONNECTOR_PRESENT
    assert "Dynamo" in message


KSERVE = """
# OffloadingConnector is chosen by the field kvCacheOffloading
if [[ "${VLLM_ADDITIONAL_ARGS}" != *"--kv-transfer-config"* ]]; then
  EXTRA="--kv-transfer-config '{\\"kv_connector\\": \\"MooncakeConnector\\"}'"
fi
eval "vllm serve /mnt/models --port 8000 ${VLLM_ADDITIONAL_ARGS}"
"""


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["/bin/bash", "-c"], "args": [KSERVE]},
        {"command": ["sh", "-c", f"vllm serve m --kv-transfer-config '{NIXL}'"]},
        {"command": ["sh", "-c", 'vllm serve m "$@"', "sh", "--kv-transfer-config", '{"kv_connector":"MyConnector"}']},
    ],
)
def test_shell_text_never_decides_on_a_connector(container: dict[str, Any]):
    pod, _ = injected(pod_of(container))
    (changed,) = pod["spec"]["containers"]
    assert {k: changed.get(k) for k in ("command", "args")} == {k: container.get(k) for k in ("command", "args")}
    assert "KVPOOL_VLLM_KV_TRANSFER_CONFIG" in env(changed)


@pytest.mark.parametrize(
    "container",
    [
        {"command": SERVE, "args": ["--kv-transfer-config", TIERING]},
        {"command": ["sh", "-c", f"vllm serve m --kv-transfer-config '{TIERING}'"]},
    ],
)
def test_shared_memory_holds_the_users_host_tier(container: dict[str, Any]):
    pod, _ = injected(pod_of(container))
    shm = next(v for v in pod["spec"]["volumes"] if v["name"] == "kvpool-shm")
    assert shm["emptyDir"]["sizeLimit"] == f"{21 * 1024}Mi"


def test_kubernetes_expands_nothing_of_the_pools_configuration():
    pod = vllm_with("--kv-transfer-config", NIXL.replace("5600", "$(PORT)"))
    pod["metadata"]["annotations"]["kvpool.dev/connector-config"] = '{"x": "$(HOME)"}'
    made, _ = injected(pod)
    (container,) = made["spec"]["containers"]
    assert "$(PORT)" in container["args"][1]
    assert '"x":"$$(HOME)"' in env(container)["KVPOOL_VLLM_KV_TRANSFER_CONFIG"]
