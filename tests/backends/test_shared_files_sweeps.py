"""One engine lists and sweeps a shared store for all: who does, what the others know, and that the limit holds."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.driver import Swept
from hicache.backends.file.system import System
from hicache.backends.limit import LIST_INTERVAL_S, _Ledger
from hicache.backends.memory import MemoryDriver
from hicache.backends.pages import PageWrites
from hicache.backends.shared_files.driver import TOUCH_S
from hicache.backends.shared_files.lease import BEAT_S, LEASE_FILE, LEASE_S, URGENT_S, SweepLease
from hicache.backends.shared_files.listing import LEFTOVER_AGE_S
from hicache.backends.shared_files.root import Root, open_root
from hicache.clock import Clock
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import HIT, PRESENT, STORED, Subject, make_keys, store_chain
from tests.seeds import rng, seeds
from tests.waiting import wait_for

from ._files import CODEC, PAGE, Faulty, page_files, page_path
from ._shared import open_limited, open_shared, shared_driver, temporaries
from .test_limit import evicted, limit_of, limited_memory, settle, sweep

REJECTED = SetOutcome.REJECTED
FAR = math.inf


def numbers(lease: SweepLease) -> tuple[int, int, int, int]:
    """Return pages, bytes, and the numbers of the listings that an engine knows."""
    found = lease.swept
    return found.pages, found.bytes, found.begun, found.ended


def ahead(seconds: float) -> ManualClock:
    """Return the clock of a machine that is so many seconds ahead."""
    clock = ManualClock()
    clock.advance(seconds)
    return clock


# The lease


@dataclass(slots=True)
class Leases:
    """Leases of several machines on one directory."""

    root: Root
    clocks: list[ManualClock] = field(default_factory=list)

    def open(self, ahead_s: float = 0.0, system: System | None = None) -> tuple[SweepLease, ManualClock]:
        clock = ahead(ahead_s)
        self.clocks.append(clock)
        return SweepLease(system or System(), self.root, clock), clock

    def pass_time(self, seconds: float) -> None:
        """Move the clocks of all machines."""
        for clock in self.clocks:
            clock.advance(seconds)

    def write(self, content: bytes) -> None:
        Path(self.root.path, LEASE_FILE).write_bytes(content)

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(Path(self.root.path, LEASE_FILE).read_bytes())
        return found


@pytest.fixture
def leases(tmp_path: Path) -> Any:
    root = open_root(tmp_path / "s", create=True, system=System())
    yield Leases(root)
    os.close(root.fd)


def test_one_engine_lists_and_the_others_know_the_size_although_their_clocks_differ(leases: Leases) -> None:
    (ours, _), (theirs, _), (last, _) = leases.open(), leases.open(-170.0), leases.open(170.0)
    assert ours.visit(False)
    assert not theirs.visit(True) and numbers(theirs) == (0, 0, 1, 0)
    ours.end(7, 700)
    assert not theirs.visit(False) and not last.visit(False)
    assert ours.swept == theirs.swept == last.swept and numbers(ours) == (7, 700, 1, 1)
    leases.pass_time(60.0)
    assert ours.visit(False)
    assert not theirs.visit(False) and numbers(theirs) == (7, 700, 2, 1)
    ours.end(8, 800)
    assert not last.visit(False) and numbers(last) == (8, 800, 2, 2)


def test_a_lease_that_has_not_changed_for_its_time_is_taken_over(leases: Leases) -> None:
    (ours, _), (theirs, _) = leases.open(), leases.open(120.0)
    assert ours.visit(False)
    ours.end(7, 700)
    assert not theirs.visit(False)
    leases.pass_time(LEASE_S - 1.0)
    assert not theirs.visit(False), "the control"
    leases.pass_time(1.0)
    assert theirs.visit(False)
    assert not ours.visit(False) and numbers(ours) == (7, 700, 2, 1)
    theirs.end(9, 900)
    assert not ours.visit(False) and numbers(ours) == (9, 900, 2, 2)


def test_a_listing_that_beats_is_not_taken_over_and_one_that_has_stopped_is(leases: Leases) -> None:
    (ours, _), (theirs, _) = leases.open(), leases.open(-120.0)
    assert ours.visit(False)
    for _ in range(100):
        leases.pass_time(BEAT_S)
        ours.beat()
        assert not theirs.visit(True)
    leases.pass_time(LEASE_S)
    assert theirs.visit(False), "the control"


def test_beats_between_two_times_write_nothing(leases: Leases) -> None:
    ours, clock = leases.open()
    assert ours.visit(False)
    before = leases.read()
    clock.advance(BEAT_S - 1.0)
    ours.beat()
    assert leases.read() == before
    clock.advance(1.0)
    ours.beat()
    assert leases.read()["beats"] == 1


@pytest.mark.parametrize("is_listing", [True, False])
def test_a_released_lease_is_taken_at_once(leases: Leases, is_listing: bool) -> None:
    (ours, _), (theirs, _) = leases.open(), leases.open(60.0)
    assert ours.visit(False)
    if not is_listing:
        ours.end(7, 700)
    assert not theirs.visit(False)
    ours.release()
    assert theirs.visit(False) and theirs.swept.ended == (0 if is_listing else 1)


def test_an_engine_that_needs_room_waits_less_unless_a_listing_is_in_progress(leases: Leases) -> None:
    (ours, _), (theirs, _) = leases.open(), leases.open(60.0)
    assert ours.visit(False)
    assert not theirs.visit(True)
    leases.pass_time(URGENT_S)
    assert not theirs.visit(True), "a listing is in progress"
    ours.end(7, 700)
    assert not theirs.visit(True)
    leases.pass_time(URGENT_S - 1.0)
    assert not theirs.visit(True)
    leases.pass_time(1.0)
    assert not theirs.visit(False), "the control: it needs no room"
    assert theirs.visit(True)


def test_a_new_engine_takes_an_old_lease_at_once_and_waits_for_a_young_one(leases: Leases) -> None:
    ours, _ = leases.open()
    assert ours.visit(False)
    ours.end(7, 700)
    young, _ = leases.open(LEASE_S - 10.0)
    assert not young.visit(True)
    old, _ = leases.open(LEASE_S + 10.0)
    assert old.visit(False)


def test_an_engine_whose_clock_is_far_off_lists_once_and_the_others_follow_it(leases: Leases) -> None:
    (ours, _), (theirs, _) = leases.open(), leases.open(-7200.0)
    assert ours.visit(False)
    ours.end(7, 700)
    assert theirs.visit(False)
    theirs.end(7, 700)
    for _ in range(3):
        leases.pass_time(60.0)
        assert not ours.visit(True)
        assert theirs.visit(False)
        theirs.end(7, 700)


DAMAGED = {
    "empty": b"", "torn": b'{"owner": "ab', "text": b"mine\n", "binary": b"\xff\xfe\0", "null": b"null", "list": b"[1]",
    "deep": b"[" * 4000, "huge": b'{"owner": "' + b"x" * (1 << 20) + b'"}', "foreign": b'{"leader": "host-1"}',
    "negative": json.dumps({"owner": "a", "begun": 1, "ended": 1, "pages": -1, "bytes": 0, "beats": 0,
                            "written_s": 1.0}).encode(),
    "text for a number": json.dumps({"owner": "a", "begun": "1", "ended": 1, "written_s": 1.0}).encode(),
    "true for a number": json.dumps({"owner": "a", "begun": True, "ended": 1, "written_s": 1.0}).encode(),
    "more than any store has": b'{"owner": "a", "begun": 1, "ended": 1, "bytes": 1' + b"0" * 400 + b"}",
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_lease_with_other_content_is_as_a_missing_one(leases: Leases, what: str) -> None:
    """The control: without the damage, the other engine has the lease."""
    (ours, _), (theirs, _) = leases.open(), leases.open(60.0)
    assert ours.visit(False)
    ours.end(7, 700)
    assert not theirs.visit(False)
    leases.write(DAMAGED[what])
    assert theirs.visit(False) and theirs.swept.bytes in (0, 700)
    theirs.end(7, 700)
    assert not ours.visit(False) and ours.swept.bytes == 700


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_strange_file_in_place_of_the_lease_is_replaced(leases: Leases, tmp_path: Path, kind: str) -> None:
    ours, _ = leases.open()
    path, outside = Path(leases.root.path, LEASE_FILE), tmp_path / "outside"
    outside.write_text("mine")
    if kind == "link":
        path.symlink_to(outside)
    else:
        os.mkfifo(path)
    assert ours.visit(False)
    ours.end(7, 700)
    assert (path.is_symlink(), leases.read()["bytes"], outside.read_text()) == (False, 700, "mine")


def test_if_two_take_the_lease_at_once_both_list_and_one_keeps_it(leases: Leases) -> None:
    theirs, _ = leases.open()
    overtaken: list[bool] = []

    def overtake(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "rename" and not overtaken:
            overtaken.append(theirs.visit(False))

    ours, _ = leases.open(60.0, Faulty(overtake))
    assert ours.visit(False) and overtaken == [True]
    theirs.end(5, 500)
    ours.end(7, 700)
    assert (leases.read()["bytes"], leases.read()["ended"]) == (700, 1)
    leases.pass_time(60.0)
    assert not theirs.visit(False) and theirs.swept.bytes == 700
    assert ours.visit(False)


class Refuses(System):
    """A file system that refuses every change with `code`, while it is not 0."""

    code = 0

    def open(self, path: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            self._refuse()
        return super().open(path, flags, mode, dir_fd=dir_fd)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        self._refuse()
        super().rename(source, target, dir_fd=dir_fd)

    def _refuse(self) -> None:
        if self.code:
            raise OSError(self.code, os.strerror(self.code))


def test_an_engine_that_cannot_write_follows_and_never_lists(leases: Leases) -> None:
    system = Refuses()
    (ours, _), (reader, _) = leases.open(), leases.open(60.0, system)
    system.code = errno.EROFS
    assert not reader.visit(True) and numbers(reader) == (0, 0, 0, 0)
    assert ours.visit(False)
    ours.end(7, 700)
    assert not reader.visit(True) and numbers(reader) == (7, 700, 1, 1)
    leases.pass_time(10 * LEASE_S)
    assert not reader.visit(True)
    system.code = 0
    assert reader.visit(True), "the control"


def test_an_engine_without_room_for_the_lease_lists_all_the_same(leases: Leases) -> None:
    system = Refuses()
    (ours, _), (theirs, _) = leases.open(0.0, system), leases.open(60.0)
    system.code = errno.ENOSPC
    assert ours.visit(True)
    ours.beat()
    system.code = 0
    ours.end(7, 700)
    assert theirs.visit(False) and numbers(theirs) == (0, 0, 1, 0), "no other engine knows when that listing began"


@pytest.mark.parametrize("call", ["pwritev", "rename"])
def test_a_lease_that_could_not_be_written_leaves_no_temporary_file(leases: Leases, call: str) -> None:
    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == call:
            raise OSError(errno.EIO, "broken")

    ours, _ = leases.open(0.0, Faulty(fault))
    with pytest.raises(OSError, match="broken"):
        ours.visit(False)
    assert temporaries(Path(leases.root.path)) == []


def test_the_temporary_file_of_a_dead_engine_s_lease_is_removed_after_an_hour(tmp_path: Path) -> None:
    root, clock = tmp_path / "s", ManualClock()
    driver = shared_driver(open_shared(root, clock=clock))
    (root / f".{LEASE_FILE}.0123456789abcdef").write_text("torn")
    (root / f".{LEASE_FILE}").write_text("mine")

    def sweep_it() -> list[str]:
        assert driver.begin_sweep(False)
        driver.end_sweep(len(list(driver.pages("", 0.0))), 0)
        return temporaries(root)

    clock.advance(LEFTOVER_AGE_S - 600.0)
    assert len(sweep_it()) == 2, "the control"
    clock.advance(1200.0)
    assert sweep_it() == [f".{LEASE_FILE}"]


def test_an_engine_that_fails_to_list_gives_the_lease_to_another(leases: Leases) -> None:
    """Otherwise its attempts would keep the lease, and no engine would sweep. The control: one that ends keeps it."""
    (broken, _), (other, _) = leases.open(), leases.open(60.0)
    assert broken.visit(False)
    assert not other.visit(True)
    for _ in range(3):
        leases.pass_time(30.0)
        broken.visit(True)
        if other.visit(True):
            break
    else:
        pytest.fail("the engine that cannot list keeps the lease")
    other.end(7, 700)
    leases.pass_time(60.0)
    assert not broken.visit(False) and other.visit(False)


# What each engine knows about the size


@dataclass(slots=True)
class Engine:
    """An engine of the model: its real ledger and lease, and what must be in its ledger."""

    lease: SweepLease
    clock: ManualClock
    ledger: _Ledger
    listing: int | None = None  # how many pages the store had when the listing in progress began
    known: int = -1  # the same for the listing that the ledger has, -1 for none


class SharedStore:
    """A model of engines that write to one store, visit its lease and list it, in any order. No page is removed.

    An engine that writes its lease may be overtaken by the others between reading and writing it.
    """

    def __init__(self, root: Root, dice: random.Random) -> None:
        self.root = root
        self.dice = dice
        self.written: list[tuple[int, int]] = []  # the engine and the bytes of each page
        self.depth = 0
        self.busy: set[int] = set()  # engines in the middle of a step
        # `pages` in the file is the number of a listing here, so that each engine's source is known.
        self.listings: list[int] = [0]
        self.engines = [self.start() for _ in range(3)]

    def start(self) -> Engine:
        clock = ahead(self.dice.uniform(-300.0, 300.0))
        system = Faulty(self.overtake)
        return Engine(SweepLease(system, self.root, clock), clock, _Ledger(1 << 60))

    def overtake(self, name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "rename" and self.depth < 2 and self.dice.random() < 0.3:
            self.depth += 1
            for _ in range(self.dice.randrange(1, 8)):
                self.step(self.dice.randrange(len(self.engines)))
            self.depth -= 1

    def step(self, which: int) -> None:
        engine, action = self.engines[which], self.dice.randrange(12)
        if which in self.busy:
            return
        self.busy.add(which)
        try:
            if action < 4:
                self.write(which)
            elif action < 7:
                self.visit(engine)
            elif action < 9:
                self.end(engine)
            elif action == 9:
                engine.clock.advance(self.dice.choice([1.0, URGENT_S, LEASE_S]))
            elif action == 10:
                engine.lease.beat()
            elif self.dice.random() < 0.3:
                self.disturb(which)
        finally:
            self.busy.discard(which)

    def write(self, which: int) -> None:
        ledger, size = self.engines[which].ledger, self.dice.randrange(1, 100)
        assert ledger.reserve(1, size) == 1
        ledger.commit(size)
        self.written.append((which, size))

    def visit(self, engine: Engine) -> None:
        is_ours = engine.lease.visit(self.dice.random() < 0.5)
        before, is_first = (engine.ledger._series, engine.ledger._ended), engine.ledger._ended < 0
        found = engine.lease.swept
        engine.ledger.follow(found)
        if not is_first and (engine.ledger._series, engine.ledger._ended) != before and engine.ledger._ended:
            engine.known = self.listings[found.pages]
        engine.listing = None
        if is_ours:
            engine.ledger.begin_listing()
            engine.listing = len(self.written)
        elif not engine.ledger.is_listed:
            engine.ledger.begin_listing()
            engine.ledger.end_listing(sum(size for _, size in self.written))
            engine.known = len(self.written)

    def end(self, engine: Engine) -> None:
        if engine.listing is None:
            return
        began, engine.listing = engine.listing, None
        later = [size for _, size in self.written[began:] if self.dice.random() < 0.5]
        engine.ledger.end_listing(sum(size for _, size in self.written[:began]) + sum(later))
        engine.known = began
        self.listings.append(began)
        listed_bytes = engine.ledger.used_bytes - engine.ledger.since_bytes
        engine.lease.end(len(self.listings) - 1, listed_bytes)
        engine.ledger.know(engine.lease.swept)

    def disturb(self, which: int) -> None:
        """An engine ends or dies, or the lease is lost."""
        kind = self.dice.randrange(3)
        if kind == 0:
            self.engines[which].lease.release()
        if kind == 2:
            if self.depth:
                return  # not while an engine that has read the lease writes it
            Path(self.root.path, LEASE_FILE).unlink(missing_ok=True)
            return
        # The pages of its predecessor are those of nobody.
        self.written = [(-1, size) if writer == which else (writer, size) for writer, size in self.written]
        self.engines[which] = self.start()

    def check(self) -> None:
        for which, engine in enumerate(self.engines):
            if engine.known >= 0:
                listed = sum(size for _, size in self.written[: engine.known])
                own = sum(size for writer, size in self.written[engine.known :] if writer == which)
                assert engine.ledger.used_bytes >= listed + own, which


@pytest.mark.parametrize("seed", seeds(100))
def test_no_engine_counts_less_than_the_last_listing_it_knows_and_its_own_writes(
    leases: Leases, seed: int
) -> None:
    """The model has the real leases and ledgers."""
    dice = rng(seed)
    store = SharedStore(leases.root, dice)
    for _ in range(200):
        store.step(dice.randrange(3))
        store.check()


def test_after_the_loss_of_the_lease_the_others_follow_its_new_numbers() -> None:
    """The control: lower numbers of the same series are older."""
    ledger = _Ledger(1000)
    ledger.follow(Swept(1, 100, 6, 6, "first"))
    ledger.follow(Swept(1, 100, 7, 7, "first"))
    ledger.commit(10)
    ledger.follow(Swept(1, 60, 6, 6, "first"))
    assert ledger.used_bytes == 110
    ledger.follow(Swept(1, 110, 1, 1, "second"))
    assert ledger.used_bytes in (110, 120)
    ledger.follow(Swept(1, 50, 2, 2, "second"))
    assert ledger.used_bytes == 50


def test_a_ledger_that_takes_a_listing_without_its_own_writes_counts_less() -> None:
    """The control: without the total of the visit before the listing began, its own writes would be missing."""
    ledger = _Ledger(1000)
    ledger.follow(Swept(1, 100, 1, 1))
    ledger.commit(50)
    ledger.follow(Swept(1, 100, 2, 1))
    ledger.commit(7)
    ledger.follow(Swept(1, 100, 2, 2))
    assert ledger.used_bytes == 157
    ledger.follow(Swept(1, 157, 3, 2))
    ledger.follow(Swept(1, 157, 3, 3))
    assert ledger.used_bytes == 157
    ledger._before.clear()
    ledger._begun_bytes = ledger.written_bytes
    ledger.commit(5)
    ledger.end_listing(100)
    assert ledger.used_bytes == 105, "the control"


def test_the_owner_s_own_listing_does_not_count_its_writes_twice() -> None:
    """A store that is nearly full would reject pages during each listing."""
    ledger = _Ledger(1000)
    ledger.follow(Swept(0, 0, 1, 0))  # as `CapacityLimit` does: visit, list, end
    ledger.begin_listing()
    ledger.end_listing(0)
    ledger.know(Swept(0, 0, 1, 1))
    ledger.commit(100)
    ledger.follow(Swept(0, 0, 2, 1))
    assert ledger.used_bytes == 100
    ledger.begin_listing()
    ledger.end_listing(100)
    ledger.know(Swept(1, 100, 2, 2))
    assert ledger.used_bytes == 100
    ledger.commit(10)
    ledger.follow(Swept(1, 100, 3, 2))
    assert ledger.used_bytes == 110


# The limit


def load(store: Subject, keys: Sequence[bytes]) -> int:
    """Return how many pages are read."""
    frames = [memoryview(bytearray(PAGE)) for _ in keys]
    return store.backend.batch_get(keys, frames, deadline=FAR).count(HIT)


def put(store: Subject, keys: Sequence[bytes]) -> list[SetOutcome]:
    """Store a chain, at any time of the clock."""
    frames = [memoryview(bytearray(PAGE)) for _ in keys]
    return store.backend.batch_set(keys, frames, parent=None, deadline=FAR)


def exists(store: Subject, keys: Sequence[bytes]) -> int:
    return store.backend.batch_exists(keys, deadline=FAR)


def pass_interval(store: Subject, clock: ManualClock) -> None:
    """Move to the next regular sweep of an engine, or its look at the others', and wait until it has ended."""
    clock.advance(1.3 * LIST_INTERVAL_S)
    settle(store, clock)


def test_a_second_engine_lists_once_and_then_knows_the_size(tmp_path: Path) -> None:
    """The control: after the owner has closed its store, the other one lists."""
    root, listings = tmp_path / "s", list[str]()
    ours_clock, theirs_clock = ManualClock(), ahead(120.0)
    ours = open_limited(root, 10, ours_clock)
    assert put(ours, make_keys(4)) == [STORED] * 4
    pass_interval(ours, ours_clock)

    def note(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "listdir" and number > 1:  # the first is that of the opening
            listings.append(name)

    theirs = open_limited(root, 10, theirs_clock, system=Faulty(note))
    settle(theirs, theirs_clock)
    assert limit_of(theirs)._ledger.used_bytes == 4 * PAGE and listings
    listings.clear()
    pass_interval(theirs, theirs_clock)
    assert limit_of(theirs)._ledger.used_bytes == 4 * PAGE and listings == []
    assert put(theirs, make_keys(7, "theirs")) == [STORED] * 6 + [REJECTED]
    assert theirs.backend.usage().pages == 4
    ours.backend.close()
    pass_interval(theirs, theirs_clock)
    assert listings and limit_of(theirs)._ledger.used_bytes <= 10 * PAGE


def test_an_engine_that_starts_during_another_s_listing_counts_the_store_itself(tmp_path: Path) -> None:
    root, clock = tmp_path / "s", ManualClock()
    lister = shared_driver(open_shared(root))
    assert lister.begin_sweep(False)
    store = open_limited(root, 10, clock)
    assert put(store, make_keys(3)) == [STORED] * 3
    lister.end_sweep(0, 0)  # it began before this engine knew of it
    pass_interval(store, clock)
    assert limit_of(store)._ledger.used_bytes == 3 * PAGE


def test_engines_that_die_one_after_another_do_not_fill_the_store_beyond_its_limit(tmp_path: Path) -> None:
    """The control: a new engine has the room that is left."""
    root, stored = tmp_path / "s", 0
    for number in range(4):
        store = open_limited(root, 10, ManualClock())  # that of its predecessors stands still
        stored += put(store, make_keys(6, f"chain {number}")).count(STORED)
        assert len(page_files(root)) == stored == min(10, 6 * (number + 1))


def test_pages_that_a_dead_engine_was_writing_count_until_they_are_removed(tmp_path: Path) -> None:
    root, keys = tmp_path / "s", make_keys(4)
    store = open_shared(root)
    store_chain(store, keys)
    for key in keys[:3]:
        page = page_path(root, CODEC, key)
        page.rename(page.with_name(f".{page.name}.dead1"))
    clock = ahead(-60.0)
    limited = open_limited(root, 10, clock)
    assert limit_of(limited)._ledger.used_bytes == 4 * PAGE
    assert put(limited, make_keys(8, "more")).count(STORED) == 6


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("seed", seeds(3))
def test_engines_exceed_the_limit_by_the_writes_of_one_interval_at_most_and_keep_heads(
    tmp_path: Path, seed: int, adaptive: bool
) -> None:
    root, dice = tmp_path / "s", rng(seed)
    clocks = [ManualClock(), ahead(150.0), ahead(300.0)]
    stores = []
    for clock in clocks:
        stores.append(open_limited(root, 20, clock, adaptive=adaptive))
        settle(stores[-1], clock)
    chains: list[list[bytes]] = []
    over = False
    for turn in range(12):
        written = 0
        for number, store in enumerate(stores):
            chains.append(make_keys(dice.randrange(1, 8), f"{turn} {number}"))
            written += put(store, chains[-1]).count(STORED)
            for chain in chains[-6:]:
                load(store, chain)
        found = len(page_files(root))
        over = over or found > 20
        assert found <= 20 + written
        for store, clock in zip(stores, clocks, strict=True):
            pass_interval(store, clock)
        assert len(page_files(root)) <= 20
        assert sum(exists(stores[0], chain) for chain in chains) == len(page_files(root)), "a head went before its tail"
    assert over, "the control: the engines did not fill the store"
    assert all(store.backend.statistics().errors == {} for store in stores)


def test_without_room_for_the_lease_a_sweep_makes_room_all_the_same(tmp_path: Path) -> None:
    system, clock = Refuses(), ManualClock()
    store, keys = open_limited(tmp_path / "s", 10, clock, system=system), make_keys(10)
    assert put(store, keys) == [STORED] * 10
    settle(store, clock)
    system.code = errno.ENOSPC
    assert put(store, make_keys(2, "more")) == [REJECTED] * 2
    sweep(store, clock)
    assert evicted(store) > 0 and exists(store, keys) == len(page_files(tmp_path / "s")) < 10
    system.code = 0
    assert put(store, make_keys(1, "more")) == [STORED]


def test_an_engine_on_a_read_only_mount_reads_and_follows(tmp_path: Path) -> None:
    root, system, clock = tmp_path / "s", Refuses(), ManualClock()
    ours, keys = open_limited(root, 10, ManualClock()), make_keys(3)
    assert put(ours, keys) == [STORED] * 3
    system.code = errno.EROFS
    reader = open_limited(root, 10, clock, system=system)
    assert load(reader, keys) == 3
    assert put(reader, make_keys(2, "more")) == [REJECTED] * 2
    sweep(reader, clock)
    assert put(reader, make_keys(2, "more")) == [REJECTED] * 2
    assert set(reader.backend.statistics().errors) == {"EROFS"} and evicted(reader) == 0


# Uses and clocks


def age(root: Path, keys: Sequence[bytes], seconds: float, clock: Clock) -> None:
    """Set the times of page files so many seconds before the time of a clock."""
    for key in keys:
        os.utime(page_path(root, CODEC, key), (clock.wall_s() - seconds,) * 2)


@pytest.mark.parametrize("has_listed", [True, False])
def test_pages_of_a_writer_whose_clock_is_slow_are_not_evicted_before_older_ones(
    tmp_path: Path, has_listed: bool
) -> None:
    """The control: a sweeper that has not listed before takes them for old."""
    root, clock = tmp_path / "s", ManualClock()
    store = open_limited(root, 20, clock)
    slow = open_limited(root, 20, ManualClock())
    old, fresh = make_keys(9, "old"), make_keys(9, "fresh")
    assert put(store, old) == [STORED] * 9
    age(root, old, 5.0, clock)
    pass_interval(store, clock)
    age(root, old, 5.0 + 1.3 * LIST_INTERVAL_S, clock)
    assert put(slow, fresh) == [STORED] * 9
    age(root, fresh, 600.0, clock)
    if not has_listed:
        store.backend.close()
        store = open_limited(root, 20, clock)
    pass_interval(store, clock)
    assert put(store, make_keys(5, "more"))[-1] is REJECTED
    sweep(store, clock)
    gone = 9 - exists(store, old), 9 - exists(store, fresh)
    assert (gone[0] > 0, gone[1] > 0) == (has_listed, not has_listed)


def test_a_time_in_the_future_counts_as_the_time_of_the_listing_that_found_it(tmp_path: Path) -> None:
    """So the page ages, and goes before a page that is used after that listing."""
    root, clock = tmp_path / "s", ManualClock()
    store, future, used = open_limited(root, 20, clock), make_keys(9, "future"), make_keys(9, "used")
    other = open_limited(root, 20, ManualClock())
    assert put(other, future) == [STORED] * 9
    age(root, future, -86400.0, clock)
    assert put(store, used) == [STORED] * 9
    pass_interval(store, clock)
    clock.advance(1.0)
    assert load(store, used) == 9
    pass_interval(store, clock)
    pass_interval(store, clock)
    assert put(store, make_keys(5, "more"))[-1] is REJECTED
    sweep(store, clock)
    assert exists(store, used) == 9 and exists(store, future) < 9


def test_a_page_in_constant_use_is_touched_each_minute_and_not_more_often(tmp_path: Path) -> None:
    touches: list[str] = []

    def note(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "utime":
            touches.append(args[0])

    root, clock, (key,) = tmp_path / "s", ManualClock(), make_keys(1)
    store = open_shared(root, system=Faulty(note), clock=clock)
    assert put(store, [key]) == [STORED]
    assert load(store, [key]) == 1 and touches == [], "it is fresh"
    clock.advance(10 * TOUCH_S)
    for _ in range(60):
        clock.advance(TOUCH_S / 6)
        assert load(store, [key]) == 1
    assert 9 <= len(touches) <= 11


def test_a_page_that_another_engine_has_just_touched_is_not_touched_again(tmp_path: Path) -> None:
    touches: list[str] = []

    def note(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "utime":
            touches.append(args[0])

    root, clock, (key,) = tmp_path / "s", ManualClock(), make_keys(1)
    store = open_shared(root, system=Faulty(note), clock=clock)
    put(store, [key])
    clock.advance(10 * TOUCH_S)
    age(root, [key], 1.0, clock)
    assert load(store, [key]) == 1 and touches == []
    age(root, [key], 2 * TOUCH_S, clock)
    assert load(store, [key]) == 1 and len(touches) == 1, "the control"


def test_a_page_that_is_used_after_the_listing_stays_and_its_room_stays_taken(tmp_path: Path) -> None:
    """A sweep that counted the page as removed would let the store grow beyond its limit."""
    root, clock, keys = tmp_path / "s", ManualClock(), make_keys(12)
    first = open_shared(root)
    for key in keys:  # chains of one page
        assert put(first, [key]) == [STORED]
    first.backend.close()

    def use_all(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "preadv" and evicts:  # the sweep has listed, and reads headers
            evicts.clear()
            for key in keys:
                os.utime(page_path(root, CODEC, key))

    evicts, system = list[int](), Faulty(use_all)
    evicts.append(1)
    system.armed = False
    store = open_limited(root, 10, clock, system=system, is_listed=False)
    system.armed = True
    wait_for(lambda: limit_of(store)._ledger.is_listed)
    settle(store, clock)
    assert limit_of(store)._ledger.used_bytes >= len(page_files(root)) * PAGE
    assert len(page_files(root)) + put(store, make_keys(8, "more")).count(STORED) <= 12


# Room of the volume, and quotas


class Volume(System):
    """A volume with room for `pages` pages of all users, of which other programs use `others`."""

    def __init__(self, root: Path, pages: int) -> None:
        self.root, self.pages, self.others = root, pages, 0

    def statvfs(self, fd: int) -> Any:
        return SimpleNamespace(f_bavail=self.pages - self.others - len(page_files(self.root)), f_frsize=PAGE)


def test_the_floor_of_free_space_lowers_the_limit_and_a_sweep_gives_space_back(tmp_path: Path) -> None:
    """The control: with more room, all pages are stored."""
    root, clock = tmp_path / "s", ManualClock()
    volume = Volume(root, 12)
    store, keys = open_limited(root, 100, clock, system=volume, free_space_floor=2 * PAGE), make_keys(13)
    settle(store, clock)
    assert put(store, keys) == [STORED] * 10 + [REJECTED] * 3
    explained = limit_of(store).rejection or ""
    assert explained.startswith("the volume has room for 80.0 KiB, and 80.0 KiB are stored") and "floor" in explained
    volume.others = 5
    pass_interval(store, clock)
    left = len(page_files(root))
    assert exists(store, keys) == left <= 5
    volume.others = -100
    pass_interval(store, clock)
    assert put(store, keys) == [PRESENT] * left + [STORED] * (13 - left)


def test_an_engine_that_does_not_list_obeys_the_floor_too(tmp_path: Path) -> None:
    root, clock = tmp_path / "s", ManualClock()
    open_limited(root, 100, ManualClock())
    volume = Volume(root, 12)
    store = open_limited(root, 100, clock, system=volume, free_space_floor=2 * PAGE)
    settle(store, clock)
    assert put(store, make_keys(13)) == [STORED] * 10 + [REJECTED] * 3


def test_a_volume_whose_room_is_unknown_is_counted_and_the_store_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(name: str, number: int, args: tuple[Any, ...]) -> None:
        if name == "statvfs":
            raise OSError(errno.EIO, "broken")

    with caplog.at_level(logging.CRITICAL):
        store = open_limited(tmp_path / "s", 10, ManualClock(), system=Faulty(fault))
        assert store_chain(store, make_keys(3)) == [STORED] * 3
        wait_for(lambda: store.backend.statistics().errors.get("listing", 0) > 0)


class Quota(System):
    """A file system whose quota is spent while `is_spent`."""

    is_spent = False

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:  # type: ignore[override]
        if self.is_spent and buffers[0].nbytes == PAGE:
            raise OSError(errno.EDQUOT, "quota")
        return os.pwritev(fd, buffers, offset)


class FullMemory(MemoryDriver):
    """Stands for a server that rejects pages while `is_spent`, as S3 and Redis do."""

    is_spent = False

    def write(self, pages: PageWrites) -> None:
        if not self.is_spent:
            return super().write(pages)
        return pages.reject(0, "no_space")


@pytest.mark.parametrize("kind", ["shared files", "memory"])
def test_a_store_that_rejects_pages_itself_makes_some_room_once_per_interval(tmp_path: Path, kind: str) -> None:
    clock, keys, more = ManualClock(), make_keys(150), make_keys(2, "more")
    store: Subject
    server: Any
    if kind == "memory":
        server = FullMemory()
        store = limited_memory(1000 * PAGE, clock, server)
    else:
        server = Quota()
        store = open_limited(tmp_path / "s", 1000, clock, system=server)
    settle(store, clock)
    assert put(store, keys) == [STORED] * 150
    pass_interval(store, clock)
    assert evicted(store) == 0, "the control"
    server.is_spent = True
    for _ in range(5):
        assert put(store, more) == [REJECTED] * 2
        sweep(store, clock)
    assert evicted(store) == 3, "two per cent"
    pass_interval(store, clock)
    put(store, more)
    sweep(store, clock)
    assert evicted(store) == 6
    server.is_spent = False
    assert put(store, more) == [STORED] * 2
    assert exists(store, keys) == 144
