"""vLLM 0.33, whose engine wants a GPU: its own tiering manager above PoolTier, and that versions do not share."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import xxhash
from en_engine import ROOT
from en_overlay import overlay

from kvpool.protocol import block, keys

from cl_nodes import Cluster  # isort: skip - en_engine makes it importable

SOURCES = Path(__file__).parent


@pytest.fixture(scope="module")
def paths(engine_home: Path) -> dict[str, list[Path]]:
    """What to put on the path for each version."""
    _, both = overlay("vllm-033", engine_home)
    return {"0.33": both, "0.32": both[1:]}


def run(paths: list[Path], home: Path, aside: Path, *arguments: str) -> dict[str, Any]:
    (aside / "xxhash").exists() or (aside / "xxhash").symlink_to(Path(xxhash.__file__).parent)
    path = [str(ROOT / "client/src"), str(aside), *map(str, paths)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL")}
    env |= {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [(home / "interpreter").read_text().strip(), str(SOURCES / "tiering_process.py"), *arguments],
        env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    lines = [line[2:] for line in done.stdout.splitlines() if line.startswith("@@")]
    assert len(lines) == 1, (done.stdout + done.stderr)[-4000:]
    answer: dict[str, Any] = json.loads(lines[0])
    return answer


def test_its_tiering_manager_hands_blocks_over_and_another_gets_them_from_the_first_ones_node(
    cluster: Cluster, paths: dict[str, list[Path]], engine_home: Path, tmp_path: Path
) -> None:
    put = run(paths["0.33"], engine_home, tmp_path, cluster["a"].socket, "put")
    assert put["version"].startswith("0.33.")
    assert put["localities"] == ["REMOTE"]
    assert put["stats"]["stores"] == {"stored": 4}
    got = run(paths["0.33"], engine_home, tmp_path, cluster["b"].socket, "get")
    assert got["found"] == ["HIT"] * 4
    assert got["bytes"] == [65, 66, 67, 68]
    assert got["stats"]["hits"] == {"peer": 4}
    other = run(paths["0.32"], engine_home, tmp_path, cluster["b"].socket, "get")
    assert other["version"].startswith("0.32.")
    assert other["found"] == ["MISS"] * 4
    assert other["fingerprint"] != got["fingerprint"]


@pytest.mark.parametrize("version", ["0.33", "0.32"])
def test_a_request_of_either_version_tells_its_salt(
    version: str, paths: dict[str, list[Path]], engine_home: Path, tmp_path: Path
) -> None:
    (tmp_path / "cluster").mkdir()
    salting = Cluster(tmp_path / "cluster", ("a",), index=False, salt_tags=True)
    try:
        put = run(paths[version], engine_home, tmp_path, salting["a"].socket, "put", "red")
        assert put["version"].startswith(version)
        assert put["stats"]["stores"] == {"stored": 4}
        headers = [block.decode_header(f.read_bytes()[: block.HEADER_BYTES]) for f in salting["a"].block_files()]
        secret = (salting.secret / "pool-secret").read_text().encode()
        (tag,) = {header.salt_tag for header in headers}
        assert tag == keys.salt_tag(keys.salt_key(secret, headers[0].tenant_tag), keys.salt_digest("red"))
    finally:
        salting.close()
