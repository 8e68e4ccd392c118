"""TieredCache: the base of every cache over L2 and L3.

    HiRadixCache   L1, L2 and L3: the cache owns the device pages
    HostCache      L2 and L3: the engine manages its device pages itself

It contains the tree, L2, prefetching, storing, new weights, events and shutdown; a derived cache adds the copies
between L2 and the device. All calls are made on the scheduler's thread, which owns the tree and the free lists, so
no lock is needed. Only `drain` and `close` wait for I/O. Calls do not raise storage errors.

Conservation of L2, verified by `check()`: free + held by nodes + reserved for operations = capacity.

Longer than 500 lines because all kinds of caches share these calls, their order in a step and the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import NamedTuple, Self, TypedDict

from .. import tracing
from ..arguments import instance, number, whole
from ..backends.base import Direction
from ..backends.kept import KeptFrames
from ..backends.storage import Storage
from ..config.storage import max_age_of
from ..controller import PREFETCH_S_MAX, Acks, HiCacheController, ReadOperation
from ..errors import InvalidInput, RankError
from ..events import EventStream, Publisher
from ..events.types import Medium
from ..frame import FrameCodec
from ..hints import Outcome
from ..histogram import STEP_BOUNDS_S, Histogram
from ..keys import TOKEN_BYTES, Namespace, RadixKey, key_page_bytes, require_epoch
from ..radix import NO_HISTORY, AdaptiveEviction, Node, RadixTree, UseHistory, check_tree, make_policy
from ..tiers import HostPool, PagePool
from .break_even import BreakEven
from .compute_queue import ComputeQueue
from .explain import Explainer, PromptTokens
from .hints import HintExecutor
from .host_tier import COPIES_SHARE_MAX, HostTier
from .mailbox import Mailbox
from .misuse import CallerWatch
from .pins import Pin, Pins
from .prefetch import Prefetcher
from .recorder import EventRecorder
from .report import CacheLog, log_end
from .statistics import NO_TIER, CacheCounters, CacheStatistics, TierStatistics
from .storage import StorageControl
from .trees import Trees
from .uses import UseMemory
from .verification import LoadVerifier

# The polling interval of `drain`. It is for shutdown and tests, where a millisecond does not matter.
DRAIN_WAIT_S = 0.001
# The share of the closing time in which stores are started; the rest is for the threads to end.
WORK_SHARE = 0.9
# `close` waits this long for a store that takes no writes: longer than a back-off, and shorter than an outage.
GATE_WAIT_S = 1.5
# `close` ends its attempts after this many in a row without a stored page: the store is full or does not answer.
FRUITLESS_MAX = 2


class TieredOptions(TypedDict, total=False):
    """The optional arguments of every TieredCache.

    `position_bytes` is the kind of keys (see `RadixKey`): 8 bytes for an engine with bigram keys. `open_storage` opens
    the store of a weights epoch, for `update_weights`; the controller's backend is that of `weights_epoch`.
    `host_codec` returns the codec that verifies frames on L2 for a weights epoch, for `integrity.verify` and
    `scrub_rate`. `kept` are frames that a previous process has left in `host`; `open_storage` opens a store that reads
    them. `release` is called at the end of `close`.
    """

    position_bytes: int
    open_storage: Callable[[int], Storage] | None
    weights_epoch: int
    break_even: BreakEven | None
    host_codec: Callable[[int], FrameCodec] | None
    kept: KeptFrames | None
    release: Callable[[], None]


class Warming(NamedTuple):
    """Pages of `key` from `start_page` on that a warm-up reads into reserved pages of L2, for `tree`."""

    tree: RadixTree
    key: RadixKey
    start_page: int
    read: ReadOperation | None


class TieredCache:
    """See the module's docstring and `TieredOptions`. Uses the configuration of `controller`.

    `device` are the pages of L1, zero for a cache without L1. `built_by` is the process that watches the cache
    (`unclosed`), which sets `on_collected`; `caller` has the thread that owns the cache. `storage` detaches the store,
    attaches another, and switches its directions off and on. `mailbox` has the operators' requests, which `poll`
    serves. `warming_pages` pages of L2 are reserved for warm-ups.
    """

    on_collected: Callable[[TieredCache], None] | None = None

    def __init__(  # noqa: PLR0913 - the options of `TieredOptions`
        self, host: HostPool, controller: HiCacheController, device: PagePool, *, position_bytes: int = TOKEN_BYTES,
        open_storage: Callable[[int], Storage] | None = None, weights_epoch: int = 0,
        break_even: BreakEven | None = None, host_codec: Callable[[int], FrameCodec] | None = None,
        kept: KeptFrames | None = None, release: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config = controller.config
        self.page_size = host.shape.tokens
        self.host = host
        self.controller = controller
        self.weights_epoch = weights_epoch = require_epoch(weights_epoch)
        self._position_bytes = position_bytes
        self._policy = make_policy(config.eviction_policy)
        self.break_even = break_even or BreakEven(config.break_even, host.payload_bytes)
        self._counters = CacheCounters()
        self._step_time = Histogram(STEP_BOUNDS_S)
        self._events: EventRecorder | None = None
        self._publisher: Publisher | None = None
        self._stores_on_host = kept is not None and config.storage is None
        self._device_pages = device.capacity
        self.explainer = Explainer(config.explain.pages, self._counters, max_age_of(config.storage))
        self.explainer.epoch = weights_epoch
        self._trees = Trees(self._new_tree, device, host)
        self._uses: UseMemory | None = None
        if config.write_policy == "write_through_selective":  # the only policy that counts uses
            self._uses = UseMemory(self.tree.page_bytes, config.selective_hits, config.selective_first_share)
        self._add_parts(kept)
        self._host_codec = host_codec
        self._scrubber = self._new_verifier() if config.integrity.verifies_host else None
        self._verifier = self._scrubber if config.integrity.verify == "load" else None  # loads wait for it
        self.storage = StorageControl(controller, self._trees, self._prefetcher, open_storage, weights_epoch)
        self.mailbox = Mailbox(controller.clock)
        self._log: CacheLog | None = None
        self._release_host = release
        self.closed = self.is_abandoned = False
        self.built_by: int | None = None
        self._contexts: dict[str, tracing.Context] = {}  # of requests that have not begun: the parents of their spans
        self.caller = CallerWatch(controller)
        # Requests that must have used a page before it is stored.
        self._saved_hits_min = config.selective_hits if config.write_policy == "write_through_selective" else 0
        self._unsaved_pages = self.warming_pages = 0

    def _add_parts(self, kept: KeptFrames | None) -> None:
        trees, controller, counters = self._trees, self.controller, self._counters
        self._l2 = HostTier(self.host, trees, controller, counters, self.break_even, kept)
        self._queue = ComputeQueue()
        self._prefetcher = Prefetcher(trees, self._l2, controller, counters, self.break_even, self._queue)
        self._pins = Pins(controller.time_s, int(self.config.pin_host_share * self.host.pages))
        self._hints = HintExecutor(trees, self._l2, controller, counters, self._pins, self._prefetcher)

    def _new_tree(self) -> RadixTree:
        config = self.config
        tree = RadixTree(
            self.page_size,
            self._policy,
            run_pages_max=min(config.write_pages_max, config.load_pages_max, self.host.pages),
            position_bytes=self._position_bytes,
            observer=self._events,
            adaptive=self._new_adaptive() if config.eviction_policy == "adaptive" else None,
        )
        tree.stores_on_host = self._stores_on_host
        tree.seals_host = config.integrity.verifies_host
        tree.epoch = self.weights_epoch
        if config.explain.pages:
            tree.on_left = self._left
        return tree

    def _left(self, tree: RadixTree, node: Node, medium: Medium) -> None:
        gate = self.controller.gate
        self.explainer.left(tree, node, medium, has_storage=gate.attached, now_s=self.controller.time_s())

    def _new_adaptive(self) -> AdaptiveEviction:
        # L2 holds copies of pages of L1, at most `COPIES_SHARE_MAX` of its pages.
        pages = max(self.host.pages, self._device_pages + int((1 - COPIES_SHARE_MAX) * self.host.pages))
        return AdaptiveEviction(
            key_page_bytes(self.page_size, self._position_bytes),
            max(1, self.config.adaptive_block_tokens // self.page_size),
            pages,
            keeps_host=self.config.write_policy != "write_through_selective",
        )

    def _new_verifier(self) -> LoadVerifier:
        if self._host_codec is None:
            raise InvalidInput("integrity.verify, scrub_rate: pass host_codec, the codec of frames on L2")
        if self.controller.has_ranks:
            raise InvalidInput("integrity.verify, scrub_rate: not supported with several ranks; remove the entries")
        self.controller.host_codec = self._host_codec(self.weights_epoch)
        return LoadVerifier(self._trees, self._l2, self._counters, self.controller, self.config.integrity.scrub_rate)

    @property
    def tree(self) -> RadixTree:
        """The current tree; `clear` and `update_weights` replace it."""
        return self._trees.current

    def start_log(self, namespace: Namespace) -> None:
        """Log the setup of the cache, and from now on the work that limits drop. Call it before the first request."""
        self._log = CacheLog(self.config, namespace, self.statistics, self.controller.clock)

    # Emptying

    def clear(self) -> None:
        """See `TreeCache`. Does not block. Storage keeps its pages, and operations keep theirs until they end."""
        self.caller.require()
        self._pins.clear()
        self._hints.clear()
        self._prefetcher.cancel_all()
        self.explainer.cleared(self.tree, self.controller.time_s())
        self._trees.retire()
        if self._l2.kept is not None:
            self._l2.kept.drop()
        if self._uses is not None:
            self._uses.clear()
        if self._events is not None:
            self._events.cleared()

    def update_weights(self, epoch: int) -> None:
        """See `TreeCache`. Opens storage again under the namespace of `epoch`, where older pages are unreachable; until
        it is open, the cache has no storage. Also raises InvalidInput if it has storage but no `open_storage`."""
        self.caller.require()
        epoch = require_epoch(epoch, above=self.weights_epoch)
        self.storage.require_opener()
        self.weights_epoch = self.explainer.epoch = epoch
        self.clear()
        if self._scrubber is not None and self._host_codec is not None:
            self.controller.host_codec = self._host_codec(epoch)
        self.storage.use_epoch(epoch)

    def record_events(self, stream: EventStream, publisher: Publisher | None = None) -> None:
        """See `TreeCache`. `statistics` shows the counters of `publisher`, which reads the stream."""
        instance("stream", stream, EventStream)
        if self.tree.node_count or self._events is not None:
            raise InvalidInput("events: call record_events once, before the first request")
        self._events = self.tree.observer = EventRecorder(stream)
        self._publisher = publisher

    def name_origin(
        self, *, extra_key: str | None = None, cache_salt: str | None = None, lora_id: int | None = None,
        lora_name: str | None = None,
    ) -> None:
        """See `TreeCache`."""
        if self._events is not None:
            self._events.describe(extra_key, cache_salt, lora_id, lora_name)

    # What to keep

    def pin(self, key: RadixKey, ttl_s: float) -> Pin | None:
        """See `TreeCache`."""
        ttl_s = number("ttl_s", ttl_s, positive=True)
        self.caller.require()
        if (pin := self._pins.add(self.tree, self.tree.match(key), ttl_s)) is None:
            self._counters.skipped["pin_share"] += 1
        return pin

    def hint(self, envelope: object, rid: str | None = None, *, cache_salt: str | None = None) -> list[Outcome]:
        """See `TreeCache`."""
        self.caller.require()
        if rid is None:
            return self._hints.take(envelope)
        return self._hints.take_from(instance("rid", rid, str), envelope, cache_salt, self._contexts.get(rid))

    # Warm-up

    def begin_warming(self, key: RadixKey, keys: Sequence[bytes], pages_max: int) -> Warming:
        """Reserve free pages of L2 for at most `pages_max` pages of `key` after those on L1 and L2; `keys` are all its
        page keys. Evicts nothing. The read stays None if nothing is missing, free or readable now.

        Another thread makes the read with `controller.read_apart`; then call `end_warming`. Raises InvalidInput for a
        key of another kind than the cache's and after `close`, TransferError after a copy to or from the device has
        failed. REQUIRES: there are no other ranks.
        """
        self._require_service()
        tree, controller, found = self.tree, self.controller, self.tree.peek(key)
        start = found.device_pages + found.host_pages
        count = min(pages_max, len(keys) - start, self.host.allocator.free_pages)
        pages = self._l2.reserve(count) if count > 0 and controller.gate.may(Direction.READ) else None
        if pages is None:
            return Warming(tree, key, start, None)
        read = ReadOperation(
            keys[start : start + count], pages, storage=controller.gate.enter(), codec=controller.host_codec,
            deadline=controller.clock() + PREFETCH_S_MAX,
        )
        self.warming_pages += count
        return Warming(tree, key, start, read)

    def end_warming(self, warming: Warming) -> int:
        """Put the pages that have arrived into the tree, and free the others: all of them if the tree or the store has
        been replaced since. Return how many the tree has taken. REQUIRES: the read was made."""
        if (read := warming.read) is None:
            return 0
        is_current = warming.tree is self.tree and read.storage is self.controller.gate.storage
        keys = list(read.keys[: read.pages_here * is_current])
        unused = read.host_pages[:0]
        if keys:
            stored = self._l2.are_in_storage(keys)
            arrived = read.host_pages[: len(keys)]
            _, unused = self.tree.insert_host(warming.key, warming.start_page, arrived, keys, stored=stored)
        self.warming_pages -= len(read.host_pages)
        self._l2.commit(len(keys), unused)
        self._l2.release(read.host_pages[len(keys) :])
        return len(keys) - len(unused)

    # Each step

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """See `TreeCache`. Without these calls, almost every hit is fetched."""
        self.break_even.observe_prefill(whole("tokens", tokens), number("seconds", seconds))

    def record_arrival(self, rid: str, left_tokens: int, *, again: bool = False) -> None:
        """Record that a request waits for the device, and that it will compute `left_tokens` tokens of its prompt if
        nothing is cached. A prefetch does so too, if there is storage; for a request that waits, it changes the tokens.
        `again`: it has begun before and lost its pages, so it waits before all others."""
        rid, left_tokens = instance("rid", rid, str), whole("left_tokens", left_tokens)
        self._queue.arrive(rid, left_tokens, self.controller.time_s(), again=again)

    def record_progress(self, rid: str, left_tokens: int) -> None:
        """Record that a request has begun, and that its next forwards compute `left_tokens` tokens of its prompt: the
        requests after it wait for them. Each call replaces the last; the end of the request ends it. Raises
        InvalidInput for a negative number."""
        rid, left_tokens = instance("rid", rid, str), whole("left_tokens", left_tokens)
        self._queue.progress(rid, left_tokens, self.controller.time_s())

    def poll(self) -> bool:
        """See `TreeCache`. Never blocks without ranks. With ranks, all call it equally often; it waits for the slowest
        if that is a whole step behind, and raises RankError if one is lost or their states diverge."""
        began_s = time.perf_counter()
        caller = self.caller
        if get_ident() != caller.owner_id and not self.closed:
            caller.require()
        caller.calls = 0
        acks = self.controller.poll()
        if acks is not None:
            self._take_in(acks)
            self._trees.sweep()
        has_proved = self._scrubber is not None and self._scrubber.poll(scrubs=acks is None and self.controller.idle)
        if has_proved:
            self._trees.sweep()
        if self._events is not None:
            self._events.poll(self.tree)
        self.controller.launch_backups()
        self._l2.report_uses()
        self._l2.drop_released()
        self.controller.report(self.break_even.rates())
        self.break_even.use_rates(self.controller.rates)
        if self._hints.is_busy:
            self._hints.advance()
        self._prefetcher.start_waiting()
        self._pins.expire()
        if self.mailbox.pending:
            self.mailbox.serve()
        self._step_time.add(time.perf_counter() - began_s)
        return acks is not None or has_proved

    def _take_in(self, acks: Acks) -> None:
        for store in acks.stored:  # first, because they free L2 pages for reads
            self._l2.stored(store)
        if acks.lost:
            self._l2.lost(acks.lost)
        for read in acks.read:  # before lookups, which share L2 with the pages that arrive
            self._prefetcher.ended(read)
        for found in acks.found:
            self._prefetcher.found(found)

    def _note_uses(self, rid: str | None, key: RadixKey, pages: int, *, begins: bool = False) -> UseHistory:
        """Count a request as a user of the first `pages` pages of `key`, once for each page; see `UseMemory`."""
        if begins:
            self.tree.times.note(self.controller.time_s(), self.tree.tick)
            if self.tree.adaptive is not None:
                self.tree.adaptive.begin(key)
        return NO_HISTORY if self._uses is None else self._uses.note(rid, key, pages, begins=begins)

    def _begins(self, rid: str, key: RadixKey, node: Node) -> None:
        """Note that a request begins with the path to `node`: pins restart, and a session that waited has returned."""
        self._pins.used(node)
        if self._hints.is_used:
            self._hints.begins(rid, key, node)

    def _note_trace(self, rid: str, trace: Mapping[str, str] | None) -> tracing.Context | None:
        """Record the trace of a request until it begins or is aborted, and return it. Raises InvalidInput."""
        if trace is not None:
            instance("trace", trace, Mapping)  # type: ignore[type-abstract]
            if (context := tracing.context_of(trace)) is not None:
                self._contexts[rid] = context
                self._hints.trace(rid, context)
        return self._contexts.get(rid)

    def _account(self, rid: str, tokens: int, context: tracing.Context | None) -> PromptTokens:
        """Return the account of a request that begins, to be completed. `context` is the parent of its span."""
        return PromptTokens(rid, self.controller.time_s(), tokens, span=tracing.begin("request", context))

    def _require_service(self) -> None:
        if self.closed:
            raise InvalidInput("the cache is closed; build a new one")
        self.caller.called()

    def take_over(self) -> None:
        """See `TreeCache`."""
        self.caller.take_over()

    # State

    def statistics(self) -> CacheStatistics:
        """Return a snapshot of all tiers. Any thread may call it; it may query the store's usage."""
        tree, publisher = self.tree, self._publisher
        return CacheStatistics(
            **self._counters.totals(),
            nodes=tree.node_count,
            pinned_pages=tree.pinned_pages,
            weights_epoch=self.weights_epoch,
            device=NO_TIER,
            host=TierStatistics.of(
                self.host.allocator, tree.host_pages, tree.host_evictable_pages, self.host.frame_bytes
            ),
            break_even=self.break_even.statistics(),
            controller=self.controller.statistics(),
            events=None if self._events is None else self._events.stream.statistics(),
            publisher=None if publisher is None else publisher.statistics(),
            prefetch_wait=self._prefetcher.wait.statistics(),
            prefetches_waiting=self._prefetcher.waiting,
            step=self._step_time.statistics(),
            unsaved_pages=self._unsaved_pages,
        )

    def check(self) -> None:
        """Raises InvariantError if a tree, a pool or a count is inconsistent. Visits every node."""
        self.break_even.check()
        self._counters.check()
        for tree in self._trees.all():
            check_tree(tree)
        self._l2.check()
        self._pins.check(self.tree)
        self._hints.check()
        self._prefetcher.check()
        self._queue.check()
        self.controller.gate.check()

    def drain(self, timeout_s: float) -> bool:
        """Poll until no copy, prefetch or store is in flight. Blocks. Return False if `timeout_s` was too short."""
        clock = self.controller.clock
        deadline = clock() + number("timeout_s", timeout_s, most=math.inf)
        self.controller.launch_loads()
        while not (self.controller.idle and (self._verifier is None or self._verifier.idle)):
            if clock() >= deadline:
                return False
            if not self.poll():
                clock.sleep(DRAIN_WAIT_S)
        return True

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish queued copies and stores, store the pages that storage lacks, and end all threads. Blocks up to
        `timeout_s` (None: as configured).

        Prefetches are cancelled. Pages that the write policy wants in storage are stored as time allows, most recently
        used first; `statistics().unsaved_pages` counts those that were not. Return False if operations or threads
        remained; stored objects are then still whole or absent. REQUIRES: no other thread is in a call.
        """
        timeout_s = self.config.transfer.shutdown_deadline if timeout_s is None else number("timeout_s", timeout_s)
        clock = self.controller.clock
        began_s = clock()
        deadline = began_s + timeout_s
        if self.closed:
            return self.controller.idle
        self.closed = True
        self.caller.take_over()
        self.mailbox.close()
        self.controller.gate.stop(Direction.READ)
        work_until_s = began_s + WORK_SHARE * timeout_s
        try:
            self.drain(max(0.0, work_until_s - clock()))
        except RankError:
            pass  # the other ranks are gone; operations in flight still end
        self.controller.leave_ranks()
        self._save_all(work_until_s)
        ended = self.controller.close(max(0.0, deadline - clock()))
        if self._scrubber is not None:
            ended &= self._scrubber.close(max(0.0, deadline - clock()))
        self.poll()
        for account in self.explainer.recent.values():
            self.explainer.end(account)
        self._unsaved_pages += self.count_unsaved()
        if self._publisher is not None:
            self._publisher.close(max(0.1, deadline - clock()))
        if self._log is not None:
            self._log.close()
            took_s = clock() - began_s
            log_end(took_s, self._unsaved_pages, everything_ended=ended, is_abandoned=self.is_abandoned)
        self._release_host()
        return ended

    def count_unsaved(self) -> int:
        """Return the number of pages that are worth storing and that storage lacks. Visits every node."""
        return sum(map(self.tree.pages, self._l2.unsaved(self._saved_hits_min)))

    def _save_all(self, until_s: float) -> None:
        """Store the pages that storage lacks, in waves that fit on L2, until `until_s` at most. Each rank does this
        alone: a rank that is slow or gone does not delay the others, and a prefix that one of them lacks is a miss.

        Stops when nothing more can be started, and after `FRUITLESS_MAX` waves that stored nothing. Waits for a
        store that takes no writes for as long as a back-off may run.
        """
        gate, clock, fruitless, lacking_pages = self.controller.gate, self.controller.clock, 0, math.inf
        idle_s = self.controller.time_s()
        while (left_s := until_s - clock()) > 0 and self.drain(left_s) and gate.attached:
            if gate.may(Direction.WRITE):
                lacking = self._l2.unsaved(self._saved_hits_min)
                before, lacking_pages = lacking_pages, sum(map(self.tree.pages, lacking))
                fruitless = 0 if lacking_pages < before else fruitless + 1
                if fruitless == FRUITLESS_MAX or not self._start_saves(lacking):
                    return
                idle_s = self.controller.time_s()
            elif self.controller.time_s() - idle_s >= GATE_WAIT_S:
                return
            elif not self.poll():
                clock.sleep(DRAIN_WAIT_S)

    def _start_saves(self, lacking: list[Node]) -> bool:
        """Start to store those of the runs that fit now. Return False if there is none. A run of L1 replaces one of
        them on L2 only if nothing else can be started; the replaced pages count as unsaved."""
        on_l2 = [run for run in lacking if run.host is not None]
        for run in on_l2:
            self.tree.hold_host(run)
        started = [self._save(run) for run in lacking]
        for run in on_l2:
            self.tree.release_host(run)
        if any(started):
            return True
        before = self.count_unsaved()
        has_started = any(self._save(run) for run in lacking if run.host is None)
        self._unsaved_pages += before - self.count_unsaved()
        return has_started

    def _save(self, node: Node) -> bool:
        """Start to store a run. Return False if that is not possible now."""
        return self.controller.has_store_room(self.tree.pages(node)) and self._l2.store(node)

    def __del__(self) -> None:
        if self.on_collected is not None:
            self.on_collected(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
