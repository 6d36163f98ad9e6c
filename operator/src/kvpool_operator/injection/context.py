"""What a family of engines is asked to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool_operator.injection.annotations import Wishes
    from kvpool_operator.injection.command_line import Reading
    from kvpool_operator.injection.pod import Pod

__all__ = ["Injection", "Target"]


@dataclass(frozen=True)
class Injection:
    """Everything that does not depend on the pod: of the pool, and of this installation."""

    pool: str
    """namespace/name"""
    block_tokens: int
    host_memory_bytes: int
    client_config: str
    sidecar_image: str
    image_pull_policy: str = "IfNotPresent"
    kvbm_host_bytes: int = 4 * 2**30
    kvbm_disk_bytes: int = 16 * 2**30


@dataclass(frozen=True)
class Target:
    """A copy of the pod, to be changed in place, and its engine's container."""

    pod: Pod
    container: dict[str, Any]
    reading: Reading
    wishes: Wishes
    injection: Injection
    again: bool
    """An earlier pass was here: what is there is ours."""

    @property
    def words(self) -> list[str]:
        """Command and arguments."""
        return [str(w) for name in ("command", "args") for w in self.container.get(name) or []]
