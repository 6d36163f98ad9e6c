"""The contract of SGLang's storage interface, without SGLang: whatever is asked, in whatever order, by whomever."""

from __future__ import annotations

import hashlib
import logging
import random
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cl_sglang import PAGE, PIECE, Config, HostPool, Tensor, Transfer, install

from kvpool.engines.sglang import fingerprint as sglang_fingerprint
from kvpool.protocol.wire import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cl_fake_sidecar import FakeSidecar

NO_ARGUMENT: Callable[[str], Any] = lambda name: None  # noqa: E731


def key(n: int) -> str:
    return hashlib.sha256(b"%d" % n).hexdigest()


def content(name: str, size: int = 2 * PIECE) -> bytes:
    return random.Random(name).randbytes(size)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch)


@pytest.fixture
def make(plugin: Any, fake: FakeSidecar) -> Iterator[Callable[..., Any]]:
    made = []

    def build(pool: HostPool | None = None, config: Config | None = None, **extra: Any) -> Any:
        config = config or Config()
        deadlines = {"lookup_ms": 500, "load_min_ms": 1000, "store_ms": 2000, "breaker_failures": 1000}
        config.extra_config = {"interface_v1": 1, "socket": fake.path, "deadlines": deadlines, **extra}
        backend = plugin.PoolHiCache(config, {})
        backend.register_mem_pool_host(pool or HostPool())
        made.append(backend)
        if backend._client is not None:
            backend._client.wait_connected(5)
        return backend

    yield build
    for backend in made:
        backend.close()


def stored(backend: Any, *numbers: int) -> list[str]:
    names = [key(n) for n in numbers]
    pool = backend.mem_pool_host
    for page, name in enumerate(names):
        pool.fill(page, content(name))
    assert backend.batch_set_v1(names, pool.places(*range(len(names)))) == [True] * len(names)
    return names


def test_pages_come_back_whole_and_in_order(make: Any) -> None:
    backend = make()
    pool = backend.mem_pool_host
    names = stored(backend, *range(6))
    order = [3, 0, 5, 1]
    asked = [names[n] for n in order] + [key(99)]
    assert backend.batch_get_v1(asked, pool.places(20, 21, 30, 22, 23)) == [True] * 4 + [False]
    for page, n in zip((20, 21, 30, 22), order, strict=True):
        assert pool.content(page) == content(names[n])
    assert pool.guards_hold()
    assert backend.stats()["zero_copy"] == {"kv": True}


def test_existence_counts_from_the_first_page_on(make: Any) -> None:
    backend = make()
    names = stored(backend, 0, 1, 2, 4)
    assert backend.batch_exists(names[:3]) == 3
    assert backend.batch_exists([*names[:2], key(9), names[2]]) == 2
    assert backend.batch_exists([key(9), *names]) == 0
    assert backend.batch_exists([]) == 0
    assert backend.exists(names[3])
    assert not backend.exists(key(9))


def test_a_page_that_lacks_a_piece_is_not_there(make: Any, fake: FakeSidecar) -> None:
    backend = make()
    names = stored(backend, 0, 1, 2)
    block_ids = backend._transfer.pages["kv"].block_ids(backend._client, names)
    assert len(block_ids) == 6
    fake.file_of(block_ids[3]).unlink()
    assert backend.batch_exists(names) == 1
    assert backend.batch_get_v1(names, backend.mem_pool_host.places(5, 6, 7)) == [True, False, True]


def test_flat_pages(make: Any) -> None:
    backend = make(interface_v1=0)
    pool = backend.mem_pool_host
    values = [Tensor(2 * PIECE) for _ in range(3)]
    names = [key(n) for n in range(3)]
    for value, name in zip(values, names, strict=True):
        value.bytes[:] = content(name)
    assert backend.batch_set(names, values)
    assert backend.set(key(5), values[0])
    assert backend.batch_exists([*names, key(9)]) == 3
    targets = [pool.get_dummy_flat_data_page() for _ in range(4)]
    got = backend.batch_get([*names, key(9)], targets)
    assert [g is t for g, t in zip(got, targets, strict=True)] == [True] * 3 + [False]
    assert got[3] is None
    assert [bytes(t.bytes) for t in targets[:3]] == [content(n) for n in names]
    assert bytes(backend.get(key(5)).bytes) == content(names[0])
    assert backend.get(key(9)) is None
    assert backend.batch_get(names, targets) == [None] * 3, "four targets for three pages"
    assert not backend.batch_set(names, values[:2])


def test_pages_in_many_pieces_are_copied(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backend = make(HostPool(pieces=20))
    assert "20 pieces per page" in caplog.text
    pool = backend.mem_pool_host
    names = [key(n) for n in range(40)]
    for page, name in enumerate(names):
        pool.fill(page, content(name, 20 * PIECE))
    assert backend.batch_set_v1(names, pool.places(*range(40))) == [True] * 40
    assert backend.batch_exists(names) == 40
    assert backend.batch_get_v1([names[7], key(99), names[8]], pool.places(50, 51, 52)) == [True, False, True]
    assert pool.content(50) == content(names[7], 20 * PIECE)
    assert pool.content(51) == b"\xee" * 20 * PIECE, "as it was"
    assert pool.content(52) == content(names[8], 20 * PIECE)
    assert pool.guards_hold()


@pytest.mark.parametrize(
    "lie",
    [
        lambda places, sizes: ([p + PIECE * 64 for p in places], sizes),
        lambda places, sizes: ([p - 64 * PIECE for p in places], sizes),
        lambda places, sizes: (places, [s + 1 for s in sizes]),
        lambda places, sizes: (places, [1 << 60 for _ in sizes]),
        lambda places, sizes: (places, [0 for _ in sizes]),
        lambda places, sizes: (places, [-s for s in sizes]),
        lambda places, sizes: ([0 for _ in places], sizes),
        lambda places, sizes: (places[:-1], sizes[:-1]),
        lambda places, sizes: (places * 2, sizes * 2),
        lambda places, sizes: (places, sizes[:-1]),
        lambda places, sizes: ([str(p) + "x" for p in places], sizes),
        lambda places, sizes: None,
    ],
)
def test_memory_outside_of_the_host_pool_is_never_touched(make: Any, lie: Any) -> None:
    backend = make()
    pool = backend.mem_pool_host
    names = stored(backend, 0, 1)
    honest = pool.get_page_buffer_meta
    before = [pool.content(page) for page in range(pool.pages)]
    pool.get_page_buffer_meta = lambda indices: lie(*honest(indices))
    assert backend.batch_get_v1(names, pool.places(5, 6)) == [False, False]
    assert backend.batch_set_v1([key(7), key(8)], pool.places(5, 6)) == [False, False]
    assert [pool.content(page) for page in range(pool.pages)] == before
    assert pool.guards_hold()
    pool.get_page_buffer_meta = honest
    assert backend.batch_exists([key(7)]) == 0


def test_arguments_of_every_kind_are_misses(make: Any) -> None:
    backend = make()
    pool = backend.mem_pool_host
    names = stored(backend, 0, 1)
    rng = random.Random(5)
    odd: list[Any] = [None, 0, -1, 1 << 70, "x", b"x", [], [None], names, {}, object(), 1.5, pool, [1, 2], names[0]]
    good: list[Any] = [names, pool.places(3, 4), names[0]]
    calls = (
        "batch_exists", "exists", "batch_get_v1", "batch_set_v1", "batch_exists_v2", "batch_get_v2", "batch_set_v2",
        "get", "batch_get", "set", "batch_set",
    )  # fmt: skip
    for _ in range(600):
        name = rng.choice(calls)
        arguments = [rng.choice(odd + good) for _ in range(rng.randint(1, 3))]
        result = getattr(backend, name)(*arguments)
        if name in ("batch_get_v1", "batch_set_v1") and isinstance(arguments[0], list):
            assert len(result) == len(arguments[0])
    for n in range(pool.pages):
        assert pool.content(n) in (content(names[0]), content(names[1]), b"\xee" * 2 * PIECE)
    assert pool.guards_hold()
    assert backend.batch_get_v1(names, pool.places(3, 4)) == [True, True], "and it still works"


def test_only_one_rank_writes_what_all_ranks_hold(make: Any, fake: FakeSidecar) -> None:
    first, second = (make(config=Config(is_mla_model=True, tp_rank=rank, tp_size=2)) for rank in (0, 1))
    names = [key(0)]
    assert second.batch_set_v1(names, second.mem_pool_host.places(0)) == [True]
    assert second.batch_set(names, [Tensor(2 * PIECE)])
    assert not list(fake.directory.iterdir())
    stored(first, 0)
    assert second.batch_get_v1(names, second.mem_pool_host.places(1)) == [True]
    assert second.mem_pool_host.content(1) == content(names[0])


def test_ranks_that_hold_shares_do_not_meet(make: Any) -> None:
    names = stored(make(config=Config(tp_rank=0, tp_size=2)), 0)
    assert make(config=Config(tp_rank=0, tp_size=2)).batch_exists(names) == 1
    for other in (Config(tp_rank=1, tp_size=2), Config(tp_size=2, pp_rank=1), Config(tp_size=2, attn_cp_rank=1)):
        assert make(config=other).batch_exists(names) == 0


def test_ranks_of_a_pod_share_its_connections(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(plugin.server, "server_argument", arguments.get)

    def each(wish: int = 4, **sizes: int) -> int:
        config = Config(extra_config={"interface_v1": 1, "connections": wish}, **sizes)
        return plugin.PoolHiCache(config, {})._connection._settings.connections

    assert (each(), each(tp_size=8), each(tp_size=8, pp_size=2), each(tp_size=64)) == (4, 4, 2, 1)
    assert each(8, tp_size=4) == 8
    arguments.update(tp_size=16, enable_dp_attention=True, dp_size=16)
    assert each(tp_size=1) == 2
    arguments.update(tp_size=1, enable_dp_attention=False, dp_size=16)
    assert each() == 2


def test_shares_of_side_pools_are_common_only_where_that_is_certain() -> None:
    class MLATokenToKVPoolHost:
        pass

    class MHATokenToKVPoolHost:
        pass

    ranks = [Config(is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    plain = [Config(tp_rank=rank, tp_size=2) for rank in (0, 1)]
    for name, pool, common in (
        ("kv", MLATokenToKVPoolHost(), True), ("draft", MLATokenToKVPoolHost(), True),
        ("draft", MHATokenToKVPoolHost(), False), ("swa", MHATokenToKVPoolHost(), False),
        ("mamba", MLATokenToKVPoolHost(), False),
    ):  # fmt: skip
        a, b = (sglang_fingerprint.rank_part(config, name, pool) for config in ranks)
        assert (a == b) is common, name
        a, b = (sglang_fingerprint.rank_part(config, name, pool) for config in plain)
        assert a != b


def test_hybrid_prefixes_follow_the_rules_of_each_pool(make: Any) -> None:
    rng = random.Random(11)
    backend = make()
    pools = {name: HostPool(page_size=size) for name, size in (("indexer", PAGE), ("swa", PAGE), ("mamba", 1))}
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, name)
    for case in range(30):
        count = rng.randint(1, 9)
        names = [key(1000 * case + n + 1) for n in range(count)]
        often = {"kv": 0.95, "indexer": 0.9, "swa": 0.7, "mamba": 0.7}
        held = {name: {n for n in range(count) if rng.random() < often[name]} for name in often}
        transfers = []
        for name, pool in (("kv", backend.mem_pool_host), *pools.items()):
            mine = sorted(held[name])
            if not mine:
                continue
            for n in mine:
                pool.fill(n, content(name + names[n]))
            if name == "kv":
                assert all(backend.batch_set_v1([names[n] for n in mine], pool.places(*mine)))
            else:
                transfers.append(Transfer(name, [names[n] for n in mine], pool.places(*mine)))
        done = backend.batch_set_v2(transfers)
        assert done == {t.name: [True] * len(t.keys or ()) for t in transfers}

        window = rng.randint(1, 3)
        policies = {"indexer": "all_pages", "swa": "trailing_pages", "mamba": "trailing_pages"}
        keys_of = {"indexer": None, "swa": ["?"] * window, "mamba": ["?"]}
        asked = [Transfer(n, keys_of[n], None, p) for n, p in policies.items() if rng.random() < 0.7]
        asked.append(Transfer("deepseek_v4_c4", None, None, "block_groups"))  # never cuts a prefix

        def fits(length: int, held: dict[str, set[int]] = held, asked: list[Transfer] = asked) -> bool:
            if not set(range(length)) <= held["kv"]:
                return False
            for t in asked[:-1]:
                size = length if t.hit_policy == "all_pages" else len(t.keys or ())
                if not set(range(max(0, length - size), length)) <= held[t.name]:
                    return False
            return True

        result = backend.batch_exists_v2(names, asked)
        lengths = [n for n in range(1, count + 1) if fits(n)]
        assert (result.restorable_prefix_pages or []) == lengths
        assert result.kv_hit_pages == max(lengths, default=0)

    window_keys = [names[n] for n in sorted(held["swa"])]
    if window_keys:
        places = pools["swa"].places(*range(20, 20 + len(window_keys)))
        got = backend.batch_get_v2([Transfer("swa", window_keys, places), Transfer("nobody", ["k"], places)])
        assert got == {"swa": [True] * len(window_keys), "nobody": [False]}
        assert pools["swa"].content(20) == content("swa" + window_keys[0])
    assert all(pool.guards_hold() for pool in pools.values())


def test_an_anchor_without_bytes_leaves_it_to_the_side_pools(make: Any) -> None:
    class Logical(HostPool):
        def __init__(self) -> None:
            super().__init__()
            self.kv_buffer = None  # type: ignore[assignment]

        def get_page_buffer_meta(self, indices: Any) -> Any:
            return None

    backend = make(Logical())
    side = HostPool()
    backend.register_mem_host_pool_v2(side, "deepseek_v4_c4")
    names = [key(n) for n in range(3)]
    assert backend.batch_exists(names) == 0
    assert backend.batch_exists_v2(names, []).kv_hit_pages == 0
    assert backend.batch_set_v1(names, side.places(0, 1, 2)) == [True] * 3
    backend.batch_set_v2([Transfer("deepseek_v4_c4", names[:2], side.places(0, 1))])
    assert backend.batch_exists_v2(names, [Transfer("deepseek_v4_c4")]).kv_hit_pages == 2


def test_threads_never_see_bytes_that_are_not_theirs(make: Any) -> None:
    pool = HostPool(64)
    backend = make(pool, keep_after_flush=True)
    ends = time.monotonic() + 20
    stop, wrong = threading.Event(), []
    loaded = [0] * 6

    def work(worker: int) -> None:
        rng = random.Random(worker)
        mine = range(worker * 10, worker * 10 + 10)
        while not stop.is_set() and time.monotonic() < ends and loaded[worker] < 60:
            names = [key(rng.randint(0, 30)) for _ in range(5)]
            for page, name in zip(mine, names, strict=False):
                pool.fill(page, content(name))
            answers = [backend.batch_set_v1(names, pool.places(*mine[:5]))]
            backend.batch_exists(names)
            got = backend.batch_get_v1(names, pool.places(*mine[5:]))
            answers.append(got)
            wrong.extend(a for a in answers if len(a) != 5)
            for page, name, ok in zip(mine[5:], names, got, strict=True):
                loaded[worker] += ok
                if ok and pool.content(page) != content(name):
                    wrong.append(name)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(0.05)
        backend.clear()
        backend.get_stats()
        backend.register_mem_host_pool_v2(HostPool(), "swa")
    for thread in threads:
        thread.join(30)
    stop.set()
    assert wrong == []
    assert sum(loaded) > 0
    assert pool.guards_hold()


def test_a_sidecar_that_hangs_holds_nobody_up(make: Any, fake: FakeSidecar) -> None:
    deadlines = {"lookup_ms": 50, "load_min_ms": 100, "store_ms": 200, "breaker_failures": 1000}
    backend = make(deadlines=deadlines)
    names = stored(backend, 0, 1)
    never = threading.Event()
    for op in (Op.LOOKUP, Op.OPEN, Op.BEGIN):
        fake.faults[op] = lambda *_: never.wait(10) or True
    try:
        places = backend.mem_pool_host.places(5, 6)
        for ask, miss in (
            (lambda: backend.batch_exists(names), 0),
            (lambda: backend.batch_get_v1(names, places), [False, False]),
            (lambda: backend.batch_set_v1([key(7), key(8)], places), [False, False]),
            (lambda: backend.batch_exists_v2(names, []).kv_hit_pages, 0),
        ):
            began = time.monotonic()
            assert ask() == miss
            assert time.monotonic() - began < 5, "ten seconds are what the sidecar takes"
    finally:
        never.set()


def test_closing_lets_go_of_what_is_under_way(make: Any, fake: FakeSidecar) -> None:
    backend = make()
    names = stored(backend, 0)
    asked, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> bool:
        asked.set()
        go_on.wait(10)
        return False

    fake.faults[Op.OPEN] = hold
    results: list[Any] = []
    places = backend.mem_pool_host.places(5)
    thread = threading.Thread(target=lambda: results.append(backend.batch_get_v1(names, places)))
    thread.start()
    assert asked.wait(5)
    backend.close()
    backend.close()
    go_on.set()
    thread.join(10)
    assert results in ([[True]], [[False]])
    assert results == [[False]] or backend.mem_pool_host.content(5) == content(names[0])
    assert backend.batch_get_v1(names, places) == [False]
    assert backend.batch_exists(names) == 0
    backend.clear()
    assert backend.batch_set_v1(names, places) == [False], "closed for good"


def test_a_flush_and_a_clear_end_the_sharing(make: Any) -> None:
    backend, other, kept = make(), make(), make(keep_after_flush=True)
    names = stored(backend, 0, 1)
    for each in (other, kept):
        assert each.batch_exists(names) == 2
        each.mem_pool_host.clear()
    assert other.batch_exists(names) == 0
    other._client.wait_connected(5)
    assert other.batch_exists(names) == 0
    assert backend.batch_exists(names) == kept.batch_exists(names) == 2
    stored(other, 0, 1)
    assert other.batch_exists(names) == 2
    assert other.stats()["fingerprint"] != backend.stats()["fingerprint"]
    kept.clear()
    kept._client.wait_connected(5)
    assert kept.batch_exists(names) == 0
    assert backend.batch_exists(names) == 2


def test_other_weights_end_the_sharing(plugin: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"weight_version": "default"}
    monkeypatch.setattr(plugin.server, "server_argument", arguments.get)
    backend = make(keep_after_flush=True)
    names = stored(backend, 0)
    assert backend.batch_exists(names) == 1
    arguments["weight_version"] = "step-1"
    assert backend.batch_get_v1(names, backend.mem_pool_host.places(1)) == [False]
    backend._client.wait_connected(5)
    assert backend.batch_exists(names) == 0
    stored(backend, 0)
    assert backend.batch_exists(names) == 1


def test_stats_are_in_sglangs_terms(make: Any) -> None:
    backend = make()
    stored(backend, 0, 1)
    backend.batch_get_v1([key(0), key(9)], backend.mem_pool_host.places(5, 6))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [2])
    assert all(speed > 0 for speed in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert backend.get_stats().backup_pgs == []


def test_without_sglang_the_message_says_what_to_do() -> None:
    code = "from kvpool.engines.sglang import PoolHiCache"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "kvpool.engines.sglang needs the HiCache storage of SGLang, which" in done.stderr
