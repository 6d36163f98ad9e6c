"""Input of the engine injectors."""

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
    """Settings of the pool and of the installation, equal for all pods."""

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
    """Copy of the pod, which injectors modify in place, with its engine container."""

    pod: Pod
    container: dict[str, Any]
    info: ContainerInfo
    request: InjectionRequest
    settings: InjectionSettings
    is_reinvocation: bool
    """An earlier invocation injected the pod: existing settings are from it."""
    engines: int = 1
    """Number of containers of the pod whose host tiers share the memory limit of the pod."""
