"""GPUs of which a prefill rate is estimated where none was measured. Pure.

Peak is the vendor's figure for dense BF16 (without sparsity); power is that of the board. An engine reaches
`UTILIZATION` of the peak in prefill, an assumption that the plan prints: measure and give --prefill-rate instead.
"""

from __future__ import annotations

from typing import NamedTuple

from kvpool_cli.errors import UsageError

UTILIZATION = 0.4


class Gpu(NamedTuple):
    """One kind of GPU."""

    tflops: float
    watts: float


GPUS = {
    "A100": Gpu(312, 400),
    "H100": Gpu(989, 700),
    "H200": Gpu(989, 700),
    "B200": Gpu(2250, 1000),
    "L40S": Gpu(362, 350),
    "MI300X": Gpu(1307, 750),
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of a name. Raises UsageError."""
    if name.upper() not in GPUS:
        raise UsageError(f"the GPU {name!r} is not known: one of {', '.join(GPUS)}, or give --prefill-rate")
    return GPUS[name.upper()]


def prefill_rate(gpu: Gpu, active_parameters: float, tensor_parallel: int) -> float:
    """Return tokens a second of one engine: 2 operations per parameter and token; attention is not counted."""
    return tensor_parallel * gpu.tflops * 1e12 * UTILIZATION / (2 * active_parameters * 1e9)
