"""TieringOffloadingSpec for engines on a CPU. vLLM's own worker supports only GPUs.

`register` puts it in the place of vLLM's own spec, in each process of an engine with `vllm_environ(zeros=...)`.

The "device" is memory of this process, so a copy is one assignment, complete when it is submitted. All other parts of
vLLM's offloading are unmodified: connector, scheduler, primary tier in shared memory, secondary tiers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


def register() -> None:
    """Replace vLLM's spec by CpuTieringSpec. Called by vLLM in each of its processes, before an engine starts."""
    OffloadingSpecFactory._registry["TieringOffloadingSpec"] = lambda: CpuTieringSpec


class CpuTieringSpec(TieringOffloadingSpec):
    """See the module's docstring. While the file named by the variable TEST_ZEROS_FILE exists, loads write zeros, as a
    control of tests that compare tokens."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CopyWorker(self, kv_caches)


class CopyWorker(OffloadingWorker):
    """Copies blocks between tensors of the engine and rows of the primary tier."""

    def __init__(self, spec: TieringOffloadingSpec, kv_caches: CanonicalKVCaches) -> None:
        self._zeros = os.environ.get("TEST_ZEROS_FILE", "")
        self._chunk_blocks = spec.blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._region = SharedOffloadRegion(
            engine_id=spec.config.engine_id, num_chunks=spec.num_chunks, rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk, cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._device: list[torch.Tensor] = []
        self._host: list[torch.Tensor] = []
        for one in kv_caches.tensors:
            self._device.append(one.tensor.view(torch.int8).view(-1, one.page_size_bytes))
            self._host.append(self._region.create_next_worker_view(one.page_size_bytes * self._chunk_blocks))
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for device, host in self._pairs(src_spec, dst_spec):
            host.copy_(device)
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        zeros = os.path.exists(self._zeros)
        for device, host in self._pairs(dst_spec, src_spec):
            device.copy_(torch.zeros_like(host) if zeros else host)
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def _pairs(self, device: GPULoadStoreSpec, host: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        assert isinstance(host, CPULoadStoreSpec)
        per_chunk, chunks, blocks = self._chunk_blocks, list(host.chunk_ids), iter(device.block_ids)
        for refs, size, first in zip(self._refs, device.group_sizes, device.block_indices, strict=True):
            skipped = first % per_chunk
            used = -(-(size + skipped) // per_chunk) if size else 0
            mine, chunks = chunks[:used], chunks[used:]
            for number in range(skipped, skipped + size):
                block, chunk, sub = int(next(blocks)), int(mine[number // per_chunk]), number % per_chunk
                for ref in refs:
                    page = self._device[ref.tensor_idx].shape[1]
                    start = sub * page
                    yield (
                        self._device[ref.tensor_idx][block, : ref.page_size_bytes],
                        self._host[ref.tensor_idx][chunk, start : start + ref.page_size_bytes],
                    )

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._device.clear()
        self._host.clear()
        self._region.cleanup()
