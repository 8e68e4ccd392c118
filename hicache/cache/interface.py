"""TreeCache: the interface between an engine and its cache.

    HiRadixCache   prefixes in a radix tree over three tiers
    SessionCache   a HiRadixCache in which conversations keep their KV between turns
    ChunkCache     no reuse; for running an engine without a prefix cache

An implementation has every method with this signature (a test compares them). It does not derive from this class, so a
missing method is an error of the type checker and not an empty method. The scheduler's thread makes all calls. They do
no storage I/O and do not raise storage errors. Only `drain` and `close` block, and with ranks `poll` may.

Each call checks its arguments before it changes anything. It raises InvalidInput for a wrong type or range, a key that
the cache cannot use, and a request that has ended, belongs to another cache or is a copy. It raises WrongThread, also
an InvalidInput, on another thread than the owner (`take_over`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self

from ..events import EventStream, Publisher
from ..hints import Outcome
from ..keys import RadixKey
from ..radix import Match, Peek
from ..tiers import Fence, KVPool, Transfer
from .device_tier import Eviction
from .pins import Pin
from .requests import RequestKV
from .statistics import CacheStatistics


class TreeCache(Protocol):
    """See the module's docstring. Per request and in this order:

    prefetch_from_storage -> check_prefetch_progress -> begin_request -> start_loading -> (forward, layer by layer)
    -> record_fence -> extend* -> cache_unfinished_req* -> cache_finished_req
    """

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def device(self) -> KVPool:
        """L1, which the forward writes KV to."""

    def match_prefix(self, key: RadixKey) -> Match:
        """Return the longest cached prefix of `key`, in whole pages, and mark it as used."""

    def peek(self, key: RadixKey) -> Peek:
        """Return how many pages of `key` are cached and reusable. Changes nothing, not even the order of eviction. For
        schedulers that sort their queue. With trailing pools, `begin_request` may find less.
        """

    def prefetch_from_storage(self, rid: str, key: RadixKey, *, trace: Mapping[str, str] | None = None) -> bool:
        """Start reading from storage the part of `key` that is not on L1 or L2. Return False if that does not pay or is
        not possible now.

        The request may begin after False, or once `check_prefetch_progress` is True. `trace` has the W3C headers
        `traceparent` and `tracestate` of the request; with `tracing.enabled`, its spans join that trace.
        """

    def check_prefetch_progress(self, rid: str) -> bool:
        """Return True once the request may begin. It can become False again when paused storage works again."""

    def abort_prefetch(self, rid: str) -> None:
        """Cancel the prefetch of a request that will not begin."""

    def begin_request(self, rid: str, key: RadixKey, *, priority: int = 0) -> RequestKV | None:
        """Give a request its KV: the cached pages of `key`, and new pages for the rest.

        The KV of the first `cached_tokens` tokens is on L1 or being loaded; the engine computes the rest, at least the
        last token. The eviction policy `priority` uses `priority`. Return None if L1 has no room now. Raises
        TransferError after a device copy has failed, CapacityError for a prompt larger than L1, InvalidInput after
        `close` and if a request with this id has begun and not ended.
        """

    def start_loading(self) -> Transfer | None:
        """Start the loads of this step as one copy. Return the transfer that the forward waits for layer by layer; it
        covers all loads in flight. `wait_layer(i)` raises if one of them failed. Return None without loads.

        `device.loading` is then the same transfer, so reading a layer of L1 through the pool waits for it.

        REQUIRES: called once per step, after `begin_request` and before the forward.
        """

    def record_fence(self, fence: Fence) -> None:
        """Order copies after a forward. Once `fence` has passed, the KV passed to the cache until the next fence is
        written, and the pages freed until then are no longer read. The latest fences are stored and waited for later. A
        fence that is recorded again means the later point, so record it on the same stream.

        REQUIRES, if a forward returns before it has ended: called after each forward was queued, also after one that
        failed halfway, and before its KV is shared or its pages are freed.
        """

    def extend(self, request: RequestKV, total_tokens: int) -> bool:
        """Make room for KV of `total_tokens` tokens, including the prompt. Return False if L1 is full now.

        The request is unchanged then; while `writeback_pages` is not 0, pages are about to become free. Raises
        InvalidInput for fewer tokens than the request began with or has shared, CapacityError for more than L1 holds.
        """

    def prepare(self, request: RequestKV, start: int, end: int) -> bool:
        """Make room in the trailing pools for a forward that computes the tokens `start` to `end - 1` of a request.

        If the cache has such pools, call it before each forward, with `start` not above the end of the last one. Then
        the pages of these tokens, and the trailing pages before `start`, have slots (`TrailingPool.slots`) until the
        next call. Return False, and take no slot, if a pool has no room now: compute fewer tokens, or let other
        requests end. Raises InvalidInput for tokens without a page in L1.
        """

    def cache_unfinished_req(self, request: RequestKV, key: RadixKey) -> None:
        """Share the computed KV of a running request: the whole pages of `key`, whose KV must be written.

        May replace entries of `request.pages` by other pages with the same content. Raises InvalidInput for a key that
        the request cannot have computed and for a request that is not running in this cache.
        """

    def cache_finished_req(self, request: RequestKV, key: RadixKey | None) -> None:
        """End a request: share its KV of `key` (None: nothing, as after an abort) and take back its pages.

        Raises as `cache_unfinished_req`; the request then continues.
        """

    def evict(self, pages: int) -> Eviction:
        """Evict `pages` pages from L1, or as many as possible. Return how many are free now, soon, and missing.

        Never waits: pages that must be copied to L2 first are freed in a later `poll`.
        """

    @property
    def writeback_pages(self) -> int:
        """L1 pages that are being copied to L2 for their eviction; they become free soon."""

    def clear(self) -> None:
        """Forget all pages of L1 and L2. Running requests keep their KV until they end, and share none of it."""

    def update_weights(self, epoch: int) -> None:
        """Switch to new weights: pages of previous epochs are no longer served or stored.

        Clears as `clear`. Raises InvalidInput, changing nothing, unless the epoch is an integer above the current one.
        """

    def pin(self, key: RadixKey, ttl_s: float) -> Pin | None:
        """Keep the cached pages of `key` until `ttl_s` seconds after their last use. Return a handle that ends it
        sooner.

        Return None if nothing was pinned: the pins' share is full, or the cache keeps no pages. Raises InvalidInput for
        a time that is not positive and finite.
        """

    def hint(self, envelope: object, rid: str | None = None, *, cache_salt: str | None = None) -> list[Outcome]:
        """Carry out the hints of a harness or a router: an envelope as JSON values, or an object with its fields, such
        as the `kv_hints` of vLLM and SGLang. Return an outcome for each action; never blocks.

        With `rid`, actions that name no prompt are about the prefix of that request, which has not begun, and are
        carried out when it ends; a value that is not an envelope is rejected too. Without, it raises InvalidInput.
        `cache_salt` separates the sessions of tenants if keys have no seed (`RadixKey.of_hashes`).
        """

    def record_events(self, stream: EventStream, publisher: Publisher | None = None) -> None:
        """Write the pages that are added to and removed from each tier into `stream`. The cache closes `publisher`.

        REQUIRES: called before the first request and once; InvalidInput otherwise.
        """

    def name_origin(
        self, *, extra_key: str | None = None, cache_salt: str | None = None, lora_id: int | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Register the owner of prompts with (`extra_key`, `cache_salt`): events then name the LoRA adapter, and the
        salt if `events.tenants` is set. Call it before the first such prompt. Cheap; may be repeated. Does nothing
        without events. At most 65,536 pairs are stored; the oldest is forgotten first.

        Raises InvalidInput as `RadixKey.of`, and for a lora_id or a lora_name of another type.
        """

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record that a forward over `tokens` prompt tokens took `seconds`: a hit must be faster than that.

        REQUIRES: the forward did not wait for a load.
        """

    def poll(self) -> bool:
        """Complete the operations that have ended and start queued ones. Call it once per step.

        Return True if any operation ended. With ranks it may wait for the slowest one, and raises RankError.
        """

    def take_over(self) -> None:
        """Make the calling thread the owner, which makes all calls from now on. Without this, the owner is the first
        thread that makes a call for a request or polls; a call of another one raises WrongThread until it has ended.

        REQUIRES: no other thread is in a call, and the earlier owner makes no more calls unless it takes over again.
        """

    def statistics(self) -> CacheStatistics:
        """Return a snapshot. Any thread may call it."""

    def check(self) -> None:
        """Raises InvariantError if an invariant does not hold. Visits everything; for tests and idle engines."""

    def drain(self, timeout_s: float) -> bool:
        """Poll until no operation is in flight. Blocks. Return False if `timeout_s` was too short."""

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the queued operations and end all threads. Blocks up to `timeout_s` (None: as configured).

        Return False if operations or threads remained.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...
