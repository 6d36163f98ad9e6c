"""Fixtures of the storage tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpool_sidecar.tenancy import limits as quota
from kvpool_testing.drives import make_drive

if TYPE_CHECKING:
    from kvpool_sidecar.storage.local.drive import Drive

MIB = 1 << 20


@pytest.fixture
def make(tmp_path):
    """Open drives in directories of their own, and close them at the end."""
    made = []

    def root(name="r", *, capacity=64 * MIB, scan=True, uid="u", limits=None, **kw) -> Drive:
        one = make_drive(
            "nvme", str(tmp_path / name), limits or quota.CapacityLimits(capacity, 85, 75, 1000), pool_uid=uid, **kw
        )
        made.append(one)
        if scan:
            one.scan()
        return one

    yield root
    for one in made:
        one.close()
