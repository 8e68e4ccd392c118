"""HiCacheTree: SGLang's interface of a tree cache, over an EngineCache.

Written for SGLang 0.5.23. Its scheduler calls per request and in this order:

    prefetch_from_storage                    at its arrival
    check_prefetch_progress, pop_prefetch_loaded_span, match_prefix, lock, init_load_back, lock,
    finish_storage_prefetch_admission        when it may run
    ready_to_load_host_cache                 once per prefill batch
    checkpoint                               after each chunk of the prompt, and at its end
    unlock, on_release                       at its end, and at a retraction

and in each step `check_hicache_events`, at its beginning, and `flush_pending_backups`, after its batch.

SGLang's handle of a node is a `Prefix`. `req.kv.cache_protected_len` is the part of a request's slots that the tree
owns, in tokens; SGLang frees the others.

All calls are made on the scheduler's thread. No call raises for a request: one whose tokens the tree cannot hold is
computed without it. Only the removal of stored pages, when SGLang clears its storage, runs on a thread of its own.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    CacheRequestHandle,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
    _dfs_weight_order,
)

from ...background import BackgroundTask
from ...cache.engine_cache import EngineCache, Found, Prefix
from ...errors import InvalidInput, InvariantError
from ...keys import RadixKey
from ..sglang.running import weight_version
from .pool import LayerWaits, SGLangPages
from .prefill import PrefillClock
from .views import HostFigures, Roots, prompt_key, rid_of, root_of, trace_of

# The pause of a step that computes nothing while copies or storage work: SGLang repeats it at once, and a busy loop
# would take the interpreter's lock from their threads.
_REST_S = 0.0005
_RECEIPT = DecLockRefParams()
# Listing and removing millions of objects takes minutes.
_CLEAR_S_MAX = 600.0

logger = logging.getLogger(__name__)


class _Matched(NamedTuple):
    """The last match of a request that may be admitted next."""

    request: Any
    key: RadixKey
    found: Found
    is_loaded: bool = False  # its part on L2


class HiCacheTree(BasePrefixCache):
    """See the module's docstring. Owns `cache`, and calls `close` at its end.

    `params` are SGLang's. `wide_ids`: token ids have up to 64 bits, as those of images. `fence` returns a point in
    SGLang's forwards, None on a CPU. `next_epoch` gets the epoch of the weights at a flush, and returns another one if
    the weights may have changed. `take_events` returns events in SGLang's form.
    """

    disable = False
    hicache_storage_pass_prefix_keys = False

    def __init__(  # noqa: PLR0913
        self, params: Any, cache: EngineCache, pages: SGLangPages, waits: LayerWaits, prefill: PrefillClock, *,
        wide_ids: bool, fence: Callable[[], Any] | None, next_epoch: Callable[[int], int | None],
        take_events: Callable[[], list[Any]] | None, close: Callable[[], None],
    ) -> None:
        self.cache = cache
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = cache.page_size
        self.is_eagle = params.is_eagle
        self._lora_names = params.kv_event_lora_names
        self.token_to_kv_pool_host = HostFigures(cache)
        self._pages = pages
        self._waits = waits
        self.prefill = prefill
        self._wide_ids = wide_ids
        self._fence = fence
        self._next_epoch = next_epoch
        self._take_events = take_events
        self._close = close
        self._matched: _Matched | None = None
        self._no_key = RadixKey(b"", b"", cache.tree.position_bytes)  # of a prompt that the tree cannot hold
        self._prefetched: dict[str, int] = {}  # tokens before the prefetch of a waiting request
        self._has_computed = True  # in this step
        self._version = weight_version()
        self._cleaner = BackgroundTask("clear-storage", self._clear_storage, linger_s=0)
        if params.enable_metrics:
            self.init_metrics_collector()

    # Prefixes

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return the cached prefix, of which `init_load_back` can load the part on L2."""
        key = self._key(params.key.raw_token_ids(), params.key.extra_key, params.key.cache_salt)
        found = self.cache.nothing if key is None else self.cache.find(key)
        self._matched = None if params.req is None else _Matched(params.req, key or self._no_key, found)
        if params.req is not None and params.req.kv_hints is not None:
            self.cache.hint(params.req.kv_hints, params.req.rid)
        return MatchResult(
            device_prefix_len=found.device_pages * self.page_size,
            last_device_node=found.device,
            last_host_node=found.end,
            best_match_node=found.end,
            host_hit_length=found.host_pages * self.page_size,
            full_kv_hit_length=(found.device_pages + found.host_pages) * self.page_size,
        )

    def touch_prefix(self, key: Any) -> None:
        """Mark the cached prefix of `key` as used."""
        mine = self._key(key.raw_token_ids(), key.extra_key, key.cache_salt)
        if mine is not None:
            self.cache.match_prefix(mine)

    def path_device_indices(self, node: Prefix) -> torch.Tensor:
        """Return the slots of the prefix, int64 `[tokens]` on the device."""
        return self._pages.slots_of(self.cache.device_pages(node))

    def lock(self, node: Prefix) -> TreeLock:
        """Keep the prefix on L1 until `unlock`."""
        self.cache.lock(node)
        return TreeLock(node, _RECEIPT)

    def unlock(self, lock: TreeLock | None) -> None:
        """Undo one `lock`."""
        if lock is not None:
            self.cache.unlock(lock.node)

    def inc_lock_ref(self, node: Prefix) -> IncLockRefResult:
        """As `lock`."""
        self.cache.lock(node)
        return IncLockRefResult()

    def dec_lock_ref(self, node: Prefix, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """As `unlock`."""
        self.cache.unlock(node)
        return DecLockRefResult()

    def root_node_handle(self, extra_key: str | None = None) -> Prefix:
        """Return the start of all prompts."""
        return self.cache.root

    def dfs_weight_order(self, node_handles: Sequence[Prefix]) -> list[int]:
        """Return the order of requests, by the handles of their prefixes, that keeps common prefixes together."""
        roots = {id(root): root for root in map(root_of, node_handles)}
        order: list[int] = _dfs_weight_order(Roots(roots), [handle.node for handle in node_handles], lambda node: node)
        return order

    def is_root(self, node: Prefix) -> bool:
        """Return True for the start of all prompts."""
        return node.is_empty

    def is_backuped(self, node: Prefix) -> bool:
        """Return True: a prefetch can begin after any prefix."""
        return True

    def get_last_hash_value(self, node: Prefix) -> None:
        """Return None: the tree knows its page keys."""

    # Slots

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Give the tree the whole pages of the first `up_to` tokens of a request, and lock them instead of its prefix.
        The request then uses the tree's slots, and its duplicates are freed."""
        left_tokens = max(0, len(req.origin_input_ids) - up_to)
        self.cache.record_progress(rid_of(req.cache_request_handle), left_tokens)
        key = self._key(req.full_untruncated_fill_ids[:up_to], req.extra_key, req.cache_salt)
        if key is None or req.lock is None:
            return
        page_size, start_page = self.page_size, req.kv.cache_protected_len // self.page_size
        begin, end = start_page * page_size, key.pages(page_size) * page_size
        if left_tokens:
            self.prefill.add(req)
        if end <= begin:
            return
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        old: Prefix = req.lock.node
        shared = self.cache.share(
            req.rid, key, old, start_page, self._pages.pages_of(row[begin:end]), priority=req.priority or 0,
            continues=left_tokens > 0, session_id=req.session_id,
        )
        if shared.prefix is old:
            return
        if shared.present_pages:
            middle = begin + shared.present_pages * page_size
            self.token_to_kv_pool_allocator.free_segment(row[begin:middle], start_pos=begin)
            slots = self._pages.slots_of(shared.pages[: shared.present_pages])
            self.req_to_token_pool.write((req.kv.req_pool_idx, slice(begin, middle)), slots)
        lock = self.lock(shared.prefix)
        self.unlock(req.lock)
        req.lock, req.last_node = lock, shared.prefix
        req.kv.cache_protected_len = req.kv.cache_inserted_len = end

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Note the end of a request, or its retraction."""
        self.cache.end(rid_of(req.cache_request_handle), req.rid if req.finished() else None)

    def evict(self, params: EvictParams) -> EvictResult:
        """Free slots. Blocks while their pages must be copied to L2 first."""
        began_s = time.perf_counter()
        freed = self.cache.make_room(-(-params.num_tokens // self.page_size)) * self.page_size
        self.update_eviction_metrics(freed, began_s)
        return EvictResult(num_tokens_evicted=freed)

    def evictable_size(self) -> int:
        """Return the tokens on L1 that `evict` can free."""
        return self.cache.tree.device_evictable_pages * self.page_size

    def protected_size(self) -> int:
        """Return the other tokens of the tree on L1, also of replaced trees."""
        return (self._pages.used_pages - self.cache.tree.device_evictable_pages) * self.page_size

    full_evictable_size = evictable_size
    full_protected_size = protected_size

    def total_size(self) -> int:
        """Return the tokens of the tree on L1."""
        return self._pages.used_pages * self.page_size

    def pretty_print(self) -> None:
        """Print the sizes of the tree."""
        print(f"HiCache: {self.cache.tree.node_count} nodes, {self.total_size()} tokens on L1")

    def sanity_check(self) -> None:
        """Raise InvariantError if the tree or a pool is inconsistent. SGLang calls it when it is idle."""
        self.cache.check()

    # Host memory

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Prefix] | None:
        """Load the promised part of the prefix on L2. Return its tokens and its end, (0, the end on L1) if computing it
        is faster; None while other loads must end first."""
        request, page_size = params.req, self.page_size
        device: Prefix = request.last_node
        device_pages, host_pages = request.prefix_len // page_size, params.host_hit_length // page_size
        found = Found(device, device_pages, params.best_match_node, host_pages)
        loaded = self.cache.load(rid_of(request.cache_request_handle), found)
        if loaded is None:
            return None
        end = found.end if loaded else device
        if self._matched is not None:
            self._matched = self._matched._replace(found=found, is_loaded=loaded > 0)
        return loaded * page_size, end

    def ready_to_load_host_cache(self) -> int:
        """Start the loads of a batch. Return the number of the transfer that its forward waits for, -1 for none."""
        self._pass_fence()
        transfer = self.cache.start_loading()
        self._has_computed = True
        self.prefill.begins(loads=transfer is not None)
        number = -1 if transfer is None else self._waits.add(transfer)
        self._waits.set_consumer(number)  # SGLang's workers do not for models without generation; this forward is next
        return number

    def flush_pending_backups(self) -> None:
        """Note the end of a step with a batch."""
        self._has_computed = True
        if self._fence is None:  # on a device, the next forward may be queued only after this call
            self.prefill.ended()

    def check_hicache_events(self) -> None:
        """Take in what has ended, and start what waits. Rests if the step before has computed nothing."""
        self.prefill.ended()
        if weight_version() != self._version:  # new weights without a flush
            self._forget()
        self._pass_fence()
        self.cache.poll()
        if not self._has_computed and not self.cache.controller.idle:
            self.cache.controller.clock.sleep(_REST_S)
        self._has_computed = False

    def _pass_fence(self) -> None:
        if self._fence is not None:
            self.cache.record_fence(self._fence())

    # Storage

    @property
    def enable_storage(self) -> bool:
        """True if the tree has storage, open or being opened, and until its last operation has ended."""
        return self.cache.storage.attached or not self.cache.controller.idle

    @property
    def may_wait(self) -> bool:
        """True if requests may have to wait for pages from storage, or until pages on L2 are verified."""
        return self.enable_storage or self.cache.config.integrity.verify == "load"

    def prefetch_from_storage(  # noqa: PLR0913, PLR0917 - SGLang's
        self, request: CacheRequestHandle, last_host_node: Prefix, new_input_tokens: array[int],
        last_hash: str | None = None, prefix_keys: list[str] | None = None,
        matched_prefix_tokens: array[int] | None = None, extra_key: str | None = None, cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> bool:
        """Start to read the part of a prompt that is not on L1 or L2."""
        tokens = new_input_tokens if matched_prefix_tokens is None else matched_prefix_tokens + new_input_tokens
        key = self._key(tokens, extra_key, cache_salt)
        if key is None:
            return False
        rid, trace = rid_of(request), None
        self._prefetched[rid] = len(matched_prefix_tokens or ())
        if self.cache.config.tracing.enabled and self._matched is not None:
            trace = trace_of(self._matched.request)
        return self.cache.prefetch_from_storage(rid, key, trace=trace)

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Return True once the request need not wait for storage."""
        return self.cache.check_prefetch_progress(rid_of(request))

    def pop_prefetch_loaded_tokens(self, request: CacheRequestHandle) -> int:
        """Put the pages that have arrived for a request into the tree. Return their tokens."""
        return self.cache.take_so_far(rid_of(request)) * self.page_size

    def pop_prefetch_loaded_span(self, handle: CacheRequestHandle) -> tuple[int, int | None]:
        """As `pop_prefetch_loaded_tokens`; also return where they begin."""
        return self.pop_prefetch_loaded_tokens(handle), self._prefetched.get(rid_of(handle))

    def finish_storage_prefetch_admission(
        self, handle: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        """Note that a request begins."""
        matched, self._matched = self._matched, None
        rid = rid_of(handle)
        self._prefetched.pop(rid, None)
        if matched is None or matched.request.cache_request_handle != handle:
            self.cache.abort_prefetch(rid)
            return
        request, found = matched.request, matched.found
        self.prefill.add(request)
        if not matched.is_loaded:
            found = Found(request.last_node, request.prefix_len // self.page_size, request.last_node, 0)
        tokens = len(request.full_untruncated_fill_ids)
        self.cache.begin(rid, matched.key, found, priority=request.priority or 0, prompt_tokens=tokens)

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        """Stop the prefetch of a request that will not run."""
        rid = rid_of(handle)
        self._prefetched.pop(rid, None)
        self.cache.abort_prefetch(rid)

    def attach_storage_backend(self, **_: Any) -> tuple[bool, str]:
        """Use the configured storage again."""
        try:
            self.cache.storage.attach()
        except InvalidInput as error:
            return False, str(error)
        return True, "HiCache uses the storage of its configuration; the arguments have no effect"

    def clear_storage_backend(self) -> bool:
        """Remove the stored pages of these weights, for all engines that use them, on a thread. Return False without
        open storage."""
        self.cache.tree.stored.forget_all()  # on each rank, also on one whose storage is not open yet
        if self.cache.controller.backend is None:
            return False
        self._cleaner.wake()
        return True

    def _clear_storage(self) -> float:
        """Return when to clear again: never."""
        if (storage := self.cache.controller.backend) is not None:
            clock = self.cache.controller.clock
            logger.info("HiCache removed %d pages", storage.clear(deadline=clock() + _CLEAR_S_MAX))
        return math.inf

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Stop using storage."""
        self.cache.storage.detach()
        return True, "HiCache does not use storage now"

    # Figures and the end

    @property
    def ongoing_write_through(self) -> Sequence[int]:
        """One entry per copy to L2 in flight; SGLang reads the length of these four."""
        return range(self.cache.copies_in_flight[0])

    @property
    def ongoing_load_back(self) -> Sequence[int]:
        """One entry per copy to L1 in flight."""
        return range(self.cache.copies_in_flight[1])

    @property
    def ongoing_prefetch(self) -> Sequence[int]:
        """Empty: a flush need not wait for reads."""
        return ()

    @property
    def ongoing_backup(self) -> Sequence[int]:
        """One entry if anything else is in flight, so that SGLang's idle loop continues."""
        return range(not self.cache.controller.idle)

    def take_events(self) -> list[Any]:
        """Return SGLang's events since the last call."""
        return [] if self._take_events is None else self._take_events()

    def reset(self) -> None:
        """Forget all pages of L1 and L2; after new weights, also those of storage."""
        self._forget()
        if self._pages.used_pages:  # SGLang is about to give all slots away
            raise InvariantError(f"flush: {self._pages.used_pages} pages of L1 are still in use; restart SGLang")

    def _forget(self) -> None:
        self._matched, self._version = None, weight_version()
        self._prefetched.clear()
        epoch = self._next_epoch(self.cache.weights_epoch)
        if epoch is None:
            self.cache.clear()
        else:
            self.cache.update_weights(epoch)

    def release_host_resources(self) -> None:
        """Store the remaining pages and end."""
        self._cleaner.close(0.0)
        self._close()

    def _key(self, tokens: array[int], extra_key: str | None, cache_salt: str | None) -> RadixKey | None:
        """Return the key of a prompt; None if the tree cannot hold it."""
        key = prompt_key(
            tokens, extra_key, cache_salt, page_size=self.page_size, bigram=self.is_eagle, wide_ids=self._wide_ids
        )
        if key is not None and key.seed:
            name = self._lora_names.resolve(extra_key)
            self.cache.name_origin(extra_key=extra_key, cache_salt=cache_salt or None, lora_name=name)
        return key
