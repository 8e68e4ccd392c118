"""Storage is notified of reused pages, and the cache of pages that storage has lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.backends.base import Direction, EvictionListener
from hicache.backends.calls import Call
from hicache.backends.file import FileDriver
from hicache.backends.guard import Override
from hicache.backends.memory import MemoryDriver
from hicache.backends.redis import RedisDriver
from hicache.backends.storage import Storage
from hicache.backends.store import Store
from hicache.cache import host_tier
from hicache.config import TransferConfig
from hicache.config.redis_storage import RedisStorageOptions
from hicache.config.storage import FileStorageOptions
from hicache.controller import storage as storage_workers
from hicache.keys import RadixKey
from hicache.radix import Node
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import Subject, store_chain, store_of
from hicache_lab.devservers import ValkeyServer
from tests.backends.redis.store import grow_old, name_of
from tests.cache.host_world import HostWorld
from tests.cache.world import GatedBackend, LastingBackend, StepClock, World, codec, every_hit, filled, prompt
from tests.passing import Passing
from tests.ranks import Exchange
from tests.tuned import tuned
from tests.waiting import wait_for

PAGE = codec().frame_bytes
HOT = prompt(1, 2, 3)
# Enough rounds to replace the content of a store of twelve pages several times.
ROUNDS = 8


def file_store(path: Path, pages: int) -> Store:
    options = FileStorageOptions(path=str(path), capacity=pages * PAGE, free_space_floor=0)
    return store_of(FileDriver, codec(), options)


def other(number: int) -> RadixKey:
    """Return a prompt of three pages that shares no page with any other prompt."""
    return prompt(100 + number, 200 + number, 300 + number)


def keys_of(key: RadixKey) -> list[bytes]:
    return key.page_keys(4, key.seed, 0, key.pages(4))


def has(backend: Storage, key: RadixKey) -> int:
    return backend.batch_exists(keys_of(key), deadline=float("inf"))


def node_of(world: World, key: RadixKey) -> Node:
    return world.cache.tree.match(key).node


def send_uses(world: World, clock: ManualClock | None = None) -> None:
    """Step until storage has been notified of all uses. With `clock`, move it while no notification is in flight: two
    within a second wait, and one in flight would miss its deadline."""

    def step() -> None:
        world.step()
        if clock is not None and world.controller._storage._touch is None:
            clock.advance(0.1)

    wait_for(lambda: not world.cache._l2._used and world.controller._storage._touch is None, step, pause_s=0)


class RecordingStore(LastingBackend):
    """A store that records the pages that it is notified of, and the threads of these calls."""

    def __init__(self, capacity_pages: int | None = None) -> None:
        super().__init__(codec(), MemoryDriver(None if capacity_pages is None else capacity_pages * PAGE))
        self.touched: list[bytes] = []
        self.threads: set[str] = set()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def _touch(self, call: Call, keys: list[bytes]) -> list[bytes]:
        self.touched += keys
        self.threads.add(threading.current_thread().name)
        assert self.may_answer.wait(20)
        return self.inner.batch_touch(keys, deadline=call.deadline + 100)

    def watch_evictions(self, listener: EvictionListener) -> None:
        self.listener = listener
        super().watch_evictions(listener)


class WithoutUsesOrNotices(Passing):
    """A store that ignores uses and does not report its evictions."""

    def _touch(self, call: Call, keys: list[bytes]) -> list[bytes]:
        return []

    def watch_evictions(self, listener: EvictionListener) -> None:
        pass


class WithoutNotices(WithoutUsesOrNotices):
    """A store that answers touches and does not report its evictions, like a store on a server."""

    def _touch(self, call: Call, keys: list[bytes]) -> list[bytes]:
        return self.inner.batch_touch(keys, deadline=call.deadline)


class Rounds:
    """An engine that serves HOT and a new prompt in each round. Rounds are more than a minute apart."""

    def __init__(self, backend: Storage, *, policy: str = "write_through") -> None:
        self.clock = StepClock()
        self.world = World(
            device_pages=20, host_pages=40, backend=backend, config=every_hit(write_policy=policy), clock=self.clock
        )

    def run(self, rounds: int = ROUNDS) -> None:
        world = self.world
        for number in range(rounds):
            request = world.serve(f"hot {number}", HOT)
            assert number == 0 or request.device_hit_tokens == 12, "HOT stays on L1"
            world.serve(f"other {number}", other(number))
            world.settle()
            send_uses(world, self.clock)
            self.clock.advance(host_tier.TOUCH_EVERY_S + 1)


@pytest.mark.parametrize(
    ("policy", "notifies"), [("write_through", True), ("write_through_selective", True), ("write_through", False)]
)
def test_a_prompt_that_often_hits_on_l1_is_in_the_file_store_after_a_restart(
    tmp_path: Path, policy: str, notifies: bool
) -> None:
    """The control, a store that is not notified of uses, evicts it."""
    store = file_store(tmp_path, 12)
    engine = Rounds(store if notifies else WithoutUsesOrNotices(store), policy=policy)
    engine.run()
    if notifies:
        assert engine.world.controller.statistics().touched_pages >= 3 * (ROUNDS - 2)
    engine.world.close()
    again = World(device_pages=20, host_pages=40, backend=file_store(tmp_path, 12))
    assert again.serve("hot", HOT).storage_hit_tokens == (12 if notifies else 0)
    if notifies:
        assert again.serve("other", other(0)).storage_hit_tokens == 0, "the store is too small for all prompts"


@pytest.mark.parametrize("uses", [True, False])
def test_a_server_keeps_a_prompt_that_hits_on_l1_longer_than_unused_pages(uses: bool) -> None:
    """Without uses, the control, the server evicts it. The server does not know the chains of its keys."""
    hot = prompt(*range(1, 13))
    more = [key for number in range(30) for key in keys_of(other(number))]
    with ValkeyServer() as server, server.client() as client:
        options = RedisStorageOptions(**server.storage(key_prefix="hot:")[1])
        world = World(device_pages=40, host_pages=40, backend=store_of(RedisDriver, codec(), options))
        with contextlib.closing(store_of(RedisDriver, codec(), options)) as beside:
            store = Subject(beside, lambda key: None, lambda key, value: None)
            world.serve("first", hot)
            world.settle()
            store_chain(store, more[:60])
            grow_old(client, client.keys("hot:*"))
            grow_old(client, [name_of(beside, key) for key in keys_of(hot)], seconds=2000)
            if uses:
                assert world.serve("hit", hot).device_hit_tokens == 48
                send_uses(world)
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.config_set("maxmemory-samples", 64)
            client.config_set("maxmemory", client.info("memory")["used_memory"] + PAGE)
            store_chain(store, more[60:])
            assert client.info("stats")["evicted_keys"] > 20
            client.config_set("maxmemory", 0)
            assert (has(beside, hot) == 12) is uses
        world.close()


# Notifications of uses


def test_a_worker_notifies_storage_heads_first_and_once_a_minute_for_each_run() -> None:
    store, clock = RecordingStore(), StepClock()
    world = World(backend=store, clock=clock)
    world.serve("first", prompt(1, 2))
    world.serve("longer", prompt(1, 2, 3))
    world.settle()
    for number in range(5):
        world.serve(f"hit {number}", prompt(1, 2, 3))
        send_uses(world, clock)
    assert store.touched == keys_of(prompt(1, 2, 3))
    assert store.threads and all(name.startswith("hicache-backup") for name in store.threads)
    clock.advance(host_tier.TOUCH_EVERY_S)
    world.serve("later", prompt(1, 2, 3))
    send_uses(world)
    assert store.touched == 2 * keys_of(prompt(1, 2, 3))
    assert world.controller.statistics().touched_pages == 6


def test_uses_within_one_second_are_sent_together() -> None:
    store, clock = RecordingStore(), StepClock()
    world = World(device_pages=24, backend=store, clock=clock)
    for number in range(4):
        world.serve(f"first {number}", other(number))
    world.settle()
    world.serve("hit 0", other(0))
    send_uses(world)
    for number in range(1, 4):
        world.serve(f"hit {number}", other(number))
        world.step()
    assert store.touched == keys_of(other(0))
    clock.advance(host_tier.TOUCH_PAUSE_S)
    send_uses(world)
    assert sorted(store.touched) == sorted(key for number in range(4) for key in keys_of(other(number)))


def test_both_parts_of_a_split_run_are_touched() -> None:
    store, clock = RecordingStore(), StepClock()
    world = World(backend=store, clock=clock)
    world.serve("whole", prompt(1, 2, 3, 4))
    world.settle()
    world.serve("head", prompt(1, 2))
    send_uses(world)
    assert store.touched == keys_of(prompt(1, 2))
    clock.advance(host_tier.TOUCH_PAUSE_S)
    world.serve("whole again", prompt(1, 2, 3, 4))
    send_uses(world)
    assert store.touched == keys_of(prompt(1, 2, 3, 4))


def test_uses_of_pages_that_are_not_stored_are_not_sent() -> None:
    store = RecordingStore()
    world = World(backend=store)
    world.cache.storage.override(Direction.WRITE, Override.OFF)
    world.step()
    for rid in "abc":
        world.serve(rid, HOT)
    send_uses(world)
    assert store.touched == []
    # The store stays open; it would report in the log of a later test that it keeps nothing.
    world.cache.storage.override(Direction.WRITE, Override.AUTO)


def test_a_bounded_number_of_uses_waits_for_a_store_that_hangs_and_dropped_uses_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_tier, "TOUCH_BYTES_MAX", 6 * 32)
    store, clock = RecordingStore(), StepClock()
    world = World(device_pages=30, host_pages=40, backend=store, clock=clock)
    for number in range(5):
        world.serve(f"first {number}", other(number))
    world.settle()
    store.may_answer.clear()
    world.serve("hit 0", other(0))
    wait_for(lambda: bool(store.touched), world.step)
    clock.advance(host_tier.TOUCH_PAUSE_S)
    for number in range(1, 5):
        request = world.serve(f"hit {number}", other(number))
        assert request.device_hit_tokens == 12
    assert world.cache.statistics().skipped["touch_dropped"] > 0
    assert store.touched == keys_of(other(0))
    store.may_answer.set()
    send_uses(world)
    assert sorted(store.touched) == sorted(key for number in range(3) for key in keys_of(other(number)))
    world.serve("hit 4 again", other(4))
    clock.advance(host_tier.TOUCH_PAUSE_S)
    send_uses(world)
    assert set(keys_of(other(4))) <= set(store.touched)


def test_a_store_that_is_replaced_while_it_hangs_is_not_notified_any_more() -> None:
    old, new = RecordingStore(), RecordingStore()
    clock = StepClock()
    world = World(
        backend=old, clock=clock, open_storage=lambda epoch: new, transfer=tuned(TransferConfig, backup_workers=2)
    )
    world.serve("first", HOT)
    world.settle()
    old.may_answer.clear()
    world.serve("hit", HOT)
    wait_for(lambda: bool(old.touched), world.step)
    world.cache.storage.attach()
    world.until(lambda: world.controller.backend is new)
    for rid in "abc":
        clock.advance(host_tier.TOUCH_EVERY_S)
        world.serve(rid, HOT)
        world.settle()
    wait_for(lambda: bool(new.touched), world.step)
    assert (old.touched, new.touched[:3]) == (keys_of(HOT), keys_of(HOT))
    old.may_answer.set()


def test_a_cache_without_an_l1_notifies_storage_too() -> None:
    store = RecordingStore()
    world = HostWorld(backend=store)
    world.write("a", prompt(1, 2))
    world.settle()
    assert world.cache.lookup("b", prompt(1, 2)).pages == 2
    world.cache.abort("b")
    wait_for(lambda: bool(store.touched), world.step)
    assert store.touched == keys_of(prompt(1, 2))


# Pages that storage has lost


@pytest.mark.parametrize(
    ("seen", "uses"), [(lambda store: store, 1), (WithoutNotices, 2), (WithoutUsesOrNotices, None)],
    ids=["by a notice", "by the reply to a touch", "not at all: the control"],
)
def test_an_evicted_prompt_is_stored_again_at_its_next_use_after_the_cache_has_noticed(
    seen: Callable[[Storage], Storage], uses: int | None
) -> None:
    store = RecordingStore(6)
    world = World(backend=seen(store))
    for number, key in enumerate([HOT, other(0), other(1)]):
        world.serve(f"first {number}", key)
        world.settle()
    assert has(store, HOT) == 0 and node_of(world, HOT).stored == (uses != 1)
    assert world.cache.statistics().lost_pages == (3 if uses == 1 else 0)
    for number in range(uses or 3):
        assert has(store, HOT) == 0
        world.serve(f"hot {number}", HOT)
        world.settle()
        send_uses(world)
        world.step()
    assert has(store, HOT) == (3 if uses else 0) and node_of(world, HOT).stored


def test_a_prompt_that_is_only_on_l1_is_copied_to_l2_and_stored_again() -> None:
    store = RecordingStore(6)
    world = World(device_pages=24, host_pages=6, backend=store)
    for number, key in enumerate([other(0), HOT, other(1), other(2)]):  # the newest copy leaves L2 first
        world.serve(f"{number}", key)
        world.settle()
    node = node_of(world, HOT)
    assert node.device is not None and node.host is None and not node.stored
    world.serve("hot again", HOT)
    world.settle()
    assert has(store, HOT) == 3


def test_a_page_lost_from_the_middle_of_a_run_marks_the_tail_as_not_stored() -> None:
    store = RecordingStore()
    world = World(backend=store)
    world.serve("long", prompt(1, 2, 3, 4))
    world.serve("head", prompt(1, 2))
    world.settle()
    head = node_of(world, prompt(1, 2))
    store.delete(keys_of(prompt(1, 2, 3, 4))[2:3], deadline=float("inf"))
    world.serve("again", prompt(1, 2, 3, 4))
    world.until(lambda: not node_of(world, prompt(1, 2, 3, 4)).stored)
    assert head.stored and world.cache.statistics().lost_pages == 2


def test_a_page_that_a_read_does_not_find_is_marked_as_not_stored() -> None:
    """The page was computed, and its node added, while the read was in flight."""
    key = prompt(1, 2, 3, 4)
    store = filled(GatedBackend(), key)
    world = World(backend=store)
    store.reads.clear()
    world.cache.prefetch_from_storage("slow", key)
    wait_for(store.entered.is_set, world.step)
    world.cache.cache_finished_req(world.begin("quick", key), key)
    world.until(lambda: node_of(world, key).stored)
    store.delete(keys_of(key)[3:], deadline=float("inf"))
    store.reads.set()
    world.until(lambda: not node_of(world, key).stored)
    world.cache.abort_prefetch("slow")


def test_each_step_handles_a_few_losses_and_above_a_limit_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_workers, "_LOST_PER_STEP", 2)
    store = RecordingStore()
    world = World(backend=store)
    world.serve("hot", HOT)
    world.settle()
    keys = keys_of(HOT)
    store.listener([bytes(32)] * 4 + keys[-1:])
    world.step()
    world.step()
    assert node_of(world, HOT).stored
    world.step()
    assert not node_of(world, HOT).stored
    store.listener([bytes(32)] * (2 * storage_workers._LOST_MAX))
    assert len(world.controller._storage._lost) == storage_workers._LOST_MAX
    world.controller._storage._lost.clear()


# Ranks


def test_ranks_notify_storage_of_uses_and_ignore_losses() -> None:
    """Only one rank has lost the prompt. If it alone unmarked the prompt, the ranks would decide differently."""
    stores, exchange, clock = [RecordingStore(6), RecordingStore()], Exchange(2), StepClock()
    worlds = [
        World(backend=store, ranks=rank, clock=clock) for store, rank in zip(stores, exchange.ranks(), strict=True)
    ]

    def serve(rid: str, key: RadixKey) -> None:
        for world in worlds:
            world.cache.cache_finished_req(world.begin(rid, key), key)
        wait_for(lambda: all(world.controller.idle for world in worlds), step)

    def step() -> None:
        for world in worlds:
            world.step()

    for number, key in enumerate([HOT, other(0), other(1), HOT]):
        serve(f"{number}", key)
    wait_for(lambda: all(keys_of(HOT)[0] in store.touched for store in stores), step)
    for _ in range(4):
        step()
    assert [has(store, HOT) for store in stores] == [0, 3]
    assert [node_of(world, HOT).stored for world in worlds] == [True, True]
    assert [world.cache.statistics().lost_pages for world in worlds] == [0, 0]
