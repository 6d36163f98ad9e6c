"""vLLM's own tests of its tiers, not changed, with PoolTier in the place of its file system tier.

upstream/failures.toml names each test that fails and why. The list only shrinks: a test that fails and is not on it, or
is on it and passes, or is not there at all, is an error.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import iniconfig
import pluggy
import py
import pygments
import pytest
import tomllib
import xxhash
from cl_nodes import Cluster
from en_engine import ROOT
from en_overlay import overlay
from en_upstream import PINS, upstream_tests

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = "tests/v1/kv_offload/tiering"
# other tiers, and a thread of the manager whose tests have limits of milliseconds: PoolTier has no part in them
ALONGSIDE = ("p2p", "test_kvcr_tier.py", "test_obj_tier.py", "test_tier_poll_thread.py")
TOOLS = (pytest, iniconfig, pluggy, py, pygments, xxhash)  # the engine's environment has none of them


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("upstream"), ("a",), index=False)
    yield cluster
    cluster.close()


def run(version: str, node: Cluster, home: Path, aside: Path) -> dict[str, tuple[str, str]]:
    """Outcome and reason of each test, by its name without the directory."""
    for tool in TOOLS:
        place = Path(str(tool.__file__))
        place = place.parent if place.name == "__init__.py" else place
        (aside / place.name).symlink_to(place)
    (aside / "_pytest").symlink_to(Path(str(pytest.__file__)).parent.parent / "_pytest")
    tests = upstream_tests(version)
    _, both = overlay("vllm-033", home)
    engine = both if version == "0.33" else both[1:]
    report = aside / "report.jsonl"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVPOOL", "PYTEST"))} | {
        "PYTHONPATH": os.pathsep.join(map(str, [aside, ROOT / "client/src", PINS, *engine, tests])),
        "PYTHONWARNINGS": "ignore",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "KVPOOL_UPSTREAM_SOCKET": node["a"].socket,
        "KVPOOL_UPSTREAM_BLOCKS": str(node["a"].home / "nvme" / "blocks"),
        "KVPOOL_UPSTREAM_SECRET": str(node.secret / "pool-secret"),
        "KVPOOL_UPSTREAM_TENANT": "team",
        "KVPOOL_UPSTREAM_REPORT": str(report),
    }
    ignored = [f"--ignore={TESTS}/{name}" for name in ALONGSIDE]
    options = ["-q", "-p", "kvpool_upstream", "-p", "no:cacheprovider", f"--basetemp={aside / 'tests'}", *ignored]
    done = subprocess.run(
        [(home / "interpreter").read_text().strip(), "-m", "pytest", *options, TESTS],
        cwd=tests, env=env, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), (done.stdout + done.stderr)[-4000:]
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    return {line["test"].removeprefix(f"{TESTS}/"): (line["outcome"], line["reason"]) for line in lines}


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_vllms_tests_of_its_file_system_tier_fail_only_where_that_is_explained(
    version: str, node: Cluster, engine_home: Path, tmp_path: Path
) -> None:
    outcomes = run(version, node, engine_home, tmp_path)
    listed = tomllib.loads((PINS / "failures.toml").read_text())
    explained = {
        test: entry["why"] for entry in listed["failure"] if version in entry["vllm"] for test in entry["tests"]
    }
    assert all(explained.values())
    failed = {test for test, (outcome, _) in outcomes.items() if outcome == "failed"}
    assert failed - set(explained) == set(), "failures that the list does not explain"
    assert set(explained) - failed == set(), "tests of the list that do not fail: remove them"
    skips = {reason for outcome, reason in outcomes.values() if outcome == "skipped"}
    assert skips <= set(listed["skips"])
    assert outcomes["test_fs_tier.py::test_fs_tier_cross_tp_round_trip"][0] == "passed"
    ours = [outcome for test, (outcome, _) in outcomes.items() if test.startswith("test_fs_tier.py")]
    assert ours.count("passed") >= listed["passed"][version]
