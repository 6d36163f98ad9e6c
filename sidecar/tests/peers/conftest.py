"""A store, a serving node and a dialing node for the tests of peers."""

from __future__ import annotations

import pytest
from sc_tls import Far, identity

from kvpool_sidecar.peers.security import PeerSecurity
from kvpool_sidecar.storage.memory import MemoryStore
from kvpool_testing.blocks import put


@pytest.fixture
def store():
    one = MemoryStore(1 << 30)
    put(one, 1, 300_000)
    yield one
    one.close()


@pytest.fixture
def far(store):
    made = []

    def make(encryption: str = "ControlOnly", **kw) -> Far:
        made.append(Far(store, PeerSecurity(identity("b", **kw), encryption)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def near():
    made = []

    def make(encryption: str = "ControlOnly", node: str = "a", **kw) -> PeerSecurity:
        made.append(PeerSecurity(identity(node, **kw), encryption))
        return made[-1]

    yield make
    for one in made:
        one.close()
