"""spec.injection of a KVCachePool: which pods are injected, and settings of their engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from kvpool_operator.api import fields as f
from kvpool_operator.api.model import LabelSelector, Model, section
from kvpool_operator.api.rules import with_rules

__all__ = ["AllowedNamespaces", "InjectionSpec"]


class AllowedNamespaces(Model):
    """Namespaces whose pods can use the pool. Tenants stay isolated: no namespace finds the blocks of another one."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.SELECTOR_FITS_FROM))

    from_: Annotated[Literal["Same", "All", "Selector"], Field(alias="from")] = "All"
    """All: every namespace. Same: the namespace of the pool. Selector: the namespace of the pool and those that match
    `selector`."""
    selector: LabelSelector | None = None
    """Labels of the namespaces, for `from: Selector`."""

    @model_validator(mode="after")
    def _fits(self) -> AllowedNamespaces:
        f.SELECTOR_FITS_FROM.check((self.from_ == "Selector") == (self.selector is not None))
        return self


class VllmInjection(Model):
    """Settings of injected vLLM engines."""

    host_memory: f.HostMemory = "4Gi"
    """Host memory of vLLM's CPU tier above the pool, per engine, such as 4Gi. It counts toward the memory limits of the
    container and of the pod; an engine with a small limit gets less."""


class DynamoInjection(Model):
    """Settings of engines with Dynamo's block manager (KVBM), which keeps blocks on their node and shares none."""

    host_memory: f.HostMemory = "4Gi"
    """Host memory of KVBM's CPU tier, per engine, such as 4Gi. It should be larger than the KV cache of the device, and
    counts toward the memory limit of the container."""
    disk_cache: f.DiskCache = "16Gi"
    """Size of KVBM's private file on the node, per engine, such as 16Gi; larger than hostMemory. It counts toward the
    pod's ephemeral storage unless the pod mounts a volume at /var/lib/kvpool-kvbm. 0 disables the file."""


class InjectionSpec(Model):
    """Injection of pods with the label kvpool.dev/inject: "true"."""

    enabled: bool = True
    """false: new pods start without the pool. Running pods are not changed."""
    allowed_namespaces: AllowedNamespaces = section(AllowedNamespaces)
    """Namespaces whose pods can use the pool."""
    watchdog: Literal["Report", "Restart"] = "Report"
    """Handling of pods that run without the pool, because the webhook was unavailable when they were created, or with
    an outdated client or configuration. Report: the status counts them, and each gets an Event. Restart: they are also
    evicted, so that their owners recreate them: one at a time, at most a tenth of an owner's pods at a time (at
    least one), within PodDisruptionBudgets, and never pods of Jobs. Restart requires the chart value
    operator.restartPods."""
    restart_every: f.RestartPause = "1m"
    """Minimum time between two evictions for this pool, such as 1m."""
    vllm: VllmInjection = section(VllmInjection)
    """Settings of injected vLLM engines."""
    dynamo: DynamoInjection = section(DynamoInjection)
    """Settings of engines with Dynamo's block manager (KVBM)."""
