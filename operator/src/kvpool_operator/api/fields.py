"""Field types and validation rules of v1alpha1, with their error messages."""

from __future__ import annotations

import re
from typing import Final

from kvpool_operator.api.addresses import object_endpoint, public_server
from kvpool_operator.api.duration import FORM
from kvpool_operator.api.rules import (
    Rule,
    bytes_between,
    count_or_percent,
    duration_between,
    host_path,
    immutable,
    matching,
    name,
    quote,
    refined,
    reserve,
)

__all__ = [
    "ADMIN_PORT",
    "BLOCK_FITS_TIER",
    "BLOCK_TOKENS_STAY",
    "CAPACITY_FITS_CLAIM",
    "CAPACITY_IS_GIVEN",
    "EVENT_PEER",
    "EVENT_PORTS_DIFFER",
    "HTTP_PORT",
    "KEY_FITS_OPERATOR",
    "LOCAL_STAYS",
    "LOOKUP_BEFORE_LOAD",
    "LOW_BELOW_HIGH",
    "ONE_INDEX",
    "ONE_LOCAL",
    "ONE_SHARE",
    "ONE_SHARED",
    "ONE_SOURCE",
    "PATHS_DIFFER",
    "POOL_NAME",
    "PORT_IS_FREE",
    "SELECTOR_FITS_FROM",
    "SHARE_STAYS",
    "SOME_LOCAL",
    "SOURCE_STAYS",
    "TAKEN_PORTS",
    "TOKENS_ARE_INT64",
    "VALUE_FITS_OPERATOR",
    "WRITES_SOMEWHERE",
    "Bandwidth",
    "BlockSize",
    "Capacity",
    "ClaimClass",
    "ClaimName",
    "ClaimSize",
    "ClaimTemplateName",
    "CleanupTime",
    "Cooldown",
    "DirtyRoom",
    "DiskCache",
    "DrainBandwidth",
    "DrainTime",
    "DriveWrites",
    "EventTenant",
    "EventTopic",
    "ExportPath",
    "HostMemory",
    "IndexDisk",
    "IndexMemory",
    "LifeTime",
    "LoadTime",
    "LocalPath",
    "LookupTime",
    "NfsServer",
    "NodeExpiry",
    "ObjectEndpoint",
    "ObjectRegion",
    "ObjectUrl",
    "PriorityClassName",
    "RdmaMemory",
    "ReadAhead",
    "Reserve",
    "ResourceName",
    "RestartPause",
    "SharedPath",
    "SidecarMemory",
    "StorageClass",
    "StoreTime",
    "TenantRoom",
    "TierName",
    "Unavailable",
    "WarmUpBandwidth",
]

HTTP_PORT: Final = 7422
"""Fixed port of the sidecar's health, metrics and status."""
INDEX_PORT: Final = 6379
"""Fixed port of the managed index."""
ADMIN_PORT: Final = 7423
"""Fixed port of the sidecar's admin API for the operator."""

_NEW_TIER: Final = "add a tier with another name, then remove this one"

POOL_NAME: Final = Rule(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$')",
    "name the pool with at most 40 lower-case letters, digits and hyphens, beginning with a letter: its objects are "
    "named after it",
    ".metadata.name",
)

TierName = name(
    24, "name the tier with at most 24 lower-case letters, digits and hyphens, beginning with a letter, such as nvme"
)
LocalPath = host_path(immutable("the path of a tier", _NEW_TIER))
SharedPath = host_path(immutable("the path of a tier", _NEW_TIER))
TenantRoom = bytes_between("0", "1Pi", "give a tenant's quota up to 1Pi, such as 200Gi; 0 is no quota")
Capacity = bytes_between(
    "64Mi", "1Pi", "give a capacity from 64Mi to 1Pi, such as 500Gi: it is the room that blocks may take in this tier"
)
Reserve = reserve("give reserveFree as a percentage from 0% to 90%, or as a quantity from 1Mi to 1Pi, such as 50Gi")

ClaimName = matching(
    r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$",
    253,
    "give the name of a PersistentVolumeClaim in the pool's namespace",
    immutable("the claim of a tier", _NEW_TIER),
)
NfsServer = public_server(immutable("the server of a tier", _NEW_TIER))
ExportPath = matching(
    r"^(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)+$",
    180,
    "give the exported directory as an absolute path such as /exports/kv, without . and .. as names",
    immutable("the export of a tier", _NEW_TIER),
)

ClaimClass = matching(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", 253, "give the name of a StorageClass")
ClaimSize = bytes_between(
    "64Mi",
    "1Pi",
    "give resources.requests.storage from 64Mi to 1Pi, such as 500Gi: it is the size of each node's volume",
)

ObjectUrl = matching(
    r"^(s3|gs|abfs)://[A-Za-z0-9][A-Za-z0-9._-]{1,251}(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*$",
    512,
    "give the object store as s3://bucket/prefix (or gs://, abfs://container/prefix), without user, account, password "
    "or query: account and credentials go into the Secret that secretRef names",
    immutable("the url of a tier", _NEW_TIER),
)
ObjectEndpoint = object_endpoint()
ObjectRegion = matching(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", 63, "give the region as in eu-central-1")

ONE_SOURCE: Final = Rule(
    "[has(self.local), has(self.shared), has(self.objectStore)].exists_one(given, given)",
    "give each tier exactly one source: local (a directory on each node's own drive), shared (a file system that "
    "every node sees) or objectStore (an S3 bucket); no other kind is known",
)
SOURCE_STAYS: Final = Rule(
    "has(self.local) == has(oldSelf.local) && has(self.shared) == has(oldSelf.shared)",
    f"the kind of a tier cannot be changed: {_NEW_TIER}",
)
ONE_LOCAL: Final = Rule(
    "has(self.path) != has(self.volumeClaimTemplate)",
    "give a local tier exactly one source: path (a directory of each node) or volumeClaimTemplate (a volume of a "
    "StorageClass for each sidecar pod)",
)
LOCAL_STAYS: Final = Rule(
    "has(self.path) == has(oldSelf.path)",
    f"the source of a local tier cannot be changed: {_NEW_TIER}",
)
CAPACITY_IS_GIVEN: Final = Rule(
    "has(self.capacity) || !has(self.path)",
    "give capacity together with path, such as 500Gi: only a volumeClaimTemplate has a size of its own",
)
CAPACITY_FITS_CLAIM: Final = Rule(
    "!has(self.capacity) || !has(self.volumeClaimTemplate) || [string(self.capacity)].all(room, !isQuantity(room) || "
    "[string(self.volumeClaimTemplate.spec.resources.requests.storage)].all(size, !isQuantity(size) || "
    "!quantity(room).isGreaterThan(quantity(size))))",
    "set capacity to at most resources.requests.storage of the volumeClaimTemplate, or leave it out",
)
ONE_SHARE: Final = Rule(
    "[has(self.hostPath), has(self.pvc), has(self.nfs)].exists_one(given, given)",
    "give a shared tier exactly one source: hostPath, pvc or nfs",
)
SHARE_STAYS: Final = Rule(
    "has(self.hostPath) == has(oldSelf.hostPath) && has(self.pvc) == has(oldSelf.pvc)",
    f"the kind of a shared tier cannot be changed: {_NEW_TIER}",
)
SOME_LOCAL: Final = Rule(
    "self.exists(t, has(t.local))", "give at least one local tier: engines write to their own node's drive first"
)
ONE_SHARED: Final = Rule(
    "self.filter(t, has(t.shared) || has(t.objectStore)).size() <= 1",
    "give at most one shared tier: a block is copied to one place",
)
PATHS_DIFFER: Final = Rule(
    "self.all(t, !has(t.local) || !has(t.local.path) || self.filter(u, has(u.local) && has(u.local.path) && "
    "(u.local.path + '/').startsWith(t.local.path + '/')).size() == 1) && "
    "self.all(t, !has(t.shared) || !has(t.shared.hostPath) || !self.exists(u, has(u.local) && has(u.local.path) && "
    "((u.local.path + '/').startsWith(t.shared.hostPath.path + '/') || "
    "(t.shared.hostPath.path + '/').startsWith(u.local.path + '/'))))",
    "give each tier a directory of its own, and none inside another tier's",
)
WRITES_SOMEWHERE: Final = Rule(
    "!(self.cache.write.policy in ['WriteBack', 'WriteThroughSelective']) || "
    "self.tiers.exists(t, has(t.shared) || has(t.objectStore))",
    "add a shared or objectStore tier, which cache.write.policy writes to; without one use WriteThrough or LocalOnly",
)
ONE_INDEX: Final = Rule(
    "!(has(self.managed) && has(self.external))",
    "give either index.managed (a Redis that the operator runs, the default) or index.external (your own), not both",
)
LOW_BELOW_HIGH: Final = Rule(
    "self.lowWatermark < self.highWatermark",
    "set lowWatermark below highWatermark: eviction starts at the high one and stops at the low one",
)
BLOCK_TOKENS_STAY: Final = immutable(
    "blockTokens", "blocks of the old size would never be found again; make a new pool for another size"
)
TAKEN_PORTS: Final = (HTTP_PORT, ADMIN_PORT, 10248, 10249, 10250, 10255, 10256, 10257, 10259)
"""Ports of the sidecar's own servers, and of the kubelet and its neighbors on a node."""
_TAKEN: Final = ", ".join(str(port) for port in TAKEN_PORTS)
PORT_IS_FREE: Final = Rule(
    f"!(self in [{_TAKEN}])",
    f"choose another port: {HTTP_PORT} is the sidecars' own for health, {ADMIN_PORT} that for the operator, and 10248 "
    "to 10259 are those of the kubelet and its neighbors",
)
EVENT_PORTS_DIFFER: Final = Rule(
    f"!self.events.enabled || (!(self.events.port in [{_TAKEN}]) && "
    f"!(self.events.replayPort in [{_TAKEN}]) && "
    "self.events.port != self.events.replayPort && self.transport.port != self.events.port && "
    "self.transport.port != self.events.replayPort)",
    f"give events.port and events.replayPort two ports that nothing else has: {HTTP_PORT} is the sidecars' own for "
    f"health, {ADMIN_PORT} that for the operator, 10248 to 10259 those of the kubelet and its neighbors, and "
    "transport.port that of the blocks",
)
LOOKUP_BEFORE_LOAD: Final = Rule(
    f"!self.lookupDeadline.matches({quote(FORM)}) || !self.loadDeadline.matches({quote(FORM)}) || "
    "duration(self.lookupDeadline) <= duration(self.loadDeadline)",
    "set lookupDeadline to at most loadDeadline: a load follows its lookup and moves the blocks",
)
BLOCK_FITS_TIER: Final = Rule(
    "[string(self.cache.maxBlockSize)].all(block, !isQuantity(block) || [quantity(block)].all(most, "
    "self.tiers.all(t, !has(t.local) || [has(t.local.capacity) ? string(t.local.capacity) : "
    "has(t.local.volumeClaimTemplate) ? string(t.local.volumeClaimTemplate.spec.resources.requests.storage) : ''"
    "].all(room, !isQuantity(room) || !most.isGreaterThan(quantity(room))))))",
    "set cache.maxBlockSize to at most the capacity of each local tier: a block must fit",
)
TOKENS_ARE_INT64: Final = Rule(
    "!has(self.promptTokensOf) || self.hashes == 'Int64'",
    "set events.hashes: Int64 with promptTokensOf: only these events contain token ids",
)
EVENT_PEER: Final = Rule(
    "has(self.namespaceSelector) || has(self.podSelector)",
    "give each entry of events.from a namespaceSelector, a podSelector, or both; {} selects all",
)

SELECTOR_FITS_FROM: Final = Rule(
    "(self.from == 'Selector') == has(self.selector)",
    "give selector together with from: Selector, and only then",
)

DriveWrites = matching(
    r"^(100(\.0{1,2})?|[1-9][0-9]?(\.[0-9]{1,2})?|0\.(0[1-9]|[1-9][0-9]?))$",
    6,
    "give driveWritesPerDay from 0.01 to 100, such as 0.8",
)
EventTopic = matching(
    r"^[A-Za-z0-9@{}._/:-]+$",
    253,
    "give a topic of letters, digits and @ . _ / : -, such as kv@{node}@my-model; {node}, {pool} and {namespace} are "
    "filled in",
)
EventTenant = matching(
    r"^(kvt/)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$",
    257,
    "give the name of a namespace, or kvt/ and the name of a KVCacheTenant",
)
BlockSize = bytes_between("64Ki", "1Gi", "give maxBlockSize from 64Ki to 1Gi")
IndexMemory = bytes_between("16Mi", "1Ti", "give maxMemory from 16Mi to 1Ti, such as 256Mi")
IndexDisk = bytes_between("64Mi", "1Ti", "give persistence.size from 64Mi to 1Ti, such as 1Gi")
StorageClass = matching(
    r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$",
    253,
    "give the name of a StorageClass",
    immutable(
        "the storage class of the index", "remove persistence, wait until the claim is deleted, then set it again"
    ),
)
Unavailable = count_or_percent("give maxUnavailable as a count of nodes from 1 to 1000, or as a percentage such as 10%")
RdmaMemory = bytes_between("16Mi", "1Ti", "give rdma.memory from 16Mi to 1Ti, such as 512Mi")
_ACCELERATOR: Final = r"(?i)(^|[.])(kubernetes|k8s)[.]io/|/(.*gpu.*|mig-.*|.*tpu.*|neuron.*|gaudi.*)$"
RESOURCE_IS_NETWORK: Final = Rule(
    f"!self.matches({quote(_ACCELERATOR)})",
    "name a network device such as rdma/hca_shared_devices_a or nvidia.com/hostdev: accelerators belong to engines, "
    "and kubernetes.io to Kubernetes",
)


def _check_resource(value: str) -> str:
    RESOURCE_IS_NETWORK.check(re.search(_ACCELERATOR, value) is None)
    return value


ResourceName = refined(
    matching(
        r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$",
        127,
        "name an extended resource with its domain, such as rdma/hca_shared_devices_a",
        RESOURCE_IS_NETWORK,
    ),
    _check_resource,
)
ClaimTemplateName = matching(
    r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$",
    253,
    "give the name of a ResourceClaimTemplate in the pool's namespace, such as rdma-nic",
)
PriorityClassName = matching(
    r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$", 253, "give the name of a PriorityClass, such as kvpool"
)
KEY_FITS_OPERATOR: Final = Rule(
    "has(self.key) || self.operator == 'Exists'",
    "give the key of the taint, or operator Exists without a key to tolerate every taint",
)
VALUE_FITS_OPERATOR: Final = Rule(
    "!has(self.value) || self.value == '' || self.operator == 'Equal'",
    "leave out value with operator Exists, which matches any value",
)
HostMemory = bytes_between("16Mi", "4Ti", "give hostMemory from 16Mi to 4Ti, such as 4Gi")
DiskCache = bytes_between("0", "64Ti", "give diskCache from 0 (none) to 64Ti, such as 16Gi")
Bandwidth = bytes_between("1M", "1T", "give expectedBandwidth in bytes per second from 1M to 1T, such as 1G")
DirtyRoom = bytes_between("0", "16Ti", "give maxDirty from 0 to 16Ti, such as 4Gi: a lost node takes as much along")
WriteBuffer = bytes_between("16Mi", "64Gi", "give write.buffer from 16Mi to 64Gi, such as 512Mi")
SidecarMemory = bytes_between("1Gi", "256Gi", "give memoryLimit from 1Gi to 256Gi, such as 2Gi")
ReadAhead = bytes_between("0", "64Gi", "give prefetch.maxBytes from 0 (off) to 64Gi, such as 512Mi")
WarmUpBandwidth = bytes_between(
    "0", "100Gi", "give warmUp.bandwidth in bytes per second from 0 (off) to 100Gi, such as 100Mi"
)
LookupTime = duration_between("1ms", "1s", "give a time from 1ms to 1s, such as 20ms: the engine waits for it")
NodeExpiry = duration_between("1m", "720h", "give nodeExpiry from 1m to 720h, such as 1h")
LoadTime = duration_between("1ms", "1m", "give loadDeadline from 1ms to 1m, such as 100ms: the engine waits for it")
StoreTime = duration_between("100ms", "10m", "give storeDeadline from 100ms to 10m, such as 10s")
LifeTime = duration_between("0s", "8760h", "give a time to live up to 8760h, such as 24h; 0s turns it off")
KeepTime = duration_between("1s", "24h", "give maxKeep from 1s to 24h, such as 1h")
Cooldown = duration_between("10ms", "10m", "give cooldown from 10ms to 10m, such as 1s")
DrainTime = duration_between("1s", "24h", "give drain.timeout from 1s to 24h, such as 10m")
DrainBandwidth = bytes_between(
    "1Mi", "100Gi", "give drain.bandwidth in bytes per second from 1Mi to 100Gi, such as 256Mi"
)
CleanupTime = duration_between("1s", "24h", "give cleanupTimeout from 1s to 24h, such as 5m")
RestartPause = duration_between("10s", "24h", "give restartEvery from 10s to 24h, such as 1m")
