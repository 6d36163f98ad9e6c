"""Whatever is wrong with the client, the engine starts and serves, and one sentence says why the pool is off.

Most faults end where vLLM builds its configuration, so they meet vLLM's own code there, in one process each; those that
come later meet a whole engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from en_cases import Cases
from en_client import client_copy
from en_engine import CPU_SPEC, Engine, connector
from test_en_vllm import PATIENT, prompt, stored, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cl_nodes import Cluster

TIERING = "vllm.v1.kv_offload.tiering.base"
MANAGER = f"from {TIERING} import SecondaryTierManager as Manager"
SOCKET = "/nowhere/kv.sock"
POOL = connector(SOCKET)
ON_A_GPU = json.loads(POOL)
ON_A_GPU["kv_connector_extra_config"]["spec_name"] = "TieringOffloadingSpec"
del ON_A_GPU["kv_connector_extra_config"]["spec_module_path"]
RAISING = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "kvpool.engines.vllm.tier":
            raise RuntimeError("planted")
sys.meta_path.insert(0, Finder())
"""
NO_CONNECTOR = """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
del KVConnectorFactory._registry["OffloadingConnector"]
"""


@pytest.fixture(scope="module")
def configurations(engine_home: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    env = {
        "PYTHONPATH": f"{engine_home / 'testing'}:{engine_home / 'site-packages'}", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "VLLM_CACHE_ROOT": str(engine_home / "vllm-cache"),
    }  # fmt: skip
    python = (engine_home / "interpreter").read_text().strip()
    command = [python, str(Path(__file__).parent / "plugin_process.py"), str(tiny_model)]
    made = Cases(command, env, tmp_path_factory.mktemp("configurations") / "log")
    yield made
    made.close()


def test_the_pool_is_configured_where_nothing_is_wrong(configurations: Cases, tmp_path: Path) -> None:
    answer = configurations.ask(path=str(client_copy(tmp_path)), connector=POOL)
    assert answer["connector"] == "OffloadingConnector", answer
    assert answer["extra"]["secondary_tiers"] == json.loads(POOL)["kv_connector_extra_config"]["secondary_tiers"]
    assert (answer["algorithm"], answer["said"]) == ("sha256_cbor", [])


def test_a_users_offloading_keeps_its_size_and_gets_the_tier(configurations: Cases, tmp_path: Path) -> None:
    theirs = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    theirs |= {"kv_connector_extra_config": {**CPU_SPEC, "cpu_bytes_to_use": 5 << 20}}
    answer = configurations.ask(path=str(client_copy(tmp_path)), connector=POOL, user=theirs)
    assert answer["extra"]["cpu_bytes_to_use"] == 5 << 20
    assert [tier["type"] for tier in answer["extra"]["secondary_tiers"]] == ["PoolTier"]


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ({"sabotage": f"import {TIERING} as m; del m.JobResult"}, "no JobResult"),
        ({"sabotage": RAISING}, "planted"),
        ({"sabotage": f"{MANAGER}\nManager.submit_load = lambda self, job, more: None"}, "submit_load"),
        ({"sabotage": f"{MANAGER}\nManager.__init__ = lambda self, other: None"}, "constructed with other"),
        (
            {"sabotage": f"{MANAGER}\nManager.__abstractmethods__ = Manager.__abstractmethods__ | {{'evict'}}"},
            "implement evict",
        ),
        ({"sabotage": NO_CONNECTOR}, "connector"),
        ({"sabotage": "import vllm.v1.kv_offload.tiering.factory as m; del m.SecondaryTierFactory"}, "cannot be built"),
        ({"connector": json.dumps(ON_A_GPU)}, "accelerator"),
        ({"connector": "{"}, "KVPOOL_VLLM_KV_TRANSFER_CONFIG"),
        ({"connector": '{"kv_connector": "OffloadingConnector", "kv_role": "none"}'}, "kv_role"),
        ({"user": {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}}, "MooncakeConnector"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_engine_is_configured_without_the_pool(
    configurations: Cases, tmp_path: Path, case: dict[str, Any], word: str
) -> None:
    answer = configurations.ask(**{"path": str(client_copy(tmp_path)), "connector": POOL, **case})
    assert answer["connector"] == case.get("user", {}).get("kv_connector"), answer
    assert answer["algorithm"] == "sha256"
    (sentence,) = answer["said"]
    assert word in sentence


@pytest.mark.parametrize(
    ("damage", "sentences"),
    [
        ({"vllm__tier": "(truncated"}, 1),
        ({"vllm__self_test": "(truncated"}, 1),
        ({"without": "engines/common/jobs.py"}, 1),
        # reported when the plug-in is loaded, which is before this test listens
        ({"vllm__plugin": "(\nmatch x:  # the grammar of another Python"}, 0),
        ({"without": "engines/vllm/connector_config.py"}, 0),
        # what reports is damaged itself: the log has it, and the operator sees a pod that never connects
        ({"without": "engines/common/without_pool.py"}, 0),
        ({"vllm_plugin": "(truncated"}, 0),
        ({"without": "__init__.py"}, 0),
    ],
)
def test_a_damaged_client_does_not_keep_an_engine_from_starting(
    configurations: Cases, tmp_path: Path, damage: dict[str, str], sentences: int
) -> None:
    answer = configurations.ask(path=str(client_copy(tmp_path, **damage)), connector=POOL)
    if damage == {"without": "__init__.py"}:  # a namespace package is as good
        assert answer["connector"] == "OffloadingConnector", answer
        return
    assert "failure" not in answer, answer
    assert answer["connector"] is None
    assert len(answer["said"]) == sentences


def served(
    cluster: Cluster, start_engine: Callable[..., Engine], folder: Path, text: str = "", **texts: str
) -> tuple[Engine, dict[str, Any]]:
    """Start an engine with a changed client, and have it answer twice what an engine without any would."""
    path = client_copy(folder, **texts)
    engine = start_engine(
        "", KVPOOL_VLLM_KV_TRANSFER_CONFIG=text or connector(cluster["a"].socket, **PATIENT),
        KVPOOL_CLIENT_CONFIG=json.dumps({"socket": cluster["a"].socket}), EXTRA_PYTHONPATH=str(path),
    )  # fmt: skip
    answer = engine.generate(prompt(70))
    assert engine.generate(prompt(70))["tokens"] == answer["tokens"]
    return engine, answer


def sentences(cluster: Cluster) -> list[str]:
    return [row["problem"] for row in cluster["a"].status()["engine_problems"]]


def test_an_engine_serves_whose_tier_cannot_be_built(
    cluster: Cluster, start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    planted = "\nEngineClient.__init__ = lambda *_: [][0]\n"
    engine, _ = served(cluster, start_engine, tmp_path, vllm__engine_client=planted)
    assert until(lambda: any("the tier could not be built: IndexError" in said for said in sentences(cluster)))
    engine.close()


def test_an_engine_of_an_untested_version_whose_self_test_fails_serves(
    cluster: Cluster, start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    planted = "\nSelfTest._test = lambda *_: [][0]\n"
    untested = "\nTESTED['vllm'] = ()\n"
    engine, _ = served(cluster, start_engine, tmp_path, common__self_test=planted, tested_versions=untested)
    assert until(lambda: any("the self-test failed" in said for said in sentences(cluster)))
    assert not engine.stats()["connected"]
    engine.close()


def test_an_untested_version_whose_self_test_passes_uses_the_pool_and_is_shown(
    cluster: Cluster, start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine, _ = served(cluster, start_engine, tmp_path, tested_versions="\nTESTED['vllm'] = ()\n")
    assert until(lambda: engine.stats()["connected"])
    own = engine.stats()["fingerprint"]
    shown = {entry["digest"]: entry["tested"] for entry in cluster["a"].status()["fingerprints"]}
    assert shown[own] is False
    stored(cluster, "a", engine, 71)
    assert engine.ask(reset=True)["reset"]
    assert engine.generate(prompt(71))["cached"] > 0
    engine.close()


def test_chunks_that_do_not_fit_the_models_blocks_become_one_block(
    cluster: Cluster, start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    text = json.loads(connector(cluster["a"].socket, **PATIENT))
    text["kv_connector_extra_config"]["block_size"] = 40  # the engine's blocks have 32 tokens
    engine, _ = served(cluster, start_engine, tmp_path, json.dumps(text))
    assert until(lambda: engine.stats()["connected"])
    stored(cluster, "a", engine, 72)
    engine.close()
