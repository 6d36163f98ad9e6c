"""vLLM's own tiering manager above PoolTier, for each version in the table of tested ones; versions do not share.

KVPOOL_VLLM_NEWEST is a folder with a vLLM that is newer than the table (`make test-vllm-newest`). The engines of the
others than 0.32 want a GPU.
"""

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

from kvpool.engines.tested_versions import is_tested
from kvpool.protocol import block, keys

from cl_nodes import Cluster  # isort: skip - en_engine makes it importable

SOURCES = Path(__file__).parent
NEWEST = os.environ.get("KVPOOL_VLLM_NEWEST", "")
TESTED = ["0.30", "0.31", "0.32", "0.33"]
VERSIONS = [*TESTED, *(["newest"] if NEWEST else [])]


@pytest.fixture(scope="module")
def paths(engine_home: Path) -> dict[str, list[Path]]:
    """What to put on the path for each version."""
    environment = [engine_home / "site-packages"]
    found = {"0.32": environment, "0.33": overlay("vllm-033", engine_home)[1]}
    for version, name in (("0.30", "vllm-030"), ("0.31", "vllm-031")):
        found[version] = overlay(name, engine_home, is_source_only=True)[1]
    if NEWEST:
        found["newest"] = [Path(NEWEST), *found["0.33"]]
    return found


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


def test_the_table_of_tested_versions_has_the_versions_of_this_file() -> None:
    assert [f"0.{minor}" for minor in range(100) if is_tested("vllm", f"0.{minor}.0")] == TESTED


@pytest.mark.parametrize("version", VERSIONS)
def test_its_tiering_manager_hands_blocks_over_and_another_gets_them_from_the_first_ones_node(
    version: str, cluster: Cluster, paths: dict[str, list[Path]], engine_home: Path, tmp_path: Path
) -> None:
    put = run(paths[version], engine_home, tmp_path, cluster["a"].socket, "put")
    assert version == "newest" or put["version"].startswith(f"{version}.")
    assert put["problem"] == ""
    assert put["localities"] == ["REMOTE"]
    stores = put["stats"]["stores"]
    assert stores["stored"] == 4 + (not is_tested("vllm", put["version"]))  # the self-test's
    got = run(paths[version], engine_home, tmp_path, cluster["b"].socket, "get")
    assert got["found"] == ["HIT"] * 4
    assert got["bytes"] == [65, 66, 67, 68]
    assert got["stats"]["hits"]["peer"] == 4


def test_versions_do_not_share(paths: dict[str, list[Path]], engine_home: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    alone = Cluster(tmp_path / "cluster", ("a",), index=False)
    try:
        put = run(paths["0.33"], engine_home, tmp_path, alone["a"].socket, "put")
        assert put["stats"]["stores"] == {"stored": 4}
        other = run(paths["0.32"], engine_home, tmp_path, alone["a"].socket, "get")
        assert other["found"] == ["MISS"] * 4
        assert other["fingerprint"] != put["fingerprint"]
    finally:
        alone.close()


@pytest.mark.parametrize(("version", "expected"), [("0.32", False), ("0.33", True)])
def test_a_load_that_ends_between_steps_is_seen_at_once(
    version: str, expected: bool, cluster: Cluster, paths: dict[str, list[Path]], engine_home: Path, tmp_path: Path
) -> None:
    """0.33 polls a tier that tolerates it from a thread of its own; 0.32 waits for the next step."""
    run(paths[version], engine_home, tmp_path, cluster["a"].socket, "put")
    got = run(paths[version], engine_home, tmp_path, cluster["b"].socket, "idle")
    assert got["idle"] is expected
    assert got["bytes"] == [65, 66, 67, 68]


@pytest.mark.parametrize("version", TESTED)
def test_a_request_of_either_version_tells_its_salt(
    version: str, paths: dict[str, list[Path]], engine_home: Path, tmp_path: Path
) -> None:
    (tmp_path / "cluster").mkdir()
    salting = Cluster(tmp_path / "cluster", ("a",), index=False, salt_tags=True)
    try:
        put = run(paths[version], engine_home, tmp_path, salting["a"].socket, "put", "red")
        assert put["stats"]["stores"] == {"stored": 4}
        headers = [block.decode_header(f.read_bytes()[: block.HEADER_BYTES]) for f in salting["a"].block_files()]
        secret = (salting.secret / "pool-secret").read_text().encode()
        (tag,) = {header.salt_tag for header in headers}
        assert tag == keys.salt_tag(keys.salt_key(secret, headers[0].tenant_tag), keys.salt_digest("red"))
    finally:
        salting.close()
