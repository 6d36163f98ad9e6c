"""As much of vLLM's tiered offloading as PoolTier touches, for a machine that has none; `installed` for imports.

A contract, not a copy: names and promises of vllm/v1/kv_offload of 0.32 and 0.33. The real thing is in
client/tests_engine.
"""

from __future__ import annotations

import abc
import enum
import importlib
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cl_stubs import stubs

if TYPE_CHECKING:
    import contextlib

    pass


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class Medium(enum.Enum):
    STORAGE = "STORAGE"


class LookupResult(enum.Enum):
    HIT = 1
    MISS = 2
    RETRY = 3


@dataclass
class OffloadingCounterMetadata:
    documentation: str
    labelnames: tuple[str, ...]


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Locality | None = None


class RequestOffloadingContext:
    pass


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.counts: dict[tuple[str, tuple[str, ...]], float] = {}

    def increase_counter(self, name: str, by: float, labels: tuple[str, ...]) -> None:
        assert by > 0
        self.counts[name, labels] = self.counts.get((name, labels), 0) + by


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: tuple[bytes, ...] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager(abc.ABC):
    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None
    ) -> None:
        assert primary_kv_view.strides is not None
        self._offloading_spec = offloading_spec
        self._block_size_bytes = primary_kv_view.strides[0]
        self.locality: Locality | None = None

    @abc.abstractmethod
    def lookup(self, key: bytes, req_context: Any) -> LookupResult: ...

    @abc.abstractmethod
    def submit_store(self, job_metadata: Any) -> None: ...

    @abc.abstractmethod
    def submit_load(self, job_metadata: Any) -> None: ...

    @abc.abstractmethod
    def get_finished_jobs(self) -> Any: ...

    @abc.abstractmethod
    def on_new_request(self, req_context: Any) -> Any: ...

    @abc.abstractmethod
    def drain_jobs(self) -> None: ...


@dataclass
class KVTransferConfig:
    kv_connector: str | None = None
    kv_role: str | None = None
    engine_id: str | None = None
    kv_load_failure_policy: str = "fail"
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kv_connector is not None and self.kv_role is None:
            raise ValueError("Please specify kv_role")
        self.engine_id = self.engine_id or "made"


class KVConnectorFactory:
    @staticmethod
    def get_connector_class(config: KVTransferConfig) -> Any:
        return object

    @staticmethod
    def create_connector(config: Any, *args: Any) -> Any:
        return object()


class OffloadingSpecFactory:
    @staticmethod
    def get_spec_cls(extra: dict[str, Any]) -> Any:
        return SimpleNamespace(build_metric_definitions=lambda _extra: {})


class SecondaryTierFactory:
    @staticmethod
    def get_tier_class(tier: dict[str, Any]) -> Any:
        found = getattr(importlib.import_module(tier["module_path"]), tier["type"])
        assert issubclass(found, SecondaryTierManager)
        return found


class EngineCore:
    """The calls through which weights change; `tiers` are reset as vLLM does it."""

    def __init__(self, *tiers: Any) -> None:
        self.tiers = tiers
        self.calls: list[str] = []

    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(str(method))
        return []

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        for tier in self.tiers if reset_connector else ():
            tier.drain_jobs()
        return True

    def _reset_caches(self, reset_running_requests: bool = True, reset_connector: bool = True) -> None:
        self.reset_prefix_cache(reset_running_requests, reset_connector=reset_connector)

    def sleep(self, level: int = 1) -> None:
        if level:
            self._reset_caches()

    def wake_up(self, tags: list[str] | None = None) -> bool:
        return True

    def set_weight_version(self, weight_version: str) -> None:
        self.calls.append(weight_version)


class Platform:
    device_type = "cuda"

    def is_cuda_alike(self) -> bool:
        return self.device_type == "cuda"

    def is_xpu(self) -> bool:
        return False


@dataclass
class TransferJob:
    job_id: int
    keys: list[bytes]
    chunk_ids: list[int]
    req_context: Any
    is_promotion: bool = False


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = field(default=None)
    _state: dict[type, Any] = field(default_factory=dict, init=False)

    def set_state(self, value: Any) -> None:
        self._state[type(value)] = value

    def get_state(self, kind: type) -> Any:
        return self._state.get(kind)


def create_req_context(request: Any) -> ReqContext:
    """The scheduler's, which knows nothing of salts."""
    return ReqContext(request.request_id)


def key(block_hash: bytes, group: int = 0) -> bytes:
    return block_hash + group.to_bytes(4, "big")


def spec(groups: int = 1, *, events: bool = True) -> Any:
    """An OffloadingSpec of a model that has no files here."""
    group = SimpleNamespace(tokens_per_block=16, layer_names=("l0",), group_id=0)
    sizes = dict.fromkeys(("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    config = SimpleNamespace(
        groups=(group,) * groups,
        enable_kv_cache_events=events,
        model=SimpleNamespace(name="org/model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=SimpleNamespace(**sizes),
        kv_cache_layout="LBHNC",
    )
    return SimpleNamespace(config=config, tokens_per_block=(16,) * groups, blocks_per_chunk=1)


_BASE = "vllm.v1.kv_offload"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.33.0", "__version_tuple__": (0, 33, 0)},
    "vllm.config": {"KVTransferConfig": KVTransferConfig},
    "vllm.envs": {"VLLM_USE_SIMPLE_KV_OFFLOAD": False},
    "vllm.platforms": {"current_platform": Platform()},
    "vllm.distributed": {},
    "vllm.distributed.kv_transfer": {},
    "vllm.distributed.kv_transfer.kv_connector": {},
    "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": KVConnectorFactory},
    "vllm.distributed.kv_transfer.kv_connector.v1": {},
    _METRICS: {},
    f"{_METRICS}.metrics": {"OffloadingConnectorStats": OffloadingConnectorStats},
    f"{_METRICS}.scheduler": {"_create_req_context": create_req_context},
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.core": {},
    _BASE: {},
    f"{_BASE}.base": {
        "Locality": Locality,
        "LookupResult": LookupResult,
        "Medium": Medium,
        "OffloadingCounterMetadata": OffloadingCounterMetadata,
        "OffloadingEvent": OffloadingEvent,
        "RequestOffloadingContext": RequestOffloadingContext,
        "get_offload_block_hash": lambda name: name[:-4],
    },
    f"{_BASE}.tiering": {},
    f"{_BASE}.factory": {"OffloadingSpecFactory": OffloadingSpecFactory},
    f"{_BASE}.tiering.factory": {"SecondaryTierFactory": SecondaryTierFactory},
    f"{_BASE}.tiering.base": {
        "JobResult": JobResult,
        "SecondaryTierManager": SecondaryTierManager,
        "TransferJob": TransferJob,
    },
}


def scheduler() -> Any:
    """The stub's module of vLLM's scheduler, as it is installed now."""
    return sys.modules[f"{_METRICS}.scheduler"]


def installed() -> contextlib.AbstractContextManager[None]:
    """Inside, `import vllm` gives the stub."""
    core = {"EngineCore": type("EngineCore", (EngineCore,), dict(vars(EngineCore)))}
    return stubs({**_MODULES, "vllm.v1.engine.core": core})
