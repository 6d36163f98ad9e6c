"""Whatever is wrong with the client, SGLang's and LMCache's servers start and serve, and one sentence says why.

Most faults end where the servers read their arguments, so they meet the engine's own code there, in one process each;
those that come later meet whole servers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cl_nodes import until
from en_cases import Cases
from en_client import client_copy
from en_lmcache import Server, plain_environment
from en_overlay import overlay
from en_sglang_server import PAGE, SGLangServer
from en_talk import words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cl_nodes import Cluster

SGLANG = "import sglang.srt.mem_cache.hicache_storage as m"
LMCACHE_API = "import lmcache.v1.distributed.api as m"
LMCACHE = "import lmcache.v1.distributed.l2_adapters.base as m"
ABSTRACT = """
def evict(self): ...
evict.__isabstractmethod__ = True
m.{0}.evict = evict
m.{0}.__abstractmethods__ = m.{0}.__abstractmethods__ | {{"evict"}}
"""
RAISING = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "kvpool.engines.{0}":
            raise RuntimeError("planted")
sys.meta_path.insert(0, Finder())
"""
OTHER_GRAMMAR = "(\nmatch x:  # the grammar of another Python"


@pytest.fixture(scope="module")
def cases(engine_home: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cases]]:
    made = {}
    for engine, arguments in (("sglang", [str(tiny_model)]), ("lmcache", [])):
        folder = tmp_path_factory.mktemp(engine)
        python, folders = overlay(engine, engine_home)
        command = [python, str(Path(__file__).parent / "server_case_process.py"), engine, *arguments]
        made[engine] = Cases(command, plain_environment(folder, folders), folder / "log")
    yield made
    for one in made.values():
        one.close()


@pytest.mark.parametrize(("engine", "found"), [("sglang", [True, "dynamic"]), ("lmcache", ["PoolL2Adapter"])])
def test_a_server_gets_the_pool_where_nothing_is_wrong(
    cases: dict[str, Cases], tmp_path: Path, engine: str, found: list[Any]
) -> None:
    assert cases[engine].ask(path=str(client_copy(tmp_path / "client"))) == {"found": found, "said": []}


@pytest.mark.parametrize(
    ("engine", "case", "word"),
    [
        ("sglang", {"sabotage": f"{SGLANG}; del m.PoolTransferResult"}, "imported: ImportError"),
        ("sglang", {"sabotage": f"{SGLANG}; del m.PoolHitPolicy"}, "PoolHitPolicy is missing"),
        ("sglang", {"sabotage": f"{SGLANG}\n{ABSTRACT.format('HiCacheStorage')}"}, "evict is new and abstract"),
        ("sglang", {"sabotage": f"{SGLANG}\nm.HiCacheStorage.get = lambda self, a, b: 0"}, "other parameters"),
        ("sglang", {"sabotage": RAISING.format("sglang.storage")}, "imported: RuntimeError"),
        ("sglang", {"variable": '{"page_size": "many"}'}, "KVPOOL_SGLANG_HICACHE"),
        ("lmcache", {"sabotage": f"{LMCACHE_API}; del m.KeyListPage"}, "created: ImportError"),
        ("lmcache", {"sabotage": f"{LMCACHE}\n{ABSTRACT.format('L2AdapterInterface')}"}, "evict"),
        ("lmcache", {"sabotage": RAISING.format("lmcache.l2_adapter")}, "created: RuntimeError"),
        ("lmcache", {"variable": '{"type": "disk"}'}, "KVPOOL_LMCACHE_L2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_server_starts_with_the_users_arguments(
    cases: dict[str, Cases], tmp_path: Path, engine: str, case: dict[str, Any], word: str
) -> None:
    answer = cases[engine].ask(path=str(client_copy(tmp_path / "client")), **case)
    assert answer["found"] == WITHOUT[engine], answer
    (sentence,) = answer["said"]
    assert word in sentence


WITHOUT: dict[str, list[Any]] = {"sglang": [False, None], "lmcache": []}


@pytest.mark.parametrize(
    ("engine", "damage", "sentences"),
    [
        ("sglang", {"sglang__pages": "(truncated"}, 1),
        ("sglang", {"without": "engines/sglang/connection.py"}, 1),
        ("sglang", {"sglang__guard": OTHER_GRAMMAR}, 1),
        # what reports is damaged itself: the log has it, and the operator sees a pod that never connects
        ("sglang", {"without": "engines/common/without_pool.py"}, 0),
        ("sglang", {"startup": "(truncated"}, 0),
        ("lmcache", {"lmcache__inventory": "(truncated"}, 1),
        ("lmcache", {"without": "engines/lmcache/guard.py"}, 1),
        ("lmcache", {"common__tasks": OTHER_GRAMMAR}, 1),
        ("lmcache", {"startup": "(truncated"}, 0),
    ],
)
def test_a_damaged_client_does_not_keep_a_server_from_starting(
    cases: dict[str, Cases], tmp_path: Path, engine: str, damage: dict[str, str], sentences: int
) -> None:
    answer = cases[engine].ask(path=str(client_copy(tmp_path / "client", **damage)))
    assert answer.get("found") == WITHOUT[engine], answer
    assert len(answer["said"]) == sentences


def sentences(cluster: Cluster, node: str) -> list[str]:
    return [row["problem"] for row in cluster[node].status()["engine_problems"]]


def test_sglangs_server_serves(cluster: Cluster, engine_home: Path, tiny_model: Path, tmp_path: Path) -> None:
    planted: dict[str, dict[str, str]] = {
        "setup": {"sglang__connection": "\nPoolConnection.connect = lambda *_: [][0]\n"},
        "alone": {},
    }
    sockets = {"setup": cluster["a"].socket, "alone": str(tmp_path / "kv.sock")}
    servers: dict[str, SGLangServer] = {}
    try:
        for name, texts in planted.items():
            (tmp_path / name).mkdir()
            client = client_copy(tmp_path / name / "client", **texts)
            servers[name] = SGLangServer(engine_home, tiny_model, tmp_path / name, sockets[name], client)
        text = words(7300, 5 * PAGE + 3)
        answers = []
        for server in servers.values():
            server.wait_ready()
            answers += [server.generate(text)["tokens"] for _ in range(2)]
        assert all(answer == answers[0] for answer in answers)
        assert until(lambda: sentences(cluster, "a") == ["the setup failed; see the engine's log"])
        assert "cannot connect to the sidecar of this node" in servers["alone"].log.read_text()
    finally:
        for server in servers.values():
            server.stop()


def test_lmcaches_server_serves(cluster: Cluster, engine_home: Path, tmp_path: Path) -> None:
    planted: dict[str, dict[str, str]] = {
        "import": {"lmcache__l2_adapter": "\nraise RuntimeError('planted')\n"},
        "created": {"lmcache__l2_adapter": "\nPoolL2Adapter.__init__ = lambda *_, **__: [][0]\n"},
        "alone": {},
    }
    sockets = {"import": cluster["a"].socket, "created": cluster["b"].socket, "alone": str(tmp_path / "kv.sock")}
    python, folders = overlay("lmcache", engine_home)
    servers: dict[str, Server] = {}
    try:
        for name, texts in planted.items():
            (tmp_path / name).mkdir()
            client = client_copy(tmp_path / name / "client", **texts)
            params = {"socket": sockets[name]}
            servers[name] = Server(tmp_path / name, python, [*folders, engine_home / "testing"], params, client)
        for name, server in servers.items():
            server.wait_ready()
            server.forget()
            assert len(server.get("/status")["storage_manager"]["l2_adapters"]) == (name == "alone")
        problem = "the adapter cannot be created"
        assert until(lambda: f"{problem}: RuntimeError" in sentences(cluster, "a"))
        assert until(lambda: f"{problem}: IndexError" in sentences(cluster, "b"))
    finally:
        for server in servers.values():
            server.stop()
