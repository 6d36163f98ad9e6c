"""What the webhook writes into variables, as the client reads it in the engine; and that both decide alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
from op_injection import SGLANG, env, injected, pod_of

from kvpool.engines.lmcache import guard as lmcache_guard
from kvpool.engines.sglang import guard as sglang_guard
from kvpool.engines.vllm import plugin
from kvpool.engines.vllm.connector_config import combine, pool_tiers
from kvpool_operator.injection.engines import lmcache, sglang, vllm

SERVE = ["vllm", "serve", "m"]


def variable(command: list[str], name: str) -> str:
    pod, _ = injected(pod_of({"command": command}))
    return str(env(pod["spec"]["containers"][0])[name])


def test_the_variables_have_the_names_that_the_client_reads():
    assert vllm.CONNECTOR_ENV == plugin.CONNECTOR_ENV
    assert sglang.SETTINGS_ENV == sglang_guard.VARIABLE
    assert lmcache.ADAPTER_ENV == lmcache_guard.VARIABLE


def test_sglangs_settings_are_valid_for_the_guard():
    text = variable(SGLANG, sglang.SETTINGS_ENV)
    assert sglang_guard.read_settings(text) == sglang_guard.DEFAULTS == json.loads(text)


def test_lmcaches_adapter_is_valid_for_the_guard():
    text = variable(["lmcache", "server"], lmcache.ADAPTER_ENV)
    assert lmcache_guard.read_adapter(text) == json.loads(text)


def pool_connector() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(variable(SERVE, vllm.CONNECTOR_ENV))
    return found


@pytest.mark.parametrize("name", sorted(vllm.COMBINABLE))
def test_the_plug_in_combines_each_connector_that_is_injected(name: str):
    children = [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]
    extra = {"connectors": children} if name == "MultiConnector" else {}
    user = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    assert len(pool_tiers(combine(pool_connector(), user).config)) == 1


@pytest.mark.parametrize("spec", sorted(vllm.SPECS))
def test_the_plug_in_combines_each_spec_that_is_injected(spec: str):
    user = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": spec}}
    assert len(pool_tiers(combine(pool_connector(), user).config)) == 1


@pytest.mark.parametrize(
    ("user", "under_dynamo"),
    [
        ({"kv_connector": "MooncakeConnector"}, False),
        ({"kv_connector": "LMCacheConnectorV1"}, False),
        ({"kv_connector": "LMCacheMPConnector"}, False),
        (
            {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": "MyOffloadingSpec"}},
            False,
        ),
        ({"kv_connector": "NixlConnector"}, True),
    ],
)
def test_the_plug_in_leaves_alone_what_is_skipped(user: dict[str, Any], under_dynamo: bool):
    combined = combine(pool_connector(), user, under_dynamo=under_dynamo)
    assert combined.config is None
    assert combined.problem
