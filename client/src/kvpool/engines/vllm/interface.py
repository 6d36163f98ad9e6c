"""Whether this vLLM has the interface that the pool's tier needs. Imports vLLM only inside of its functions.

A version alone decides nothing: names, abstract methods, their parameters and the fields of the dataclasses do. An
unknown abstract method is a reason against the pool, an unknown optional one is not.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from typing import TYPE_CHECKING, Any, Final

from kvpool.engines.tested_versions import described, is_tested

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["connector_problem", "interface_problem", "is_strict", "platform_problem", "strict_problem", "tier_problem"]

STRICT_ENV: Final = "KVPOOL_ENGINE_STRICT"

NAMES: Final = {
    "vllm.v1.kv_offload.base": (
        "Locality", "LookupResult", "Medium", "OffloadingCounterMetadata", "OffloadingEvent",
        "RequestOffloadingContext", "get_offload_block_hash",
    ),
    "vllm.v1.kv_offload.tiering.base": ("JobResult", "SecondaryTierManager", "TransferJob"),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": ("OffloadingConnectorStats",),
}  # fmt: skip
METHODS: Final = {
    "lookup": ("key", "req_context"),
    "submit_store": ("job_metadata",),
    "submit_load": ("job_metadata",),
    "get_finished_jobs": (),
    "on_new_request": ("req_context",),
    "drain_jobs": (),
}
"""Abstract methods that PoolTier implements, with their parameters."""
FIELDS: Final = {
    "TransferJob": ("job_id", "keys", "chunk_ids", "req_context"),
    "JobResult": ("job_id", "success", "successful_keys"),
}
CONSTRUCTOR: Final = ("offloading_spec", "primary_kv_view", "tier_type")
_OPTIONAL_ARGUMENT: Final = "backpressure_detector"  # since vLLM 0.31


def is_strict(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether an untested version runs without the pool (KVPOOL_ENGINE_STRICT=1)."""
    return environment.get(STRICT_ENV, "") == "1"


def strict_problem(version: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return why this version must not use the pool, empty unless KVPOOL_ENGINE_STRICT forbids untested ones."""
    if not is_strict(environment) or is_tested("vllm", version):
        return ""
    return f"vLLM {described('vllm')} is tested, this is {version}, and {STRICT_ENV}=1 is set"


def interface_problem() -> str:
    """Return what the tier needs and this vLLM lacks, empty if nothing. Never raises."""
    try:
        found = {}
        for module, names in NAMES.items():
            loaded = importlib.import_module(module)
            for name in names:
                if not hasattr(loaded, name):
                    return f"this vLLM has no {name} in {module}"
                found[name] = getattr(loaded, name)
        return (
            _method_problem(found["SecondaryTierManager"])
            or _constructor_problem(found["SecondaryTierManager"])
            or _field_problem(found)
        )
    except Exception as e:
        return f"this vLLM's KV offloading cannot be read: {type(e).__name__}: {e}"


def platform_problem(extra: Mapping[str, Any]) -> str:
    """Return why vLLM's offloading cannot run on this accelerator, empty if it can. Never raises.

    `extra`: kv_connector_extra_config. A spec of another module has a copy worker of its own.
    """
    if extra.get("spec_module_path"):
        return ""
    try:
        from vllm.platforms import current_platform

        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return ""
        return f"vLLM's KV offloading does not support this accelerator ({current_platform.device_type})"
    except Exception as e:
        return f"the accelerator is unknown: {type(e).__name__}: {e}"


def connector_problem(config: Any) -> str:
    """Return why vLLM could not make the connectors of the pool, empty if it could. Never raises.

    `config`: a KVTransferConfig.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.get_connector_class(config)
        for part in config.kv_connector_extra_config.get("connectors", []):
            if part["kv_connector"] == "OffloadingConnector":
                KVConnectorFactory.get_connector_class(type(config)(**part))
    except Exception as e:
        return f"the connector cannot be made: {type(e).__name__}: {e}"
    return ""


def tier_problem(extra: Mapping[str, Any]) -> str:
    """Return why vLLM could not build the offloading spec and its tiers, empty if it could. Never raises.

    Does what vLLM's scheduler does when it has the model, where an exception would end the engine.
    """
    try:
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        spec = getattr(OffloadingSpecFactory, "get_spec_cls", None)
        spec_class = spec(extra) if spec is not None else None
        for tier in extra.get("secondary_tiers", []):
            if not str(tier.get("module_path", "")).startswith("kvpool."):
                continue
            tier_class: Any = SecondaryTierFactory.get_tier_class(tier)
            missing = sorted(getattr(tier_class, "__abstractmethods__", ()))
            if missing:
                return f"the pool's tier does not implement {', '.join(missing)} of this vLLM"
            inspect.signature(tier_class).bind(
                offloading_spec=None, primary_kv_view=None, tier_type="", **{_OPTIONAL_ARGUMENT: None}
            )
            tier_class.build_metric_definitions(tier)
        if spec_class is not None:
            spec_class.build_metric_definitions(extra)
    except Exception as e:
        return f"the pool's tier cannot be built: {type(e).__name__}: {e}"
    return ""


def _method_problem(manager: Any) -> str:
    unknown = sorted(set(manager.__abstractmethods__) - set(METHODS))
    if unknown:
        return f"this vLLM's tiers must implement {', '.join(unknown)}, which the pool's does not"
    for name, parameters in METHODS.items():
        method = getattr(manager, name, None)
        if method is None:
            return f"this vLLM's tiers have no {name}"
        required = _required(method)[1:]
        if required != parameters:
            return f"{name} of this vLLM's tiers takes {', '.join(required) or 'nothing'}"
    return ""


def _constructor_problem(manager: Any) -> str:
    required = _required(manager.__init__)[1:]
    if required not in (CONSTRUCTOR, (*CONSTRUCTOR, _OPTIONAL_ARGUMENT)):
        return f"this vLLM's tiers are constructed with {', '.join(required)}"
    return ""


def _field_problem(found: Mapping[str, Any]) -> str:
    for name, wanted in FIELDS.items():
        have = {field.name for field in dataclasses.fields(found[name])}
        lacking = [field for field in wanted if field not in have]
        if lacking:
            return f"{name} of this vLLM has no {', '.join(lacking)}"
    required = {
        field.name
        for field in dataclasses.fields(found["JobResult"])
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    unknown = sorted(required - set(FIELDS["JobResult"]))
    return f"JobResult of this vLLM needs {', '.join(unknown)}" if unknown else ""


def _required(function: Any) -> tuple[str, ...]:
    """Return the names of the parameters that have no default, `self` included."""
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    )
