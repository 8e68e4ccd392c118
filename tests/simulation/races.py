"""Races that hierarchical caches have had, each planted as a small change of the part in which it lived.

A simulation that does not find them is worth nothing, so each has to be found within a stated number of seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hicache.cache import HiRadixCache
from hicache.cache.backup import Backup, CopyTask
from hicache.cache.books import DeviceLedger
from hicache.cache.loading import Loader
from hicache.cache.prefetch import Prefetcher
from hicache.cache.storing import Storing
from hicache.controller import Acks, BackupOperation, CopyOperation, HiCacheController, PrefetchState
from hicache.controller.progress import PrefetchProgress, StoreProgress
from hicache.keys import RadixKey
from hicache.radix import Fate, Node, RadixTree
from hicache.tiers import Fence
from hicache.types import NO_PAGES, PageIds
from tests.simulation.device import SimulatedCopyEngine, SimulatedTransfer
from tests.simulation.setting import Parts
from tests.simulation.workers import SimulatedWorkers


@dataclass(frozen=True, slots=True)
class Race:
    """`kinds` is how it may show, `seeds` within how many it must."""

    parts: Parts
    kinds: set[str]
    seeds: int


def _become(instance: object, kind: type[Any]) -> None:
    """Turn a part of a cache into one with the planted race, a subclass that adds no fields."""
    instance.__class__ = kind


# Copies between L1 and L2


def _ended(acks: Acks | None, *, load: bool) -> list[CopyOperation]:
    """The copies of one direction that have ended, well or not."""
    if acks is None:
        return []
    failed = [copy for copy in acks.failed_copies if copy.tag.node.backup_pending is not load]
    return (acks.loaded if load else acks.written) + failed


class _UnlocksWritesAtSubmit(HiCacheController):
    """A backup protects its device pages until it was submitted, not until it has ended."""

    def submit_write(self, tag: CopyTask, device_pages: PageIds, host_pages: PageIds) -> None:
        super().submit_write(tag, device_pages, host_pages)
        tag.tree.unlock(tag.node)

    def poll(self) -> Acks | None:
        acks = super().poll()
        for copy in _ended(acks, load=False):
            copy.tag.tree.lock(copy.tag.node)
        return acks


class _UnlocksLoadsAtSubmit(HiCacheController):
    """A load protects its pages until it was submitted: they may be evicted and handed out while it still writes."""

    def submit_load(self, tag: CopyTask, host_pages: PageIds, device_pages: PageIds) -> CopyOperation:
        tag.tree.unlock(tag.node)
        return super().submit_load(tag, host_pages, device_pages)

    def poll(self) -> Acks | None:
        acks = super().poll()
        for copy in _ended(acks, load=True):
            copy.tag.tree.lock(copy.tag.node)
        return acks


class _EagerTransfer(SimulatedTransfer):
    def done(self) -> bool:
        return True


class _AcknowledgesEarly(SimulatedCopyEngine):
    """The ack of a backup is taken from its launch and not from its event."""

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> SimulatedTransfer:
        transfer = super().backup(blocks, host_blocks, after=after)
        _become(transfer, _EagerTransfer)
        return transfer


class _ForgetsSplits(RadixTree):
    """The ack of a backup knows the node it was made for and not the parts into which it was split since."""

    def accept_backup(self, node: Node, host_pages: PageIds) -> PageIds:
        for part in self.span(node, len(host_pages)):
            part.backup_pending = False
        count = self.pages(node)
        self.set_host(node, host_pages[:count].copy())
        return host_pages[count:]


class _FreesVictimsAtSubmit(Backup):
    """The L1 pages of a write-back victim are handed out as soon as its copy to L2 was submitted."""

    l1: DeviceLedger

    def save(self, victim: Node) -> Fate:
        fate = super().save(victim)
        if fate is Fate.SAVING and victim.device is not None:
            self.l1.allocator.free(victim.device)
            self.l1.request_pages -= len(victim.device)
        return fate

    def written(self, copy: CopyOperation) -> list[PageIds]:
        self.l1.request_pages += sum(map(len, super().written(copy)))
        return []


def _with_l1(cache: HiRadixCache) -> None:
    """Show the backup the books of L1, which it has no business to know."""
    _become(cache._backup, _FreesVictimsAtSubmit)
    vars(cache._backup)["l1"] = cache._l1


class _ForgetsCancelledPages(Loader):
    """The pages of a load that is taken back stay on L1 in the tree, although nobody fills them."""

    def cancel(self, load: CopyOperation) -> None:
        self._controller.cancel_load(load)
        load.tag.tree.unlock(load.tag.node)


# Prefetch


class _GivesPagesBackAtCancel(Prefetcher):
    """A cancelled prefetch gives its pages back at once, while the read still fills them."""

    def _close(self, prefetch: Any) -> None:
        super()._close(prefetch)
        operation = prefetch.operation
        if operation.state is PrefetchState.READING:
            unused = operation.host_pages[operation.taken_pages :]
            self._ledger.settle(len(unused), unused)
            operation.taken_pages = len(operation.host_pages)


class _TakesLateArrivals(Prefetcher):
    """The late completion of a cancelled prefetch enters the tree, with pages that are given back."""

    def ended(self, operation: Any) -> None:
        prefetch = self._active[operation.tag]
        if prefetch.answered:
            late = operation.host_pages[: operation.completed_pages]
            prefetch.tree.insert_host(operation.key, operation.start_page, late, operation.keys[: len(late)])
        super().ended(operation)


class _BelievesShortReads(HiCacheController):
    """How much a read brought is taken from what was asked for, so a short read shows what lay there before."""

    def _take_prefetch(self, progress: PrefetchProgress, acks: Acks) -> None:
        operation = progress.operation
        if progress.ended and operation.state is PrefetchState.READING:
            progress = progress._replace(pages=len(operation.host_pages))
        super()._take_prefetch(progress, acks)


class _DoesNotHoldAnchors(Prefetcher):
    """A prefetch attaches what arrives to the node behind which it started, without having kept that node there."""

    def start(self, rid: str, key: RadixKey) -> bool:
        known = set(self._active)
        started = super().start(rid, key)
        for new in set(self._active) - known:
            self._active[new].tree.release_host(self._active[new].anchor)
        return started

    def _take(self, prefetch: Any) -> None:
        operation, tree, anchor = prefetch.operation, prefetch.tree, prefetch.anchor
        arrived = operation.host_pages[: operation.arrived_pages]
        operation.taken_pages = len(arrived)
        tokens = operation.key.tokens[operation.start_page * tree.page_bytes :][: len(arrived) * tree.page_bytes]
        if len(arrived) == 0 or tokens[: tree.page_bytes] in anchor.children:
            self._ledger.settle(len(arrived), arrived)
            return
        tree.set_host(tree._add_child(anchor, tokens), arrived.copy())
        self._ledger.settle(len(arrived), NO_PAGES)

    def _end(self, prefetch: Any) -> None:
        prefetch.tree.hold_host(prefetch.anchor)
        super()._end(prefetch)


# Storage and workers


class _StoresWithoutHolding(Storing):
    """A store reads host pages that nobody keeps: they are evicted and filled with something else meanwhile."""

    def store(self, node: Node) -> bool:
        is_new = not (node.stored or node.store_pending)
        goes_on = super().store(node)
        if goes_on and is_new:
            self._trees.current.release_host(node)
        return goes_on

    def stored(self, backup: BackupOperation) -> None:
        backup.tag.tree.hold_host(backup.tag.node)
        super().stored(backup)


class _GivesStuckJobsUp(SimulatedWorkers[Any]):
    """A job past its deadline counts as failed, although its call still runs and still writes."""

    def _substitute_run(self, run: Any) -> None:
        super()._substitute_run(run)
        self._fail(run.job)
        self.acknowledge(run.job)

    def _end(self, run: Any) -> None:
        if not run.stuck:
            super()._end(run)


class _LosesJobsOfTheDead(SimulatedWorkers[Any]):
    """Whoever waits for a job of a worker that died waits for ever."""

    def supervise(self) -> None:
        self._seats += len(self._dead)
        self._dead.clear()
        super().supervise()


# New weights, pins


class _KeepsPrefetchesThroughUpdates(Prefetcher):
    """An update of the weights forgets the prefetches under way, so old pages enter the new tree."""

    def cancel_all(self) -> None:
        pass

    def _take(self, prefetch: Any) -> None:
        own, prefetch.tree = prefetch.tree, self._trees.current
        super()._take(prefetch)
        prefetch.tree = own


class _StoresWithWhatIsOpen(HiCacheController):
    """A store that was submitted before an update goes to the storage that is open when its worker comes to it."""

    def poll(self) -> Acks | None:
        acks = super().poll()
        now_open = self._storage.lifecycle.jobs
        for store in self._storage.backups._waiting if now_open is not None else ():  # type: ignore[attr-defined]
            store.jobs.in_flight -= 1
            store.jobs = now_open
            store.jobs.in_flight += 1
        return acks


class _BelievesDetachedStores(HiCacheController):
    """A store that ends after its server was detached counts as one at the server that is attached now."""

    def _take_store(self, store: BackupOperation, state: StoreProgress, acks: Acks) -> None:
        super()._take_store(store, state, acks)
        store.stored = state is StoreProgress.STORED


class _KeepsMarksOfDetached(RadixTree):
    """What the server that was detached had is believed to be at the one that is attached."""

    def forget_stored(self) -> None:
        pass


class _DropsPinnedRuns(Backup):
    """Eviction from L1 does not look at pins."""

    def save(self, victim: Node) -> Fate:
        fate = super().save(victim)
        return Fate.DROP if fate is Fate.KEEP else fate


def _tree(kind: type[RadixTree]) -> Parts:
    return Parts(after=lambda cache: _become(cache.tree, kind))


def _prefetcher(kind: type[Prefetcher]) -> Parts:
    return Parts(after=lambda cache: _become(cache._prefetcher, kind))


def _backup(kind: type[Backup]) -> Parts:
    return Parts(after=lambda cache: _become(cache._backup, kind))


def _storing(kind: type[Storing]) -> Parts:
    return Parts(after=lambda cache: _become(cache._storing, kind))


WRONG, LATE, BOOKS = "wrong bytes", "late write", "invariant"

RACES: dict[str, Race] = {
    "a device page of a backup is freed at submit": Race(Parts(controller=_UnlocksWritesAtSubmit), {WRONG, BOOKS}, 40),
    "a device page of a load is freed at submit": Race(
        Parts(controller=_UnlocksLoadsAtSubmit), {WRONG, LATE, BOOKS}, 400
    ),
    "a backup is visible before its copy has ended": Race(Parts(copies=_AcknowledgesEarly), {WRONG}, 40),
    "a split during a backup loses a part": Race(_tree(_ForgetsSplits), {WRONG, BOOKS}, 40),
    "a device page of a write-back victim is freed at submit": Race(Parts(after=_with_l1), {WRONG, LATE, BOOKS}, 150),
    "the pages of a cancelled load stay visible": Race(
        Parts(after=lambda cache: _become(cache._loader, _ForgetsCancelledPages)), {WRONG}, 500
    ),
    "a cancelled prefetch gives back pages that are still being read": Race(
        _prefetcher(_GivesPagesBackAtCancel), {LATE, WRONG}, 300
    ),
    "a late arrival enters the tree after its pages were given back": Race(
        _prefetcher(_TakesLateArrivals), {WRONG, LATE, BOOKS}, 300
    ),
    "a short read shows what lay in the pages before": Race(Parts(controller=_BelievesShortReads), {WRONG}, 100),
    "the anchor of a prefetch is evicted": Race(_prefetcher(_DoesNotHoldAnchors), {BOOKS, "left behind"}, 200),
    "a store reads a page that was evicted": Race(_storing(_StoresWithoutHolding), {WRONG}, 100),
    "a stuck read is given up while it still writes": Race(Parts(workers=_GivesStuckJobsUp), {WRONG, LATE}, 300),
    "the job of a dead worker is never acknowledged": Race(Parts(workers=_LosesJobsOfTheDead), {"stuck"}, 300),
    "the forward does not wait for a layer": Race(Parts(waits_for_layers=False), {WRONG}, 40),
    "a prefetch of old weights enters the new tree": Race(_prefetcher(_KeepsPrefetchesThroughUpdates), {WRONG}, 500),
    "a store of old weights is stored under the new epoch": Race(Parts(controller=_StoresWithWhatIsOpen), {WRONG}, 500),
    "a store at a detached server counts for the attached one": Race(
        Parts(controller=_BelievesDetachedStores), {"stale mark"}, 500
    ),
    "what a detached server had is believed of the attached one": Race(
        _tree(_KeepsMarksOfDetached), {"stale mark"}, 40
    ),
    "a pinned run is dropped": Race(_backup(_DropsPinnedRuns), {"pin", BOOKS}, 500),
}
