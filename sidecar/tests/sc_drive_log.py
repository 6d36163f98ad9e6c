"""Events of a drive, collected for tests."""

from __future__ import annotations

from kvpool_sidecar.blocks.events import BlockEvents, BlocksRemoved, DriveIncident


class Log(BlockEvents):
    def __init__(self) -> None:
        super().__init__()
        self.keys: list[bytes] = []
        self.counts: dict[str, int] = {}
        self.subscribe(BlocksRemoved, lambda event: self.keys.extend(event.block_keys))
        self.subscribe(DriveIncident, self._count)

    def _count(self, event: DriveIncident) -> None:
        self.counts[event.kind] = self.counts.get(event.kind, 0) + event.occurrences
