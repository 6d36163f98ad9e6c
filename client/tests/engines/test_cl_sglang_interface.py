"""What the storage backend does with an SGLang that is not tested, or that has another interface."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
from cl_lmcache import PATIENT, until
from cl_sglang import PIECE, Config, HiCacheStorage, HostPool, Transfer, install

if TYPE_CHECKING:
    from cl_fake_sidecar import FakeSidecar


def config(fake: FakeSidecar) -> Config:
    return Config(extra_config={"interface_v1": 1, "socket": fake.path, "deadlines": PATIENT})


def key(n: int) -> str:
    return hashlib.sha256(b"%d" % n).hexdigest()


def stored(backend: Any, *numbers: int) -> list[str]:
    names = [key(n) for n in numbers]
    pool = backend.mem_pool_host
    for page in range(len(names)):
        pool.fill(page, bytes([page + 1]) * (2 * PIECE))
    assert backend.batch_set_v1(names, pool.places(*range(len(names)))) == [True] * len(names)
    return names


@pytest.mark.parametrize("version", ["0.5.20", "0.5.24", "0.6.0", "0.5.24.dev1", ""])
def test_a_release_that_is_not_tested_uses_the_pool_after_its_self_test(
    version: str, monkeypatch: pytest.MonkeyPatch, fake: FakeSidecar
) -> None:
    plugin = install(monkeypatch, version)
    backend = plugin.PoolHiCache(config(fake), {})
    backend.register_mem_pool_host(HostPool())
    backend._client.wait_connected(5)
    names = stored(backend, 0, 1)
    before = backend.stats()["client"]["stores"]["stored"]
    assert until(lambda: backend.batch_exists(names) == 2)
    assert backend.batch_exists(names) == 2
    assert backend.stats()["client"]["stores"]["stored"] == before + 1
    assert backend.mem_pool_host.guards_hold()
    assert fake.hellos[-1].is_tested is False
    backend.close()


def test_a_failed_self_test_is_reported_and_gives_no_hit(monkeypatch: pytest.MonkeyPatch, fake: FakeSidecar) -> None:
    plugin = install(monkeypatch, "0.5.24")
    reported = []
    report = lambda problem, engine: reported.append(problem)  # noqa: E731
    monkeypatch.setattr("kvpool.engines.common.self_test.report_without_pool", report)
    backend = plugin.PoolHiCache(config(fake), {})
    backend.register_mem_pool_host(HostPool())
    backend._client.wait_connected(5)
    names = stored(backend, 0)
    load = backend._client.get_into

    def other_bytes(block_ids: Any, buffers: Any, deadline: Any = None) -> Any:
        results = load(block_ids, buffers, deadline)
        buffers[0][0] ^= 1
        return results

    monkeypatch.setattr(backend._client, "get_into", other_bytes)
    assert until(lambda: backend.batch_exists(names) or reported)
    assert backend.batch_exists(names) == 0
    assert set(reported) == {"the self-test read other bytes than it stored"}
    backend.close()


def refused(storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fake: FakeSidecar, version: str) -> str:
    """The sentence that a backend reports with these names of hicache_storage; it misses everything."""
    plugin = install(monkeypatch, version, storage)
    reported: list[str] = []
    monkeypatch.setattr(plugin, "report_without_pool", lambda problem, engine: reported.append(problem))
    backend = plugin.PoolHiCache(config(fake), {})
    pool = HostPool()
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(HostPool(), "mamba")
    assert backend.batch_exists([key(0)]) == 0
    assert backend.batch_set_v1([key(0)], pool.places(0)) == [False]
    assert backend.batch_get_v1([key(0)], pool.places(0)) == [False]
    assert backend.batch_exists_v2([key(0)], [Transfer("mamba")]).kv_hit_pages == 0
    backend.close()
    assert not fake.hellos
    (sentence,) = reported
    return sentence


def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch, fake: FakeSidecar) -> None:
    class Other(HiCacheStorage):
        def batch_get_v1(self, hashes: Any, pages: Any, extra_info: Any = None) -> Any: ...

    found = refused({"HiCacheStorage": Other}, monkeypatch, fake, "0.5.23")
    assert found == "SGLang 0.5.23 has another storage interface: Other.batch_get_v1 has other parameters"


def test_a_missing_method_is_refused(monkeypatch: pytest.MonkeyPatch, fake: FakeSidecar) -> None:
    class Other(HiCacheStorage):
        batch_set_v1 = None  # type: ignore[assignment]

    assert "Other.batch_set_v1 is missing" in refused({"HiCacheStorage": Other}, monkeypatch, fake, "0.5.23")


def test_a_missing_field_is_refused(monkeypatch: pytest.MonkeyPatch, fake: FakeSidecar) -> None:
    class Other:
        tp_rank = tp_size = pp_rank = 0

    assert "HiCacheStorageConfig.pp_size is missing" in refused(
        {"HiCacheStorageConfig": Other}, monkeypatch, fake, "0.5.30"
    )


def test_strict_refuses_a_release_that_is_not_tested(monkeypatch: pytest.MonkeyPatch, fake: FakeSidecar) -> None:
    monkeypatch.setenv("KVPOOL_ENGINE_STRICT", "1")
    assert "this is 0.5.99, and KVPOOL_ENGINE_STRICT=1 is set" in refused({}, monkeypatch, fake, "0.5.99")


def test_a_constructor_that_fails_is_a_miss(monkeypatch: pytest.MonkeyPatch, fake: FakeSidecar) -> None:
    monkeypatch.setattr("kvpool.engines.sglang.server.connections_per_rank", lambda *_: 1 / 0)
    assert refused({}, monkeypatch, fake, "0.5.23") == "the storage could not be created: ZeroDivisionError"


def test_pages_of_an_unknown_policy_are_misses(monkeypatch: pytest.MonkeyPatch, fake: FakeSidecar) -> None:
    plugin = install(monkeypatch)
    backend = plugin.PoolHiCache(config(fake), {})
    backend.register_mem_pool_host(HostPool())
    backend._client.wait_connected(5)
    names = stored(backend, 0, 1)
    assert backend.batch_exists_v2(names, [Transfer("x", hit_policy="block_groups")]).kv_hit_pages == 2
    assert backend.batch_exists_v2(names, [Transfer("x", hit_policy="first_page")]).kv_hit_pages == 0
    backend.close()


@pytest.mark.parametrize(("version", "connects"), [("0.5.23", True), ("0.5.24", False)])
def test_an_untested_release_whose_flushes_cannot_be_seen_is_refused(
    version: str, connects: bool, monkeypatch: pytest.MonkeyPatch, fake: FakeSidecar
) -> None:
    class Unmarked(HostPool):
        def clear(self) -> None: ...

    plugin = install(monkeypatch, version)
    monkeypatch.setattr(plugin, "report_without_pool", lambda problem, engine: None)
    backend = plugin.PoolHiCache(config(fake), {})
    backend.register_mem_pool_host(Unmarked())
    assert (backend._client is not None) is connects
    backend.close()
