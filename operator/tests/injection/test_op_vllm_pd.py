"""vLLM with disaggregated prefill: the pool next to the user's NixlConnector."""

from __future__ import annotations

import json
from typing import Any

import pytest
from op_injection import (
    NIXL,
    injected,
    pod_of,
    skipped,
)

from kvpool_operator.injection.engines.vllm_pd import wrap_connector
from kvpool_operator.injection.skip import SkipReason


def pair(*words: str, engine: str = "vllm-pd", **container: Any) -> dict[str, Any]:
    return pod_of({"command": ["vllm", "serve", "m"], "args": list(words), **container}, engine=engine)


@pytest.mark.parametrize("words", [["--kv-transfer-config", NIXL], [f"--kv-transfer-config={NIXL}"]])
def test_a_nixl_connector_is_wrapped_when_asked_for(words: list[str]):
    pod, _ = injected(pair(*words, "--port", "8000"))
    args = pod["spec"]["containers"][0]["args"]
    text = args[0].partition("=")[2] if len(words) == 1 else args[1]
    whole = json.loads(text)
    # MultiConnector gives engine_id to its parts itself and fails on a part that has one
    assert {k: v for k, v in whole.items() if k != "kv_connector_extra_config"} == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": "p-1",
    }
    first, second = whole["kv_connector_extra_config"]["connectors"]
    assert first == {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_port": "5600"}
    assert second["kv_connector"] == "OffloadingConnector"
    assert second["kv_connector_extra_config"]["secondary_tiers"][0]["type"] == "PoolTier"
    assert args[len(words) :] == ["--port", "8000", "--prefix-caching-hash-algo", "sha256_cbor"]
    assert "kvpool-shm" in {v["name"] for v in pod["spec"]["volumes"]}


def test_without_the_annotation_a_pair_stays_as_it_is_and_hears_what_to_do():
    reason, message = skipped(pair("--kv-transfer-config", NIXL, engine=""))
    assert reason is SkipReason.CONNECTOR_PRESENT
    assert "kvpool.dev/engine: vllm-pd" in message


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "8000"],
        ["--kv-transfer-config", "{"],
        ["--kv-transfer-config", "[]"],
        ["--kv-transfer-config", "[" * 100_000],
        ["--kv-transfer-config", '{"kv_connector":"MooncakeConnector","kv_role":"kv_both"}'],
        ["--kv-transfer-config", '{"kv_connector":"MultiConnector","kv_role":"kv_both"}'],
        ["--kv-transfer-config.kv_connector", "NixlConnector"],
    ],
)
def test_what_cannot_be_wrapped_stays(words: list[str]):
    reason, message = skipped(pair(*words))
    assert reason is SkipReason.CONNECTOR_PRESENT
    assert "vllm-pd" in message


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["sh", "-c", f"vllm serve m --kv-transfer-config '{NIXL}'"]},
        {"command": ["python3", "-m", "dynamo.vllm", "--kv-transfer-config", NIXL]},
    ],
)
def test_a_pair_in_a_shell_or_under_dynamo_is_not_wrapped(container: dict[str, Any]):
    assert skipped(pod_of(container, engine="vllm-pd"))[0] is SkipReason.CONNECTOR_PRESENT


def test_kubernetes_still_expands_what_the_user_wrote_and_nothing_of_ours():
    theirs = '{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_connector_extra_config":{"ip":"$(POD_IP)"}}'
    pod = pair("--kv-transfer-config", theirs)
    pod["metadata"]["annotations"]["kvpool.dev/connector-config"] = '{"x": "$(HOME)"}'
    made, _ = injected(pod)
    text = made["spec"]["containers"][0]["args"][1]
    assert '"ip":"$(POD_IP)"' in text
    assert '"x":"$$(HOME)"' in text


def test_a_users_failure_policy_wins_over_ours():
    whole = wrap_connector({"kv_connector": "NixlConnector", "kv_load_failure_policy": "fail"}, {"kv_connector": "O"})
    assert whole["kv_load_failure_policy"] == "fail"
    assert all("kv_load_failure_policy" not in c for c in whole["kv_connector_extra_config"]["connectors"])
