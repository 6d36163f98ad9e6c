"""The pool's connector beside what a user of vLLM has configured."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.engines.vllm.connector_config import NativeOffloading, combine, offloading_extra, pool_tiers

TIER = {"type": "PoolTier", "module_path": "kvpool.engines.vllm"}
POOL: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 30,
        "block_size": 256,
        "offload_prompt_only": False,
        "secondary_tiers": [TIER],
    },
}
PART = {key: value for key, value in POOL.items() if key != "kv_load_failure_policy"}
FS = {"type": "fs", "root_dir": "/data"}


def offloading(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def extra_of(config: dict[str, Any] | None) -> dict[str, Any]:
    assert config is not None
    extra: dict[str, Any] = config["kv_connector_extra_config"]
    return extra


@pytest.mark.parametrize("user", [None, {}, {"kv_connector": None, "kv_role": None}])
def test_an_engine_without_a_connector_gets_the_pools(user: dict[str, Any] | None) -> None:
    assert combine(POOL, user) == (POOL, "")


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPullConnector", "NixlPushConnector"])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_a_transfer_of_prefills_stays_first_and_keeps_its_role(name: str, role: str) -> None:
    user = {"kv_connector": name, "kv_role": role, "engine_id": "e", "kv_buffer_device": "cpu"}
    config, problem = combine(POOL, user)
    assert problem == ""
    assert config == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "engine_id": "e",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [{"kv_connector": name, "kv_role": role, "kv_buffer_device": "cpu"}, PART]
        },
    }


def test_the_failure_policy_of_the_user_holds_for_both() -> None:
    config, _ = combine(POOL, {"kv_connector": "NixlConnector", "kv_load_failure_policy": "fail"})
    assert config is not None
    assert config["kv_load_failure_policy"] == "fail"
    assert all("kv_load_failure_policy" not in part for part in extra_of(config)["connectors"])


def test_dynamo_keeps_its_transfer_as_the_only_connector() -> None:
    config, problem = combine(POOL, {"kv_connector": "NixlConnector"}, under_dynamo=True)
    assert config is None
    assert "Dynamo" in problem
    assert combine(POOL, None, under_dynamo=True).config == POOL


def test_the_pool_is_appended_to_a_multi_connector_of_transfers() -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    user = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": [nixl]},
    }
    config, _ = combine(POOL, user)
    assert config is not None
    assert config["kv_role"] == "kv_both"
    assert extra_of(config)["connectors"] == [nixl, PART]
    assert extra_of(user)["connectors"] == [nixl], "the user's configuration is not changed in place"


def test_the_tier_joins_the_offloading_inside_a_multi_connector() -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    theirs = offloading(spec_name="TieringOffloadingSpec", cpu_bytes_to_use=5)
    user = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [nixl, theirs]}}
    config, _ = combine(POOL, user)
    first, second = extra_of(config)["connectors"]
    assert first == nixl
    assert extra_of(second)["cpu_bytes_to_use"] == 5
    assert pool_tiers(config) == [TIER]


def test_a_multi_connector_with_another_store_is_left_alone() -> None:
    parts = [{"kv_connector": "NixlConnector"}, {"kv_connector": "LMCacheConnectorV1"}]
    user = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": parts}}
    assert combine(POOL, user).config is None
    assert "LMCache" in combine(POOL, user).problem


def test_the_tier_is_appended_to_tiers_of_the_user_and_their_sizes_stay() -> None:
    """As KServe's kvCacheOffloading renders it."""
    user = offloading(
        spec_name="TieringOffloadingSpec", cpu_bytes_to_use=7 << 30, blocks_per_chunk=4, secondary_tiers=[FS]
    )
    config, problem = combine(POOL, user)
    assert problem == ""
    assert extra_of(config) == {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 7 << 30,
        "blocks_per_chunk": 4,
        "offload_prompt_only": False,
        "secondary_tiers": [FS, TIER],
    }


def test_what_the_user_left_open_is_the_pools() -> None:
    config, _ = combine(
        POOL, offloading(spec_name="TieringOffloadingSpec", cpu_bytes_to_use=5, offload_prompt_only=True)
    )
    assert extra_of(config)["block_size"] == 256
    assert extra_of(config)["offload_prompt_only"] is True


def test_offloading_to_host_memory_alone_gets_tiers() -> None:
    config, _ = combine(POOL, offloading(cpu_bytes_to_use=5))
    assert extra_of(config)["spec_name"] == "TieringOffloadingSpec"
    assert extra_of(config)["cpu_bytes_to_use"] == 5
    assert pool_tiers(config) == [TIER]


def test_native_offloading_gets_the_tier() -> None:
    """vLLM itself puts --kv-offloading-size into cpu_bytes_to_use."""
    config, problem = combine(POOL, None, NativeOffloading("native", is_simple=False))
    assert problem == ""
    assert config is not None
    assert config["kv_connector"] == "OffloadingConnector"
    assert extra_of(config)["spec_name"] == "TieringOffloadingSpec"


@pytest.mark.parametrize(
    ("user", "native", "word"),
    [
        (None, NativeOffloading("lmcache", is_simple=False), "lmcache"),
        (None, NativeOffloading("native", is_simple=True), "SimpleCPUOffloadConnector"),
        ({"kv_connector": "NixlConnector"}, NativeOffloading("native", is_simple=False), "NixlConnector"),
        ({"kv_connector": "LMCacheMPConnector"}, None, "server"),
        ({"kv_connector": "LMCacheConnectorV1"}, None, "annotation"),
        ({"kv_connector": "P2pNcclConnector"}, None, "P2pNcclConnector"),
        ({"kv_connector": "x\n" * 999}, None, "x?x?"),
        (offloading(spec_name="TheirSpec", spec_module_path="their.module"), None, "TheirSpec"),
        (offloading(spec_name="TieringOffloadingSpec", secondary_tiers="fs"), None, "cannot be combined"),
        ({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": [1]}, None, "cannot be combined"),
        ({"kv_connector": "MultiConnector"}, None, "MultiConnector"),
        (
            {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": ["a"]}},
            None,
            "MultiConnector",
        ),
    ],
)
def test_everything_else_is_left_alone_with_a_sentence(
    user: dict[str, Any] | None, native: NativeOffloading | None, word: str
) -> None:
    config, problem = combine(POOL, user, native)
    assert config is None
    assert word in problem
    assert "\n" not in problem
    assert len(problem) < 200


def test_a_tier_that_the_user_configured_is_not_added_again() -> None:
    assert combine(POOL, POOL) == (None, "")
    nested = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [PART]}}
    assert combine(POOL, nested) == (None, "")
    assert offloading_extra(nested) == POOL["kv_connector_extra_config"]


@pytest.mark.parametrize("pool", [{}, {"kv_connector": "Other"}, {**POOL, "kv_connector_extra_config": 5}])
def test_a_pool_that_is_no_offloading_connector_is_refused(pool: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="OffloadingConnector"):
        combine(pool, None)


def test_settings_are_not_shared_between_configurations() -> None:
    user = offloading(spec_name="TieringOffloadingSpec", secondary_tiers=[FS])
    combine(POOL, user)
    assert extra_of(user)["secondary_tiers"] == [FS]
    assert POOL["kv_connector_extra_config"]["secondary_tiers"] == [TIER]
