"""HiCacheTier: a secondary tier of vLLM's TieringOffloadingSpec over a ChunkTier.

vLLM creates it in the scheduler's process and calls it only on the scheduler's thread. vLLM does not notify a tier of
new weights, except by `drain_jobs`, which it calls before it resets its caches: for new weights, for sleep and on
request.

Written for vLLM 0.32.
"""

from __future__ import annotations

import itertools
import logging
import queue
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ...backends.opening import StorageOpener
from ...backends.storage import Storage
from ...clock import SYSTEM_CLOCK
from ...config import HiCacheConfig
from ...errors import ConfigError
from ...geometry import DTYPE_BYTES
from ...keys import Namespace
from ..options import engine_config, hints_of, model_identity
from .identity import ChunkGroup, ChunkLayout, chunk_keys
from .tier import ChunkTier

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger(__name__)

# A group of layers without one of the first chunks never gets one: each prompt gives chunks of all groups.
_CHUNKS_OF_ALL_GROUPS = 100
# vLLM keeps the tokens of each announced chunk: about 2 KiB for 64 tokens. Beyond it the oldest count as removed.
_ANNOUNCED_MAX = 1 << 16
_WHERE = "secondary_tiers of kv_connector_extra_config"


class HiCacheTier(SecondaryTierManager):
    """See the module's docstring, and vLLM's SecondaryTierManager for each method. Options of its entry in
    `secondary_tiers`:

    `config` is the file of HiCache's configuration, or from HiCacheConnector the configuration; the sections storage,
    storage_format, integrity, transfer, prefetch and metrics are used. `model` is a name of the weights instead of the
    model's folder: it must change whenever they do, and with each flag that changes their results, which vLLM does not
    pass to a tier. `in_place` transfers chunks without a copy: a store that hangs then blocks the requests that wait
    for it, and `reset_cache`. `locality` is for vLLM.

    Raises ConfigError for invalid options or configuration, BackendError if storage cannot be opened.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(  # noqa: PLR0917 - vLLM's arguments, and the options
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: BackpressureDetector | None = None, config: str | HiCacheConfig | None = None,
        model: str | None = None, in_place: bool = False, locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        layout = chunk_layout(offloading_spec, self.block_size_bytes)
        options = config
        if not isinstance(options, HiCacheConfig):
            options = engine_config(_WHERE, {"config": config}, layout.chunk_tokens, whole_page=True)
        if options.storage is None:
            raise ConfigError("storage: is not configured, but a tier of vLLM needs it; add the section `storage`")
        name = offloading_spec.config.model.name
        identity = model_identity(_WHERE, {"model": model}, name, None)
        opener = StorageOpener(options, element_bytes=DTYPE_BYTES.get(layout.dtype))

        def open_namespace(namespace: Namespace) -> Storage:
            storage = opener.open_namespace(namespace)
            if self._announces:
                storage.watch_evictions(self._evicted.put)
            return storage

        # Chunks that this engine has stored, for routers, by page key; only with events that name tokens.
        events = offloading_spec.kv_events_config
        self._announces = events.enable_kv_cache_events and events.self_describing_kv_events
        self._announced: dict[bytes, OffloadKey] = {}
        self._events: list[OffloadingEvent] = []
        self._evicted: queue.SimpleQueue[Iterable[bytes]] = queue.SimpleQueue()
        self._stores: set[int] = set()  # in flight, to be announced
        self._has_refused_hints = False
        self._chunks = 0  # passed to `submit_store`, until the groups are compared
        self._groups_without = {} if layout.chunk_blocks == 1 else {one.number: one.layers for one in layout.groups}
        namespace = layout.namespace(identity, name).labelled(options.model_label)
        self._tier = ChunkTier(
            options, namespace, primary_kv_view.cast("B"), open_namespace, _key_of,
            in_place=in_place, processes=offloading_spec.config.parallel.data_parallel_size,
        )

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._tier.lookup(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        if not found and self._announced:
            self._withdraw([_key_of(key)])
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        if self._groups_without:
            self._compare_groups(job_metadata)
        if self._announces:
            self._stores.add(job_metadata.job_id)
        self._tier.store(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._tier.load(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        found = self._tier.ended()
        for ended in found:
            if ended.number in self._stores:
                self._stores.remove(ended.number)
                self._announce([OffloadKey(name) for name in ended.moved])
        return [
            JobResult(
                job_id=ended.number, success=ended.is_complete,
                successful_keys=[OffloadKey(name) for name in ended.moved], transfer_time=ended.seconds,
                transfer_bytes=len(ended.moved) * self.block_size_bytes,
            )
            for ended in found
        ]

    def take_events(self) -> Iterable[OffloadingEvent]:
        """See vLLM's SecondaryTierManager: the chunks that this engine has stored, until it learns of their loss."""
        for _ in range(self._evicted.qsize()):
            self._withdraw(self._evicted.get_nowait())
        events, self._events = self._events, []
        return events

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """See vLLM's SecondaryTierManager: chunks are stored when they are computed."""
        if not self._has_refused_hints and hints_of(req_context) is not None:
            self._has_refused_hints = True
            logger.warning(
                "vllm tier: hints are not carried out, because vLLM itself evicts from its host memory; models with "
                "full attention have them with HiCacheConnector"
            )
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._tier.forget(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._tier.step()

    def drain_jobs(self) -> None:
        """See vLLM's SecondaryTierManager. Also switches to a new namespace, because the weights may have changed.

        The epoch is the time: a counter would restart with the process, and could find pages of other weights.
        """
        self._tier.reset(int(1e9 * SYSTEM_CLOCK.wall_s()))
        self._stores.clear()  # those that have ended are of the old namespace
        self._withdraw(list(self._announced))

    def shutdown(self) -> None:
        """See vLLM's SecondaryTierManager. Blocks for at most `transfer.shutdown_deadline`."""
        self._tier.close()

    def _announce(self, chunks: list[OffloadKey]) -> None:
        if new := {key: chunk for chunk in chunks if (key := _key_of(chunk)) not in self._announced}:
            self._announced |= new
            self._add_event(list(new.values()), removed=False)
            self._withdraw(list(itertools.islice(self._announced, max(0, len(self._announced) - _ANNOUNCED_MAX))))

    def _withdraw(self, keys: Iterable[bytes]) -> None:
        if gone := [chunk for key in keys if (chunk := self._announced.pop(key, None)) is not None]:
            self._add_event(gone, removed=True)

    def _add_event(self, chunks: list[OffloadKey], *, removed: bool) -> None:
        # With `removal_expected`, vLLM keeps the hashes of a chunk's blocks until it is removed.
        self._events.append(OffloadingEvent(chunks, self.medium, removed, self.locality, removal_expected=not removed))

    def _compare_groups(self, stored: TransferJob) -> None:
        """Warn once if vLLM has no chunks of some layers: a hit needs chunks of all groups. Chunks of several blocks
        have this effect on state layers, of which vLLM keeps single blocks."""
        self._chunks += len(stored.keys)
        for key in stored.keys:
            self._groups_without.pop(get_offload_group_idx(key), None)
        if self._groups_without and self._chunks >= _CHUNKS_OF_ALL_GROUPS:
            layers = next(iter(self._groups_without.values()))
            logger.warning(
                "vllm tier: none of the first %d chunks is of layer %s, so no prompt can hit; remove blocks_per_chunk, "
                "as for all models with state layers", self._chunks, layers[0],
            )
            self._groups_without = {}


def chunk_layout(spec: OffloadingSpec, chunk_bytes: int) -> ChunkLayout:
    """Return the chunk layout of the engine of `spec`: rows of `chunk_bytes` of its primary tier."""
    config = spec.config
    parallel = config.parallel
    platform = current_platform.device_type
    if platform == "cpu":  # its kernels pack K for the instruction set
        platform += f":{torch.backends.cpu.get_cpu_capability()}"
    return ChunkLayout(
        engine=f"vllm/{vllm_version}/{platform}", dtype=config.model.dtype, kv_layout=str(config.kv_cache_layout),
        groups=tuple(
            ChunkGroup(group.group_id, group.tokens_per_block, tuple(group.layer_names)) for group in config.groups
        ),
        chunk_bytes=chunk_bytes, chunk_blocks=config.cache.blocks_per_chunk, hash_tokens=config.cache.tokens_per_hash,
        is_canonical=config.canonical_layout, is_replicated=config.replicated_layout, tp_size=parallel.tp_size,
        pp_size=parallel.pp_size, cp_size=parallel.pcp_size, dcp_size=parallel.dcp_size,
    )


def _key_of(name: bytes) -> bytes:
    """Return the page key of a chunk. REQUIRES: a request has arrived, so vLLM has set its root hash."""
    root: bytes = kv_cache_utils.NONE_HASH
    return chunk_keys(root)(name)
