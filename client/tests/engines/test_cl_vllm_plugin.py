"""The vLLM plug-in that fills in the connector, and its entry point."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engines.vllm import plugin as vllm_plugin


@dataclass
class EngineArgs:
    kv_transfer_config: Any = None
    prefix_caching_hash_algo: str = "sha256"
    kv_offloading_size: float | None = None
    calls: int = 0

    def create_engine_config(self, value: int = 1) -> tuple[Any, str, int]:
        self.calls += 1
        return self.kv_transfer_config, self.prefix_caching_hash_algo, value


@pytest.fixture
def engine_args(monkeypatch: pytest.MonkeyPatch) -> type[EngineArgs]:
    """A stand-in for vLLM's class of that name; the real one is used in client/tests_engine."""
    fake_vllm = SimpleNamespace(KVTransferConfig=lambda **kw: SimpleNamespace(**kw))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(config=fake_vllm))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm.config", fake_vllm)  # type: ignore[arg-type]
    cls = type("EngineArgs", (EngineArgs,), {})
    vllm_plugin.wrap(cls)
    vllm_plugin.wrap(cls)  # vLLM may call the plug-in again
    return cls


TEXT = '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'


def test_the_plugin_fills_in_the_connector(engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, TEXT)
    args = engine_args()
    config, algorithm, value = args.create_engine_config(value=5)
    assert (config.kv_connector, algorithm, value, args.calls) == ("OffloadingConnector", "sha256_cbor", 5, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"kv_transfer_config": "mine"}, ("mine", "sha256", 1)),
        ({"kv_offloading_size": 4.0}, (None, "sha256", 1)),
    ],
)
def test_settings_of_the_user_win_over_the_plugin(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], expected: Any
) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, TEXT)
    assert engine_args(**given).create_engine_config() == expected


def test_a_hash_that_the_user_chose_stays(engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, TEXT)
    assert engine_args(prefix_caching_hash_algo="xxhash").create_engine_config()[1] == "xxhash"


TIER = '{"kv_connector": "O", "kv_connector_extra_config": {"secondary_tiers": [{"module_path": "kvpool.engines.of"}]}}'


@pytest.mark.parametrize(
    ("version", "expected"), [((0, 33, 0), "O"), ((0, 31, 2), None), ((0, 34), None), ("no such module", None)]
)
def test_a_vllm_that_the_tier_does_not_know_runs_without_the_pool(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch, version: Any, expected: str | None
) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, TIER)
    if isinstance(version, tuple):
        tier = SimpleNamespace(PoolTier=object)
        monkeypatch.setitem(sys.modules, "kvpool.engines.of", tier)  # type: ignore[arg-type]
        sys.modules["vllm"].__version_tuple__ = version  # type: ignore[attr-defined]
        sys.modules["vllm"].__version__ = ".".join(map(str, version))
    config, _, calls = engine_args().create_engine_config()
    assert (getattr(config, "kv_connector", None), calls) == (expected, 1)


@pytest.mark.parametrize("text", ["", "{", "[]", "5"])
def test_a_broken_connector_text_changes_nothing(
    engine_args: type[EngineArgs], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(vllm_plugin.CONNECTOR_ENV, text)
    assert engine_args().create_engine_config() == (None, "sha256", 1)


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
