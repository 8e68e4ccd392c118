"""HiCacheStore: translates SGLang's storage interfaces to a HostPoolStorage.

Written for SGLang 0.5.23, which creates one store per rank and calls it from three threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.observability.metrics_collector import StorageMetrics

from ...arguments import instance
from ...errors import ConfigError, HiCacheError, InvalidInput
from ..options import known_options
from ..store import EngineStorage
from .identity import KV, EngineIdentity
from .pages import EngineHostPool, HostPages
from .running import OPTIONS, PROCESSES_MAX, page_config, running_engine, weight_version
from .storage import HostPoolStorage

logger = logging.getLogger(__name__)

# SGLang's own entries, and those of HiCache.
_KNOWN = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "file_storage_path", "config", "model",
    "fixed_weights",
})
# SGLang waits 10 s for its storage threads when it flushes or detaches; its scheduler dies if one is still in a call.
_DEADLINE_S_MAX = 5.0


class HiCacheStore(HiCacheStorage):
    """HiCache's storage as the L3 of SGLang's hierarchical cache. See HiCacheStorage for each method.

    `--hicache-storage-backend-extra-config` has `config`, the path of HiCache's configuration, and may have `model`, a
    name of the weights that changes whenever they do: by default the fingerprint of the model's folder, or the commit
    of its snapshot. Raises ConfigError for unsupported settings, with the flag to set; the engine then does not start.

    SGLang does not notify its storage of new weights, but flushes its caches, and may increment a version. So storage
    ends with a flush, unless `fixed_weights` is set because weights never change while SGLang runs.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        self._config = storage_config
        self._extra = dict(storage_config.extra_config or {})
        self._storage: HostPoolStorage | None = None
        self._engine: EngineIdentity
        known_options(OPTIONS, self._extra, _KNOWN)
        if not self._extra.get("interface_v1"):
            logger.warning(
                'SGLang copies each page, and a full store may evict the head of a prompt before its tail; add '
                '"interface_v1": 1 to --hicache-storage-backend-extra-config'
            )
        if storage_config.should_split_heads:
            raise ConfigError(f"{OPTIONS}: tp_lcm_size: pages split by heads are not supported by HiCache; remove it")

    def register_mem_pool_host(self, mem_pool_host: EngineHostPool) -> None:
        """Open storage, for the pages of the pool if it has bytes. Blocks while new weights are fingerprinted."""
        super().register_mem_pool_host(mem_pool_host)
        if isinstance(mem_pool_host, LogicalHostPool):
            self._require_in_place(mem_pool_host)
        config = page_config(self._extra, mem_pool_host.page_size)
        self._engine = running_engine(self._extra, config.model_label)
        is_current = self._weights_are_those_of_now(mem_pool_host)
        storage = EngineStorage(config, processes=PROCESSES_MAX, deadline_s_max=_DEADLINE_S_MAX)
        self._storage = HostPoolStorage(storage, is_current)
        if not isinstance(mem_pool_host, LogicalHostPool):
            self._add(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: EngineHostPool, host_pool_name: PoolName) -> None:
        """Open storage for the pages of a pool of a hybrid model. The pool of `register_mem_pool_host` comes again, as
        `kv`. Blocks while a store is opened."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._add(str(host_pool_name), host_pool)

    # Interface v1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._open.lookup(keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """See HiCacheStorage: return for each page whether it arrived."""
        return self._open.read(keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """See HiCacheStorage: return for each page whether it is stored now."""
        return self._open.write(keys, host_indices, None if extra_info is None else extra_info.prefix_keys)

    # Interface without zero copy: a page is a tensor with the bytes of the pool's `get_data_page`

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """See HiCacheStorage: return the page, in `target_location` or a new tensor; None if it did not arrive."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        """See HiCacheStorage, and `get`."""
        targets = [None] * len(keys) if target_locations is None else target_locations
        return self._by_tensors(target_sizes).read_flat(keys, targets)

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: object = None, target_sizes: object = None
    ) -> bool:
        """See HiCacheStorage: return whether the page is stored now."""
        return self.batch_set([key], None if value is None else [value], target_location, target_sizes)

    def batch_set(
        self, keys: list[str], values: Sequence[torch.Tensor] | None = None, target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """See HiCacheStorage: return whether all pages are stored now."""
        return self._by_tensors(target_locations, target_sizes).write_flat(keys, () if values is None else values)

    # Interface v2

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        found = self._open.find(keys, pool_transfers or [])
        return PoolTransferResult(found.pages, found.pools, list(found.lengths))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """See HiCacheStorage: return for each pool and page whether it arrived."""
        return self._open.read_pools(transfers)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """See HiCacheStorage: return for each pool and page whether it is stored now."""
        return self._open.write_pools(transfers, None if extra_info is None else extra_info.prefix_keys)

    # Methods for both interfaces

    def exists(self, key: str) -> bool:
        return self._open.lookup([key]) == 1

    def clear(self) -> None:
        """Remove the pages of this rank with its weights and layout, for all engines that use them."""
        logger.info("HiCache removed %d pages", self._open.clear())

    def get_stats(self) -> StorageMetrics:
        """Return the pages and the speed of each call since the last time, for SGLang's own metrics."""
        found = StorageMetrics()
        for transfer in self._open.take_transfers():
            pages = found.prefetch_pgs if transfer.is_read else found.backup_pgs
            pages.append(transfer.pages)
            speeds = found.prefetch_bandwidth if transfer.is_read else found.backup_bandwidth
            speeds.append(transfer.bytes_per_s / 1e9)
        return found

    def close(self) -> None:
        """Close storage; SGLang calls it when it detaches, after its threads have ended, and at its end."""
        if self._storage is not None and not self._storage.close():
            logger.warning("storage did not close in time; one of its threads is still running")

    def _require_in_place(self, pool: EngineHostPool) -> None:
        if not self._extra.get("interface_v1"):
            raise ConfigError(
                f'{OPTIONS}: pages of {type(pool).__name__} are only transferred in place; add "interface_v1": 1'
            )

    def _by_tensors(self, *addresses: object) -> HostPoolStorage:
        """Return storage. Raises InvalidInput if SGLang passes addresses or sizes of pages."""
        if any(one is not None for one in addresses):
            raise InvalidInput("HiCacheStore: pages by address and size are not supported; pass a tensor for each page")
        return self._open

    def _add(self, name: str, pool: EngineHostPool) -> None:
        """Open a store for the pages of a pool. If that fails, close all stores: SGLang may call the others, although
        the pools of its model belong together."""
        storage = self._open
        try:
            pages = HostPages(pool)
            if name == KV and not pages.is_flat:
                self._require_in_place(pool)
            namespace = self._engine.namespace(self._config, pool, pages, name)
            storage.add(name, pages, namespace)
        except HiCacheError:
            self.close()
            raise
        logger.info(
            "HiCache stores pages of %d tokens, %d bytes in %d parts (%s, pool %s); weights: %s; namespace %s (%s)",
            pages.shape.tokens, pages.shape.payload_bytes, len(pages.shape.pieces), pool.layout, name,
            self._engine.weights[:24], namespace.digest.hex()[:8], namespace.name,
        )

    def _weights_are_those_of_now(self, pool: EngineHostPool) -> Callable[[], bool]:
        """Return a function that is True while the weights cannot have changed. A flush clears all pools, and gives the
        first one new tables. Raises ConfigError for a pool without a table, unless weights are fixed."""
        version, table = weight_version(), getattr(pool, "slot_used", None)
        fixed = instance(f"{OPTIONS}: fixed_weights", self._extra.get("fixed_weights", False), bool)
        if table is None and not fixed:
            raise ConfigError(
                f"{OPTIONS}: HiCache cannot detect a flush of SGLang's host pool {type(pool).__name__}, and so not new "
                'weights; if weights never change while SGLang runs, add "fixed_weights": true'
            )
        return lambda: weight_version() == version and (fixed or getattr(pool, "slot_used", None) is table)

    @property
    def _open(self) -> HostPoolStorage:
        if self._storage is None:
            raise ConfigError("HiCacheStore: no host pool is registered; call register_mem_pool_host first")
        return self._storage
