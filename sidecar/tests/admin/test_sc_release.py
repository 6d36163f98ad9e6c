"""Operation `release`: a session that an administrator names by its digest has ended on this node."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from kvpool.config import HintsConfig
from kvpool.errors import ProtocolError
from kvpool.protocol.hint import Hint, HintKind, session_digest, session_tag
from kvpool_sidecar.admin.context import Context
from kvpool_sidecar.admin.release import Release
from kvpool_sidecar.counters import Stats
from kvpool_sidecar.replication.session_hints import SessionHints
from kvpool_sidecar.storage.local.store import LocalStore
from kvpool_sidecar.tenancy.identity import Tenant
from kvpool_sidecar.tenancy.limits import CapacityLimits
from kvpool_testing.blocks import header, payload, write
from kvpool_testing.drives import make_drive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = b"a secret of this test, long enough"
TEAM = Tenant(SECRET, "team")
IDS = (b"1" * 32, b"2" * 32)


@pytest.fixture
def hints(tmp_path: Path) -> Iterator[SessionHints]:
    """Hints of a node that has two blocks of a session."""
    store = LocalStore([make_drive("nvme", str(tmp_path), CapacityLimits(1 << 28, 85, 75, 1000))])
    store.drives[0].scan()
    for n, block_id in enumerate(IDS):
        data = payload(n, 20_000)
        pending = store.begin(TEAM.block_key(block_id), len(data))
        assert pending is not None
        its = {"block_key": TEAM.block_key(block_id), "block_id": block_id, "tenant_tag": TEAM.tag}
        head = dataclasses.replace(header(n, data), **its)
        write(pending, head, data)
        pending.commit()
    yield SessionHints(HintsConfig, store, Stats())
    store.close()


def released(hints: SessionHints, tenant: str, session: str) -> dict[str, int]:
    context = Context()
    Release(SECRET, hints)({"tenant": tenant, "session": session_digest(session).hex()}, context)
    return context.counts


def test_a_known_session_is_released_and_no_other(hints: SessionHints):
    assert released(hints, "team", "run-42") == {"releasedBlocks": 0, "knownSessions": 0}
    tag = session_tag(TEAM.session_key, session_digest("run-42"))
    assert hints.apply(TEAM, Hint(HintKind.TURN, tag, 0, IDS)).blocks == 2
    assert released(hints, "other", "run-42") == {"releasedBlocks": 0, "knownSessions": 0}
    assert released(hints, "team", "run-42") == {"releasedBlocks": 2, "knownSessions": 1}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"tenant": "team"},
        {"tenant": "", "session": "ab" * 32},
        {"tenant": "team", "session": "run-42"},
        {"tenant": "team", "session": "AB" * 32},
        {"tenant": "team", "session": "ab" * 32, "all": True},
        {"tenant": 7, "session": "ab" * 32},
    ],
)
def test_parameters_that_name_no_session_are_refused(hints: SessionHints, params: dict[str, object]):
    with pytest.raises(ProtocolError):
        Release(SECRET, hints)(params, Context())
