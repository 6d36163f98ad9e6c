"""Nodes that several test modules share."""

from __future__ import annotations

import pytest
from sc_nodes import Cluster


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two nodes and an index, for tests that leave the processes as they are."""
    with Cluster(tmp_path_factory.mktemp("pair")) as c:
        yield c, c.node("a"), c.node("b")


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    """The same with a shared tier and without an index."""
    with Cluster(tmp_path_factory.mktemp("sharing"), index=False, shared=True) as c:
        yield c, c.node("a"), c.node("b")
