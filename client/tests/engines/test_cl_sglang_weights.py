"""Which calls of SGLang's scheduler are evidence of new weights, and what a storage does about them, without SGLang."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from cl_sglang import Config, HostPool, install

from kvpool.engines.sglang import weight_changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cl_fake_sidecar import FakeSidecar


class Engine:
    """A scheduler and its weight updater, as much as is watched. `pools`: host pools that its flushes clear."""

    def __init__(self) -> None:
        engine = self
        self.pools: list[HostPool] = []

        class Scheduler:
            def handle_rpc_request(self, recv_req: Any) -> str:
                return "remote"

        class SchedulerWeightUpdaterManager:
            def __init__(self, size: int) -> None:
                assert size == 1

            def update_weights_from_disk(self, recv_req: Any) -> str:
                if recv_req.flush_cache:
                    engine.flush()
                if recv_req.fails:
                    raise RuntimeError("half of them")
                return "updated"

            def get_weights_by_name(self, recv_req: Any) -> str:
                return "weights"

        self.scheduler, self.updater_class = Scheduler, SchedulerWeightUpdaterManager

    def flush(self) -> None:
        for pool in self.pools:
            pool.clear()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    classes = {"scheduler": engine.scheduler, "scheduler_components.weight_updater": engine.updater_class}
    for name, kind in classes.items():
        module = types.ModuleType(name)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, f"sglang.srt.managers.{name}", module)
    monkeypatch.setattr(weight_changes, "_updaters", 0)
    return engine


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, fake: FakeSidecar, engine: Engine) -> Iterator[Callable[..., Any]]:
    plugin, made = install(monkeypatch), []

    def build(**extra: Any) -> Any:
        config = Config(extra_config={"interface_v1": 1, "socket": fake.path, **extra})
        backend = plugin.PoolHiCache(config, {})
        backend.register_mem_pool_host(HostPool())
        engine.pools.append(backend.mem_pool_host)
        made.append(backend)
        assert backend._client.wait_connected(5)
        return backend

    yield build
    for backend in made:
        backend.close()


def namespace(backend: Any) -> str:
    """The namespace of the storage's next operation."""
    return str(backend._current().fingerprint.hex())


def update(engine: Engine, updater: Any, *, flush_cache: bool = True, fails: bool = False) -> None:
    request = SimpleNamespace(flush_cache=flush_cache, fails=fails)
    if fails:
        with pytest.raises(RuntimeError, match="half of them"):
            updater.update_weights_from_disk(request)
    else:
        assert updater.update_weights_from_disk(recv_req=request) == "updated"


def test_a_flush_alone_keeps_the_namespace_of_an_engine_whose_updates_are_watched(make: Any, engine: Engine) -> None:
    backend = make()
    updater = engine.updater_class(1)
    own = namespace(backend)
    for _ in range(2):
        engine.flush()
        assert namespace(backend) == own
    assert updater.get_weights_by_name(None) == "weights"
    assert namespace(backend) == own


@pytest.mark.parametrize("extra", [{}, {"keep_after_flush": True}])
@pytest.mark.parametrize("fails", [False, True])
def test_an_update_renews_the_namespace_whatever_the_user_says_of_flushes(
    make: Any, engine: Engine, extra: dict[str, Any], fails: bool
) -> None:
    backend = make(**extra)
    updater = engine.updater_class(1)
    first = namespace(backend)
    update(engine, updater, fails=fails)
    second = namespace(backend)
    assert second != first
    engine.flush()
    assert namespace(backend) == second


def test_the_first_flush_after_an_update_without_one_renews_again(make: Any, engine: Engine) -> None:
    """Until then SGLang may store pages of the earlier weights."""
    backend = make()
    updater = engine.updater_class(1)
    engine.flush()  # before the update: it says nothing about pages that are written after it
    first = namespace(backend)
    update(engine, updater, flush_cache=False)
    second = namespace(backend)
    engine.flush()
    third = namespace(backend)
    engine.flush()
    assert len({first, second, third}) == 3
    assert namespace(backend) == third


def test_an_updater_that_was_there_before_the_storage_is_not_watched(make: Any, engine: Engine) -> None:
    engine.updater_class(1)
    backend = make()
    own = namespace(backend)
    engine.flush()
    assert namespace(backend) != own


@pytest.mark.parametrize("missing", ["update_weights_from_disk", "handle_rpc_request"])
def test_flushes_count_where_calls_cannot_be_watched(make: Any, engine: Engine, missing: str) -> None:
    delattr(engine.updater_class if missing.startswith("update") else engine.scheduler, missing)
    backend = make()
    engine.updater_class(1)
    own = namespace(backend)
    engine.flush()
    assert namespace(backend) != own


@pytest.mark.parametrize(
    ("call", "request_", "arguments", "is_evidence"),
    [
        ("update_weights_from_ipc", {}, {}, True),
        ("end_weight_update", {}, {}, True),
        ("a_method_of_next_year", {}, {}, True),
        ("check_weights", {}, {}, False),
        ("resume_memory_occupation", {}, {}, False),
        ("release_memory_occupation", {"tags": None}, {}, True),
        ("release_memory_occupation", {"tags": ["weights"]}, {"enable_memory_saver": True}, True),
        ("release_memory_occupation", {"tags": ["kv_cache"]}, {"enable_memory_saver": True}, False),
        ("release_memory_occupation", {"tags": None}, {"enable_memory_saver": False}, False),
        (
            "release_memory_occupation",
            {"tags": None},
            {"enable_memory_saver": True, "enable_weights_cpu_backup": True},
            False,
        ),
        ("handle_rpc_request", {"method": "save_sharded_model"}, {}, False),
        ("handle_rpc_request", {"method": "load_my_weights"}, {}, True),
        ("handle_rpc_request", {}, {}, True),
    ],
)
def test_evidence(call: str, request_: dict[str, Any], arguments: dict[str, Any], is_evidence: bool) -> None:
    assert bool(weight_changes.evidence_of(call, SimpleNamespace(**request_), arguments.get)) == is_evidence


def test_a_storage_that_cannot_be_told_does_not_fail_the_update(
    make: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    updater = engine.updater_class(1)
    own = namespace(backend)

    def fail() -> None:
        raise RuntimeError("no state")

    with monkeypatch.context() as patch:
        patch.setattr(backend._resets, "before_change", fail)
        update(engine, updater)
    assert namespace(backend) != own
