"""Labels, annotations and finalizers of the API: every name, with its meaning for the reference page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "ANNOTATION_APPLIED_HASH",
    "ANNOTATION_CONFIG_DIGEST",
    "ANNOTATION_CONNECTOR",
    "ANNOTATION_CONTAINER",
    "ANNOTATION_ENGINE",
    "ANNOTATION_INDEX_MEMORY",
    "ANNOTATION_INJECTED",
    "ANNOTATION_INJECTED_ENGINE",
    "ANNOTATION_INJECTED_REVISION",
    "ANNOTATION_INJECTION_WARNINGS",
    "ANNOTATION_POOL",
    "ANNOTATION_PREFLIGHT",
    "ANNOTATION_PREFLIGHT_SPEC",
    "ANNOTATION_RESYNC",
    "ANNOTATION_SELECTED_BY",
    "ANNOTATION_SKIP_REASON",
    "ANNOTATION_WIPED",
    "CLIENTLESS_ENGINES",
    "ENGINE_KINDS",
    "FINALIZER_CLEANUP",
    "FINALIZER_OPERATION",
    "LABEL_INJECT",
    "LABEL_POOL",
    "LABEL_POOL_NAMESPACE",
    "LABEL_RETAINED",
    "LABEL_SOCKETS",
    "METADATA_KEYS",
    "NAMESPACE_OPT_IN",
    "OPT_OUT",
    "SOCKETS_FROM_AGENT",
    "MetadataKey",
]

LABEL_INJECT: Final = "kvpool.dev/inject"
LABEL_POOL: Final = "kvpool.dev/pool"
LABEL_SOCKETS: Final = "kvpool.dev/sockets"
SOCKETS_FROM_AGENT: Final = "agent"
"""Value of LABEL_SOCKETS: the node agent, and no container of the sidecar's pod, gives it the sockets."""
LABEL_POOL_NAMESPACE: Final = "kvpool.dev/pool-namespace"
LABEL_RETAINED: Final = "kvpool.dev/retained"

ANNOTATION_POOL: Final = "kvpool.dev/pool"
ANNOTATION_CONTAINER: Final = "kvpool.dev/container"
ANNOTATION_ENGINE: Final = "kvpool.dev/engine"
ANNOTATION_CONNECTOR: Final = "kvpool.dev/connector-config"
ANNOTATION_INJECTED: Final = "kvpool.dev/injected"
ANNOTATION_INJECTED_ENGINE: Final = "kvpool.dev/injected-engine"
ANNOTATION_INJECTED_REVISION: Final = "kvpool.dev/injected-revision"
ANNOTATION_INJECTION_WARNINGS: Final = "kvpool.dev/injection-warnings"
ANNOTATION_SELECTED_BY: Final = "kvpool.dev/selected-by"
ANNOTATION_SKIP_REASON: Final = "kvpool.dev/skip-reason"
ANNOTATION_PREFLIGHT: Final = "kvpool.dev/preflight"
ANNOTATION_PREFLIGHT_SPEC: Final = "kvpool.dev/preflight-spec"
ANNOTATION_RESYNC: Final = "kvpool.dev/resync"
ANNOTATION_CONFIG_DIGEST: Final = "kvpool.dev/config-digest"
ANNOTATION_INDEX_MEMORY: Final = "kvpool.dev/index-memory"
ANNOTATION_APPLIED_HASH: Final = "kvpool.dev/applied-digest"
ANNOTATION_WIPED: Final = "kvpool.dev/wiped"

FINALIZER_CLEANUP: Final = "kvpool.dev/cleanup"
FINALIZER_OPERATION: Final = "kvpool.dev/operation"

NAMESPACE_OPT_IN: Final = ("enabled", "true")
"""Values of LABEL_INJECT on a Namespace that inject the engine pods in it."""
OPT_OUT: Final = ("disabled", "false")
"""Values of LABEL_INJECT that exclude a Pod; on a Namespace, all pods without a label of their own."""
ENGINE_KINDS: Final = ("vllm", "vllm-pd", "lmcache", "sglang", "dynamo", "none")
"""Values of ANNOTATION_ENGINE, next to `auto`, and of ANNOTATION_INJECTED_ENGINE."""
CLIENTLESS_ENGINES: Final = frozenset({"dynamo"})
"""Engine kinds that cannot use the client: they have no interface for a remote tier."""


@dataclass(frozen=True)
class MetadataKey:
    """One label, annotation or finalizer, for the reference page."""

    key: str
    kind: Literal["label", "annotation", "finalizer"]
    on: str
    """Kind of the object that carries it."""
    set_by: Literal["user", "webhook", "operator"]
    description: str


METADATA_KEYS: Final = (
    MetadataKey(
        LABEL_INJECT,
        "label",
        "Pod",
        "user",
        'Set to "true" to inject the pod when it is created, to "false" or "disabled" to exclude it from what its '
        'namespace or a pool selects. The webhook sets it to "true" on the pods that they select.',
    ),
    MetadataKey(
        LABEL_INJECT,
        "label",
        "Namespace",
        "user",
        "`enabled` injects the engine pods of the namespace when they are created; `disabled` excludes them from "
        "`spec.injection.selector` of pools. The label of a pod takes precedence.",
    ),
    MetadataKey(
        ANNOTATION_POOL,
        "annotation",
        "Namespace",
        "user",
        "Pool of the pods in the namespace that name none and that no pool selects, as on a pod.",
    ),
    MetadataKey(
        ANNOTATION_POOL,
        "annotation",
        "Pod",
        "user",
        "Pool of the pod: the name of a KVCachePool, or `namespace/name`. A name is looked up in the pod's namespace, "
        "then among the pools that allow the namespace. Without it, the webhook selects the only pool of the "
        "namespace, or the only pool that allows it. The webhook replaces it by `namespace/name`.",
    ),
    MetadataKey(
        ANNOTATION_CONTAINER,
        "annotation",
        "Pod",
        "user",
        "Name of the container that runs the engine, or several names, separated by commas. Without it, the webhook "
        "selects every container that runs an engine, also native sidecars.",
    ),
    MetadataKey(
        ANNOTATION_ENGINE,
        "annotation",
        "Pod",
        "user",
        f"Engine kind: `auto` (default), {', '.join(f'`{e}`' for e in ENGINE_KINDS)}. `none` adds only the client and "
        "its socket; `vllm-pd` is another name of `vllm`. A kind other than `auto` overrides what image and resources "
        "suggest.",
    ),
    MetadataKey(
        ANNOTATION_CONNECTOR,
        "annotation",
        "Pod",
        "user",
        "JSON merge patch (RFC 7386) for the connector configuration that the webhook adds to vLLM.",
    ),
    MetadataKey(
        ANNOTATION_PREFLIGHT,
        "annotation",
        "KVCachePool",
        "user",
        "Any new value repeats the preflight checks.",
    ),
    MetadataKey(
        ANNOTATION_INJECTED,
        "annotation",
        "Pod",
        "webhook",
        "The pod is injected. The value is a digest of what was added.",
    ),
    MetadataKey(
        ANNOTATION_INJECTED_ENGINE,
        "annotation",
        "Pod",
        "webhook",
        "Engine kind of the injected pod.",
    ),
    MetadataKey(
        ANNOTATION_INJECTED_REVISION,
        "annotation",
        "Pod",
        "webhook",
        "Digest of the pool settings that the pod was injected with. A pod whose digest differs from the current one "
        "is outdated.",
    ),
    MetadataKey(
        ANNOTATION_INJECTION_WARNINGS,
        "annotation",
        "Pod",
        "webhook",
        "What the injected pod does not get, or gets less of, and why. The operator emits it as an Event of the pod.",
    ),
    MetadataKey(
        ANNOTATION_SELECTED_BY,
        "annotation",
        "Pod",
        "webhook",
        "What selected a pod without a label of its own: `namespace`, or `pool` (`spec.injection.selector`).",
    ),
    MetadataKey(
        ANNOTATION_SKIP_REASON,
        "annotation",
        "Pod",
        "webhook",
        "Reason why the pod was not injected, and the action to take.",
    ),
    MetadataKey(
        LABEL_POOL,
        "label",
        "objects of a pool",
        "operator",
        "Name of the KVCachePool.",
    ),
    MetadataKey(
        LABEL_POOL_NAMESPACE,
        "label",
        "cluster-scoped objects of a pool",
        "operator",
        "Namespace of the KVCachePool.",
    ),
    MetadataKey(
        LABEL_SOCKETS,
        "label",
        "sidecar pods",
        "operator",
        "`agent`: the node agent passes the sockets of engine pods to this sidecar.",
    ),
    MetadataKey(
        LABEL_RETAINED,
        "label",
        "Secret",
        "operator",
        "The Secret belongs to a deleted pool with `deletionPolicy: Retain`.",
    ),
    MetadataKey(
        ANNOTATION_PREFLIGHT_SPEC,
        "annotation",
        "Pod of the preflight DaemonSet",
        "operator",
        "Digest of the part of the spec that the preflight checks depend on.",
    ),
    MetadataKey(
        ANNOTATION_RESYNC,
        "annotation",
        "DaemonSet",
        "operator",
        "Changes while a rollover is stalled, so that the DaemonSet controller evaluates its pods again.",
    ),
    MetadataKey(
        ANNOTATION_CONFIG_DIGEST,
        "annotation",
        "Pod of the sidecar DaemonSet",
        "operator",
        "Digest of the settings that require a restart of the sidecar.",
    ),
    MetadataKey(
        ANNOTATION_INDEX_MEMORY,
        "annotation",
        "StatefulSet of the index",
        "operator",
        "Memory of the managed index for entries, in bytes.",
    ),
    MetadataKey(
        ANNOTATION_APPLIED_HASH,
        "annotation",
        "objects of a pool",
        "operator",
        "Digest of the manifest that the operator applied last.",
    ),
    MetadataKey(
        ANNOTATION_WIPED,
        "annotation",
        "KVCachePool",
        "operator",
        "The blocks of the deleted pool were removed from its nodes.",
    ),
    MetadataKey(
        FINALIZER_CLEANUP,
        "finalizer",
        "KVCachePool",
        "operator",
        "Delays the deletion until the pool's objects and, with `deletionPolicy: Delete`, its blocks are removed.",
    ),
    MetadataKey(
        FINALIZER_OPERATION,
        "finalizer",
        "KVCacheOperation",
        "operator",
        "Delays the deletion until the operation is cancelled on its nodes.",
    ),
)
