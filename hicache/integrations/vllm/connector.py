"""PageConnector: translates vLLM's connector interface, in the scheduler's process and in each worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ...admin import serve_configured as serve_admin
from ...cache import create_host_cache
from ...errors import ConfigError
from ...events import EventStream
from ...metrics import serve_configured as serve_metrics
from .announced import WorkerLayout, announce, announced
from .blocks import BlockEvents, describer
from .engine import AdapterKeys, VllmEngine, warn_of_settings
from .figures import CopyStats
from .jobs import Report, Step
from .scheduler import SchedulerSide
from .worker import Collected, WorkerSide

_CLOSE_S = 10.0


@dataclass
class HiCacheStep(KVConnectorMetadata):
    """The orders of one step for the workers."""

    step: Step


@dataclass
class HiCacheReport(KVConnectorWorkerMetadata):
    """The report of one worker, or of all, after a step."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, HiCacheReport)
        return HiCacheReport(self.report.merge(other.report))


class PageConnector(KVConnectorBase_V1, SupportsHMA):
    """The HiCacheConnector of a model with full attention: its pages are in frames that all ranks share."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._engine = VllmEngine.of(vllm_config, kv_cache_config)
        self._adapters = AdapterKeys()
        self._scheduler: _Scheduler | None = None
        self._worker: WorkerSide | None = None
        self._collected = Collected()
        if role == KVConnectorRole.SCHEDULER:
            warn_of_settings(vllm_config, kv_cache_config)
            found = announced(self._engine.name, self._engine.layout.ranks)
            self._engine = self._engine.as_announced(found)
            self._scheduler = _Scheduler(self._engine, kv_cache_config.kv_cache_groups[0].kv_cache_spec, found)

    # Called by vLLM before it starts

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # The worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        engine, rank = self._engine, get_tensor_model_parallel_rank()
        pool = engine.open_pool(worker=True)
        self._worker = WorkerSide(pool, engine.layout, rank, engine.layers(kv_caches), engine.config.transfer)
        announce(engine.name, rank, engine.worker_layout(kv_caches, pool))

    def unregister_kv_caches(self) -> None:
        """Wait for all copies: vLLM (0.33 or later) unmaps its caches to sleep. It maps them at the same addresses when
        it wakes up, so there is nothing to restore."""
        self._side.drain()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._side.flush(_step(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._side.begin_step(_step(connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._side.start_loads(self._step)
        if self._step.layerwise and self._step.loads:
            for layer in range(self._engine.early_layers):
                self._side.wait_layer(layer)

    def wait_for_layer_load(self, layer_name: str) -> None:
        names = self._engine.layer_names
        # A layer that is not in `names` shares the KV of a previous one.
        if self._step.layerwise and self._step.loads and layer_name in names:
            self._side.wait_layer(names.index(layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: pages are saved after the whole forward, in one copy."""

    def wait_for_save(self) -> None:
        self._side.start_saves(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        found = self._collected = self._side.collect(self._step)
        return KVConnectorTransferResults(found.released, found.received, found.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._collected.invalid_blocks

    def build_connector_worker_meta(self) -> HiCacheReport | None:
        report = self._side.take_report()
        return None if report is None else HiCacheReport(report)

    # The scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.decisions.on_device = lambda block: gpu_block_pool.get_cached_block(block, [0]) is not None

    def on_new_request(self, request: Any) -> None:
        self._decisions.arrive(request, self._adapters.of(request.lora_request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._decisions.match(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._engine.layerwise

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._decisions.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        storage = min(num_external_tokens, self._decisions.loaded_from_storage(request))
        split = {CacheHitSource.HOST: num_external_tokens - storage, CacheHitSource.DISK: storage}
        return {source: tokens for source, tokens in split.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> HiCacheStep:
        blocks = scheduler_output.kv_connector_block_state
        return HiCacheStep(self._decisions.build_step(
            scheduler_output, lambda rid: found[0] if (found := blocks.get_block_ids(rid)) is not None else None
        ))

    def update_connector_output(self, connector_output: Any) -> None:
        reported = connector_output.kv_connector_worker_meta
        if isinstance(reported, HiCacheReport):
            self._decisions.report(reported.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._decisions.finish(request.request_id), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        (blocks,) = block_ids
        return self.request_finished(request, blocks)

    def has_pending_block_frees(self) -> bool:
        return self._decisions.frees_blocks_soon

    def reset_cache(self) -> bool:
        self._decisions.new_weights()
        return True

    def take_events(self) -> Iterable[Any]:
        events = None if self._scheduler is None else self._scheduler.events
        return () if events is None else events.take()

    # Figures

    def get_kv_connector_stats(self) -> CopyStats | None:
        copied = None if self._scheduler is None else self._scheduler.decisions.take_copied()
        return CopyStats(data=copied) if copied else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close(_CLOSE_S)
        if self._scheduler is not None:
            self._scheduler.close()

    @property
    def _side(self) -> WorkerSide:
        assert self._worker is not None, "vLLM registers its KV caches before the first step"
        return self._worker

    @property
    def _step(self) -> Step:
        return _step(self._get_connector_metadata())

    @property
    def _decisions(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM decides in the scheduler's process"
        return self._scheduler.decisions


class _Scheduler:
    """The parts of a connector in the scheduler's process."""

    def __init__(self, engine: VllmEngine, spec: KVCacheSpec, workers: WorkerLayout) -> None:
        self._pool = engine.open_pool(worker=False)
        if workers.memory != self._pool.identity:
            raise ConfigError("a worker shares other memory than the scheduler; restart the engine, with one /dev/shm")
        namespace = engine.namespace(workers.form)
        cache = create_host_cache(engine.config, namespace, host=self._pool)
        self.events: BlockEvents | None = None
        section, events = engine.config.events, engine.vllm.kv_events_config
        if events is not None and events.enable_kv_cache_events and section.endpoint is None:
            stream = EventStream(section.buffer)
            cache.record_events(stream)
            self.events = BlockEvents(stream.subscribe(), section.media)
        blocks_of = describer(section, engine.layout, spec, in_vllm=self.events is not None)
        self.decisions = SchedulerSide(
            cache, engine.layout, layerwise=engine.layerwise, blocks_of=blocks_of,
            shares_blocks=engine.vllm.cache_config.enable_prefix_caching,
            in_lockstep=engine.vllm.parallel_config.data_parallel_size > 1,
        )
        self._metrics = serve_metrics(engine.config, cache.statistics)
        self._admin = serve_admin(engine.config, cache, namespace)

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()
        if self._metrics is not None:
            self._metrics.close()
        self.decisions.close()
        self._pool.unlink()


def _step(metadata: KVConnectorMetadata) -> Step:
    assert isinstance(metadata, HiCacheStep)
    return metadata.step
