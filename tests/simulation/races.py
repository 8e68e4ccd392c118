"""Races that hierarchical caches have had. Each is planted as a small change of the responsible class.

They are the negative control of the simulation: it must find each one within a stated number of seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hicache import tracing
from hicache.cache import RequestKV
from hicache.cache.device_tier import DeviceTier
from hicache.cache.host_tier import HostTier
from hicache.cache.prefetch import Prefetcher
from hicache.cache.prefetch_states import State
from hicache.cache.trailing import TrailingTier
from hicache.controller import Acks, Backup, HiCacheController, Load, LookupOperation, ReadOperation, StoreOperation
from hicache.controller.agreement import StoreProgress
from hicache.radix import EvictionChoice, Match, Node, RadixTree
from hicache.radix.stored import StoredPrefixes
from hicache.tiers import Fence
from hicache.types import NO_PAGES, PageIds
from tests.simulation.device import SimulatedCopyEngine, SimulatedTransfer
from tests.simulation.setting import Parts, Setting
from tests.simulation.workers import SimulatedWorkers


@dataclass(frozen=True, slots=True)
class Race:
    """A planted race: `kinds` are its possible findings, `seeds` the number of seeds within which it must be found."""

    parts: Parts
    kinds: set[str]
    seeds: int


def _become(instance: object, kind: type[Any]) -> None:
    """Give a part of a cache the class with the planted race, a subclass without fields of its own."""
    instance.__class__ = kind


# Copies between L1 and L2


class _UnlocksBackupsAtSubmit(DeviceTier):
    """A backup protects its device pages only until it is submitted, not until it ends."""

    def _back_up(self, path: list[Node], *, evicts: bool = False) -> bool:
        started = super()._back_up(path, evicts=evicts)
        for node in path if started else ():
            self._trees.current.unlock(node)
        return started

    def written(self, backup: Backup) -> None:
        if not self._halted:
            self._lock(backup)
        super().written(backup)

    def failed(self, backup: Backup) -> None:
        self._lock(backup)
        super().failed(backup)

    def _lock(self, backup: Backup) -> None:
        tree, node, _ = self._backups[backup]
        tree.lock(node)


class _UnlocksLoadsAtSubmit(DeviceTier):
    """A load protects its pages only until it is submitted: they may be evicted and reused while it still writes."""

    def load_back(
        self, tree: RadixTree, match: Match, context: tracing.Context | None = None
    ) -> tuple[Node, PageIds, Load | None]:
        node, pages, load = super().load_back(tree, match, context)
        if load is not None:
            tree.unlock(node)
        return node, pages, load

    def loaded(self, load: Load, outcome: str) -> None:
        tree, node, _ = self._loads[load]
        tree.lock(node)
        super().loaded(load, outcome)


class _IgnoresFencesOfBackups(SimulatedCopyEngine):
    """A copy to L2 does not wait until the forward has written its pages."""

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> SimulatedTransfer:
        return super().backup(blocks, host_blocks)


class _IgnoresFencesOfLoads(SimulatedCopyEngine):
    """A copy to L1 does not wait for the last forward that reads its pages."""

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> SimulatedTransfer:
        return super().load(host_blocks, blocks)


class _ForgetsReaders(DeviceTier):
    """A load does not wait for the forwards of an ended request, which may still read its pages."""

    def read(self, pages: PageIds) -> None:
        pass


class _EagerTransfer(SimulatedTransfer):
    def done(self) -> bool:
        return True


class _AcknowledgesEarly(SimulatedCopyEngine):
    """A backup is acknowledged at its launch, not at its event."""

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> SimulatedTransfer:
        transfer = super().backup(blocks, host_blocks, after=after)
        _become(transfer, _EagerTransfer)
        return transfer


class _ForgetsSplits(RadixTree):
    """A backup updates only the node for which it was started, not the parts into which the node was split."""

    def accept_backup(self, node: Node, host_pages: PageIds) -> PageIds:
        for part in self.span(node, len(host_pages)):
            part.backup_pending = False
        count = self.pages(node)
        self.set_host(node, host_pages[:count].copy())
        return host_pages[count:]


class _FreesVictimsAtSubmit(DeviceTier):
    """The L1 pages of a write-back victim are freed as soon as its copy to L2 is submitted."""

    def write_back(self, victim: Node) -> EvictionChoice:
        choice = super().write_back(victim)
        if choice is EvictionChoice.WRITING_BACK and victim.device is not None:
            self.free(victim.device)
        return choice

    def _show(self, backup: Backup) -> list[PageIds]:
        self.request_pages += sum(map(len, super()._show(backup)))
        return []


class _ForgetsCancelledPages(DeviceTier):
    """The pages of a cancelled load stay on L1 in the tree, but are never filled."""

    def cancel_load(self, load: Load) -> None:
        if self._controller.cancel_load(load):
            tree, node, _ = self._loads.pop(load)
            tree.unlock(node)


# Prefetch


class _FreesPagesAtCancel(Prefetcher):
    """A cancelled prefetch frees its pages at once, while the read still fills them."""

    def _cancel(self, prefetch: Any) -> None:
        super()._cancel(prefetch)
        fetch = prefetch.current
        if isinstance(read := fetch.operation, ReadOperation):
            unused = read.host_pages[fetch.taken_pages :]
            self._host.release(unused)
            fetch.taken_pages = len(read.host_pages)


class _TakesLateArrivals(Prefetcher):
    """Pages of a cancelled prefetch that arrive late enter the tree, although they are also freed."""

    def ended(self, read: ReadOperation) -> None:
        prefetch = self._operations[read]
        if prefetch.state is State.CANCELLED:
            late, fetch = read.host_pages[: read.pages_here], prefetch.current
            fetch.tree.insert_host(prefetch.key, fetch.start_page, late, list(read.keys[: len(late)]))
        super().ended(read)


class _TrustsRequestedLength(HiCacheController):
    """A read counts as complete even if it was short, so old contents of its pages become visible."""

    def _take_prefetch(self, acks: Acks, operation: LookupOperation | ReadOperation, ended: bool, pages: int) -> None:
        if ended and isinstance(operation, ReadOperation):
            pages = len(operation.host_pages)
        super()._take_prefetch(acks, operation, ended, pages)


class _DoesNotHoldAnchors(Prefetcher):
    """A prefetch attaches its pages to the node behind which it started, but does not hold that node."""

    def _hold(self, fetch: Any, match: Match) -> None:
        fetch.anchor, fetch.start_page = match.node, match.pages

    def _release(self, fetch: Any) -> None:
        fetch.anchor = None

    def _take(self, prefetch: Any) -> None:
        fetch = prefetch.current
        read, arrived = fetch.operation, fetch.operation.pages
        tree, anchor, pages = fetch.tree, fetch.anchor, read.host_pages[:arrived]
        fetch.taken_pages = arrived
        tokens = prefetch.key.tokens[fetch.start_page * tree.page_bytes :][: arrived * tree.page_bytes]
        if arrived == 0 or tokens[: tree.page_bytes] in anchor.children:
            self._host.release(pages)
            return
        tree.set_host(tree._add_child(anchor, tokens), pages.copy())
        self._host.commit(arrived, NO_PAGES)


# Storage and workers


class _StoresWithoutHolding(HostTier):
    """A store does not hold its host pages: they may be evicted and reused while it reads them."""

    def store(self, node: Node) -> bool:
        is_new = not (node.stored or node.store_pending)
        is_accepted = super().store(node)
        if is_accepted and is_new:
            self._trees.current.release_host(node)
        return is_accepted

    def stored(self, store: StoreOperation) -> None:
        tree, node = self._stores[store]
        tree.hold_host(node)
        super().stored(store)


class _FailsStuckJobs(SimulatedWorkers[Any]):
    """A job past its deadline counts as failed, although its call still runs and writes."""

    def _substitute_run(self, run: Any) -> None:
        super()._substitute_run(run)
        self.fail(run.job)
        self.acknowledge(run.job)

    def _end(self, run: Any) -> None:
        if not run.stuck:
            super()._end(run)


class _WithdrawsRunningJobs(SimulatedWorkers[Any]):
    """A running store can be cancelled: its pages are evicted and reused while it reads them."""

    def __init__(self, *parts: Any, **rest: Any) -> None:
        super().__init__(*parts, **rest)
        self._withdrawn: list[Any] = []

    def withdraw(self, job: Any) -> bool:
        running = any(run.job is job for run in self._in_flight)
        if running:
            self._withdrawn.append(job)
        return running or super().withdraw(job)

    def _end(self, run: Any) -> None:
        if run.job not in self._withdrawn:
            super()._end(run)
        else:
            self._seats += not run.stuck


class _LosesJobsOfTheDead(SimulatedWorkers[Any]):
    """The job of a dead worker is never acknowledged."""

    def supervise(self) -> None:
        self._seats += len(self._dead)
        self._dead.clear()
        super().supervise()


# New weights, pins


class _KeepsPrefetchesThroughUpdates(Prefetcher):
    """An update of the weights does not cancel the prefetches in flight, so old pages enter the new tree."""

    def cancel_all(self) -> None:
        pass

    def _take(self, prefetch: Any) -> None:
        fetch = prefetch.current
        own, fetch.tree = fetch.tree, self._trees.current
        super()._take(prefetch)
        fetch.tree = own


class _StoresInCurrentStorage(HiCacheController):
    """A store that was submitted before an update is written to the storage that is open when it runs."""

    def poll(self) -> Acks | None:
        acks = super().poll()
        now_open = self.gate.storage
        for store in self._storage.pools[StoreOperation]._waiting if now_open is not None else ():  # type: ignore[attr-defined]
            self.gate.slot.leave(store.storage)
            store.storage = self.gate.enter()
        return acks


class _CountsDetachedStores(HiCacheController):
    """A store that ends after its server was detached counts as stored in the attached server."""

    def _take_store(self, store: StoreOperation, progress: StoreProgress, acks: Acks) -> None:
        super()._take_store(store, progress, acks)
        store.stored = progress is StoreProgress.STORED


class _KeepsMarksOfDetached(StoredPrefixes):
    """Marks of pages in the detached server stay, and are taken for pages in the attached one."""

    def forget_all(self) -> None:
        pass


class _DropsPinnedRuns(DeviceTier):
    """Eviction from L1 ignores pins."""

    def write_back(self, victim: Node) -> EvictionChoice:
        choice = super().write_back(victim)
        if choice is not EvictionChoice.KEEP:
            return choice
        victim.host_ref = 0  # otherwise the tree would keep it
        return EvictionChoice.DROP


# Trailing pools. Each keeps silent about the holds that it forgets


class _Silent(TrailingTier):
    def check(self, requests: Sequence[RequestKV], copying: Sequence[PageIds]) -> None:
        pass


class _FreesSlotsOfBackups(_Silent):
    """A slot can get another page while a copy to L2 still reads it."""

    def copying(self, pages: PageIds) -> None:
        pass

    def copied(self, pages: PageIds, *, on_host: bool = True) -> None:
        pass


class _FreesSlotsOfLoads(_Silent):
    """A slot can get another page while a copy from L2 still fills it."""

    def loaded(self, load: Load) -> bool:
        if load in self._loads:
            pages = self._loads[load][2]
            self._hold(pages)
        return super().loaded(load)

    def begin(self, request: RequestKV) -> bool:
        before = len(self._loads)
        begun = super().begin(request)
        if len(self._loads) > before:
            self._release(list(self._loads.values())[-1][2])
        return begun


class _FreesSlotsOfRequests(_Silent):
    """A request does not keep the slots that it reads."""

    def prepare(self, request: RequestKV, start: int, end: int, *, shares: bool) -> bool:
        prepared = super().prepare(request, start, end, shares=shares)
        if prepared:
            self.end(request)
            request.trailing = [(end // self._page_size,) * 2] * len(self.pools)
        return prepared


class _UsesPagesWithoutSlots(TrailingTier):
    """A prefix on L1 counts as a hit also without its slots."""

    def usable(self, match: Match) -> int:
        return len(match.device_pages)

    def begin(self, request: RequestKV) -> bool:
        return super().begin(request) or bool(self._hold([NO_PAGES] * len(self.pools)))


class _CopiesPagesWithoutSlots(_Silent):
    """A page is copied to L2 without the part that L1 lacks."""

    def may_copy(self, pages: PageIds) -> bool:
        return True


def _trailing(kind: type[TrailingTier]) -> Parts:
    return Parts(draw=Setting.draw_pooled, after=lambda cache: _become(cache._trailing, kind))


def _tree(kind: type[RadixTree]) -> Parts:
    return Parts(after=lambda cache: _become(cache.tree, kind))


def _prefetcher(kind: type[Prefetcher]) -> Parts:
    return Parts(after=lambda cache: _become(cache._prefetcher, kind))


def _l1(kind: type[DeviceTier]) -> Parts:
    return Parts(after=lambda cache: _become(cache._l1, kind))


def _l2(kind: type[HostTier]) -> Parts:
    return Parts(after=lambda cache: _become(cache._l2, kind))


WRONG, LATE, BOOKS = "wrong bytes", "late write", "invariant"

RACES: dict[str, Race] = {
    "a device page of a backup is freed at submit": Race(_l1(_UnlocksBackupsAtSubmit), {WRONG, BOOKS}, 40),
    "a device page of a load is freed at submit": Race(_l1(_UnlocksLoadsAtSubmit), {WRONG, LATE, BOOKS}, 400),
    "a backup ignores the fence": Race(Parts(copies=_IgnoresFencesOfBackups), {WRONG}, 40),
    "a load ignores the fence": Race(Parts(copies=_IgnoresFencesOfLoads), {WRONG}, 400),
    "a load does not wait for the last reader of its pages": Race(_l1(_ForgetsReaders), {WRONG}, 400),
    "a backup is visible before its copy has ended": Race(Parts(copies=_AcknowledgesEarly), {WRONG}, 40),
    "a split during a backup loses one part": Race(_tree(_ForgetsSplits), {WRONG, BOOKS}, 40),
    "a device page of a write-back victim is freed at submit": Race(
        _l1(_FreesVictimsAtSubmit), {WRONG, LATE, BOOKS}, 150
    ),
    "the pages of a cancelled load stay visible": Race(_l1(_ForgetsCancelledPages), {WRONG}, 500),
    "a cancelled prefetch frees pages that are still being read": Race(
        _prefetcher(_FreesPagesAtCancel), {LATE, WRONG}, 300
    ),
    "a late arrival enters the tree after its pages were freed": Race(
        _prefetcher(_TakesLateArrivals), {WRONG, LATE, BOOKS}, 300
    ),
    "a short read shows old contents of its pages": Race(Parts(controller=_TrustsRequestedLength), {WRONG}, 100),
    "the anchor of a prefetch is evicted": Race(_prefetcher(_DoesNotHoldAnchors), {BOOKS, "left behind"}, 200),
    "a store reads an evicted page": Race(_l2(_StoresWithoutHolding), {WRONG, BOOKS}, 100),
    "a stuck read counts as failed while it still writes": Race(Parts(workers=_FailsStuckJobs), {WRONG, LATE}, 300),
    "the job of a dead worker is never acknowledged": Race(Parts(workers=_LosesJobsOfTheDead), {"stuck"}, 300),
    "a running store is cancelled": Race(Parts(workers=_WithdrawsRunningJobs), {WRONG}, 500),
    "the forward does not wait for a layer": Race(Parts(waits_for_layers=False), {WRONG}, 40),
    "a prefetch of old weights enters the new tree": Race(_prefetcher(_KeepsPrefetchesThroughUpdates), {WRONG}, 500),
    "a store of old weights is stored under the new epoch": Race(
        Parts(controller=_StoresInCurrentStorage), {WRONG}, 500
    ),
    "a store in a detached server counts for the attached one": Race(
        Parts(controller=_CountsDetachedStores), {"stale mark"}, 500
    ),
    "marks of a detached server count for the attached one": Race(
        Parts(after=lambda cache: _become(cache.tree.stored, _KeepsMarksOfDetached)), {"stale mark"}, 40
    ),
    "a pinned run is dropped": Race(_l1(_DropsPinnedRuns), {"pin", BOOKS}, 500),
    "a slot of a backup is freed at submit": Race(_trailing(_FreesSlotsOfBackups), {WRONG}, 200),
    "a slot of a load is freed at submit": Race(_trailing(_FreesSlotsOfLoads), {WRONG, LATE}, 400),
    "a request does not keep its slots": Race(_trailing(_FreesSlotsOfRequests), {WRONG}, 40),
    "a prefix without its slots is a hit": Race(_trailing(_UsesPagesWithoutSlots), {WRONG}, 40),
    "a page without a slot is copied to L2": Race(_trailing(_CopiesPagesWithoutSlots), {WRONG}, 40),
}
