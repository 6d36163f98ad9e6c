"""Sends the requests of an operation to sidecars and records their results."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool_operator.errors import SidecarRejectedError, SidecarUnavailableError
from kvpool_operator.operations.state import NodeResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool_operator.desired.inputs import PoolSecret
    from kvpool_operator.operations.state import OperationState
    from kvpool_operator.sidecars.admin_client import SidecarAdminClient
    from kvpool_operator.sidecars.operation import SidecarAddress

__all__ = ["OperationExecutor"]


class OperationExecutor:
    """Runs steps on sidecars. The id of a request is `UID-STEP`, so that starting it twice starts it once."""

    def __init__(self, admin_client: SidecarAdminClient) -> None:
        self._admin_client = admin_client

    async def run(
        self, uid: str, state: OperationState, secret: PoolSecret, sidecars: Sequence[SidecarAddress]
    ) -> None:
        """Start or poll the current step on each sidecar that has not finished it, and record the results."""
        requests = state.requests(sidecars)
        await asyncio.gather(*(self._run_one(uid, state, secret, number, to) for number, to in requests))

    async def cancel(
        self, uid: str, state: OperationState, secret: PoolSecret, sidecars: Sequence[SidecarAddress]
    ) -> bool:
        """Cancel every step on every sidecar that can be reached; whether all of them confirmed it."""

        async def cancel_one(number: int, to: SidecarAddress) -> bool:
            try:
                await self._admin_client.cancel(secret, to, f"{uid}-{number}")
            except (SidecarUnavailableError, SidecarRejectedError):
                return False
            return True

        requests = [(n, to) for n in range(len(state.steps)) for to in sidecars if to.address]
        return all(await asyncio.gather(*(cancel_one(number, to) for number, to in requests)))

    async def _run_one(
        self, uid: str, state: OperationState, secret: PoolSecret, number: int, to: SidecarAddress
    ) -> None:
        step = state.steps[number]
        name = f"{uid}-{number}"
        previous = state.node_results.get((number, to.node), NodeResult())
        try:
            progress = None
            if previous.progress is not None:
                progress = await self._admin_client.poll(secret, to, name)
            earlier = previous.earlier
            if progress is None:  # not started yet, or the sidecar restarted since
                counts = previous.progress.counts if previous.progress is not None else {}
                earlier = _sum(previous.earlier, counts)
                progress = await self._admin_client.start(secret, to, name, step.kind, step.params)
        except SidecarUnavailableError as e:
            result = replace(previous, problem=str(e), unanswered=previous.unanswered + 1)
        except SidecarRejectedError as e:
            result = NodeResult(problem=str(e), is_final=True)
        else:
            result = NodeResult(progress, earlier=earlier)
        state.node_results[number, to.node] = result


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(one) + Counter(other))
