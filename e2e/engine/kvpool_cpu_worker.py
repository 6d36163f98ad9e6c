"""Copies between an engine's KV cache and host memory where the engine itself runs on the CPU.

vLLM's own copy worker refuses a CPU ("CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"), so the
demo and the cluster tests name this one in the connector's configuration::

    {"spec_name": "CpuTieringSpec", "spec_module_path": "kvpool_cpu_worker"}

Everything above the copy is vLLM's own code: primary tier, secondary tiers, scheduler. Never for production.

Interface: `OffloadingWorker` and `TieringOffloadingSpec` of vLLM 0.32 (base.py and tiering/spec.py of v1/kv_offload).
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["CopyWorker", "CpuTieringSpec"]


class CopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies whole pages at once, in the caller's thread. A chunk of host memory holds `blocks_per_chunk` KV blocks.

    With `canonical`, host memory has vLLM's canonical layout: one page for all ranks, in which each rank has the places
    that the mapping of a layer names.
    """

    def __init__(
        self, kv_caches: Any, region: SharedOffloadRegion, blocks_per_chunk: int, *, canonical: bool = False
    ) -> None:
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._canonical = canonical
        self._layers_of_group = kv_caches.group_data_refs
        # int8, so that strides are bytes whatever the KV dtype is: [block, byte] and [chunk, block in it, byte]
        self._kv = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        if canonical:
            pages = [0] * len(kv_caches.tensors)
            for layer in (layer for layers in self._layers_of_group for layer in layers):
                pages[layer.tensor_idx] = max(pages[layer.tensor_idx], layer.mapping.canonical_page_size_bytes)
            views = [region.create_next_canonical_view(page * blocks_per_chunk) for page in pages]
        else:
            views = [region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk) for t in kv_caches.tensors]
        self._host = [view.unflatten(1, (blocks_per_chunk, -1)) for view in views]
        self._finished: list[TransferResult] = []

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, to_host: bool) -> bool:
        began, copied, first_block, first_chunk = time.monotonic(), 0, 0, 0
        for layers, count, index in zip(self._layers_of_group, blocks.group_sizes, blocks.block_indices, strict=True):
            if count == 0:
                continue
            place = torch.arange(count) + index % self._per_chunk  # the first block may lie inside a chunk
            block_ids = torch.from_numpy(blocks.block_ids[first_block : first_block + count]).long()
            chunk_ids = torch.from_numpy(chunks.block_ids[first_chunk:]).long()[place // self._per_chunk]
            inside = place % self._per_chunk
            first_block += count
            first_chunk += int(place[-1]) // self._per_chunk + 1
            for layer in layers:
                size = layer.page_size_bytes
                kv, host = self._kv[layer.tensor_idx], self._host[layer.tensor_idx]
                if self._canonical:
                    _copy_mapped(layer.mapping, kv, host, block_ids, chunk_ids, inside, to_host=to_host)
                elif to_host:
                    host[chunk_ids, inside, :size] = kv[block_ids, :size]
                else:
                    kv[block_ids, :size] = host[chunk_ids, inside, :size]
                copied += count * size
        self._finished.append(TransferResult(job_id, True, copied, time.monotonic() - began))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: a submitted copy is done."""

    def shutdown(self) -> None:
        self._kv.clear()
        self._host.clear()
        self._region.cleanup()


def _copy_mapped(
    mapping: Any,
    kv: torch.Tensor,
    host: torch.Tensor,
    block_ids: torch.Tensor,
    chunk_ids: torch.Tensor,
    inside: torch.Tensor,
    *,
    to_host: bool,
) -> None:
    """Copy this rank's bytes of pages between `kv` and canonical pages. Of ranks with equal bytes one writes a page."""
    if to_host:
        writes = (chunk_ids * host.shape[1] + inside) % mapping.num_writers == mapping.writer_index
        block_ids, chunk_ids, inside = block_ids[writes], chunk_ids[writes], inside[writes]
    local = torch.cat([_places(run.local_offset, run.local_stride, run) for run in mapping.runs])
    shared = torch.cat([_places(run.canonical_offset, run.canonical_stride, run) for run in mapping.runs])
    page = (chunk_ids[:, None], inside[:, None], shared[None, :])
    if to_host:
        host[page] = kv[block_ids[:, None], local[None, :]]
    else:
        kv[block_ids[:, None], local[None, :]] = host[page]


def _places(offset: int, stride: int, run: Any) -> torch.Tensor:
    """Places of a run's bytes: fragments of `fragment_size` bytes, `stride` apart."""
    starts = offset + torch.arange(run.num_fragments) * stride
    return (starts[:, None] + torch.arange(run.fragment_size)[None, :]).flatten()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiering with the copy worker above. The scheduler's side and the worker's side each have an instance."""

    _worker: OffloadingWorker | None

    def get_manager(self) -> Any:
        manager = super().get_manager()
        _mapped(self._engine_id, "scheduler", self._scheduler_mmap)
        return manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        worker = self._worker
        if worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            canonical = bool(self.config.canonical_layout)
            if canonical:
                self._validate_canonical_refs(kv_caches)
            worker = self._worker = CopyWorker(kv_caches, region, self.blocks_per_chunk, canonical=canonical)
            _mapped(self._engine_id, "worker", region)
        return worker


_SIDES: dict[str, dict[str, Any]] = {}


def _mapped(engine_id: str, side: str, region: Any) -> None:
    """Once both sides in this process have mapped the region, drop its name: then no way to die leaves it behind."""
    sides = _SIDES.setdefault(engine_id, {})
    sides[side] = region
    if len(sides) == 2:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(region.mmap_path)
        for mapped in sides.values():
            mapped._creator = False  # else its cleanup looks for the name again
        del _SIDES[engine_id]
