"""Storage learns what is hot, and the cache learns what storage has lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache.backends.base import EvictionListener, StorageBackend, touch
from hicache.backends.envelope import Wrapper
from hicache.backends.file import FileBackend
from hicache.backends.guard import Direction, Override
from hicache.backends.pages import PageReads
from hicache.backends.redis import RedisBackend
from hicache.backends.testing import Store, store_chain
from hicache.cache import host_tier
from hicache.config import TransferConfig
from hicache.config.redis_storage import RedisStorageOptions
from hicache.config.storage import FileStorageOptions
from hicache.controller import storage as storage_workers
from hicache.devservers import ValkeyServer
from hicache.events import EventStream, Medium, PrefixIndex
from hicache.keys import RadixKey
from hicache.radix import Node
from tests.backends.redis.store import grow_old
from tests.cache.host_world import HostWorld
from tests.cache.world import LastingBackend, ShiftedClock, World, codec, every_hit, prompt
from tests.ranks import Exchange
from tests.waiting import wait_for

PAGE = codec().frame_bytes
HOT = prompt(1, 2, 3)
# Rounds in which all of a store of twelve pages is replaced several times.
ROUNDS = 8


def file_store(path: Path, pages: int) -> FileBackend:
    options = FileStorageOptions(path=str(path), capacity=pages * PAGE, free_space_floor=0)
    return FileBackend(codec(), options)


def other(number: int) -> RadixKey:
    """A prompt of three pages that no other one shares."""
    return prompt(100 + number, 200 + number, 300 + number)


def keys_of(key: RadixKey) -> list[bytes]:
    return key.page_keys(4, key.seed, 0, key.pages(4))


def has(backend: StorageBackend, key: RadixKey) -> int:
    return backend.batch_exists(keys_of(key), deadline=float("inf"))


def node_of(world: World, key: RadixKey) -> Node:
    return world.cache.tree.match(key).node


def told(world: World) -> None:
    """Until storage has been told all that is to be told."""
    world.until(lambda: not world.cache._l2._used and world.controller._storage._touch is None)


class Listening(LastingBackend):
    """A store that notes what it is told, and on which threads."""

    def __init__(self, capacity_pages: int | None = None) -> None:
        super().__init__(codec(), None if capacity_pages is None else capacity_pages * PAGE)
        self.told: list[bytes] = []
        self.threads: set[str] = set()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        self.told += keys
        self.threads.add(threading.current_thread().name)
        assert self.may_answer.wait(20)
        return super().use(keys, deadline)


class Deaf(Wrapper):
    """A store that is told of no use, and tells of no eviction."""

    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        return []

    def watch_evictions(self, listener: EvictionListener) -> None:
        pass


class Mute(Deaf):
    """A store that answers touches, and tells of no eviction: as one on a server."""

    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        return touch(self._inner, keys, deadline=deadline)


class Rounds:
    """An engine whose users ask for HOT in each round, a minute apart, and for something new each time."""

    def __init__(self, backend: StorageBackend, *, policy: str = "write_through") -> None:
        self.clock = ShiftedClock()
        self.world = World(
            device_pages=20, host_pages=40, backend=backend, config=every_hit(write_policy=policy), clock=self.clock
        )

    def run(self, rounds: int = ROUNDS) -> None:
        world = self.world
        for number in range(rounds):
            request = world.serve(f"hot {number}", HOT)
            assert number == 0 or request.device_hit_tokens == 12, "it never leaves L1"
            world.serve(f"other {number}", other(number))
            world.settle()
            self.clock.shift_s += host_tier.TOUCH_EVERY_S + 1
            told(world)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_a_prompt_that_hits_on_l1_each_round_is_in_the_file_store_after_a_restart(tmp_path: Path, policy: str) -> None:
    engine = Rounds(file_store(tmp_path, 12), policy=policy)
    engine.run()
    assert engine.world.controller.statistics().touched_pages >= 3 * (ROUNDS - 2)
    engine.world.close()
    again = World(device_pages=20, host_pages=40, backend=file_store(tmp_path, 12))
    assert again.serve("hot", HOT).storage_hit_tokens == 12
    assert again.serve("other", other(0)).storage_hit_tokens == 0, "the store is too small for all"


def test_a_store_that_is_told_nothing_evicts_it(tmp_path: Path) -> None:
    """The control of the test above."""
    engine = Rounds(Deaf(file_store(tmp_path, 12)))
    engine.run()
    engine.world.close()
    again = World(device_pages=20, host_pages=40, backend=file_store(tmp_path, 12))
    assert again.serve("hot", HOT).storage_hit_tokens == 0


@pytest.mark.parametrize("uses", [True, False])
def test_a_prompt_that_hits_on_l1_outlives_others_on_a_server_that_evicts_what_is_unused(uses: bool) -> None:
    """And does not without being used, which is the control. A server of keys knows no chains."""
    hot = prompt(*range(1, 13))
    more = [key for number in range(30) for key in keys_of(other(number))]
    with ValkeyServer() as server, server.client() as client:
        options = RedisStorageOptions(**server.storage(key_prefix="hot:")[1])
        world = World(device_pages=40, host_pages=40, backend=RedisBackend(codec(), options))
        with contextlib.closing(RedisBackend(codec(), options)) as beside:
            store = Store(beside, lambda key: None, lambda key, value: None)
            world.serve("first", hot)
            world.settle()
            store_chain(store, more[:60])
            grow_old(client, client.keys("hot:*"))
            if uses:
                assert world.serve("hit", hot).device_hit_tokens == 48
                told(world)
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.config_set("maxmemory-samples", 64)
            client.config_set("maxmemory", client.info("memory")["used_memory"] + PAGE)
            store_chain(store, more[60:])
            assert client.info("stats")["evicted_keys"] > 20
            client.config_set("maxmemory", 0)
            assert (has(beside, hot) == 12) is uses
        world.close()


# What is told, and when


def test_uses_are_told_on_a_worker_heads_first_and_once_a_minute() -> None:
    store, clock = Listening(), ShiftedClock()
    world = World(backend=store, clock=clock)
    world.serve("first", prompt(1, 2))
    world.serve("longer", prompt(1, 2, 3))
    world.settle()
    for number in range(5):
        world.serve(f"hit {number}", prompt(1, 2, 3))
        told(world)
    assert store.told == keys_of(prompt(1, 2, 3))
    assert store.threads and all(name.startswith("hicache-backup") for name in store.threads)
    clock.shift_s += host_tier.TOUCH_EVERY_S
    world.serve("later", prompt(1, 2, 3))
    told(world)
    assert store.told == 2 * keys_of(prompt(1, 2, 3))
    assert world.controller.statistics().touched_pages == 6


def test_uses_of_one_second_are_told_together() -> None:
    store, clock = Listening(), ShiftedClock()
    world = World(device_pages=24, backend=store, clock=clock)
    for number in range(4):
        world.serve(f"first {number}", other(number))
    world.settle()
    world.serve("hit 0", other(0))
    told(world)
    for number in range(1, 4):
        world.serve(f"hit {number}", other(number))
        world.step()
    assert store.told == keys_of(other(0))
    clock.shift_s += host_tier.TOUCH_PAUSE_S
    told(world)
    assert sorted(store.told) == sorted(key for number in range(4) for key in keys_of(other(number)))


def test_a_run_that_was_split_is_told_in_both_its_parts() -> None:
    store, clock = Listening(), ShiftedClock()
    world = World(backend=store, clock=clock)
    world.serve("whole", prompt(1, 2, 3, 4))
    world.settle()
    world.serve("head", prompt(1, 2))
    told(world)
    assert store.told == keys_of(prompt(1, 2))
    clock.shift_s += host_tier.TOUCH_PAUSE_S
    world.serve("whole again", prompt(1, 2, 3, 4))
    told(world)
    assert store.told == keys_of(prompt(1, 2, 3, 4))


def test_what_is_not_stored_is_not_told() -> None:
    store = Listening()
    world = World(backend=store)
    world.cache.storage.override(Direction.WRITE, Override.OFF)
    world.step()
    for rid in "abc":
        world.serve(rid, HOT)
    told(world)
    assert store.told == []


def test_uses_wait_for_a_store_that_hangs_up_to_a_bound_and_are_counted_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_tier, "TOUCH_BYTES_MAX", 6 * 32)
    store, clock = Listening(), ShiftedClock()
    world = World(device_pages=30, host_pages=40, backend=store, clock=clock)
    for number in range(5):
        world.serve(f"first {number}", other(number))
    world.settle()
    store.may_answer.clear()
    world.serve("hit 0", other(0))
    wait_for(lambda: bool(store.told), world.step)
    clock.shift_s += host_tier.TOUCH_PAUSE_S
    for number in range(1, 5):
        request = world.serve(f"hit {number}", other(number))
        assert request.device_hit_tokens == 12
    assert world.cache.statistics().skipped["touch_dropped"] > 0
    assert store.told == keys_of(other(0))
    store.may_answer.set()
    told(world)
    assert sorted(store.told) == sorted(key for number in range(3) for key in keys_of(other(number)))
    world.serve("hit 4 again", other(4))
    clock.shift_s += host_tier.TOUCH_PAUSE_S
    told(world)
    assert set(keys_of(other(4))) <= set(store.told)


def test_a_store_that_is_replaced_while_it_hangs_is_told_no_more() -> None:
    old, new = Listening(), Listening()
    clock = ShiftedClock()
    world = World(
        backend=old, clock=clock, open_storage=lambda epoch: new, transfer=TransferConfig(backup_workers=2)
    )
    world.serve("first", HOT)
    world.settle()
    old.may_answer.clear()
    world.serve("hit", HOT)
    wait_for(lambda: bool(old.told), world.step)
    world.cache.storage.attach()
    world.until(lambda: world.controller.backend is new)
    for rid in "abc":
        clock.shift_s += host_tier.TOUCH_EVERY_S
        world.serve(rid, HOT)
        world.settle()
    wait_for(lambda: bool(new.told), world.step)
    assert (old.told, new.told[:3]) == (keys_of(HOT), keys_of(HOT))
    old.may_answer.set()


def test_a_cache_without_an_l1_tells_too() -> None:
    store = Listening()
    world = HostWorld(backend=store)
    world.write("a", prompt(1, 2))
    world.settle()
    assert world.cache.lookup("b", prompt(1, 2)).pages == 2
    world.cache.abort("b")
    wait_for(lambda: bool(store.told), world.step)
    assert store.told == keys_of(prompt(1, 2))


# What storage has lost


def test_an_evicted_prompt_is_stored_again_at_its_next_use() -> None:
    store = Listening(6)
    world = World(backend=store)
    world.serve("hot", HOT)
    world.settle()
    world.serve("other", other(0))
    world.serve("more", other(1))
    world.settle()
    assert has(store, HOT) == 0 and not node_of(world, HOT).stored
    assert world.cache.statistics().lost_pages == 3
    world.serve("hot again", HOT)
    world.settle()
    assert has(store, HOT) == 3 and node_of(world, HOT).stored


def test_without_notices_it_is_found_out_by_telling_the_use() -> None:
    inner = Listening(6)
    world = World(backend=Mute(inner))
    world.serve("hot", HOT)
    world.settle()
    for number in range(2):
        world.serve(f"other {number}", other(number))
    world.settle()
    assert has(inner, HOT) == 0 and node_of(world, HOT).stored
    world.serve("hot, told", HOT)
    world.until(lambda: not node_of(world, HOT).stored)
    world.serve("hot, stored", HOT)
    world.settle()
    assert has(inner, HOT) == 3


def test_a_store_that_neither_hears_nor_tells_keeps_its_mark_for_good() -> None:
    """The control of the two tests above."""
    inner = Listening(6)
    world = World(backend=Deaf(inner))
    world.serve("hot", HOT)
    for number in range(2):
        world.serve(f"other {number}", other(number))
    world.settle()
    for rid in "abc":
        world.serve(rid, HOT)
        world.settle()
    assert node_of(world, HOT).stored and has(inner, HOT) == 0


def test_a_prompt_that_is_on_l1_alone_is_copied_and_stored_again() -> None:
    store = Listening(6)
    world = World(device_pages=24, host_pages=6, backend=store)
    for number, key in enumerate([other(0), HOT, other(1), other(2)]):  # the newest copy leaves L2 first
        world.serve(f"{number}", key)
        world.settle()
    node = node_of(world, HOT)
    assert node.device is not None and node.host is None and not node.stored
    world.serve("hot again", HOT)
    world.settle()
    assert has(store, HOT) == 3


def test_a_page_that_is_lost_from_the_middle_takes_the_tail_of_its_run() -> None:
    store = Listening()
    world = World(backend=store)
    world.serve("long", prompt(1, 2, 3, 4))
    world.serve("head", prompt(1, 2))
    world.settle()
    head = node_of(world, prompt(1, 2))
    store.delete(keys_of(prompt(1, 2, 3, 4))[2:3], deadline=float("inf"))
    world.serve("again", prompt(1, 2, 3, 4))
    world.until(lambda: not node_of(world, prompt(1, 2, 3, 4)).stored)
    assert head.stored and world.cache.statistics().lost_pages == 2


def test_what_a_read_does_not_find_is_not_stored() -> None:
    """The node of the page came back by being computed while the read was under way."""
    store = Gated()
    first = World(backend=store)
    first.serve("a", prompt(1, 2, 3, 4))
    first.close()
    world = World(backend=store)
    store.may_read.clear()
    world.cache.prefetch_from_storage("slow", prompt(1, 2, 3, 4))
    wait_for(store.reading.is_set, world.step)
    world.cache.cache_finished_req(world.begin("quick", prompt(1, 2, 3, 4)), prompt(1, 2, 3, 4))
    world.until(lambda: node_of(world, prompt(1, 2, 3, 4)).stored)
    store.delete(keys_of(prompt(1, 2, 3, 4))[3:], deadline=float("inf"))
    store.may_read.set()
    world.until(lambda: not node_of(world, prompt(1, 2, 3, 4)).stored)
    world.cache.abort_prefetch("slow")


class Gated(Listening):
    """A store whose reads wait."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.may_read = threading.Event(), threading.Event()
        self.may_read.set()

    def read(self, pages: PageReads[bytes]) -> None:
        self.reading.set()
        assert self.may_read.wait(20)
        super().read(pages)


def test_losses_are_taken_in_some_at_a_time_and_beyond_a_bound_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_workers, "_LOST_PER_STEP", 2)
    store = Listening()
    world = World(backend=store)
    world.serve("hot", HOT)
    world.settle()
    keys = keys_of(HOT)
    store._on_evicted([bytes(32)] * 4 + keys[-1:])
    world.step()
    world.step()
    assert node_of(world, HOT).stored
    world.step()
    assert not node_of(world, HOT).stored
    store._on_evicted([bytes(32)] * (2 * storage_workers._LOST_MAX))
    assert len(world.controller._storage._lost) == storage_workers._LOST_MAX
    world.controller._storage._lost.clear()


def test_evictions_of_storage_are_events() -> None:
    store, stream = Listening(6), EventStream(1 << 20)
    world = World(backend=store)
    world.cache.record_events(stream)
    reader, index = stream.subscribe(), PrefixIndex()
    world.serve("hot", HOT)
    world.settle()
    index.apply(reader.drain(1000))
    assert index.prefix_pages(keys_of(HOT), Medium.STORAGE) == 3
    for number in range(2):
        world.serve(f"other {number}", other(number))
    world.settle()
    index.apply(reader.drain(1000))
    assert index.prefix_pages(keys_of(HOT), Medium.STORAGE) == 0
    assert index.prefix_pages(keys_of(HOT), Medium.DEVICE) == 3
    index.check()


# Ranks


def test_ranks_tell_storage_of_uses_and_take_in_no_losses() -> None:
    """Only one of them has lost the prompt: with the mark gone there alone, they would decide differently."""
    stores, exchange, clock = [Listening(6), Listening()], Exchange(2), ShiftedClock()
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
    wait_for(lambda: all(keys_of(HOT)[0] in store.told for store in stores), step)
    for _ in range(4):
        step()
    assert [has(store, HOT) for store in stores] == [0, 3]
    assert [node_of(world, HOT).stored for world in worlds] == [True, True]
    assert [world.cache.statistics().lost_pages for world in worlds] == [0, 0]
