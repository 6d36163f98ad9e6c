"""Operation `warm`: copy the pool's most popular blocks from peers, as a joining node does.

Parameters: `bytes_per_s`. Counts: blocks and bytes copied; `full`: 1 if the space ran out. It never evicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.errors import ProtocolError, RefusedError
from kvpool.protocol.block import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvpool_sidecar.admin.context import Context
    from kvpool_sidecar.replication.warm_up import WarmUp

__all__ = ["Warm"]


class Warm:
    """Operation `warm`."""

    def __init__(self, warm_up: WarmUp | None) -> None:
        self._warm_up = warm_up

    def __call__(self, params: Mapping[str, object], context: Context) -> Mapping[str, int]:
        rate = params.get("bytes_per_s")
        if params.keys() != {"bytes_per_s"} or isinstance(rate, bool) or not isinstance(rate, int) or rate <= 0:
            raise ProtocolError("warm: bytes_per_s (a number above 0) is required, and nothing else is allowed")
        if self._warm_up is None:
            raise RefusedError("the pool does not record popular blocks; set spec.cache.warmUp.bandwidth above 0")
        context.count("blocks", 0)
        context.count("bytes", 0)

        def stored(payload_len: int) -> None:
            context.count("blocks")
            context.count("bytes", HEADER_BYTES + payload_len)

        was_full = self._warm_up.run_once(
            rate, context.cancelled, stored, lambda done, total: context.set_progress(done, total, "blocks")
        )
        return {"full": 1} if was_full else {}
