"""Each page that a lookup or a read did not get is counted by its reason: in the daemon, its metric and `/statusz`."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.errors import StoreError
from hicache.backends.storage import Storage
from hicache.backends.store import UNGUARDED, Store
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.daemon.pool import DaemonPool
from hicache.daemon.sharing import SharedStore
from hicache.frame import HEADER_BYTES, FrameCodec
from hicache.ghosts import Kind, PageAccounts, Reason, key_ids
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    bare,
    delete,
    empty_frames,
    exists,
    load,
    make_keys,
    memory_store,
    memory_subject,
    soon,
    store_chain,
)
from tests.backends._subjects import doorless
from tests.backends._troubled import CODEC, Troubled
from tests.daemon.daemons import NAMESPACE, Client, Daemon, keys_of, read, write
from tests.daemon.test_metrics import parsed
from tests.daemon.test_stand_in import switched_off
from tests.seeds import seeds
from tests.waiting import wait_for

UNIT = 4096
PAGE = -(-(HEADER_BYTES + PAYLOAD_BYTES) // UNIT) * UNIT
HOST: Kind = (Reason.EVICTED, "host")


@pytest.fixture
def shared() -> Iterator[Callable[..., SharedStore]]:
    """A function that makes a shared store with a pool of so many pages in front of a store."""
    made: list[SharedStore] = []

    def make(
        inner: Storage | None, pool_pages: int = 2, pool: DaemonPool | None = None, codec: FrameCodec = CODEC,
        clock: Clock = SYSTEM_CLOCK,
    ) -> SharedStore:
        made.append(SharedStore(codec, pool or DaemonPool(pool_pages * PAGE, unit_bytes=UNIT), inner, clock=clock))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.pages.pool.check()


def missed(store: SharedStore) -> dict[str, int]:
    """Return the missed pages by reason, whose sum is that of the misses."""
    found = store.sharing()
    assert sum(found.missed.values()) == found.misses
    return {"/".join(filter(None, kind)): pages for kind, pages in found.missed.items()}


def replaced(store: SharedStore) -> list[bytes]:
    """Store two pages, then two others, which replace them in a pool of two pages. Return the first ones."""
    old = make_keys(2, "old")
    for keys in (old, make_keys(2, "new")):
        store_chain(doorless(store), keys)
    return old


def test_pages_that_left_the_pool_count_by_what_the_store_did_with_them(shared: Callable[..., SharedStore]) -> None:
    down = Troubled()
    down.down = True
    for inner, reason in (
        (None, "evicted/host"), (memory_store(CODEC, 2 * CODEC.frame_bytes), "evicted/storage"),
        (memory_store(CODEC, 1), "not_stored/full"), (bare(down, CODEC), "not_stored/failed"),
        (switched_off(), "not_stored/paused"),
    ):
        store = shared(inner)
        old = replaced(store)
        assert exists(doorless(store), old) == 0
        assert missed(store) == {reason: 2}
        assert HIT not in load(doorless(store), old)
        assert missed(store) == {reason: 4}
        assert exists(doorless(store), make_keys(1, "unknown")) == 0
        assert sum(missed(store).values()) == 5 and max(missed(store).values()) == 4


@pytest.mark.parametrize("reports", [True, False])
def test_a_store_reports_evictions_of_pages_that_this_daemon_has_not_seen(
    shared: Callable[..., SharedStore], reports: bool
) -> None:
    """The control: a store that does not report them."""
    driver = Troubled(2 * CODEC.frame_bytes)
    inner = bare(driver, CODEC)
    store = shared(inner)
    if not reports:
        inner.watch_evictions(lambda keys: None)
    theirs = make_keys(2, "theirs")
    store_chain(memory_subject(inner, driver), theirs)
    store_chain(memory_subject(inner, driver), make_keys(2, "others"))
    assert exists(doorless(store), theirs) == 0
    assert missed(store) == {"evicted/storage" if reports else "new": 2}


def test_pages_behind_a_damaged_one_count_with_it(shared: Callable[..., SharedStore]) -> None:
    driver, keys = Troubled(), make_keys(5)
    store = shared(bare(driver, CODEC), 8)
    store_chain(doorless(store), keys)
    store.pages.pool.drop(store.pages.space, keys)
    driver.poke(CODEC.namespace, keys[1], bytes(CODEC.frame_bytes))
    assert load(doorless(store), keys) == [HIT, CORRUPT, HIT, HIT, HIT]
    assert missed(store) == {"damaged": 1}
    more = make_keys(2, "more")
    assert exists(doorless(store), [*keys, *more]) == 1
    assert missed(store) == {"damaged": 5, "new": 2}
    assert store.batch_has(keys, deadline=soon()) == [True, False, True, True, True]
    assert missed(store) == {"damaged": 6, "new": 2}
    store_chain(doorless(store), keys[1:2], keys[0])
    assert exists(doorless(store), keys) == 5 and missed(store) == {"damaged": 6, "new": 2}


@pytest.mark.parametrize("verb", ["clear", "delete", "memory"])
def test_pages_that_were_removed_on_request_count_as_cleared(shared: Callable[..., SharedStore], verb: str) -> None:
    store = shared(None if verb == "memory" else memory_store(CODEC))
    old = replaced(store)
    if verb == "clear":
        store.clear(deadline=soon())
    elif verb == "delete":
        delete(doorless(store), old)
    else:
        old = make_keys(2, "new")
        store.pages.pool.clear(store.pages.space)
    assert exists(doorless(store), old) == 0
    assert missed(store) == {"evicted/cleared": 2}


def test_while_the_store_does_not_answer_only_pages_that_it_may_have_are_unavailable(
    shared: Callable[..., SharedStore],
) -> None:
    driver = Troubled()
    store = shared(bare(driver, CODEC))
    old = replaced(store)  # in the store
    driver.down = True
    lost = make_keys(2, "lost")
    for keys in (lost, make_keys(2, "last")):  # not in the store
        store_chain(doorless(store), keys)
    unknown = make_keys(2, "unknown")
    for keys in (old, lost, unknown):
        assert exists(doorless(store), keys) == 0
        load(doorless(store), keys)
    assert missed(store) == {"unavailable": 8, "not_stored/failed": 4}
    store.slot.replace(None)
    wait_for(lambda: not store.stores)
    assert exists(doorless(store), unknown) == 0
    assert missed(store) == {"unavailable": 10, "not_stored/failed": 4}
    store_chain(doorless(store), unknown)
    store_chain(doorless(store), lost)
    assert exists(doorless(store), unknown) == 0
    assert missed(store) == {"unavailable": 10, "not_stored/failed": 4, "not_stored/paused": 2}


class Slow(Troubled):
    """A driver whose lookups and reads take as long as their deadline."""

    clock = ManualClock()

    def _reach(self, verb: str, keys: Sequence[bytes], deadline: float, parent: bytes | None = None) -> None:
        if verb in {"find", "get"}:
            self.clock.advance(deadline - self.clock())
            raise StoreError("deadline")


@pytest.mark.parametrize("pool_pages", [0, 2])
def test_pages_of_calls_whose_time_was_over_are_late(shared: Callable[..., SharedStore], pool_pages: int) -> None:
    driver = Slow()
    store = shared(Store(driver, CODEC, UNGUARDED, clock=driver.clock), pool_pages, clock=driver.clock)
    keys = make_keys(3)
    assert store.batch_exists(keys, deadline=driver.clock() + 1) == 0
    assert missed(store) == {"late/lookup": 3}
    assert HIT not in store.batch_get(keys, empty_frames(CODEC, 3), deadline=driver.clock() + 1)
    assert missed(store) == {"late/lookup": 3, "late/read": 3}


def test_namespaces_count_apart_and_share_one_memory(shared: Callable[..., SharedStore]) -> None:
    pool = DaemonPool(2 * PAGE, unit_bytes=UNIT)
    one, other = shared(None, pool=pool), shared(None, pool=pool, codec=FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES))
    old = replaced(one)
    for store in (one, other):
        assert exists(doorless(store), old) == 0
    assert (missed(one), missed(other)) == ({"evicted/host": 2}, {"new": 2})


def test_a_page_in_storage_beyond_the_maximum_age_has_expired() -> None:
    clock, keys = ManualClock(), make_keys(4)
    accounts = PageAccounts(100, 60.0, clock)
    accounts.left(keys[:3], None)
    accounts.left(keys[3:], HOST)
    clock.advance(59)
    accounts.evicted(keys[:1])
    clock.advance(1)
    accounts.evicted(keys[1:2])
    accounts.missing(keys)
    assert accounts.counts() == {(Reason.EVICTED, "storage"): 1, (Reason.EXPIRED, ""): 2, HOST: 1}


def test_the_memory_of_pages_that_left_is_limited() -> None:
    dice, accounts = random.Random(0), PageAccounts(1600)
    peaks = []
    tracemalloc.start()
    for _ in range(10):
        for _ in range(16):
            accounts.left([dice.randbytes(32) for _ in range(100)], HOST)
        accounts.left([last := dice.randbytes(32)] * 5000, HOST)  # a long run is cut
        peaks.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(accounts._ghosts) <= 1600 + 16 * 256 and peaks[-1] < 2 * peaks[1]
    accounts.missing([last, bytes(32)])
    assert accounts.counts() == {HOST: 1, (Reason.NEW, ""): 1}
    assert len(key_ids(last)) == 1


class Oracle:
    """Knows the last event of each page: why it will be missed (`ghosts`), or once it leaves the pool (`losses`)."""

    def __init__(self, store: SharedStore, driver: Troubled) -> None:
        self.ghosts: dict[bytes, str] = {}
        self.losses: dict[bytes, str] = {}
        self._store, self._driver = store, driver
        self._before = self._present()

    def _present(self) -> tuple[set[bytes], set[bytes]]:
        return set(self._store.pages.space.pages), {name[32:] for name in self._driver._pages}

    def see(self, key: bytes, event: str) -> None:
        """Learn what a call of one page has changed, with what the call means for that page."""
        (old_pool, old_store), (pool, stored) = self._before, self._present()
        for lost in old_pool - pool:
            self.ghosts[lost] = self.losses.pop(lost)
        for lost in old_store - stored:
            self.ghosts[lost] = "evicted/storage"
        if event == "evicted/cleared" or (event and key not in pool):
            self.ghosts[key] = event
        elif event or key in pool - old_pool:
            self.losses[key] = event or "stored"
        self._before = pool, stored

    def reason(self, key: bytes) -> str:
        """Return why a page is missed now."""
        known = self.ghosts.get(key, "new")
        if self._driver.down and known in {"new", "stored"}:
            return "unavailable"
        return "evicted/storage" if known == "stored" else known


@pytest.mark.parametrize("pool_pages", [0, 3])
@pytest.mark.parametrize("seed", seeds(2))
def test_the_reasons_of_random_calls_are_those_of_an_oracle(
    shared: Callable[..., SharedStore], seed: int, pool_pages: int
) -> None:
    dice, driver = random.Random(seed), Troubled(8 * CODEC.frame_bytes)
    store = shared(bare(driver, CODEC), pool_pages)
    keys, oracle = make_keys(24), Oracle(store, driver)
    expected: Counter[str] = Counter()
    for _ in range(400):
        driver.down = dice.random() < 0.2
        key, action = dice.choice(keys), dice.randrange(8)
        if action < 3:
            store_chain(doorless(store), [key])
            oracle.see(key, "not_stored/failed" if driver.down else "stored")
        elif action == 3 and not driver.down:
            delete(doorless(store), [key])
            oracle.see(key, "evicted/cleared")
        else:
            found = load(doorless(store), [key]) if dice.randrange(2) else store.batch_has([key], deadline=soon())
            if found[0] not in (True, HIT):
                expected[oracle.reason(key)] += 1
            oracle.see(key, "")
        assert missed(store) == expected
    assert len(expected) == 5


# A real daemon

POOL = {"pool": "64KiB"}  # four pages


@pytest.fixture
def connected() -> Iterator[Callable[[Daemon], Client]]:
    """A function that opens the namespace of the tests over a new connection to a daemon."""
    made: list[Client] = []

    def connect(daemon: Daemon) -> Client:
        made.append(daemon.client())
        assert made[-1].open()[0] == 200
        return made[-1]

    yield connect
    for one in made:
        one.close()


def of_metric(daemon: Daemon) -> dict[str, int]:
    found = parsed(daemon.ask("GET", "/metrics")[1].decode())
    series = {name: value for name, value in found.items() if name[0] == "hicache_daemon_missed_pages_total"}
    assert len(series) == 24, "every reason has a series from the start"
    named = {"/".join(filter(None, (dict(labels)["reason"], dict(labels)["detail"]))): int(value)
             for (_, labels), value in series.items()}
    return {name: value for name, value in named.items() if value}


def of_status(daemon: Daemon) -> dict[str, int]:
    sharing = daemon.status()["namespaces"][0]["sharing"]
    found = {f"{reason}/{detail}".strip("/"): pages
             for reason, details in sharing["missed"].items() for detail, pages in details.items()}
    assert sum(found.values()) == sharing["misses"]
    return found


def of_ctl(daemon: Daemon) -> dict[str, int]:
    found = daemon.ask("GET", "/v1/explain")[1]
    assert found["unit"] == "pages"
    return {f"{one['reason']}/{one['detail']}".strip("/"): one["tokens"] for one in found["total"]["computed"]}


def lookup(client: Client, keys: Sequence[bytes]) -> int:
    count: int = client.verb("exists", keys=keys)[1]["pages"]
    return count


def test_a_daemon_says_why_pages_were_missed(
    start: Callable[..., Daemon], connected: Callable[[Daemon], Client], tmp_path: Path
) -> None:
    folder = tmp_path / "pages"
    storage: dict[str, Any] = {"type": "file", "options": {"path": str(folder), "free_space_floor": 0}}
    daemon = start(POOL, storage=storage)
    client = connected(daemon)
    damaged, paused = keys_of(1, "damaged"), keys_of(2, "paused")
    assert lookup(client, keys_of(3, "unknown")) == 0
    write(client, damaged)
    client.call("PUT", "/v1/admin/breakers", {"direction": "write", "mode": "off"})
    write(client, paused)
    client.call("PUT", "/v1/admin/breakers", {"direction": "write", "mode": "auto"})
    for number in range(2):  # replace them in the pool
        assert write(client, keys_of(3, f"others{number}"))[1]["outcomes"] == ["stored"] * 3
    (path,) = (one for one in folder.rglob("*") if damaged[0].hex() in one.name)
    path.write_bytes(path.read_bytes()[:-1000] + bytes(1000))
    read(client, damaged)
    assert lookup(client, paused) == 0
    expected = {"new": 3, "damaged": 1, "not_stored/paused": 2}
    assert of_metric(daemon) == of_status(daemon) == expected
    client.verb("clear")
    assert lookup(client, keys_of(3, "others1")) == 0
    assert of_metric(daemon) == of_status(daemon) == of_ctl(daemon) == expected | {"evicted/cleared": 3}
    wait_for(lambda: sum(row[-1].get("new", 0) for row in daemon.ask("GET", "/history")[1]["rows"]) == 3)


@pytest.mark.parametrize(("storage", "reason"), [
    (None, "evicted/host"), ({"type": "memory", "options": {"capacity": "4KiB"}}, "not_stored/full"),
])
def test_a_page_that_was_evicted_from_the_pool_says_whether_the_store_was_full(
    start: Callable[..., Daemon], connected: Callable[[Daemon], Client], storage: dict[str, Any] | None, reason: str
) -> None:
    daemon = start(POOL, storage=storage)
    client = connected(daemon)
    for number in range(3):
        assert write(client, keys_of(2, str(number)))[1]["outcomes"] == ["stored"] * 2
    assert lookup(client, keys_of(2, "0")) == 0
    assert of_metric(daemon) == of_status(daemon) == {reason: 2}
    assert daemon.status()["namespaces"][0]["namespace"] == NAMESPACE
