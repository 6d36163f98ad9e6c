"""Codes about engine pods: selection, injection, sharing, connection. Pure data."""

from __future__ import annotations

from typing import Final

from kvpool_operator.api.findings.row import Row, Severity
from kvpool_operator.api.reasons import EventReason, Reason

# 01: selection and injection of engine pods
LABEL_ON_WORKLOAD: Final = Row(
    "KVP0101",
    Severity.ERROR,
    "The label is on the workload",
    "The label `kvpool.dev/inject` is on a Deployment, StatefulSet or similar object, and not on its pod template.",
    "Its pods are not injected, and run without the pool.",
    "Move the label to `spec.template.metadata.labels`.",
)
POD_NOT_INJECTED: Final = Row(
    "KVP0102",
    Severity.ERROR,
    "A pod was not injected",
    "The pod was created while the webhook was unavailable, or before its namespace or a pool selected it.",
    "The engine runs without the pool.",
    "Recreate the pod, or set `spec.injection.watchdog: Restart`.",
    (Reason.PODS_NOT_INJECTED, EventReason.NOT_INJECTED),
)
POD_SKIPPED: Final = Row(
    "KVP0103",
    Severity.ERROR,
    "A pod was skipped",
    "The webhook cannot inject the pod; the annotation `kvpool.dev/skip-reason` has the reason.",
    "The engine runs without the pool.",
    "Change what the reason names, and recreate the pod.",
    (Reason.ALL_PODS_SKIPPED, EventReason.INJECTION_SKIPPED),
)
POOL_NOT_FOUND: Final = Row(
    "KVP0104",
    Severity.ERROR,
    "The pool of a pod does not exist",
    "The annotation `kvpool.dev/pool` of the pod names no KVCachePool.",
    "The engine runs without a pool, and no pool counts it.",
    "Correct the annotation on the pod template, or create the pool.",
    (EventReason.POOL_NOT_FOUND,),
)
WEBHOOK_UNAVAILABLE: Final = Row(
    "KVP0105",
    Severity.ERROR,
    "The webhook is unavailable",
    "The webhook is not installed, has no certificate, or has no ready replica.",
    "New pods start without the pool.",
    "Check the Deployment of the webhook: `kubectl -n kvpool-system describe deploy kvpool-webhook`.",
    (Reason.WEBHOOK_UNAVAILABLE,),
)
NAMESPACE_NOT_ALLOWED: Final = Row(
    "KVP0106",
    Severity.ERROR,
    "The pool does not admit a namespace",
    "The pool's `spec.injection.allowedNamespaces` does not admit the namespace of the pod.",
    "The pod gets no socket, and its engine runs without the pool.",
    "Admit the namespace in `spec.injection.allowedNamespaces`, and recreate the pod.",
)
INJECTION_DISABLED: Final = Row(
    "KVP0107",
    Severity.WARNING,
    "Injection is disabled",
    "`spec.injection.enabled` of the pool is false.",
    "New pods start without the pool.",
    "Set `spec.injection.enabled: true`.",
    (Reason.DISABLED,),
)
PODS_REJECTED: Final = Row(
    "KVP0108",
    Severity.ERROR,
    "The API server rejects pods",
    "A LimitRange, a ResourceQuota or a policy of the namespace rejects the pods of a workload.",
    "The workload has no pods, or fewer than it should have.",
    "Raise the limit that the message names, or lower what the containers request.",
)
CLIENT_IMAGE_UNAVAILABLE: Final = Row(
    "KVP0109",
    Severity.ERROR,
    "The image of the client cannot be pulled",
    "The node cannot pull the image of the init container `kvpool-client`.",
    "The engine does not start.",
    "Make the image available to the namespace, for example with `imagePullSecrets`.",
    (EventReason.CLIENT_IMAGE_UNAVAILABLE,),
)
INJECTION_LIMITED: Final = Row(
    "KVP0110",
    Severity.INFO,
    "A pod gets less than the pool's settings",
    "The pod's own resources or settings limit what injection can add.",
    "The engine uses the pool with a limitation.",
    "Change what the message names, and recreate the pod.",
    (EventReason.INJECTION_LIMITED,),
)
CLIENT_OUTDATED: Final = Row(
    "KVP0111",
    Severity.INFO,
    "A pod has an older client or configuration",
    "The pool or the release changed after the pod was injected.",
    "The engine works with the earlier settings.",
    "Recreate the pod when it is convenient.",
    (EventReason.INJECTION_OUTDATED,),
)
NODE_AGENT_MISSING: Final = Row(
    "KVP0112",
    Severity.ERROR,
    "The node agent does not run",
    "The DaemonSet `kvpool-agent` has no pod on the node.",
    "Pods that start on the node get no socket, and run without the pool.",
    "Correct `agent.nodeSelector` and `agent.tolerations` of the chart.",
    (Reason.NODE_AGENT_MISSING,),
)
# 02: whether engines share blocks
HASHES_DIFFER: Final = Row(
    "KVP0201",
    Severity.ERROR,
    "Engines hash prompts differently",
    "Engines of one model differ in `PYTHONHASHSEED`, hash algorithm, tokenizer or chat template. "
    "Each engine reports the hash of fixed tokens (`hash_probe`), and digests of its tokenizer and template.",
    "The same prompt has other block names in each engine, from the first block or the first other token on.",
    "Give all engines of the model the same `PYTHONHASHSEED`, for example `0`, and restart them.",
    (Reason.FINGERPRINTS_DIFFER,),
)
FINGERPRINTS_DIFFER: Final = Row(
    "KVP0202",
    Severity.ERROR,
    "Engines of one model have different settings",
    "Data type, parallel sizes, weights or versions differ, so blocks of one engine are unusable for the other.",
    "These engines share no blocks.",
    "Run the engines with the same version and settings; `kubectl kvpool fingerprints diff` shows the fields.",
    (Reason.FINGERPRINTS_DIFFER,),
)
CHUNKS_DIFFER: Final = Row(
    "KVP0203",
    Severity.ERROR,
    "Engines cut prompts into different blocks",
    "The block or chunk sizes of engines of one model differ.",
    "These engines share no blocks.",
    "Give the engines the same block size and chunk size, and restart them.",
    (Reason.FINGERPRINTS_DIFFER,),
)
ENGINE_SHARES_NOTHING: Final = Row(
    "KVP0204",
    Severity.WARNING,
    "An engine shares with no other engine",
    "LoRA adapters, computed scales, dummy weights, or weights that were replaced at run time make blocks private.",
    "The engine finds its own blocks only.",
    "See the line with kvpool in the engine's log; restart the engine after new weights.",
    (Reason.FINGERPRINTS_DIFFER,),
)
NO_REMOTE_TIER: Final = Row(
    "KVP0205",
    Severity.WARNING,
    "An engine has no interface for a remote tier",
    "The engine uses Dynamo's KVBM, which keeps blocks on its node.",
    "Its blocks are not shared.",
    "Run vLLM without KVBM.",
    (Reason.NO_REMOTE_TIER,),
)
PROMPTS_NEVER_FOUND: Final = Row(
    "KVP0206",
    Severity.WARNING,
    "No prompt is found",
    "Engines store blocks and request prompts, and the first block of every prompt is unknown. "
    "Prompts are new, hashed or tokenized differently, or have different salts.",
    "There are no hits.",
    "Compare `PYTHONHASHSEED` and `--prefix-caching-hash-algo` of the engines, tokenizers, chat templates and "
    "`cache_salt`.",
)
STORED_UNDER_OTHER_FINGERPRINT: Final = Row(
    "KVP0207",
    Severity.INFO,
    "Blocks exist under another fingerprint",
    "The node has blocks of the model, which engines with other settings stored.",
    "They are not found: the cache fills again.",
    "Expected after an update of engines. Otherwise give all engines the same settings.",
)
# 03: connection of engines
ENGINE_REFUSED: Final = Row(
    "KVP0301",
    Severity.ERROR,
    "An engine refused the plug-in",
    "The plug-in does not work with this engine, or a setting keeps it from starting, as the message says.",
    "The engine runs without the pool.",
    "Use a supported version of the engine, or correct what the sentence names.",
    (Reason.ENGINES_SILENT, EventReason.ENGINE_WITHOUT_POOL),
)
ENGINE_SILENT: Final = Row(
    "KVP0302",
    Severity.ERROR,
    "An injected engine is not connected",
    "The pod is Ready, and its engine never connected to the sidecar of its node.",
    "The engine runs without the pool.",
    "Read the lines with kvpool in the engine's log.",
    (Reason.ENGINES_SILENT, EventReason.ENGINE_WITHOUT_POOL),
)
VERSIONS_DIFFER: Final = Row(
    "KVP0303",
    Severity.ERROR,
    "Client and sidecar have incompatible versions",
    "The sidecar refused the protocol of the pod's client.",
    "The engine runs without the pool.",
    "Recreate the pod, which injects the client of this release.",
    (Reason.ENGINES_SILENT,),
)
NO_SIDECAR_ON_NODE: Final = Row(
    "KVP0304",
    Severity.ERROR,
    "The engine's node has no sidecar",
    "The pod runs on a node that `spec.nodes` does not select.",
    "The engine runs without the pool.",
    "Extend `spec.nodes` to the node, or schedule the engine on nodes of the pool.",
    (Reason.ENGINES_SILENT,),
)
ENGINE_UNTESTED: Final = Row(
    "KVP0305",
    Severity.INFO,
    "The version of an engine was not tested",
    "The release was not tested with this version of the engine; the plug-in's self-test passed.",
    "None is known.",
    "Prefer a supported version.",
)
