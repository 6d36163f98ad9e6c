"""spec.injection of a KVCachePool: which pods are injected, and settings of their engines."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from kvpool_operator.api import fields as f
from kvpool_operator.api.model import LabelSelector, Model, section
from kvpool_operator.api.rules import Rule, with_rules

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


SELECTOR_CHOOSES: Final = Rule(
    "!has(self.selector) || (has(self.selector.matchLabels) && size(self.selector.matchLabels) > 0) || "
    "(has(self.selector.matchExpressions) && size(self.selector.matchExpressions) > 0)",
    "give injection.selector at least one label or expression: an empty one would select every pod",
)
SELECTOR_NEEDS_NAMESPACES: Final = Rule(
    "!has(self.selector) || (has(self.allowedNamespaces) && has(self.allowedNamespaces.from) && "
    "self.allowedNamespaces.from != 'All')",
    "give allowedNamespaces.from: Same or Selector together with injection.selector, so that it selects no pods of "
    "other teams",
)


class InjectionSpec(Model):
    """Injection of engine pods: those with the label kvpool.dev/inject: "true", those in namespaces with the label
    kvpool.dev/inject: enabled, and those that `selector` selects."""

    model_config = ConfigDict(json_schema_extra=with_rules(SELECTOR_CHOOSES, SELECTOR_NEEDS_NAMESPACES))

    enabled: bool = True
    """false: new pods start without the pool. Running pods are not changed."""
    allowed_namespaces: AllowedNamespaces = section(AllowedNamespaces)
    """Namespaces whose pods can use the pool."""
    selector: LabelSelector | None = None
    """Labels of pods that are injected without a label or annotation of KVPool, in the allowed namespaces. For engines
    whose pod templates cannot be edited. It requires allowedNamespaces.from: Same or Selector. A pod's own annotation
    kvpool.dev/pool takes precedence, the label kvpool.dev/inject: disabled on a pod or its namespace excludes it, and a
    pod that two pools select is not injected."""
    watchdog: Literal["Report", "Restart"] = "Report"
    """Handling of pods that run without the pool, because the webhook was unavailable or nothing selected them when
    they were created, or with an outdated client or configuration. Report: the status counts them, and each gets an
    Event. Restart: they are also evicted, so that their owners recreate them: one at a time, at most a tenth of an
    owner's pods at a time (at least one), within PodDisruptionBudgets, and never pods of Jobs. Restart requires the
    chart value operator.restartPods."""
    restart_every: f.RestartPause = "1m"
    """Minimum time between two evictions for this pool, such as 1m."""
    vllm: VllmInjection = section(VllmInjection)
    """Settings of injected vLLM engines."""
    dynamo: DynamoInjection = section(DynamoInjection)
    """Settings of engines with Dynamo's block manager (KVBM)."""

    @model_validator(mode="after")
    def _selects(self) -> InjectionSpec:
        chosen = self.selector
        SELECTOR_CHOOSES.check(chosen is None or bool(chosen.match_labels or chosen.match_expressions))
        SELECTOR_NEEDS_NAMESPACES.check(chosen is None or self.allowed_namespaces.from_ != "All")
        return self
