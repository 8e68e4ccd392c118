"""A random engine compares a HostCache with a brute-force model, and finds caches that are broken on purpose.

The model keeps page keys in sets. It does not model eviction and storage. With either, the cache may offer fewer pages
than the model, or more from storage, but never a wrong byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hicache.backends.base import Direction
from hicache.backends.storage import Storage
from hicache.cache import HostCache, HostLoad, HostMatch, HostWrite
from hicache.config import TransferConfig
from hicache.keys import PAGE_KEY_BYTES, TOKEN_BYTES, RadixKey
from tests.cache.host_world import PAGE_TOKENS, HostWorld, every_hit, memory_backend, prompt
from tests.cache.world import prefetch
from tests.seeds import rng, seeds

pytestmark = pytest.mark.long

STEPS = 500
RIDS = [f"r{n}" for n in range(6)]
POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")


@dataclass(slots=True, eq=False)
class Write:
    """A write in the model. `keys` are all page keys of its prompt."""

    handle: HostWrite
    key: RadixKey
    keys: list[bytes]
    epoch: int
    left: list[int]  # pages that the workers have not yet copied
    complete: bool = False

    @property
    def own(self) -> list[bytes]:
        """Return the page keys that this write adds."""
        return self.keys[self.handle.start_page :]


@dataclass(slots=True, eq=False)
class Load:
    """A load in the model."""

    handle: HostLoad
    key: RadixKey
    keys: list[bytes]  # of its pages only
    epoch: int
    asker: int  # numbers the requests that use this id one after the other


@dataclass(slots=True)
class Model:
    """L2 as sets of page keys, without eviction and storage. `old` has the operations of earlier trees."""

    shown: set[bytes] = field(default_factory=set)
    writes: list[Write] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    old: list[Write | Load] = field(default_factory=list)
    failed: set[tuple[str, int]] = field(default_factory=set)
    askers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RIDS, 0))
    clears: int = 0
    begun: dict[tuple[str, int], int] = field(default_factory=dict)  # the number of clears before its first lookup

    def prefix(self, keys: list[bytes], known: set[bytes]) -> int:
        """Return how many leading pages are known."""
        return next((n for n, key in enumerate(keys) if key not in known), len(keys))

    def promised(self) -> set[bytes]:
        """Return the keys that are shown, or will be if all writes complete."""
        return self.shown.union(*(write.own for write in self.writes))

    def end(self, write: Write, *, complete: bool) -> None:
        """End a write, then show or drop complete writes until nothing changes."""
        if complete:
            write.complete = True
        else:
            self.writes.remove(write)
        changed = True
        while changed:
            changed = False
            for waiting in [write for write in self.writes if write.complete]:
                start = waiting.handle.start_page
                if self.prefix(waiting.keys[:start], self.shown) == start:
                    self.shown.update(waiting.own)
                elif self.prefix(waiting.keys[:start], self.promised()) == start:
                    continue
                self.writes.remove(waiting)
                changed = True

    def clear(self) -> None:
        self.old += [*(write for write in self.writes if not write.complete), *self.loads]
        self.shown, self.writes, self.loads = set(), [], []
        self.clears += 1

    def begin(self, rid: str) -> None:
        """Record the first lookup or load of a request."""
        self.begun.setdefault((rid, self.askers[rid]), self.clears)

    def is_old(self, rid: str) -> bool:
        """Return True if a request was first looked up before the last clear."""
        return self.begun.get((rid, self.askers[rid]), self.clears) != self.clears


class RandomHost:
    """An engine that makes random calls and compares the results with the model."""

    def __init__(self, seed: int, kind: type[HostCache] = HostCache) -> None:
        self.random = chance = rng(seed)
        self.stored = chance.random() < 0.4
        self.hashed = chance.random() < 0.3
        pages = chance.choice([8, 14, 24, 200])
        self.stores = {0: memory_backend()} if self.stored else {}
        options = every_hit(
            eviction_policy=chance.choice(POLICIES),
            write_policy=chance.choice(["write_through", "write_through_selective"]),
            prefetch=prefetch(policy=chance.choice(["timeout", "best_effort", "wait_complete"]), timeout_base=2),
        )
        self.world = HostWorld(
            host_pages=pages,
            backend=self.stores.get(0),
            config=options,
            transfer=TransferConfig(store_host_share=1.0),  # the default would be very few of so few pages
            position_bytes=PAGE_KEY_BYTES if self.hashed else TOKEN_BYTES,
            open_storage=self.open_storage if self.stored else None,
            kind=kind,
        )
        self.world.leave()  # `run` closes it
        self.cache = self.world.cache
        self.model = Model()
        self.offered_pages = self.exact_pages = self.evicted_before = 0
        self.actions: list[Callable[[], None]] = [
            *[self.look_up] * 4, *[self.begin_write] * 4, *[self.end_write] * 5, *[self.copy] * 2,
            *[self.begin_load] * 4, *[self.end_load] * 4, *[self.prefetch] * 3, *[self.abort] * 3, *[self.poll] * 2,
            self.detach, self.empty,
        ]

    def open_storage(self, epoch: int) -> Storage:
        return self.stores.setdefault(epoch, memory_backend(epoch=epoch))

    @property
    def exact(self) -> bool:
        """True if the model and the cache must agree exactly: no storage, no evictions."""
        return not self.stored and self.evicted_pages == self.evicted_before

    @property
    def evicted_pages(self) -> int:
        return self.cache._counters.evicted_pages["host"]

    def run(self, steps: int = STEPS) -> None:
        """Make random calls, end all operations and close the cache."""
        for _ in range(steps):
            self.random.choice(self.actions)()
            self.audit()
        for rid in RIDS:
            self.cache.abort(rid)
        while self.model.writes or self.model.loads or self.model.old:
            self.end_write()
            self.end_load()
            self.audit()
        self.close()

    def close(self) -> None:
        """Close the cache, from which no request has anything now."""
        self.world.close()

    def audit(self) -> None:
        self.cache.check()
        self.world.audit()
        for load in [*self.model.loads, *(each for each in self.model.old if isinstance(each, Load))]:
            self.world.compare(load.key, load.handle, epoch=load.epoch)

    # Actions of the engine

    def prompt(self) -> tuple[RadixKey, list[bytes]]:
        """Return a prompt with many common prefixes with others, and its page keys."""
        pages = [self.random.choice([1, 1, 1, 1, 1, 2]) for _ in range(self.random.randrange(1, 8))]
        key = prompt(*pages, tail=0, salt=self.random.choice([None, None, None, "tenant"]))
        keys = key.page_keys(PAGE_TOKENS, key.seed, 0, len(pages))
        return (RadixKey.of_hashes(keys), keys) if self.hashed else (key, keys)

    def look_up(self) -> None:
        rid, (key, keys) = self.random.choice(RIDS), self.prompt()
        start = self.random.choice([0, self.random.randrange(len(keys) + 1)])
        found = self.cache.lookup(rid, key, start)
        self.model.begin(rid)
        if self.is_failed(rid):
            assert found == HostMatch(0, loading=False)
        elif self.exact:
            pages = max(0, self.model.prefix(keys, self.model.shown) - start)
            wanted = set(keys[start : start + pages])
            assert found.pages == pages
            assert found.loading == any(
                wanted.intersection(load.keys) for load in self.model.loads if load.handle.rid != rid
            )
            self.exact_pages += pages
        self.offered_pages += found.pages

    def begin_load(self) -> None:
        rid, (key, keys) = self.random.choice(RIDS), self.prompt()
        found = self.cache.lookup(rid, key)
        self.model.begin(rid)
        if found.loading and self.random.random() < 0.7:
            return
        end = self.random.randrange(1, len(keys) + 1) if self.random.random() < 0.3 else found.pages
        if end == 0:
            return
        start = self.random.randrange(end)
        handle = self.cache.begin_load(rid, key, start, end)
        assert (handle is not None) >= (end <= found.pages)
        if self.exact:
            assert (handle is not None) == (self.model.prefix(keys, self.model.shown) >= end)
        if handle is not None:
            asker = self.model.askers[rid]
            self.model.loads.append(Load(handle, key, keys[start:end], self.cache.weights_epoch, asker))

    def end_load(self) -> None:
        loads = [*self.model.loads, *(each for each in self.model.old if isinstance(each, Load))]
        if not loads:
            return
        load = self.random.choice(loads)
        (self.model.loads if load in self.model.loads else self.model.old).remove(load)
        seconds = self.random.choice([0.001, 0.01, None])
        if seconds is None:
            self.model.failed.add((load.handle.rid, load.asker))
        self.cache.end_load(load.handle, seconds)

    def begin_write(self) -> None:
        rid, (key, keys) = self.random.choice(RIDS), self.prompt()
        start = self.random.choice([0, 0, 0, 0, self.random.randrange(len(keys))])
        free, promised = self.world.free_pages, self.model.prefix(keys, self.model.promised())
        exact = self.exact
        handle = self.cache.begin_write(rid, key, start)
        if self.model.is_old(rid):
            assert handle is None
            return
        if exact and self.exact:
            wanted = promised < len(keys) and promised >= start
            assert (handle is not None) == (wanted and len(keys) - promised <= free)
            assert handle is None or handle.start_page == promised
        if handle is None:
            return
        assert start <= handle.start_page and handle.start_page + len(handle.host_pages) == len(keys)
        left = list(range(len(handle.host_pages)))
        self.model.writes.append(Write(handle, key, keys, self.cache.weights_epoch, left))

    def copy(self) -> None:
        """Copy one page, as a worker does."""
        if (write := self.some_write()) is not None and write.left:
            page = write.left.pop(self.random.randrange(len(write.left)))
            stamp = self.world.stamp(write.key, write.handle.start_page + page, write.epoch)
            self.world.host.payload(int(write.handle.host_pages[page]))[:] = stamp

    def end_write(self) -> None:
        write = self.some_write()
        if write is None:
            return
        complete = self.random.random() < 0.8
        if complete:
            self.world.copy(write.key, write.handle, epoch=write.epoch)
        self.cache.end_write(write.handle, complete=complete)
        if write in self.model.writes:
            self.model.end(write, complete=complete)
        else:
            self.model.old.remove(write)

    def some_write(self) -> Write | None:
        """Return a random write that has not ended, or None."""
        old = [each for each in self.model.old if isinstance(each, Write)]
        writes = [*(write for write in self.model.writes if not write.complete), *old]
        return self.random.choice(writes) if writes else None

    def prefetch(self) -> None:
        rid, (key, _) = self.random.choice(RIDS), self.prompt()
        if self.cache.storage.attached and self.random.random() < 0.7:
            self.world.until(lambda: self.world.controller.gate.may(Direction.READ))  # storage may still be opening
        self.cache.prefetch(rid, key)
        if self.random.random() < 0.5:
            self.world.until(lambda: self.cache.check_prefetch(rid))

    def abort(self) -> None:
        rid = self.random.choice(RIDS)
        self.cache.abort(rid)
        self.model.askers[rid] += 1

    def is_failed(self, rid: str) -> bool:
        return (rid, self.model.askers[rid]) in self.model.failed

    def poll(self) -> None:
        (self.world.settle if self.random.random() < 0.3 else self.world.step)()

    def detach(self) -> None:
        """Sometimes detach storage, or attach it again."""
        if self.stored and not self.cache.storage.attached:
            self.cache.storage.attach()
        elif self.stored and self.random.random() < 0.2:
            self.cache.storage.detach()

    def empty(self) -> None:
        if self.random.random() < 0.7:
            return
        if self.random.random() < 0.5:
            self.cache.clear()
        else:
            self.cache.update_weights(self.cache.weights_epoch + 1)
        self.model.clear()
        self.evicted_before = self.evicted_pages


@pytest.mark.parametrize("seed", seeds(8))
def test_a_random_engine_finds_what_the_model_expects_and_no_wrong_byte(seed: int) -> None:
    RandomHost(seed).run()


def test_the_random_engine_reaches_all_paths() -> None:
    """Without these hits, the test above would also pass with a cache that is always empty."""
    runs = [RandomHost(seed) for seed in range(16)]
    for run in runs:
        run.run()
    states = [run.cache.statistics() for run in runs]
    assert sum(run.exact_pages for run in runs) > 100 and sum(run.offered_pages for run in runs) > 500
    assert sum(state.controller.loaded_pages for state in states) > 100
    assert sum(state.controller.prefetched_pages for state in states) > 5  # fewer on a busy machine
    assert sum(state.evicted_pages.get("host", 0) for state in states) > 100


# Caches that are broken on purpose


class ShowsAtBegin(HostCache):
    """Shows a write as soon as its pages are reserved."""

    def begin_write(self, rid: str, key: RadixKey, start_page: int = 0) -> HostWrite | None:
        write = super().begin_write(rid, key, start_page)
        if write is not None:
            self._show(write)
        return write

    def end_write(self, write: HostWrite, *, complete: bool) -> None:
        """Do nothing: `begin_write` has shown the pages."""


class LoadsWithoutHolding(HostCache):
    """Does not hold the pages of a load: they can be evicted and overwritten before the load ends."""

    def begin_load(self, rid: str, key: RadixKey, start_page: int, end_page: int) -> HostLoad | None:
        load = super().begin_load(rid, key, start_page, end_page)
        if load is not None:
            load._tree.release_host(load._node)
        return load

    def end_load(self, load: HostLoad, seconds: float | None) -> None:
        load._tree.hold_host(load._node)
        super().end_load(load, seconds)

    def check(self) -> None:
        """Check nothing, so that only the engine can find the bug."""


class FreesWritesAtClear(HostCache):
    """Frees pages at a clear although workers still write to them."""

    def clear(self) -> None:
        super().clear()
        for write in list(self._writes):
            self._end_write(write, write.host_pages)
        self._trees.sweep()

    def end_write(self, write: HostWrite, *, complete: bool) -> None:
        if write in self._writes:
            super().end_write(write, complete=complete)


class ShowsOldWrites(HostCache):
    """Adds a write of earlier weights to the new tree."""

    def end_write(self, write: HostWrite, *, complete: bool) -> None:
        if write._tree is not self.tree:
            write._tree.release_host(write._anchor)
            write._tree, write._anchor = self.tree, self.tree.match(RadixKey(b"", b"", write._key.position_bytes)).node
        super().end_write(write, complete=complete)


class WritesForOldRequests(HostCache):
    """Accepts the pages of a request that began before a clear."""

    def begin_write(self, rid: str, key: RadixKey, start_page: int = 0) -> HostWrite | None:
        request = self._requests.get(rid)
        if request is not None:
            request.tree = self.tree
        return super().begin_write(rid, key, start_page)


class ReservesTwice(HostCache):
    """Reserves pages again that another write is already adding."""

    def _reach(self, key: RadixKey, pages: int) -> int:
        return pages


class DropsEarlyWrites(HostCache):
    """Drops a write that ends before the write of its prefix."""

    def _show_complete(self, writes: list[HostWrite]) -> None:
        super()._show_complete(writes)
        for write in [write for write in self._writes if write._complete]:
            self._end_write(write, write.host_pages)


class OffersFailedLoads(HostCache):
    """Offers pages again to a request whose load of them has failed."""

    def end_load(self, load: HostLoad, seconds: float | None) -> None:
        failed = load._request.failed
        super().end_load(load, seconds)
        load._request.failed = failed


BROKEN = [ShowsAtBegin, LoadsWithoutHolding, FreesWritesAtClear, ShowsOldWrites, WritesForOldRequests,
          ReservesTwice, DropsEarlyWrites, OffersFailedLoads]


@pytest.mark.parametrize("kind", BROKEN)
def test_the_random_engine_finds_a_broken_cache(kind: type[HostCache]) -> None:
    for seed in range(30):
        try:
            RandomHost(seed, kind).run()
        except AssertionError:
            return
    pytest.fail(f"{kind.__name__} was not found")
