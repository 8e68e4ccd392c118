"""Builds the tree from SGLang's flags and pools, with the servers of metrics and of the admin surface."""

from __future__ import annotations

import atexit
import json
import logging
import secrets
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule

from ...admin import serve_configured as serve_admin
from ...cache import create_cache
from ...cache.engine_cache import EngineCache
from ...clock import SYSTEM_CLOCK
from ...config import HiCacheConfig
from ...controller import TorchRankGroup
from ...errors import ConfigError
from ...events import EventStream
from ...geometry import KVGeometry, KVLayout
from ...keys import Namespace
from ...metrics.families import cache_collector
from ...metrics.server import serve_collector
from ...tiers import EngineBlocks
from ..options import known_options
from ..sglang.running import OPTIONS, PROCESSES_MAX, page_config, running_engine
from .events import TreeEvents
from .pool import DraftWaits, LayerWaits, SGLangPages, device_layers
from .prefill import PrefillClock
from .settings import INEFFECTIVE, REFUSED, USE_OWN_TREE, refused, without_effect
from .tree import HiCacheTree
from .weights import WeightsWatch

logger = logging.getLogger(__name__)


def build_tree(context: TreeCacheBuildContext) -> HiCacheTree:
    """Return the tree. Blocks while weights are fingerprinted for the first time, and until storage is open. Raises
    ConfigError, with what to change, for what the tree does not support; SGLang then does not start."""
    params = context.params
    _require_supported(context)
    allocator = params.token_to_kv_pool_allocator
    pool, drafts = allocator.get_kvcache(), params.mtp_draft_device_pools
    geometry, layers = device_layers(pool, drafts)
    extra = _extra_of(get_memory().hicache_storage_backend_extra_config)
    known_options(OPTIONS, extra, frozenset({"config", "model"}))
    config = _config_of(page_config(extra, params.page_size), context)
    blocks = EngineBlocks(layers, first=1, slots_per_block=params.page_size)  # one block per page; page 0 is padding
    namespace = _namespace(extra, config, geometry, wide_ids=_has_wide_ids(context))
    ranks = _ranks(config, params.tp_cache_group)
    pages = SGLangPages(allocator)
    cache = create_cache(config, namespace, device=blocks.device, device_blocks=blocks, engine_pages=pages, ranks=ranks)
    assert isinstance(cache, EngineCache)
    waits = LayerWaits(geometry.layers, blocks.device)
    _register_waits(context, waits, pool, drafts)
    first = get_parallel().attn_tp_rank == 0
    servers = [
        serve_collector(config, cache_collector(cache.statistics), ports=PROCESSES_MAX) if first else None,
        serve_admin(config, cache, namespace) if first else None,
    ]

    def close() -> None:
        for server in servers:
            if server is not None:
                server.close()
        servers.clear()
        cache.close()

    atexit.register(close)
    return HiCacheTree(
        params, cache, pages, waits,
        PrefillClock(cache.record_prefill, _events_of_forwards(context, blocks.device, timed=True)),
        wide_ids=_has_wide_ids(context), fence=_events_of_forwards(context, blocks.device, timed=False),
        next_epoch=_epochs(WeightsWatch.of_worker(context.tp_worker), params.tp_cache_group),
        take_events=_events(context, config, cache), close=close,
    )


def _require_supported(context: TreeCacheBuildContext) -> None:
    """Raise ConfigError for what this tree cannot have, with all reasons. Log the flags without effect."""
    params, parallel, given = context.params, get_parallel(), _given_flags(context.server_args)
    problems = {
        "--enable-hierarchical-cache is not set, and without it SGLang does not load from host memory; set it":
            not context.enable_hierarchical_cache,
        "this model or a flag turns SGLang's prefix cache off; remove --radix-cache-backend":
            context.disable_radix_cache,
        f"models with sliding windows are not supported; {USE_OWN_TREE}": context.is_hybrid_swa,
        f"models with state are not supported; {USE_OWN_TREE}": context.is_hybrid_ssm,
        f"models with a sparse-attention index are not supported; {USE_OWN_TREE}": context.is_dsa,
        f"context parallelism is not supported; {USE_OWN_TREE}": parallel.attn_cp_size > 1 or parallel.dcp_enabled,
        f"a draft model with a KV pool of its own is not supported; {USE_OWN_TREE}":
            bool(params.sidecar_draft_device_pools),
    }
    found = [f"{name}: {words}" for name, words in refused(given)]
    found = found or [problem for problem, is_there in problems.items() if is_there]
    if found:
        raise ConfigError("--radix-cache-backend hicache: " + "; ".join(found))
    for name, words in without_effect(given):
        logger.warning("%s has no effect with HiCache's tree: %s", name, words)


def _given_flags(args: Any) -> dict[str, Any]:
    """Return the values of the known flags that are not SGLang's defaults, by field."""
    defaults = type(args)(model_path=args.model_path)
    fields = [*INEFFECTIVE, *(one.field for one in REFUSED)]
    return {name: getattr(args, name) for name in fields if getattr(args, name) != getattr(defaults, name)}


def _extra_of(text: str | None) -> dict[str, Any]:
    try:
        extra = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"{OPTIONS}: {error}; write a JSON object") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"{OPTIONS}: {type(extra).__name__} is not a JSON object")
    return extra


def _config_of(config: HiCacheConfig, context: TreeCacheBuildContext) -> HiCacheConfig:
    """Return the configuration of this process: keys of 8 bytes where a position is not one token of 4 bytes, and its
    own names for each data-parallel rank."""
    if _has_wide_ids(context) and config.events.endpoint is not None:
        raise ConfigError(
            "events.endpoint: this model's images have ids of 62 bits, which these events cannot hold; remove it, and "
            "use SGLang's --kv-events-config"
        )
    changes: dict[str, Any] = {"bigram_keys": context.params.is_eagle or _has_wide_ids(context)}
    parallel, shared = get_parallel(), config.host.shared
    rank = parallel.attn_dp_rank or parallel.dp_rank or 0
    if rank and shared.name:
        changes["host"] = config.host.model_copy(
            update={"shared": shared.model_copy(update={"name": f"{shared.name}-dp{rank}"})}
        )
    if rank and config.admin.socket is not None:
        socket = config.admin.socket
        changes["admin"] = config.admin.model_copy(update={"socket": f"{socket}-dp{rank}"})
    return config.model_copy(update=changes)


def _has_wide_ids(context: TreeCacheBuildContext) -> bool:
    """Return True if token ids may have more than 31 bits: SGLang names images by ids of 62 bits."""
    return bool(context.model_config.is_multimodal)


def _namespace(extra: dict[str, Any], config: HiCacheConfig, geometry: KVGeometry, *, wide_ids: bool) -> Namespace:
    engine, parallel = running_engine(extra, config.model_label), get_parallel()
    is_mla = geometry.layout is KVLayout.MLA
    return Namespace(
        model=engine.model, geometry=geometry, kv_scales=engine.kv_scales, tp_rank=parallel.attn_tp_rank,
        tp_size=parallel.attn_tp_size, ranks_share_pages=is_mla,
        engine_layout=f"sglang {engine.version} tree kv={engine.kv_cache_dtype}{' wide' if wide_ids else ''}",
        quantisation=engine.quantization, label=engine.label,
    )


def _ranks(config: HiCacheConfig, group: Any) -> TorchRankGroup | None:
    """Return the ranks that schedule alike, over a process group of their own; None for one rank."""
    if group is None or dist.get_world_size(group) == 1:
        return None
    own = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    return TorchRankGroup(own, config.ranks)


def _epochs(watch: WeightsWatch, group: Any) -> Callable[[int], int | None]:
    def next_epoch(epoch: int) -> int | None:
        """Return the epoch after `epoch`, the same on all ranks, or None if no rank has new weights.

        It is unique: other engines with the same start, also later ones, may have other new weights.
        """
        proposed = max(epoch + 1, (int(SYSTEM_CLOCK.wall_s()) << 31) + secrets.randbits(31))
        votes = torch.tensor([watch.changed(), proposed], dtype=torch.int64)
        if group is not None:
            dist.all_reduce(votes, dist.ReduceOp.MAX, group)
        changed, agreed = votes.tolist()
        return agreed if changed else None

    return next_epoch


def _events(context: TreeCacheBuildContext, config: HiCacheConfig, cache: EngineCache) -> Callable[[], Any] | None:
    """Return the source of SGLang's `--kv-events-config`; None without it, and on ranks that do not publish."""
    params = context.params
    if not params.enable_kv_cache_events:
        return None
    if cache.event_stream is None:  # HiCache does not publish events itself
        cache.record_events(EventStream(config.events.buffer))
    assert cache.event_stream is not None
    return TreeEvents(
        cache.event_stream, page_size=params.page_size, lora_names=params.kv_event_lora_names,
        dynamo_format=params.dynamo_kv_event_format, wide_ids=_has_wide_ids(context),
    ).take


def _register_waits(context: TreeCacheBuildContext, waits: LayerWaits, pool: Any, drafts: Any) -> None:
    """Let SGLang's forwards wait for the layers that they read."""
    pool.register_layer_transfer_counter(waits)
    first = pool.layer_num
    for draft in drafts:
        draft.register_layer_transfer_counter(DraftWaits(waits, first))
        first += draft.layer_num
    context.tp_worker.register_hicache_layer_transfer_counter(waits)


def _events_of_forwards(
    context: TreeCacheBuildContext, device: torch.device, *, timed: bool
) -> Callable[[], torch.cuda.Event] | None:
    """Return a function that records an event after the forwards that SGLang has queued: on the stream of its forwards,
    or without overlap scheduling on that of its scheduler, which is the current one. None on a CPU."""
    if device.type != "cuda":
        return None
    stream = None if get_schedule().disable_overlap_schedule else context.tp_worker.model_runner.forward_stream

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream(device))
        return event

    return record
