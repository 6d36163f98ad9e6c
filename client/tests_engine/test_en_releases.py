"""Releases of SGLang and LMCache from the oldest that the plug-ins admit: their real modules, probed and configured.

What runs here is the interface and the handling of arguments; blocks are moved with the newest releases only
(test_en_sglang*.py, test_en_lmcache.py), and of LMCache by its storage manager here.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cl_nodes import until
from en_lmcache import Storage
from en_overlay import overlay

from kvpool_sidecar.commands.install_client import install_client

if TYPE_CHECKING:
    from cl_nodes import Cluster

PROGRAM = Path(__file__).parent / "release_process.py"
PLAIN = [True, "dynamic", 64]


def libraries(engine: str, version: str, home: Path) -> tuple[str, list[Path]]:
    """The Python and its folders with this release in front; the newest release needs no folder of its own."""
    python, folders = overlay(engine, home)
    if not list(folders[0].glob(f"{engine}-{version}.dist-info")):
        folders = [overlay(f"{engine}-{version}", home)[1][0], *folders]
    return python, folders


def asked(python: str, folders: list[Path], home: Path, *arguments: str) -> dict[str, Any]:
    install_client(str(home / "client"), "")
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("KVPOOL", "LMCACHE"))},
        "PYTHONPATH": os.pathsep.join(map(str, [home / "client", *folders])),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "KVPOOL_SGLANG_HICACHE": "{}",
        "KVPOOL_LMCACHE_L2": "{}",
    }
    with (home / "log").open("w+") as log:
        done = subprocess.run(
            [python, str(PROGRAM), *arguments],
            env=env, stdout=subprocess.PIPE, stderr=log, text=True, check=False, timeout=600,
        )  # fmt: skip
        log.seek(0)
        assert done.returncode == 0, log.read()[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("@@")]
    answer: dict[str, Any] = json.loads(line[2:])
    return answer


@pytest.mark.parametrize("version", ["0.5.20", "0.5.21", "0.5.22", "0.5.23"])
def test_sglangs_arguments_get_the_pool(version: str, engine_home: Path, tiny_model: Path, tmp_path: Path) -> None:
    python, folders = libraries("sglang", version, engine_home)
    answer = asked(python, folders, tmp_path, "sglang", str(tiny_model))
    assert (answer["version"], answer["problem"]) == (version, "")
    # 0.5.20 does not start where its host pools do not fit: it gets the pool with a size of the user's
    unsized = [False, None, 1, "this SGLang does not fit its host memory to the pod: set --hicache-size"]
    assert answer["plain"] == (unsized if version == "0.5.20" else PLAIN)
    assert answer["sized"] == PLAIN
    assert answer["no cache"] == [False, None, 1, "--disable-radix-cache disables caching"]
    assert answer["another storage"] == [True, "file", 1, "--hicache-storage-backend file is configured"]
    *resolved, sentence = answer["refused"]
    assert resolved == [False, None, 1]
    assert sentence.startswith("SGLang refuses its hierarchical cache with these arguments: ")


@pytest.mark.parametrize("version", ["0.5.4", "0.5.5", "0.5.6"])
def test_lmcaches_arguments_get_the_pool(version: str, engine_home: Path, cluster: Cluster, tmp_path: Path) -> None:
    python, folders = libraries("lmcache", version, engine_home)
    answer = asked(python, folders, tmp_path, "lmcache", cluster["a"].socket)
    assert answer == {
        "version": version,
        "problems": ["", ""],
        "adapters": ["PoolL2Adapter"],
        "beside": ["MockL2AdapterConfig", "PoolL2Adapter"],
        "policy": "retain",
        "healthy": False,  # its socket is not configured here
    }


@pytest.mark.parametrize("version", ["0.5.4", "0.5.5"])
def test_chunks_of_lmcaches_storage_manager_come_back(
    version: str, engine_home: Path, tiny_model: Path, cluster: Cluster, tmp_path: Path
) -> None:
    python, folders = libraries("lmcache", version, engine_home)
    tokens = [7 + n % 400 for n in range(64 * 3)]
    storages = []
    try:
        for name in "ab":
            (tmp_path / name).mkdir()
            storages.append(Storage(tmp_path / name, python, folders, tiny_model, {"socket": cluster[name].socket}))
        first, second = storages
        assert until(lambda: first.ask(stats=True)["connected"] and second.ask(stats=True)["connected"], 60)
        assert first.ask(put=tokens) == {"chunks": 3}
        assert until(lambda: second.ask(contains=tokens)["prefix"] == 3, 60)
        answer = second.ask(get=tokens)
        assert answer["got"] == answer["expected"]
    finally:
        for storage in storages:
            storage.stop()
