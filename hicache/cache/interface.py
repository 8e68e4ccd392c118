"""TreeCache: what an engine calls, whichever cache it embeds.

    HiRadixCache   prefixes in a radix tree over three tiers
    SessionCache   a HiRadixCache in which conversations keep their KV between turns
    ChunkCache     no reuse at all; the engine runs unchanged

An implementation has every name with this signature (a test compares them) and derives from nothing here, so that a
name it lacks is an error of the type checker and not an empty method. All calls come from the scheduler's thread; none
does storage I/O, none raises for a storage reason, and only `drain` and `close` block, and with ranks `poll` may.

Each call checks its arguments before it changes anything: a wrong type or range, a key that the cache cannot take, and
a request that has ended, belongs to another cache or is a copy are InvalidInput.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from ..events import EventStream, Publisher
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
        """The longest cached prefix of `key`, in whole pages; marks it as used."""

    def peek(self, key: RadixKey) -> Peek:
        """How much of `key` is cached, in pages that a request could reuse. Changes nothing, not even the order of
        eviction. For schedulers that order their queue by it.
        """

    def prefetch_from_storage(self, rid: str, key: RadixKey) -> bool:
        """Start reading what storage has of `key` beyond L1 and L2. False if it is not worth it or not possible now.

        Then, or once `check_prefetch_progress` says so, the request may begin.
        """

    def check_prefetch_progress(self, rid: str) -> bool:
        """Whether the request need not wait for its prefetch. One that need not while storage is paused may have to
        again when storage works."""

    def abort_prefetch(self, rid: str) -> None:
        """Forget a request that has not begun and will not."""

    def begin_request(self, rid: str, key: RadixKey, *, priority: int = 0) -> RequestKV | None:
        """Give a request its KV: what is cached of `key`, and own pages for the rest of it.

        KV of the first `cached_tokens` tokens is there, or being loaded; at least the last token is left to compute.
        `priority` counts for the eviction policy of that name. None if L1 has no room now. Raises TransferError after a
        device copy has failed, CapacityError for a prompt that is larger than L1, InvalidInput once closed.
        """

    def start_loading(self) -> Transfer | None:
        """Start the loads of this step as one copy, and return what the forward waits for layer by layer: all loads in
        flight. `wait_layer(i)` raises if any of them failed. None if there are none.

        `device.loading` is the same transfer from here on, so that reading a layer of L1 through the pool waits for it.

        REQUIRES: called once per step, after `begin_request` and before the forward.
        """

    def record_fence(self, fence: Fence) -> None:
        """Say what copies come after: KV handed to the cache from now on, until the next fence, is written once `fence`
        has passed, and pages that are freed are read no more. The latest fences are kept and waited for later: one that
        is recorded again stands for the later point, so record it on the same stream.

        REQUIRES, if a forward returns before it has ended: called after each forward was queued, also one that failed
        halfway, and before its KV is shared or its pages are freed.
        """

    def extend(self, request: RequestKV, total_tokens: int) -> bool:
        """Make room for KV of `total_tokens` tokens in all, the prompt included; False if L1 is full now.

        The request is unchanged then; while `writeback_pages` is not 0, room is on its way. Raises InvalidInput for
        fewer tokens than the request began with or has shared since, CapacityError for more than L1 holds.
        """

    def cache_unfinished_req(self, request: RequestKV, key: RadixKey) -> None:
        """Share what a running request has computed: the whole pages of `key`, all of whose KV is written.

        May put other pages with the same content into `request.pages`. Raises InvalidInput for a key that the request
        cannot have computed and for a request that is not running in this cache.
        """

    def cache_finished_req(self, request: RequestKV, key: RadixKey | None) -> None:
        """End a request: share what it has of `key` (None: nothing more, as after an abort) and take its pages.

        Raises as `cache_unfinished_req`, and the request then goes on.
        """

    def evict(self, pages: int) -> Eviction:
        """Take `pages` pages off L1, as far as they may leave; tells what is free now, what soon, and what is short.

        Never waits: what has to be copied to L2 first leaves L1 when a later `poll` finds it there.
        """

    @property
    def writeback_pages(self) -> int:
        """L1 pages that are being copied to L2 in order to be evicted: room that is on its way."""

    def clear(self) -> None:
        """Forget all that L1 and L2 hold. Running requests keep their KV until they end, and share none of it."""

    def update_weights(self, epoch: int) -> None:
        """The model has new weights: no page of an earlier epoch is served or stored from now on.

        As `clear`. Raises InvalidInput for an epoch that is not an integer above the current one; nothing has changed
        then.
        """

    def pin(self, key: RadixKey, ttl_s: float) -> Pin | None:
        """Keep what is cached of `key` for `ttl_s` seconds after its last use; return a handle that ends it sooner.

        None if nothing is pinned: pins have no room, or the cache keeps no page. Raises InvalidInput for a time that
        is not positive and finite.
        """

    def record_events(self, stream: EventStream, publisher: Publisher | None = None) -> None:
        """Write what appears on and leaves each tier into `stream`; `publisher` is closed with the cache.

        REQUIRES: called before the first request and once; InvalidInput otherwise.
        """

    def name_origin(
        self,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        lora_id: int | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Say whose prompts those of (`extra_key`, `cache_salt`) are: events name the LoRA adapter, and the salt if
        `events.tenants` is set. Call it before the first such prompt; cheap, and may be repeated. Does nothing unless
        events are recorded. At most 65,536 pairs are known at once, and the first of them is forgotten first.

        Raises InvalidInput as `RadixKey.of` does, and for a lora_id or a lora_name of another type.
        """

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Say how long a forward over `tokens` prompt tokens took: what a hit has to be faster than.

        REQUIRES: the forward did not wait for a load.
        """

    def poll(self) -> bool:
        """Take in what has ended since the last step and start what is queued; once per step.

        Returns whether anything ended. With ranks it may wait for the slowest one, and raises RankError.
        """

    def statistics(self) -> CacheStatistics:
        """A snapshot. May be called from any thread."""

    def check(self) -> None:
        """Raises InvariantError if an invariant does not hold. Visits everything; for tests and idle engines."""

    def drain(self, timeout_s: float) -> bool:
        """Poll until nothing is under way; blocks. False if something still is after `timeout_s`."""

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what is queued and end all threads; blocks up to `timeout_s` (None: as configured).

        False if something was left.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
