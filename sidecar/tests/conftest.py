"""Fixtures of the sidecar's tests."""

from __future__ import annotations

import pytest
from sc_nodes import Cluster


@pytest.fixture
def cluster(tmp_path):
    """A factory: `cluster(shared=True)`; everything it started is ended."""
    made = []

    def make(**kw) -> Cluster:
        directory = tmp_path / f"cluster-{len(made)}"
        directory.mkdir()
        made.append(Cluster(directory, **kw))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()
