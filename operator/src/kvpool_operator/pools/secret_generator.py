"""The one place where a pool's random values are made."""

from __future__ import annotations

import secrets
import uuid

from kvpool_operator.desired.inputs import PoolSecret

__all__ = ["make_secret"]


def make_secret(known_pool_id: str = "") -> PoolSecret:
    """New values. `known_pool_id` (from the pool's status) keeps its directories usable when its Secret was lost."""
    return PoolSecret(
        pool_id=known_pool_id or str(uuid.uuid4()),
        pool_secret=secrets.token_hex(32),
        managed_index_password=secrets.token_urlsafe(32),
    )
