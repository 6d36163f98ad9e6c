"""The vLLM plug-in that fills in the connector, and its entry point."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cl_vllm_stub as stub
import pytest

from kvpool.engines.common import without_pool
from kvpool.engines.vllm import plugin as vllm_plugin

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class EngineArgs:
    kv_transfer_config: Any = None
    prefix_caching_hash_algo: str = "sha256"
    kv_offloading_size: float | None = None
    kv_offloading_backend: str = "native"
    data_parallel_size: int = 1
    data_parallel_size_local: int | None = None
    data_parallel_rank: int | None = None
    runner_type: str = "generate"
    refuse: str = ""
    calls: int = 0

    def create_engine_config(self, value: int = 1) -> Any:
        self.calls += 1
        if self.refuse and self.kv_transfer_config is not None:
            raise ValueError(self.refuse)
        model = SimpleNamespace(runner_type=self.runner_type, is_attention_free=False)
        return SimpleNamespace(args=replace(self), model_config=model, value=value)


@pytest.fixture
def engine_args(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[EngineArgs]]:
    """A stand-in for vLLM's class of that name; the real one is used in client/tests_engine."""
    monkeypatch.delitem(sys.modules, "kvpool.engines.vllm.tier", raising=False)
    cls = type("EngineArgs", (EngineArgs,), {"create_engine_config": EngineArgs.create_engine_config})
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, TEXT)
    with stub.installed():
        vllm_plugin.wrap(cls)
        vllm_plugin.wrap(cls)  # vLLM may call the plug-in again
        yield cls


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sentences that would be reported to the sidecar."""
    reported: list[str] = []
    monkeypatch.setattr(without_pool, "report_without_pool", lambda problem, _engine: reported.append(problem))
    return reported


TIER = {"type": "PoolTier", "module_path": "kvpool.engines.vllm"}
EXTRA = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20, "block_size": 64, "secondary_tiers": [TIER]}
POOL = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": EXTRA}
TEXT = json.dumps(POOL)


def connector_of(config: Any) -> str | None:
    return config.args.kv_transfer_config and config.args.kv_transfer_config.kv_connector


def test_the_plugin_fills_in_the_connector(engine_args: type[EngineArgs], said: list[str]) -> None:
    args = engine_args()
    config = args.create_engine_config(value=5)
    assert connector_of(config) == "OffloadingConnector"
    assert config.args.kv_transfer_config.kv_connector_extra_config == EXTRA
    assert (config.args.prefix_caching_hash_algo, config.value, args.calls) == ("sha256_cbor", 5, 1)
    assert said == []


def test_a_hash_that_the_user_chose_stays(engine_args: type[EngineArgs]) -> None:
    assert (
        engine_args(prefix_caching_hash_algo="xxhash").create_engine_config().args.prefix_caching_hash_algo == "xxhash"
    )


def test_a_connector_of_the_user_is_combined(engine_args: type[EngineArgs]) -> None:
    theirs = stub.KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_consumer", engine_id="mine")
    config = engine_args(kv_transfer_config=theirs).create_engine_config()
    assert connector_of(config) == "MultiConnector"
    transfer = config.args.kv_transfer_config
    assert transfer.engine_id == "mine"
    first, second = transfer.kv_connector_extra_config["connectors"]
    assert first == {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    assert second["kv_connector_extra_config"] == EXTRA


def test_native_offloading_keeps_its_size(engine_args: type[EngineArgs]) -> None:
    config = engine_args(kv_offloading_size=0.001).create_engine_config()
    assert connector_of(config) == "OffloadingConnector"
    assert config.args.kv_offloading_size == 0.001
    assert config.args.kv_transfer_config.kv_connector_extra_config["secondary_tiers"] == [TIER]


def test_another_connector_is_left_alone_and_reported(engine_args: type[EngineArgs], said: list[str]) -> None:
    theirs = stub.KVTransferConfig(kv_connector="FlexKVConnectorV1", kv_role="kv_both")
    config = engine_args(kv_transfer_config=theirs).create_engine_config()
    assert config.args.kv_transfer_config is theirs
    assert config.args.prefix_caching_hash_algo == "sha256"
    assert said == ["it already uses FlexKVConnectorV1, which cannot be combined with the pool"]


@pytest.mark.parametrize("text", ["{", "[]", "5", '{"kv_connector": "Other"}', '{"a":' * 5000, "x" * ((1 << 20) + 1)])
def test_a_broken_connector_text_changes_nothing_and_is_reported(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch, text: str, said: list[str]
) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, text)
    config = engine_args().create_engine_config()
    assert (config.args.kv_transfer_config, config.args.prefix_caching_hash_algo) == (None, "sha256")
    (sentence,) = said
    assert vllm_plugin.CONNECTOR_ENV in sentence


def test_without_the_variable_nothing_changes(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, "")
    assert connector_of(engine_args().create_engine_config()) is None
    assert said == []


def test_a_connector_that_vllm_refuses_is_taken_back(engine_args: type[EngineArgs], said: list[str]) -> None:
    """For instance with expandable segments of the GPU's allocator, or in sleep mode."""
    args = engine_args(refuse="does not support sleep mode")
    config = args.create_engine_config()
    assert (connector_of(config), config.args.prefix_caching_hash_algo) == (None, "sha256")
    assert "sleep mode" in said[0]


def test_an_engine_that_fails_anyway_fails_with_its_own_error(engine_args: type[EngineArgs], said: list[str]) -> None:
    theirs = stub.KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    with pytest.raises(ValueError, match="no such model"):
        engine_args(kv_transfer_config=theirs, refuse="no such model").create_engine_config()
    assert said == []


def test_a_model_without_a_kv_cache_runs_without_the_pool(engine_args: type[EngineArgs], said: list[str]) -> None:
    assert connector_of(engine_args(runner_type="pooling").create_engine_config()) is None
    assert "no KV cache" in said[0]


@pytest.mark.parametrize("version", ["0.99.0", "0.33.1rc1.dev31+gabc", "0.29.0"])
@pytest.mark.parametrize("strict", [False, True])
def test_an_untested_version_uses_the_pool_unless_strict(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch, said: list[str], version: str, strict: bool
) -> None:
    monkeypatch.setenv("KVPOOL_ENGINE_STRICT", "1" if strict else "0")
    sys.modules["vllm"].__version__ = version  # type: ignore[attr-defined]
    assert connector_of(engine_args().create_engine_config()) == (None if strict else "OffloadingConnector")
    assert len(said) == strict
    assert all(version in sentence for sentence in said)


def test_an_accelerator_without_offloading_runs_without_the_pool(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(stub.Platform, "device_type", "npu")
    assert connector_of(engine_args().create_engine_config()) is None
    assert "npu" in said[0]


@pytest.mark.parametrize(
    ("given", "engines"),
    [
        ({"data_parallel_size": 4}, 4),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, 2),
        ({"data_parallel_size": 4, "data_parallel_rank": 3}, 1),
        ({}, 1),
    ],
)
def test_a_host_tier_that_does_not_fit_into_shared_memory_is_not_configured(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch, said: list[str], given: dict[str, int], engines: int
) -> None:
    for free, fits in ((engines << 20, True), ((engines << 20) - 4096, False)):
        room = SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)
        monkeypatch.setattr(vllm_plugin.os, "statvfs", lambda _path, room=room: room)
        assert connector_of(engine_args(**given).create_engine_config()) == ("OffloadingConnector" if fits else None)
    assert "/dev/shm" in said[0]
    assert len(said) == 1


def test_the_entry_point_is_found_in_a_plain_directory(tmp_path: Path) -> None:
    source = Path(vllm_plugin.__file__).parent.parent.parent
    (tmp_path / "kvpool").symlink_to(source)
    info = importlib.metadata.distribution("kvpool")
    target = tmp_path / f"kvpool-{info.version}.dist-info"
    target.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (target / name).write_text(info.read_text(name) or "")
    code = """
from importlib.metadata import entry_points
(point,) = entry_points(group="vllm.general_plugins")
point.load()()
print(point.name, point.value)
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL")}
    env["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == ["kvpool", "kvpool.engines.vllm_plugin:register"]
