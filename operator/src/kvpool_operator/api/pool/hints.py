"""spec.hints of a KVCachePool: what sessions may say of their blocks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvpool_operator.api import fields as f  # noqa: TC001  read by pydantic
from kvpool_operator.api.model import Model

__all__ = ["Hints"]


class Hints(Model):
    """Session hints: engines, gateways and orchestrators report that a session has ended or when it continues. A hint
    changes which blocks are evicted first and what is read ahead; never what a block contains, how long it may live, or
    who may read it."""

    enabled: bool = True
    """true: sidecars accept hints. Each tenant then has an eviction order of its own on every drive, so that its hints
    change the order of its own blocks only; on a full drive, the tenant with the highest usage loses blocks first. A
    starting sidecar reads the header of each block. Hints have an effect with cache.eviction.policy PrefixAware. The
    Secret NAME-hints has the token of POST /hints: only routers and gateways that may release sessions should have
    it."""
    share: Annotated[int, Field(ge=0, le=100)] = 25
    """Percent of a tenant's bytes on a drive that its sessions may expect to use again. A larger share lets a tenant
    keep more of what it announces, at the expense of its other blocks. 0: sessions can only report that they have
    ended."""
    max_keep: f.KeepTime = "1h"
    """Longest time for which a session's announcement counts, such as 1h. A longer one is shortened to it."""
    token_revision: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Change the number to create a new token of POST /hints. The previous one is rejected as soon as the sidecars have
    the new configuration."""
