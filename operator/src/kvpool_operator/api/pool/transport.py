"""spec.transport, spec.failOpen and spec.events of a KVCachePool."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from kvpool_operator.api import fields as f
from kvpool_operator.api.duration import to_ms
from kvpool_operator.api.model import LabelSelector, Model, section
from kvpool_operator.api.rules import with_rules

__all__ = ["Events", "FailOpen", "Transport"]


class Breaker(Model):
    """Circuit breaker of each client."""

    failures: Annotated[int, Field(ge=1, le=1000)] = 5
    """Number of consecutive failures that open the breaker. While it is open, the client answers every lookup with a
    miss in less than a millisecond."""
    cooldown: f.Cooldown = "1s"
    """Time that the breaker stays open before the client retries, such as 1s."""


class FailOpen(Model):
    """Deadlines of engine requests to the pool. After a deadline the result is a miss, and the engine computes."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.LOOKUP_BEFORE_LOAD))

    lookup_deadline: f.LookupTime = "20ms"
    """Maximum time of a lookup, such as 20ms."""
    load_deadline: f.LoadTime = "100ms"
    """Minimum deadline of a load, such as 100ms. The deadline of a large load is three times the time that it takes at
    `expectedBandwidth`."""
    expected_bandwidth: f.Bandwidth = "1G"
    """Expected bytes per second of a load, such as 1G."""
    store_deadline: f.StoreTime = "10s"
    """Maximum time of a background store, such as 10s. Engines never wait for a store."""
    breaker: Breaker = section(Breaker)
    """Circuit breaker of each client."""

    @model_validator(mode="after")
    def _order(self) -> FailOpen:
        f.LOOKUP_BEFORE_LOAD.check(to_ms(self.lookup_deadline) <= to_ms(self.load_deadline))
        return self


class DeviceResource(Model):
    """Extended resource of a node."""

    name: f.ResourceName
    """Name of the resource, such as rdma/hca_shared_devices_a. A device plugin of the cluster provides it."""
    count: Annotated[int, Field(ge=1, le=16)] = 1
    """Number of devices that each sidecar requests."""


class Rdma(Model):
    """RDMA resources of the sidecars."""

    resources: Annotated[list[DeviceResource], Field(max_length=8)] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Extended resources that add an RDMA device to the sidecar pods."""
    resource_claim_template_name: f.ClaimTemplateName | None = None
    """Name of a ResourceClaimTemplate in the namespace of the pool. Each sidecar pod gets a ResourceClaim from it, by
    dynamic resource allocation of Kubernetes 1.34 or later. A DRA driver of the cluster adds the RDMA device."""
    memory: f.RdmaMemory = "512Mi"
    """Registered memory on each node, such as 512Mi. Half holds blocks that peers read, half receives blocks that this
    node reads. If `resources` or
    `resourceClaimTemplateName` is set, the memory limit of the sidecars includes it."""


class Transport(Model):
    """Transfer of blocks between nodes."""

    protocol: Literal["Auto", "TCP", "RDMA"] = "Auto"
    """Auto: RDMA between nodes that both support it, otherwise TCP. RDMA: the same, and the condition TransportReady is
    False while a node cannot use RDMA. TCP: never RDMA. status.transport reports the protocol in use and the reason."""
    rdma: Rdma = section(Rdma)
    """RDMA resources of the sidecars."""
    encryption: Literal["ControlOnly", "Always"] = "ControlOnly"
    """ControlOnly: sidecars authenticate each other by certificates over TLS, and blocks are sent unencrypted. Always:
    blocks are encrypted too, at several times the CPU time, and RDMA is not used."""
    streams: Annotated[int, Field(ge=1, le=4)] = 2
    """Number of TCP connections that one large load from one peer uses. The same number is kept connected in advance
    for each peer."""
    port: Annotated[int, Field(ge=1024, le=65535, json_schema_extra=with_rules(f.PORT_IS_FREE))] = 7421
    """TCP port of the sidecars on their pod IP addresses."""

    @model_validator(mode="after")
    def _port(self) -> Transport:
        f.PORT_IS_FREE.check(self.port not in f.TAKEN_PORTS)
        return self


class EventPeer(Model):
    """Pods that may connect to the event ports, as a peer in a NetworkPolicy."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.EVENT_PEER))

    namespace_selector: LabelSelector | None = None
    """Labels of the namespaces; {} selects all. If it is omitted, only the namespace of the pool."""
    pod_selector: LabelSelector | None = None
    """Labels of the pods in these namespaces; {} selects all. If it is omitted, all pods of these namespaces."""

    @model_validator(mode="after")
    def _some_selector(self) -> EventPeer:
        f.EVENT_PEER.check(self.namespace_selector is not None or self.pod_selector is not None)
        return self


class Events(Model):
    """KV cache events for routers, which can send a request to a node that holds the blocks of its prompt."""

    model_config = ConfigDict(json_schema_extra=with_rules(f.TOKENS_ARE_INT64))

    enabled: bool = False
    """true: each sidecar publishes the blocks of its node in vLLM's KV event format on ZeroMQ, and answers routers that
    present the token in the Secret NAME-events how much of a prompt each node holds. Events reveal which prompts were
    processed: only routers should have the Secret. Sidecars and clients of releases without this field
    cannot read the format of blocks stored with it: upgrade all of them first."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 5557
    """TCP port of the event publisher (ZeroMQ PUB) on the pod IP addresses of the sidecars."""
    replay_port: Annotated[int, Field(ge=1024, le=65535)] = 5558
    """TCP port where a subscriber requests missed events (ZeroMQ ROUTER)."""
    topic: f.EventTopic = "kv@{node}@"
    """Topic of the messages. llm-d expects kv@<pod>@<model>: if the pool serves a single model, set kv@{node}@ followed
    by the name of the model."""
    hashes: Literal["Bytes", "Int64"] = "Int64"
    """Format of block hashes. Int64: each of the engine's blocks by 64 bits, as vLLM and SGLang publish them by
    default; Dynamo requires it. Bytes: one whole hash for each stored block, as vLLM with
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0. Sidecars and clients of releases without the field promptTokensOf cannot read
    blocks that are stored with Int64: upgrade all of them first."""
    prompt_tokens_of: f.EventTenant | None = None
    """Tenant whose token ids the events contain: the name of a namespace, or kvt/ and the name of a KVCacheTenant. Then
    the stream has no blocks of other tenants. Routers that index tokens, such as Dynamo's, need it. Token ids are the
    text of prompts and answers: only routers that may read these should have the Secret NAME-events. It requires
    hashes: Int64. If it is omitted, events contain no token ids."""
    token_revision: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Change the number to create a new token and new keys for routers. The previous ones are rejected after the
    sidecars have restarted."""
    from_: Annotated[list[EventPeer], Field(alias="from", max_length=16)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """Pods that may connect to the event ports. It takes effect if the installation creates NetworkPolicies. If it is
    empty, none may connect."""
    authentication: Literal["Curve", "None"] = "Curve"
    """Curve: a subscriber of the stream needs the keys in the Secret NAME-events (CURVE of ZeroMQ, which also
    encrypts). None: everyone who reaches the ports can read the stream; only for routers that do not support CURVE."""

    @model_validator(mode="after")
    def _tokens(self) -> Events:
        f.TOKENS_ARE_INT64.check(not self.prompt_tokens_of or self.hashes == "Int64")
        return self
