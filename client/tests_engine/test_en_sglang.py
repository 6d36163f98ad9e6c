"""PoolHiCache under SGLang's real controllers, factory, host pools and hashes, with tensors on the CPU.

Two processes, each on a node of its own, hold as many controllers as the tests want. A page's bytes follow from its
key, so each process knows what it must get.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
from cl_nodes import Cluster, until
from en_sglang import PAGE, SGLang

from kvpool.protocol import block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def prompt(seed: int, pages: int = 5, more: int = 9) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 50_000 for i in range(pages * PAGE + more)]


def chain(tokens: list[int], extra: str | None, salt: str | None) -> list[str]:
    """SGLang's names of a prompt's pages, by the rule alone: each begins with the request's name space."""
    seed = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra, salt):
        seed.update(b"\0" if part is None else b"\1" + len(part.encode()).to_bytes(8, "little") + part.encode())
    before, names = seed.digest(), []
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + PAGE])
        before = hashlib.sha256(before + page).digest()
        names.append(before.hex())
    return names


@pytest.fixture(scope="module")
def engines(engine_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SGLang, SGLang]]:
    logs = tmp_path_factory.mktemp("sglang")
    made: list[SGLang] = []
    try:
        for name in "ab":
            made.append(SGLang(engine_home, logs / f"{name}.log"))
        for engine in made:
            engine.wait_ready()
        yield made[0], made[1]
    finally:
        for engine in made:
            engine.close()


def pair(engines: tuple[SGLang, SGLang], cluster: Cluster, name: str, kind: str = "mha", **options: Any) -> str:
    """A controller of this name in each process, on its node, connected."""
    for engine, node in zip(engines, "ab", strict=True):
        engine.make(name, kind, cluster[node].socket, **options)
        assert until(lambda engine=engine: engine.ask(name, stats=True)["connected"])
    return name


def store(
    cluster: Cluster, engine: SGLang, name: str, tokens: list[int], blocks: int, **options: Any
) -> dict[str, Any]:
    """Have a controller on node a store a prompt; wait until node a has told the index."""
    before = len(cluster["a"].block_files())
    answer = engine.ask(name, store=tokens, **options)
    assert answer["stored"] == len(tokens) // PAGE * PAGE
    assert until(lambda: len(cluster["a"].block_files()) == before + blocks)
    assert until(lambda: cluster["a"].announced() >= before + blocks)
    return answer


def gone(engines: tuple[SGLang, SGLang], name: str) -> None:
    for engine in engines:
        engine.ask(name, detach=True)


def test_what_one_node_stored_another_loads(cluster: Cluster, engines: tuple[SGLang, SGLang]) -> None:
    a, b = engines
    name = pair(engines, cluster, "move")
    store(cluster, a, name, prompt(1), 10)
    stats = [engine.ask(name, stats=True) for engine in engines]
    assert stats[0]["fingerprint"] == stats[1]["fingerprint"] != ""
    assert stats[0]["zero_copy"] == {"kv": True}
    assert stats[0]["metrics"]["stored"] == [10]
    got = b.ask(name, fetch=prompt(1))
    assert (got["hit"], got["completed"], got["equal"]) == (5 * PAGE, 5 * PAGE, True)
    assert b.ask(name, stats=True)["client"]["hits"] == {"peer": 10}
    own = a.ask(name, fetch=prompt(1))
    assert (own["completed"], own["equal"]) == (5 * PAGE, True)
    assert a.ask(name, stats=True)["client"]["hits"] == {"local": 10}
    longer = b.ask(name, fetch=prompt(1)[: 5 * PAGE] + prompt(2))
    assert (longer["completed"], longer["equal"]) == (5 * PAGE, True)
    gone(engines, name)


def test_salts_and_extra_keys_keep_requests_apart(cluster: Cluster, engines: tuple[SGLang, SGLang]) -> None:
    a, b = engines
    name = pair(engines, cluster, "salts")
    names = store(cluster, a, name, prompt(3), 10, salt="one")["keys"]
    assert names == chain(prompt(3), None, "one")
    for other in ({}, {"salt": "two"}, {"extra": "one"}, {"salt": "one", "extra": "x"}):
        assert b.ask(name, fetch=prompt(3), **other)["hit"] == 0
    same = b.ask(name, fetch=prompt(3), salt="one")
    assert (same["completed"], same["equal"]) == (5 * PAGE, True)
    gone(engines, name)


def test_a_truncated_block_makes_a_shorter_prefix(cluster: Cluster, engines: tuple[SGLang, SGLang]) -> None:
    a, b = engines
    name = pair(engines, cluster, "truncated")
    block_ids = store(cluster, a, name, prompt(4), 10)["block_ids"]
    victim = block_ids[2 * 3 + 1]  # the values of the fourth page
    for file in cluster["a"].block_files():
        if block.decode_header(file.read_bytes()[: block.HEADER_BYTES]).block_id.hex() == victim:
            file.chmod(0o600)
            file.write_bytes(file.read_bytes()[:-1000])
    for engine in (b, a):
        got = engine.ask(name, fetch=prompt(4))
        assert (got["completed"], got.get("equal")) == (3 * PAGE, True)
    gone(engines, name)


@pytest.mark.parametrize(
    ("layout", "zero_copy", "blocks"),
    [("page_first_direct", True, 10), ("layer_first", True, 10), ("layer_first", False, 5), ("page_first", False, 5)],
)
def test_layouts(cluster: Cluster, engines: tuple[SGLang, SGLang], layout: str, zero_copy: bool, blocks: int) -> None:
    a, b = engines
    name = pair(engines, cluster, f"{layout}{zero_copy}", layout=layout, zero_copy=zero_copy)
    seed = 100 + blocks
    pages = blocks if layout != "layer_first" or not zero_copy else 5 * 4  # two layers: four pieces per page
    store(cluster, a, name, prompt(seed), pages)
    got = b.ask(name, fetch=prompt(seed))
    assert (got["hit"], got["completed"], got["equal"]) == (5 * PAGE, 5 * PAGE, True)
    gone(engines, name)


def test_engines_that_differ_do_not_share(cluster: Cluster, engines: tuple[SGLang, SGLang]) -> None:
    a, b = engines
    name = pair(engines, cluster, "base")
    store(cluster, a, name, prompt(5), 10)
    others = [
        {"dtype": "float16"}, {"model": "tinier"}, {"layout": "page_first_direct"}, {"zero_copy": False},
        {"ranks": {"tp_size": 2}}, {"ranks": {"pp_size": 2}}, {"ranks": {"tp_rank": 1}},
    ]  # fmt: skip
    for other in others:
        b.make("other", "mha", cluster["b"].socket, **other)
        assert until(lambda: b.ask("other", stats=True)["connected"])
        assert b.ask("other", fetch=prompt(5))["hit"] == 0, other
        b.ask("other", detach=True)
    assert b.ask(name, fetch=prompt(5))["hit"] == 5 * PAGE
    gone(engines, name)


def test_of_ranks_that_hold_the_same_one_writes_and_all_read(cluster: Cluster, engines: tuple[SGLang, SGLang]) -> None:
    a, b = engines
    for engine, node, rank in ((a, "a", 0), (b, "b", 1)):
        engine.make("mla", "mla", cluster[node].socket, ranks={"tp_rank": rank, "tp_size": 2})
        assert until(lambda engine=engine: engine.ask("mla", stats=True)["connected"])
    before = len(cluster["b"].block_files())
    b.ask("mla", store=prompt(6))
    assert b.ask("mla", fetch=prompt(6))["hit"] == 0
    assert len(cluster["b"].block_files()) == before
    store(cluster, a, "mla", prompt(6), 5)
    got = b.ask("mla", fetch=prompt(6))
    assert (got["completed"], got["equal"]) == (5 * PAGE, True)
    gone(engines, "mla")


@pytest.mark.parametrize(
    ("kind", "seed", "blocks", "more", "usable"),
    [
        # the state after page 5, and after page 8
        ("mamba", 71, 5 * 2 + 2, 3 * 2 + 2, {8: 8, 7: 5, 5: 5, 4: 0}),
        # a window of pages 4 and 5, and one of 7 and 8
        ("swa", 72, 5 * 2 + 2 * 2, 3 * 2 + 2 * 2, {8: 8, 7: 5, 6: 5, 4: 0, 3: 0}),
        # all pages of a draft model
        ("draft", 73, 5 * 2 + 5 * 2, 3 * 2 + 3 * 2, {8: 8, 7: 7, 4: 4}),
    ],
)
def test_a_hybrid_models_prefix_ends_where_its_side_pool_has_what_it_needs(
    cluster: Cluster,
    engines: tuple[SGLang, SGLang],
    kind: str,
    seed: int,
    blocks: int,
    more: int,
    usable: dict[int, int],
) -> None:
    a, b = engines
    name = pair(engines, cluster, kind, kind)
    store(cluster, a, name, prompt(seed, 5, 0), blocks)
    store(cluster, a, name, prompt(seed, 8, 0), more)
    assert a.ask(name, stats=True)["zero_copy"] == {"kv": True, kind: True}
    for pages, length in usable.items():
        got = b.ask(name, fetch=prompt(seed, pages, 0))
        assert got["hit"] == got["completed"] == length * PAGE, pages
        if length:
            assert got["equal"] is got["side_equal"] is True
            assert got["side"] == {"mamba": 1, "swa": 2, "draft": length}[kind]
    gone(engines, name)


def test_after_a_flush_an_engine_shares_nothing(cluster: Cluster, engines: tuple[SGLang, SGLang]) -> None:
    a, b = engines
    name = pair(engines, cluster, "flush")
    store(cluster, a, name, prompt(8), 10)
    assert b.ask(name, fetch=prompt(8))["completed"] == 5 * PAGE
    assert b.ask(name, flush=True)["flushed"]
    assert b.ask(name, fetch=prompt(8))["hit"] == 0
    assert until(lambda: b.ask(name, stats=True)["connected"])
    assert b.ask(name, fetch=prompt(8))["hit"] == 0
    b.ask(name, store=prompt(8))
    own = b.ask(name, fetch=prompt(8))  # its own, from now on
    assert (own["completed"], own["equal"]) == (5 * PAGE, True)
    b.make("kept", "mha", cluster["b"].socket, keep_after_flush=True)
    assert until(lambda: b.ask("kept", stats=True)["connected"])
    assert b.ask("kept", flush=True)["flushed"]
    assert b.ask("kept", fetch=prompt(8))["completed"] == 5 * PAGE
    b.ask("kept", clear=True)
    assert until(lambda: b.ask("kept", stats=True)["connected"])
    assert b.ask("kept", fetch=prompt(8))["hit"] == 0
    b.ask("kept", detach=True)
    gone(engines, name)


def test_without_a_sidecar_nothing_waits(engines: tuple[SGLang, SGLang], tmp_path: Path) -> None:
    a, _ = engines
    cluster = Cluster(tmp_path, ("x",))
    try:
        a.make("alone", "mha", str(tmp_path / "nowhere.sock"))
        assert a.ask("alone", store=prompt(9))["stored"] == 0
        assert a.ask("alone", fetch=prompt(9))["hit"] == 0
        a.ask("alone", detach=True)
        a.make("fault", "mha", cluster["x"].socket)
        assert until(lambda: a.ask("fault", stats=True)["connected"])
        assert a.ask("fault", store=prompt(9))["stored"] == 5 * PAGE
        assert a.ask("fault", fetch=prompt(9))["completed"] == 5 * PAGE
        cluster["x"].stop(kill=True)
        assert a.ask("fault", fetch=prompt(9))["hit"] == 0
        assert a.ask("fault", store=prompt(10))["stored"] == 0
        cluster["x"].start()
        cluster["x"].wait_ready()
        assert until(lambda: a.ask("fault", fetch=prompt(9))["completed"] == 5 * PAGE)
        a.ask("fault", detach=True)
    finally:
        cluster.close()
