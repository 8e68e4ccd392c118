"""Builds a running cache from a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from .. import tracing
from ..arguments import instance, whole
from ..backends.kept import open_kept
from ..backends.opening import StorageOpener
from ..backends.registry import BackendSpec
from ..backends.storage import Storage
from ..clock import SYSTEM_CLOCK, Clock
from ..config import HiCacheConfig
from ..config.remote_storage import RemoteStorageOptions
from ..config.storage import parts_of
from ..controller import HiCacheController, RankGroup
from ..controller.ranks import require_equal
from ..errors import BackendUnavailable, ConfigError, HiCacheError, InvalidInput, RankError
from ..events import EventStream
from ..events.factory import create_publisher
from ..geometry import DTYPE_BYTES, KVGeometry, PageShape
from ..keys import BIGRAM_BYTES, PAGE_KEY_BYTES, TOKEN_BYTES, Namespace
from ..tiers import (
    CopyEngine,
    EngineBlocks,
    EnginePages,
    HostPool,
    HostWindow,
    KVPool,
    PooledCopies,
    TrailingPool,
    create_copy_engine,
    create_device_pool,
)
from ..tiers.device import known_device
from ..tiers.memory import DeviceMemory, host_is_pinned, host_pages
from ..tiers.memory import device_pages as count_device_pages
from .break_even import BreakEven, Rates
from .chunk_cache import ChunkCache
from .engine_cache import EngineCache
from .host_cache import HostCache
from .host_pool import adopt_frames, host_codecs, open_host_pool, release_of, released_on_failure
from .interface import TreeCache
from .radix_cache import HiRadixCache
from .session_cache import SessionCache
from .tiered import TieredOptions
from .unclosed import watch

logger = logging.getLogger(__name__)

Cache = TypeVar("Cache", bound=HiRadixCache | HostCache | ChunkCache)
Tiered = TypeVar("Tiered", bound=HiRadixCache | HostCache)
# The sections in which ranks may differ; all others influence decisions, which must be identical.
_OF_EACH_RANK = {
    "device", "host", "integrity", "storage_format", "storage", "ranks", "metrics", "events", "admin", "daemon",
    "tracing",
}


def create_cache(  # noqa: PLR0913 - the parts that engines and tests replace
    config: HiCacheConfig, namespace: Namespace, *, device: torch.device | str = "cpu", device_pages: int | None = None,
    device_memory: DeviceMemory | None = None, device_blocks: EngineBlocks | None = None,
    engine_pages: EnginePages | None = None, trailing: Sequence[TrailingPool] = (), ranks: RankGroup | None = None,
    environ: Mapping[str, str] | None = None, clock: Clock = SYSTEM_CLOCK,
) -> TreeCache:
    """Build the configured cache: a HiRadixCache, SessionCache (`sessions.enabled`), or ChunkCache (no `prefix_cache`).

    Allocates the pools. Except for a ChunkCache, it also opens storage and starts the workers. `namespace` contains the
    geometry, a KVGeometry; its page size must be the configured one. `device_pages` is the size of L1 if the
    configuration does not set it; `device_memory` is the memory that fractions refer to, by default the driver's
    figure. With `device_blocks`, L1 is tensors of the engine on `device`, one block per page; page 0 stays unused. With
    `engine_pages` too, the engine also owns their free list, and the cache is an `EngineCache`. `trailing` are pools of
    layers with a window or a state (`TrailingPool`). All `ranks` must make this call: L1 and L2 have the size of the
    smallest rank's, and all ranks start or none. Times are those of `clock`. Raises ConfigError, CapacityError,
    SharedMemoryError, BackendError and RankError with what to change, and InvalidInput for an argument of another type,
    a PageShape and a `key_hash`; then everything is stopped again.

        >>> from hicache import HiCacheConfig, KVGeometry, Namespace, RadixKey
        >>> namespace = Namespace("weights", KVGeometry(layers=2, heads=1, head_dim=8, page_size=16))
        >>> config = HiCacheConfig.model_validate({"page_size": 16, "device": {"tokens": 512}, "host": {"tokens": 512}})
        >>> with create_cache(config, namespace) as cache:
        ...     request = cache.begin_request("r1", RadixKey.of(range(40)))
        ...     request.cached_tokens, len(request.pages)
        (0, 3)
    """
    geometry = _attention(instance("namespace", namespace, Namespace))
    known = _known_device(device)
    _require_page_size(instance("config", config, HiCacheConfig), geometry.page_size)
    namespace = _with_pools(config, namespace, known, trailing)
    _require_for_engine(config, engine_pages, device_blocks, trailing)
    l1_pages = _l1_pages(config, geometry, known, device_pages, device_memory, device_blocks)
    l1_pages = l1_pages if engine_pages is None else engine_pages.capacity
    l2_pages = host_pages(config.host, namespace.shape, l1_pages) if config.prefix_cache else 0
    page_bytes = namespace.shape.payload_bytes
    if ranks is not None:
        l1_pages, l2_pages, page_bytes = _agreed_sizes(ranks, config, namespace, l1_pages, l2_pages, trailing)

    def build(undo: ExitStack) -> HiRadixCache | ChunkCache:
        if device_blocks is not None:
            l1 = KVPool(geometry, device_blocks, l1_pages, owned=engine_pages)
        else:
            l1 = create_device_pool(geometry, l1_pages, known)
        if not config.prefix_cache:
            cache = ChunkCache(l1, weights_epoch=namespace.weights_epoch, trailing=trailing)
            undo.callback(cache.close)
            return cache
        pin = known if host_is_pinned(config.host, known.type) else None
        l2 = open_host_pool(config, namespace.shape, l2_pages, pin=pin, rank=None if ranks is None else ranks.rank)
        radix = partial(HiRadixCache, trailing=trailing)
        kind = EngineCache if engine_pages is not None else SessionCache if config.sessions.enabled else radix

        def make(controller: HiCacheController, options: TieredOptions) -> HiRadixCache:
            options["position_bytes"] = BIGRAM_BYTES if config.bigram_keys else TOKEN_BYTES
            options["break_even"] = BreakEven(config.break_even, page_bytes)
            options["release"] = release_of(l2)
            return kind(l1, l2, controller, **options)

        with released_on_failure(l2):
            return _start(undo, config, namespace, environ, l2, _copies(config, l1, l2, trailing), make, ranks, clock)

    return _all_or_none(config, ranks, build, clock)


def create_host_cache(
    config: HiCacheConfig, namespace: Namespace, *, host: HostPool | None = None,
    environ: Mapping[str, str] | None = None, clock: Clock = SYSTEM_CLOCK,
) -> HostCache:
    """Build a cache for an engine that manages its device pages itself; opens storage and starts the workers.

    L2 is `host`, such as a pool in shared memory with the pages of `namespace`; without it, a pool of `host.size` or
    `host.tokens`, which is private unless `host.shared` names it. The engine supplies page keys if `namespace` has a
    `key_hash`, otherwise tokens. The entries of `config` about L1, and `prefix_cache`, are ignored. Raises ConfigError,
    CapacityError, SharedMemoryError and BackendError with what to change, and InvalidInput for a `host` with other
    pages; then everything is stopped again.

        >>> from hicache import HiCacheConfig, KVGeometry, Namespace, RadixKey
        >>> namespace = Namespace("weights", KVGeometry(layers=2, heads=1, head_dim=8, page_size=16))
        >>> config = HiCacheConfig.model_validate({"page_size": 16, "host": {"tokens": 512}})
        >>> with create_host_cache(config, namespace) as cache:
        ...     cache.lookup("r1", RadixKey.of(range(40)))
        HostMatch(pages=0, loading=False)
    """
    shape = instance("namespace", namespace, Namespace).shape
    _require_page_size(instance("config", config, HiCacheConfig), shape.tokens)
    if config.bigram_keys:
        raise ConfigError("bigram_keys: a HostCache keys pages by tokens or by the engine's hashes; remove the entry")
    if config.sessions.enabled:
        raise ConfigError("sessions.enabled: sessions keep KV on L1, but this engine owns its L1; remove the entry")
    if host is None:
        l2 = _own_host(config, shape)
    elif (l2 := instance("host", host, HostPool)).shape != shape:
        raise InvalidInput(
            f"host: the pool has pages of {l2.payload_bytes} bytes in {len(l2.shape.pieces)} pieces, the namespace "
            f"of {shape.payload_bytes} in {len(shape.pieces)}, or tokens or names differ; make both from one page shape"
        )

    def make(controller: HiCacheController, options: TieredOptions) -> HostCache:
        options["position_bytes"] = PAGE_KEY_BYTES if namespace.key_hash else TOKEN_BYTES
        if host is None:
            options["release"] = release_of(l2)
        return HostCache(l2, controller, **options)

    def build(undo: ExitStack) -> HostCache:
        with released_on_failure(l2) if host is None else nullcontext():
            return _start(undo, config, namespace, environ, l2, None, make, None, clock)

    return _all_or_none(config, None, build, clock)


def _with_pools(
    config: HiCacheConfig, namespace: Namespace, device: torch.device, trailing: Sequence[TrailingPool]
) -> Namespace:
    """Return the namespace with the pieces of `trailing`. Raises ConfigError for a cache that cannot have any."""
    if trailing and config.sessions.enabled:
        raise ConfigError("sessions.enabled: true: not for a model with trailing pools; remove the entry")
    for pool in trailing:
        if instance("trailing", pool, TrailingPool).pool.device != device:
            raise ConfigError(f"trailing: pool {pool.name} is on {pool.pool.device}, L1 on {device}; use one device")
    return replace(namespace, more_pieces=tuple(piece for pool in trailing for piece in pool.pieces))


def _copies(config: HiCacheConfig, l1: KVPool, l2: HostPool, trailing: Sequence[TrailingPool]) -> CopyEngine:
    """Return the copy engine between `l2` and all pools, whose pieces follow each other in a page."""
    end = l1.geometry.layers
    device = create_copy_engine(l1.blocks, HostWindow(l2, 0, end), config.transfer)
    if not trailing:
        return device
    parts = []
    with ExitStack() as undo:
        undo.callback(device.close, 1.0)
        for pool in trailing:
            first, end = end, end + len(pool.pieces)
            window = HostWindow(l2, first, end - first)
            parts.append((pool, create_copy_engine(pool.pool.blocks, window, config.transfer)))
            undo.callback(parts[-1][1].close, 1.0)
        undo.pop_all()
    return PooledCopies(device, parts)


def _all_or_none(
    config: HiCacheConfig, ranks: RankGroup | None, build: Callable[[ExitStack], Cache], clock: Clock
) -> Cache:
    """Return the result of `build`, publishing events, if all ranks succeed; otherwise undo its stack.

    The other ranks are notified before the undo, which may close the rank group: they need not wait for the deadline.
    """
    with ExitStack() as undo:
        try:
            cache = build(undo)
            if config.events.endpoint is not None and (ranks is None or ranks.rank == 0):
                # All ranks have the same tree, and one address.
                stream = EventStream(config.events.buffer)
                given = isinstance(cache, HostCache) and cache.tree.position_bytes == PAGE_KEY_BYTES
                cache.record_events(stream, create_publisher(config.events, stream, given_keys=given, clock=clock))
        except RankError:  # all ranks know, or cannot be notified
            raise
        except HiCacheError:
            if ranks is not None:
                with suppress(RankError):  # the error of this rank says more
                    ranks.agree(np.array([False], dtype=np.int64))
            raise
        if ranks is not None and not ranks.agree(np.array([True], dtype=np.int64))[0]:
            raise RankError("another rank could not start; see its error")
        undo.pop_all()
    if not isinstance(cache, ChunkCache):  # which has nothing to lose
        watch(cache)
    return cache


def _start(  # noqa: PLR0913, PLR0917 - the differences between the two kinds of caches
    undo: ExitStack, config: HiCacheConfig, namespace: Namespace, environ: Mapping[str, str] | None, host: HostPool,
    copies: CopyEngine | None, make: Callable[[HiCacheController, TieredOptions], Tiered], ranks: RankGroup | None,
    clock: Clock,
) -> Tiered:
    """Open storage, start the workers, and make a cache over both, which `undo` closes."""
    if copies is not None:
        undo.callback(copies.close, 1.0)
    if config.tracing.enabled:
        tracing.enable()
    namespace, epoch = namespace.labelled(config.model_label), namespace.weights_epoch
    opener = storage_opener(config, namespace, environ, clock=clock)
    options: TieredOptions = {"weights_epoch": epoch}
    if config.host.shared.keep or config.integrity.verifies_host:
        options["host_codec"] = codecs = host_codecs(config, namespace, environ, clock)
    if config.host.shared.keep:
        if ranks is not None:
            raise ConfigError("host.shared.keep: not supported with several ranks; remove the entry")
        options["kept"] = kept = adopt_frames(host, codecs(epoch))
        store_of = opener  # behind the kept frames, if there is a store
        opener = lambda epoch: open_kept(codecs(epoch), kept, store_of and store_of(epoch), clock)  # noqa: E731
    options["open_storage"] = opener
    backend = _open_now_or_later(config, opener, epoch, ranks)
    if backend is not None:
        undo.callback(backend.close)
    try:
        controller = HiCacheController(
            host, copies, backend, config, ranks=ranks, stores_pages=namespace.writes, rates=len(Rates()), clock=clock
        )
        undo.pop_all()  # the controller closes its backend and its copies
        undo.callback(controller.close, 1.0)
        cache = make(controller, options)
    except InvalidInput as error:
        raise ConfigError(str(error)) from error
    undo.pop_all()
    undo.callback(cache.close)
    if opener is not None and backend is None:
        cache.storage.attach()
    cache.start_log(namespace)
    return cache


def _own_host(config: HiCacheConfig, shape: PageShape) -> HostPool:
    if config.host.size is None and config.host.tokens is None:
        raise ConfigError("host.ratio: needs the size of L1, but this engine owns its L1; use host.size")
    pin = None
    if config.host.pin == "on":  # `auto` depends on the device of L1, which only the engine knows
        if not torch.cuda.is_available():
            raise ConfigError("host.pin: 'on' needs a CUDA device, but torch finds none; use auto or off")
        pin = torch.device("cuda", torch.cuda.current_device())
    return open_host_pool(config, shape, host_pages(config.host, shape, 0), pin=pin)


def _agreed_sizes(
    ranks: RankGroup, config: HiCacheConfig, namespace: Namespace, l1_pages: int, l2_pages: int | Callable[[], int],
    trailing: Sequence[TrailingPool],
) -> tuple[int, int, int]:
    """Return the pages of the smallest L1 and L2, and the bytes of the longest page: its size differs between pipeline
    stages. Raises RankError on all ranks if their settings would lead to different decisions.

    Raises ConfigError for a share of the memory with several ranks: their pools must be equal, but each would take its
    share of what the others have left.
    """
    same = (
        config.model_dump(exclude=_OF_EACH_RANK), config.storage is not None,
        namespace.model, namespace.weights_epoch,
        namespace.kv_scales, namespace.quantisation, namespace.key_hash, namespace.ranks_share_pages,
        [(pool.trailing_tokens, pool.pool.pages) for pool in trailing],
    )
    require_equal(ranks, "configuration", str(same))
    if callable(l2_pages):
        if ranks.size > 1:
            raise ConfigError(
                f"host.size: a share needs one pool per machine; with {ranks.size} ranks write a size: 64GiB"
            )
        l2_pages = l2_pages()
    numbers = np.array([l1_pages, l2_pages, -namespace.shape.payload_bytes], dtype=np.int64)
    l1_least, l2_least, longest = ranks.agree(numbers).tolist()
    return l1_least, l2_least, -longest


def _require_for_engine(
    config: HiCacheConfig, pages: EnginePages | None, blocks: EngineBlocks | None, trailing: Sequence[TrailingPool]
) -> None:
    """Raise ConfigError for settings that an `EngineCache`, which has `pages` of the engine, cannot have."""
    if pages is None:
        return
    if trailing:
        raise ConfigError("engine_pages: an engine with the free list of L1 cannot have trailing pools; leave them out")
    if blocks is None:
        raise ConfigError("engine_pages: an engine with the free list of L1 has its tensors too; pass device_blocks")
    if not config.prefix_cache or config.sessions.enabled:
        entry = "sessions.enabled: true" if config.prefix_cache else "prefix_cache: false"
        raise ConfigError(f"{entry}: not for an engine that manages its requests itself; remove the entry")


def _known_device(device: torch.device | str) -> torch.device:
    try:
        known = known_device(device)
    except InvalidInput as error:
        raise ConfigError(str(error)) from error
    if known.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {known}: not supported for L1; use cpu, cuda or cuda:N")
    if known.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {known}: torch finds no CUDA device; use 'cpu'")
    return known


def _l1_pages(
    config: HiCacheConfig, geometry: KVGeometry, device: torch.device, pages: int | None, memory: DeviceMemory | None,
    blocks: EngineBlocks | None,
) -> int:
    pages = None if pages is None else whole("device_pages", pages, 1)
    if blocks is None:
        if pages is not None and not config.device.is_given:
            return pages
        return count_device_pages(config.device, geometry, device, memory)
    if pages is not None or config.device.is_given:
        raise ConfigError("device_blocks: the tensors set the size of L1; remove device_pages and the size in `device`")
    on = instance("device_blocks", blocks, EngineBlocks).device
    if (on.type, on.index or 0) != (device.type, device.index or 0):
        raise ConfigError(f"device_blocks: the tensors are on {blocks.device}; pass device={str(blocks.device)!r}")
    try:
        return KVPool(geometry, blocks).pages
    except InvalidInput as error:
        raise ConfigError(str(error)) from error


def _attention(namespace: Namespace) -> KVGeometry:
    """Return the geometry of L1. Raises InvalidInput for a namespace that is not for a cache with its own L1."""
    if not isinstance(namespace.geometry, KVGeometry):
        raise InvalidInput(
            "namespace: geometry: L1 needs a KVGeometry; a PageShape is for an engine with its own device cache"
        )
    if namespace.key_hash:
        raise InvalidInput("namespace: key_hash: this cache hashes tokens; set it to '', or use create_host_cache")
    return namespace.geometry


def _require_page_size(config: HiCacheConfig, tokens: int) -> None:
    if tokens != config.page_size:
        raise ConfigError(f"page_size: {config.page_size} is configured, but the engine uses {tokens}; set the same")


def open_storage(
    config: HiCacheConfig, namespace: Namespace, *, environ: Mapping[str, str] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Storage:
    """Open the configured store with the pages of `namespace`, without a cache. The caller closes it.

    Blocks until the store is open. Environment variables are read from `environ`, by default those of the process.
    Raises ConfigError without storage in `config` and for another page size, BackendError if the store cannot be
    opened, InvalidInput for arguments of another type.

        >>> from hicache import HiCacheConfig, KVGeometry, Namespace
        >>> namespace = Namespace("weights", KVGeometry(layers=2, heads=1, head_dim=8, page_size=16))
        >>> config = HiCacheConfig.model_validate({"page_size": 16, "storage": {"type": "memory"}})
        >>> open_storage(config, namespace).close()
    """
    shape = instance("namespace", namespace, Namespace).shape
    _require_page_size(instance("config", config, HiCacheConfig), shape.tokens)
    opener = storage_opener(config, namespace, environ, clock=clock)
    if opener is None:
        raise ConfigError("storage: is not configured; add the section `storage` with the type of the store")
    return opener(namespace.weights_epoch)


def storage_opener(
    config: HiCacheConfig, namespace: Namespace, environ: Mapping[str, str] | None, spec: BackendSpec | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Callable[[int], Storage] | None:
    """Return a function that opens the configured store, or its part `spec`, for a weights epoch; None without storage.
    Reads the keys once, here. Raises ConfigError."""
    if config.storage is None:
        return None
    namespace = namespace.labelled(config.model_label)
    geometry = namespace.geometry
    # A PageShape does not contain the size of an element.
    element_bytes = DTYPE_BYTES[geometry.dtype] if isinstance(geometry, KVGeometry) else None
    storage = StorageOpener(config, environ, element_bytes, clock)

    def opener(epoch: int) -> Storage:
        codec = storage.codec(
            replace(namespace, weights_epoch=epoch).digest,
            namespace.shape.payload_bytes,
            weights_epoch=epoch,
            label=namespace.name,
        )
        return storage.open(codec, spec)

    return opener


def _open_now_or_later(
    config: HiCacheConfig, opener: Callable[[int], Storage] | None, epoch: int, ranks: RankGroup | None
) -> Storage | None:
    """Return the open storage, or None: without storage, and if a daemon or a part of a composition is unavailable on
    any rank. The cache then starts without storage and opens it later.

    All ranks call it. Raises the errors of `opener`, and RankError if another rank raises.
    """
    if opener is None:
        return None
    if config.storage is None:  # only pages that a previous process has left on the host
        return opener(epoch)
    backend = None
    try:
        backend = opener(epoch)
    except BackendUnavailable as error:
        options = config.storage.options
        if not parts_of(options) and not isinstance(options, RemoteStorageOptions):
            raise
        logger.warning("storage is not open yet; the cache starts without it and tries again: %s", error)
    if ranks is not None:
        # 0 means that a rank cannot start.
        agreed = ranks.agree(np.array([1 if backend is None else 2], dtype=np.int64))[0]
        if agreed < 2 and backend is not None:
            backend.close()
            backend = None
        if not agreed:
            raise RankError("another rank could not start; see its error")
    return backend
