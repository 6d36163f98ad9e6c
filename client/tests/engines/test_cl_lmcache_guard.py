"""LMCache's guard: which arguments a server gets, and when it gets none."""

from __future__ import annotations

import argparse
import json
import types
from typing import TYPE_CHECKING, Any

import cl_lmcache_stub as stub
import pytest

from kvpool.engines.lmcache import guard

with stub.installed():
    from kvpool.engines.lmcache import l2_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator

MINE = json.dumps(guard.ADAPTER, separators=(",", ":"))
DISK = '{"type":"disk","path":"/data"}'


@pytest.fixture(autouse=True)
def lmcache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sys.argv", ["server"])
    with stub.installed():
        monkeypatch.setitem(__import__("sys").modules, "kvpool.engines.lmcache.l2_adapter", l2_adapter)
        yield


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sentences: list[str] = []
    monkeypatch.setattr(guard, "report_without_pool", lambda problem, engine: sentences.append(problem))
    return sentences


def parsed(text: str, *adapters: str, policy: str = "default", refuses: str = "nothing") -> tuple[list[str], str]:
    """The adapters and the policy that LMCache reads."""

    def parse_args_to_config(args: Any) -> tuple[list[str], str]:
        if any(refuses in adapter for adapter in args.l2_adapter):
            raise ValueError(f"refused: {refuses}")
        return args.l2_adapter, args.l2_prefetch_policy

    module = types.SimpleNamespace(parse_args_to_config=parse_args_to_config)
    guard.guard(module, text)
    arguments = argparse.Namespace(l2_adapter=list(adapters), l2_prefetch_policy=policy)
    found: tuple[list[str], str] = module.parse_args_to_config(arguments)
    return found


def test_a_server_gets_the_adapter(reported: list[str]) -> None:
    assert parsed("{}") == ([MINE], "retain")
    assert reported == []


def test_the_users_adapters_are_kept_in_front(reported: list[str]) -> None:
    assert parsed(MINE, DISK) == ([DISK, MINE], "default")
    assert reported == []


def test_the_users_policy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("{}", policy="other") == ([MINE], "other")
    monkeypatch.setattr("sys.argv", ["server", "--l2-prefetch-policy=default"])
    assert parsed("{}") == ([MINE], "default")


def test_the_pool_in_the_users_own_arguments_is_left_alone(reported: list[str]) -> None:
    assert parsed("{}", MINE) == ([MINE], "default")
    assert reported == []


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '{"type": "disk"}', '{"module_path": "os"}', '{"class_name": "X"}',
             '{"adapter_params": 1}', '{"serde": {}}', "[" * 100_000],
)  # fmt: skip
def test_a_variable_that_is_not_valid_is_reported(reported: list[str], text: str) -> None:
    assert parsed(text, DISK) == ([DISK], "default")
    assert reported == ["KVPOOL_LMCACHE_L2 is not valid"]


def test_a_refused_adapter_is_left_out(reported: list[str]) -> None:
    assert parsed("{}", DISK, refuses="PoolL2Adapter") == ([DISK], "default")
    assert reported == ["LMCache refuses the adapter with these arguments: refused: PoolL2Adapter"]


def test_the_users_own_mistake_is_raised(reported: list[str]) -> None:
    with pytest.raises(ValueError, match="refused: disk"):
        parsed("{}", DISK, refuses="disk")


def test_a_constructor_that_raises_is_reported(reported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_adapter, "create_event_notifier", lambda: 1 / 0)
    assert parsed("{}") == ([], "default")
    assert reported == ["the adapter cannot be created: ZeroDivisionError"]


def test_another_interface_is_reported(reported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_adapter.L2AdapterInterface, "submit_unlock", lambda self, keys, why: None)
    assert parsed("{}", DISK) == ([DISK], "default")
    assert "submit_unlock has other parameters" in reported[0]


def test_an_adapter_that_cannot_be_imported_is_reported(reported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kvpool.engines.lmcache.l2_adapter", None)
    assert parsed("{}") == ([], "default")
    assert reported == ["the adapter cannot be created: ModuleNotFoundError"]


def test_arguments_of_another_shape_are_reported(reported: list[str]) -> None:
    module = types.SimpleNamespace(parse_args_to_config=lambda args: "config")
    guard.guard(module, "{}")
    assert module.parse_args_to_config(argparse.Namespace()) == "config"
    assert reported == ["the server's arguments could not be read: AttributeError"]


def test_an_lmcache_without_the_function_is_reported(reported: list[str]) -> None:
    guard.guard(types.SimpleNamespace(), "{}")
    assert reported == ["this LMCache reads its arguments in another way"]


def test_strict_refuses_a_release_that_is_not_tested(reported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2_adapter.lmcache, "__version__", "0.6.0")
    monkeypatch.setenv("KVPOOL_ENGINE_STRICT", "1")
    assert parsed("{}") == ([], "default")
    assert "this is 0.6.0, and KVPOOL_ENGINE_STRICT=1" in reported[0]
