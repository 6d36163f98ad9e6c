"""What a running pool saved, with the figures it was computed from. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvpool_cli.errors import UsageError
from kvpool_cli.planner import catalog
from kvpool_cli.planner.gpus import UTILIZATION, prefill_rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvpool_cli.planner.gpus import Gpu
    from kvpool_cli.planner.pool_status import ModelTokens, PoolStatus

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class ModelSavings:
    """Savings of one model in the last hour. None: cannot be computed from what is known."""

    pool: str
    model: str
    tokens_asked: int
    tokens_found: int
    prefill_rate: float | None
    """Tokens a second that one engine computes."""
    prefill_source: str
    engine_seconds: float | None
    """Seconds of prefill that the found tokens would have taken, before the time of their loads."""
    gpu_seconds: float | None
    kwh: float | None
    tenant: str = ""
    """Name of the KVCacheTenant, or the tag of another tenant; empty for all tenants together."""


@dataclass(frozen=True)
class Rates:
    """How tokens become seconds. `given`: tokens a second by model; `gpu`: estimates the rest by its peak."""

    given: Mapping[str, float]
    gpu: Gpu | None
    tensor_parallel: int = 1
    watts: float | None = None

    def of(self, model: str) -> tuple[float | None, str]:
        """Return tokens a second of one engine, and where the figure is from."""
        for name in (model, "*"):
            if name in self.given:
                return self.given[name], "given"
        if self.gpu is None:
            return None, "not known: give --prefill-rate or --gpu"
        try:
            shipped = catalog.find(model)
        except UsageError:
            return None, f"not known: no parameters of {model} ship; give --prefill-rate"
        if shipped.active_parameters is None:
            return None, "not known: give --prefill-rate"
        rate = prefill_rate(self.gpu, shipped.active_parameters, self.tensor_parallel)
        return (
            rate,
            f"estimated: {UTILIZATION:.0%} of {self.gpu.tflops:g} TFLOP/s, {shipped.active_parameters:g}e9 parameters",
        )


def savings(pools: Sequence[PoolStatus], rates: Rates) -> list[ModelSavings]:
    """Return the savings by pool and model, the most found tokens first."""
    found = [_of(pool.name, row, rates) for pool in pools for row in pool.models]
    return sorted(found, key=lambda row: (-row.tokens_found, row.pool, row.model, row.tenant))


def report(pools: Sequence[PoolStatus], rows: Sequence[ModelSavings]) -> dict[str, Any]:
    """Return the data of `kvpool savings`. Sums leave out models whose savings cannot be computed."""
    return {
        "window": "1h",
        "models": [asdict(row) for row in rows],
        "total": {
            "tokens_asked": sum(row.tokens_asked for row in rows),
            "tokens_found": sum(row.tokens_found for row in rows),
            "engine_seconds": sum(row.engine_seconds or 0.0 for row in rows),
            "gpu_seconds": sum(row.gpu_seconds or 0.0 for row in rows),
            "kwh": sum(row.kwh or 0.0 for row in rows),
            "models_not_computed": sum(row.engine_seconds is None for row in rows),
        },
        "measured_engine_seconds": {pool.name: pool.seconds_saved for pool in pools},
    }


def _of(pool: str, row: ModelTokens, rates: Rates) -> ModelSavings:
    rate, source = rates.of(row.model)
    engine = row.found / rate if rate else None
    gpu = engine * rates.tensor_parallel if engine is not None else None
    kwh = gpu * rates.watts / JOULES_PER_KWH if gpu is not None and rates.watts is not None else None
    return ModelSavings(pool, row.model, row.asked, row.found, rate, source, engine, gpu, kwh, row.tenant)
