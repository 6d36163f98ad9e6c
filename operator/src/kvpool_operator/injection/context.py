"""What a family of engines is asked to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool_operator.injection.annotations import InjectionRequest
    from kvpool_operator.injection.command_line import ContainerInfo
    from kvpool_operator.injection.pod import Pod

__all__ = ["InjectionContext", "InjectionSettings"]


@dataclass(frozen=True)
class InjectionSettings:
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
class InjectionContext:
    """A copy of the pod, to be changed in place, and its engine's container."""

    pod: Pod
    container: dict[str, Any]
    reading: ContainerInfo
    wishes: InjectionRequest
    injection: InjectionSettings
    again: bool
    """An earlier pass was here: what is there is ours."""

    @property
    def words(self) -> list[str]:
        """Command and arguments."""
        return [str(w) for name in ("command", "args") for w in self.container.get(name) or []]
