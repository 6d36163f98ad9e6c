"""As much of vLLM's tiered offloading as PoolTier touches, for a machine that has none; `installed` for imports.

A contract, not a copy: names and promises of vllm/v1/kv_offload of 0.32 and 0.33. The real thing is in
client/tests_engine.
"""

from __future__ import annotations

import enum
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


class SecondaryTierManager:
    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any):
        assert primary_kv_view.strides is not None
        self._offloading_spec = offloading_spec
        self._block_size_bytes = primary_kv_view.strides[0]
        self.locality: Locality | None = None


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
    "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cuda")},
    "vllm.distributed": {},
    "vllm.distributed.kv_transfer": {},
    "vllm.distributed.kv_transfer.kv_connector": {},
    "vllm.distributed.kv_transfer.kv_connector.v1": {},
    _METRICS: {},
    f"{_METRICS}.metrics": {"OffloadingConnectorStats": OffloadingConnectorStats},
    f"{_METRICS}.scheduler": {"_create_req_context": create_req_context},
    "vllm.v1": {},
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
    f"{_BASE}.tiering.base": {"JobResult": JobResult, "SecondaryTierManager": SecondaryTierManager},
}


def scheduler() -> Any:
    """The stub's module of vLLM's scheduler, as it is installed now."""
    return sys.modules[f"{_METRICS}.scheduler"]


def installed() -> contextlib.AbstractContextManager[None]:
    """Inside, `import vllm` gives the stub."""
    return stubs(_MODULES)
