"""The fixtures of sidecar/tests, for tests of several nodes that take longer (make test-drain)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


@pytest.fixture
def cluster(tmp_path):
    """A factory: `cluster(shared=True)`; everything it started is ended."""
    from sc_nodes import Cluster

    made = []

    def make(**kw) -> Cluster:
        directory = tmp_path / f"cluster-{len(made)}"
        directory.mkdir()
        made.append(Cluster(directory, **kw))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()
