"""SGLang's guard, against a double of its argument record: what is written, and when nothing is."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from typing import Any

import pytest

from kvpool.engines.sglang import guard

EXTRA = "hicache_storage_backend_extra_config"


@dataclasses.dataclass
class ServerArgs:
    """The arguments that the guard reads, with SGLang's defaults; resolved as SGLang does it: once, and sealed."""

    model_path: str = "m"
    page_size: int | None = None
    enable_hierarchical_cache: bool = False
    hicache_mem_layout: str = "page_first"
    hicache_storage_prefetch_policy: str = "timeout"
    hicache_storage_backend: str | None = None
    hicache_storage_backend_extra_config: str | None = None
    hicache_ratio: float | None = None
    hicache_size: int = 0
    hicache_host_memory_fraction: float | None = 0.8
    enable_lmcache: bool = False
    enable_unified_cache_external_linker: bool = False
    disable_radix_cache: bool = False
    disaggregation_mode: str = "null"
    encoder_only: bool = False
    device: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    nnodes: int = 1

    def resolve_once(self) -> None:
        if getattr(self, "_resolution_finished", False):
            return
        if getattr(self, "_resolution_failed", False):
            raise RuntimeError("resolution already failed on this ServerArgs")
        self._resolution_failed = True
        resolved = {"device": self.device or "cuda"}
        if self.model_path == "refuses-hicache" and self.enable_hierarchical_cache:
            raise ValueError("not with this model")
        if self.model_path == "missing":
            raise FileNotFoundError("no such model")
        if self.model_path == "drops-hicache":
            resolved["enable_hierarchical_cache"] = False
        if self.model_path == "on-a-cpu":
            resolved["device"] = "cpu"
        self._resolved = resolved
        self._resolution_failed = False
        self._resolution_finished = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and getattr(self, "_resolution_finished", False):
            raise AttributeError(f"server_args.{name} assigned after resolution")
        object.__setattr__(self, name, value)


RAW = dataclasses.asdict(ServerArgs())


class View:
    def __init__(self, record: Any) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return self._record._resolved.get(name, getattr(self._record, name))


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sentences: list[str] = []
    monkeypatch.setattr(guard, "report_without_pool", lambda problem, engine: sentences.append(problem))
    return sentences


@pytest.fixture
def server_args(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's modules that the guard imports, and a record class of this test."""
    parts: dict[str, dict[str, Any]] = {
        "sglang.srt.arg_groups.arg_utils": {"record_fields": dataclasses.fields},
        "sglang.srt.arg_groups.overrides": {"resolving_view": View},
        "sglang.srt.mem_cache.pool_host.base": {"host_memory_budget_bytes": lambda requested=0: 64 << 30},
        "sglang.srt.mem_cache.storage.backend_factory": {},
        "kvpool.engines.sglang.storage": {"interface_problem": lambda: ""},
    }
    for name, contents in parts.items():
        names = name.split(".")
        for n in range(1, len(names)):
            parent = ".".join(names[:n])
            if parent.startswith("sglang"):
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    module = types.ModuleType("sglang.srt.server_args")
    module.ServerArgs = type("ServerArgs", (ServerArgs,), {"resolve_once": ServerArgs.resolve_once})  # type: ignore[attr-defined]
    return module


def resolved(module: Any, text: str = "{}", **arguments: Any) -> Any:
    guard.guard(module, text)
    record = module.ServerArgs(**arguments)
    record.resolve_once()
    return record


def raw(record: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(record).items() if RAW[name] != value}


def test_a_server_gets_the_pool(server_args: Any, reported: list[str]) -> None:
    record = resolved(server_args)
    written = raw(record)
    assert json.loads(written.pop(EXTRA)) == guard.DEFAULTS[EXTRA]
    assert written == {"page_size": 64, "enable_hierarchical_cache": True, "hicache_storage_backend": "dynamic"}
    assert reported == []
    record.resolve_once()  # as each publishing process does
    assert record.page_size == 64


def test_what_the_user_chose_is_kept(server_args: Any, reported: list[str]) -> None:
    record = resolved(server_args, page_size=16, hicache_mem_layout="layer_first", enable_hierarchical_cache=True)
    assert (record.page_size, record.hicache_mem_layout, record.hicache_storage_backend) == (
        16, "layer_first", "dynamic",
    )  # fmt: skip
    assert reported == []


def test_settings_of_the_variable_win_over_the_defaults(server_args: Any) -> None:
    record = resolved(server_args, '{"page_size": 128, "hicache_storage_prefetch_policy": "best_effort"}')
    assert (record.page_size, record.hicache_storage_prefetch_policy) == (128, "best_effort")


def test_the_pool_in_the_users_own_flags_is_left_alone(server_args: Any, reported: list[str]) -> None:
    mine = json.dumps(guard.DEFAULTS[EXTRA])
    record = resolved(server_args, hicache_storage_backend="dynamic", **{EXTRA: mine})
    assert raw(record) == {"hicache_storage_backend": "dynamic", EXTRA: mine}
    assert reported == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend file is configured"),
        ({EXTRA: "@mine.yaml"}, "--hicache-storage-backend-extra-config is configured"),
        ({"enable_lmcache": True}, "--enable-lmcache is configured"),
        ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker is configured"),
        ({"disable_radix_cache": True}, "--disable-radix-cache disables caching"),
        ({"disaggregation_mode": "decode"}, "a decode engine"),
        ({"encoder_only": True}, "an encoder has no KV cache"),
        ({"device": "xpu"}, "does not copy pages of the device xpu"),
        ({"device": "cpu"}, "does not copy pages of the device cpu"),
        ({"model_path": "on-a-cpu"}, "does not copy pages of the device cpu"),
        ({"model_path": "refuses-hicache"}, "refuses its hierarchical cache with these arguments: not with this model"),
        ({"model_path": "drops-hicache"}, "SGLang disables its hierarchical cache for this model"),
        ({"tp_size": 16}, "64 GiB of host memory are free beyond SGLang's reserve: too little for 16 ranks"),
    ],
)
def test_nothing_is_set_where_the_pool_would_not_be_used(
    server_args: Any, reported: list[str], arguments: dict[str, Any], sentence: str
) -> None:
    record = resolved(server_args, **arguments)
    assert raw(record) == arguments
    assert record._resolution_finished
    (found,) = reported
    assert sentence in found


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "1", '{"page_size": "64"}', '{"page_size": true}', '{"page_size": 0}', '{"tp_size": 2}',
             '{"hicache_storage_backend_extra_config": "x"}', "[" * 100_000, " " * 70_000 + "{}"],
)  # fmt: skip
def test_a_variable_that_is_not_valid_is_reported(server_args: Any, reported: list[str], text: str) -> None:
    assert raw(resolved(server_args, text)) == {}
    assert reported == ["KVPOOL_SGLANG_HICACHE is not valid"]


def test_the_users_own_mistake_is_raised_as_without_the_pool(server_args: Any, reported: list[str]) -> None:
    with pytest.raises(FileNotFoundError, match="no such model"):
        resolved(server_args, model_path="missing")


def test_a_backend_that_cannot_be_imported_is_reported(
    server_args: Any, reported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvpool.engines.sglang.storage", None)
    assert raw(resolved(server_args)) == {}
    assert reported == ["the storage backend cannot be imported: ModuleNotFoundError"]


def test_another_interface_is_reported(server_args: Any, reported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    storage = sys.modules["kvpool.engines.sglang.storage"]
    monkeypatch.setattr(
        storage, "interface_problem", lambda: "SGLang 0.9.0 has another storage interface: X is missing"
    )
    assert raw(resolved(server_args)) == {}
    assert reported == ["SGLang 0.9.0 has another storage interface: X is missing"]


def test_an_argument_that_sglang_no_longer_has_is_reported(server_args: Any, reported: list[str]) -> None:
    record = server_args.ServerArgs()
    guard.guard(server_args, "{}")
    del record.hicache_storage_backend
    type(record).hicache_storage_backend = property(lambda self: self._gone)
    record.resolve_once()
    assert record._resolution_finished
    assert reported == ["the server's arguments could not be read: AttributeError"]


def test_an_sglang_that_does_not_fit_its_host_memory_wants_a_size(server_args: Any, reported: list[str]) -> None:
    fields = [(f.name, f.type, f) for f in dataclasses.fields(ServerArgs) if f.name != "hicache_host_memory_fraction"]
    methods = {"resolve_once": ServerArgs.resolve_once, "__setattr__": ServerArgs.__setattr__}
    server_args.ServerArgs = dataclasses.make_dataclass("ServerArgs", fields, namespace=methods)
    record = resolved(server_args)
    assert record.enable_hierarchical_cache is False
    assert reported == ["this SGLang does not fit its host memory to the pod: set --hicache-size"]
    assert resolved(server_args, hicache_size=8).hicache_storage_backend == "dynamic"


def test_an_sglang_without_the_entry_point_is_reported_when_a_server_starts(reported: list[str]) -> None:
    class Older:
        def __post_init__(self) -> None:
            self.made = True

    module = types.ModuleType("sglang.srt.server_args")
    module.ServerArgs = Older  # type: ignore[attr-defined]
    guard.guard(module, "{}")
    assert reported == []
    record = Older()
    record.__post_init__()
    assert record.made
    assert reported == ["this SGLang resolves its arguments in another way; upgrade SGLang"]
