"""Followers: which results of a leader's prefetch apply to a follower, and which pages it looks up itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hicache.backends.base import Direction, GetOutcome
from hicache.backends.calls import Call
from hicache.cache.prefetch_states import LOOKUPS_MAX, WAITING, State
from hicache.frame import PageBuffer
from hicache.keys import RadixKey
from tests.cache.world import GatedBackend, ShiftedClock, World, every_hit, filled, prefetch, prompt
from tests.seeds import rng, seeds

KEY = prompt(*range(1, 9))


class GatedLookups(GatedBackend):
    """A store whose lookups wait too, except for the first `free_lookups`.

    The next `failures` lookups and reads fail. With `claims`, lookups find all pages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.free_lookups = 0
        self.claims = False
        self.failures = {"lookup": 0, "read": 0}

    def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
        found = super()._exists(call, keys)
        if self.lookups > self.free_lookups:
            assert self.reads.wait(30)
        self._fail("lookup")
        return len(keys) if self.claims else found

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        outcomes = super()._get(call, keys, pages)
        self._fail("read")
        return outcomes

    def _fail(self, verb: str) -> None:
        if self.failures[verb]:
            self.failures[verb] -= 1
            raise RuntimeError("driver bug")


def store_of(*keys: RadixKey) -> GatedLookups:
    return filled(GatedLookups(), *keys)


def world_of(
    backend: GatedBackend, *, threshold_pages: int = 3, clock: ShiftedClock | None = None, **changes: object
) -> World:
    options = prefetch(**{"policy": "wait_complete", "threshold_tokens": 4 * threshold_pages, **changes})
    return World(
        device_pages=400, host_pages=400, backend=backend, config=every_hit(prefetch=options),
        clock=clock or ShiftedClock(),
    )


def start(world: World, backend: GatedBackend, keys: dict[str, RadixKey]) -> None:
    """Start the prefetches of all `keys`. The first lookup waits."""
    backend.reads.clear()
    for rid, key in keys.items():
        world.cache.prefetch_from_storage(rid, key)


def arrive(world: World, backend: GatedBackend, keys: dict[str, RadixKey]) -> None:
    """As `start`, then let the lookup continue."""
    start(world, backend, keys)
    assert len(world.cache._prefetcher._operations) == 1, "the other requests follow"
    backend.reads.set()


def hits(world: World, keys: dict[str, RadixKey]) -> dict[str, int]:
    """Begin each request when it need not wait any more; return how many pages it finds in the cache."""
    world.arrive(*keys)
    return {rid: world.attempt(rid, key).cached_tokens // 4 for rid, key in keys.items()}


def test_a_follower_of_a_fruitless_leader_looks_up_its_other_pages() -> None:
    backend = store_of(KEY)
    world = world_of(backend)
    keys = {"leader": prompt(1, 701, 702, 703), "follower": KEY}  # they share one page, which is stored
    arrive(world, backend, keys)
    assert hits(world, keys) == {"leader": 1, "follower": 8}


def test_100_followers_that_share_the_page_that_storage_lacks_make_no_lookup() -> None:
    backend = store_of(prompt(1, 2))
    world = world_of(backend)
    keys = {str(number): prompt(1, 2, 3, 500 + number) for number in range(101)}
    arrive(world, backend, keys)
    assert set(hits(world, keys).values()) == {0}
    assert backend.lookups == 1 and world.skipped["prefetch_hit_too_short"] == 101


def test_100_followers_that_diverge_from_a_fruitless_leader_at_the_same_page_share_one_read() -> None:
    """Their common pages are looked up and read once, not 100 times."""
    shared = prompt(1, *range(2, 30))
    backend = store_of(shared)
    world = world_of(backend)
    keys = {"leader": prompt(1, 701, 702, 703)}
    keys |= {str(number): prompt(1, *range(2, 30), 500 + number, 501, 502) for number in range(100)}
    arrive(world, backend, keys)
    world.arrive(*keys)
    assert backend.pages_read == 29
    assert backend.lookups == 1 + 1 + 99  # leader; first follower, with the common pages; ends of the others
    assert {world.attempt(rid, key).cached_tokens // 4 for rid, key in list(keys.items())[1:]} == {29}


def test_followers_that_diverge_from_a_fruitless_leader_at_different_pages_look_up_at_once() -> None:
    backend = store_of(prompt(1))
    world = world_of(backend)
    keys = {str(number): prompt(1, 500 + number, 2, 3) for number in range(20)}
    backend.free_lookups = 1
    start(world, backend, keys)
    world.until(lambda: len(world.cache._prefetcher._operations) == 19)
    assert world.cache.statistics().prefetches_waiting == 0
    backend.reads.set()
    assert sum(hits(world, keys).values()) == 0


def test_a_follower_with_a_longer_prompt_than_its_leader_looks_up_the_rest() -> None:
    backend = store_of(prompt(*range(1, 21)))
    world = world_of(backend, host_share=8 / 400)
    keys = {"leader": prompt(*range(1, 5)), "follower": prompt(*range(1, 9))}
    arrive(world, backend, keys)
    world.arrive("leader")
    assert world.attempt("leader", keys["leader"]).cached_tokens == 16
    world.arrive("follower")
    assert world.attempt("follower", keys["follower"]).cached_tokens == 32


@pytest.mark.parametrize("end", ["abort", "begin"])
def test_followers_look_up_themselves_after_their_leader_is_aborted_or_begins(end: str) -> None:
    backend = store_of(KEY)
    world = world_of(backend)
    keys = dict.fromkeys(("leader", "one", "two"), KEY)
    start(world, backend, keys)
    world.cache.abort_prefetch("leader") if end == "abort" else world.attempt("leader", KEY)
    del keys["leader"]
    assert not any(world.cache.check_prefetch_progress(rid) for rid in keys)
    backend.reads.set()
    assert hits(world, keys) == {"one": 8, "two": 8}
    assert backend.pages_read == 8


def late_world(keys: dict[str, RadixKey]) -> tuple[World, GatedLookups]:
    """Return a world in which requests have waited 10 s: 2 s too long for 8 pages, 30 s too short for 89."""
    backend, clock = store_of(prompt(*range(1, 90))), ShiftedClock()
    world = world_of(backend, policy="timeout", timeout_base=5, timeout_per_1024_tokens=100, clock=clock)
    start(world, backend, keys)
    assert not any([world.cache.check_prefetch_progress(rid) for rid in keys])
    clock.shift_s = 10
    world.step()
    return world, backend


def test_a_follower_with_a_longer_timeout_than_its_late_leader_looks_up_itself() -> None:
    keys = {"leader": prompt(*range(1, 9)), "follower": prompt(*range(1, 90))}
    world, backend = late_world(keys)
    assert world.cache.check_prefetch_progress("leader")
    assert not world.cache.check_prefetch_progress("follower")
    world.attempt("leader", keys["leader"])
    assert world.prefetch_of("follower").state in WAITING
    backend.reads.set()
    world.until(lambda: world.controller.statistics().prefetched_pages > 80)
    world.arrive("follower")
    assert world.attempt("follower", keys["follower"]).cached_tokens == 89 * 4


def test_a_follower_does_not_wait_longer_than_its_own_timeout() -> None:
    keys = {"leader": prompt(*range(1, 90)), "follower": prompt(*range(1, 9))}
    world, backend = late_world(keys)
    assert world.cache.check_prefetch_progress("follower")
    assert not world.cache.check_prefetch_progress("leader")
    backend.reads.set()
    assert world.attempt("follower", keys["follower"]).cached_tokens == 0
    world.arrive("leader")
    world.cache.abort_prefetch("leader")


@pytest.mark.parametrize("what", ["lookup", "read"])
def test_followers_of_a_leader_that_fails_look_up_themselves_after_the_back_off(what: str) -> None:
    backend = store_of(KEY)
    backend.failures[what] = 1
    world = world_of(backend)
    keys = dict.fromkeys(("leader", "one", "two"), KEY)
    arrive(world, backend, keys)
    world.until(lambda: world.controller.statistics().prefetched_pages == 8)
    assert backend.lookups == 2 and backend.failures[what] == 0
    assert hits(world, keys) == dict.fromkeys(keys, 8)


def test_if_the_read_of_a_leader_finds_nothing_its_followers_do_not_repeat_it() -> None:
    backend = store_of(prompt(1))
    backend.claims = True  # lookups find pages that reads do not find
    world = world_of(backend)
    backend.delete([KEY.page_keys(4, b"", 0, 1)[0]], deadline=float("inf"))
    keys = {str(number): KEY for number in range(100)}
    arrive(world, backend, keys)
    assert set(hits(world, keys).values()) == {0}
    assert backend.lookups == 1


@pytest.mark.usefixtures("long_back_off")
def test_followers_make_no_lookups_while_a_failed_store_is_paused() -> None:
    backend = store_of(KEY)
    backend.failures["lookup"] = 1
    world = world_of(backend)
    keys = {str(number): KEY for number in range(100)}
    arrive(world, backend, keys)
    world.until(lambda: not world.controller.gate.may(Direction.READ))
    assert all(world.cache.check_prefetch_progress(rid) for rid in keys)
    assert backend.lookups == 1
    for rid in keys:
        world.cache.abort_prefetch(rid)


@pytest.mark.parametrize("end", ["clear", "detach", "attach another"])
def test_followers_stop_waiting_when_the_prefetch_of_their_leader_is_cancelled(end: str) -> None:
    backend = store_of(KEY)
    world = world_of(backend)
    keys = dict.fromkeys(("leader", "one", "two"), KEY)
    start(world, backend, keys)
    if end == "clear":
        world.cache.clear()
    elif end == "detach":
        world.cache.storage.detach()
    else:
        world.cache.storage.attach(lambda epoch: store_of(KEY))
    assert all(world.cache.check_prefetch_progress(rid) for rid in keys)
    backend.reads.set()
    world.settle()
    assert world.cache.tree.host_pages == 0
    if end != "detach":
        world.until(lambda: world.controller.gate.may(Direction.READ))
        assert world.serve("later", KEY).storage_hit_tokens == 32


def waiting_for_room() -> tuple[World, GatedLookups]:
    """Return a world in which "a" waits for room behind "other", and the first pages of "a" have left L1 and L2."""
    backend = store_of(KEY, prompt(*range(11, 15)))
    world = world_of(backend, threshold_pages=1, host_share=4 / 400)
    world.cache._prefetcher.share.promote = None
    world.serve("prefix", prompt(*range(1, 6)))
    world.settle()
    world.prefetch("other", prompt(*range(11, 15)))
    world.cache.prefetch_from_storage("a", KEY)
    world.until(lambda: world.prefetch_of("a").state is State.AWAITING_ROOM)
    world.cache.evict(100)
    world.host.free(world.cache.tree.evict_host(100))
    return world, backend


def test_a_prefetch_whose_prefix_is_evicted_each_time_it_waits_for_room_is_dropped() -> None:
    """Without the limit, a request could repeat its lookup without end."""
    world, backend = waiting_for_room()
    world.prefetch_of("a").lookups = LOOKUPS_MAX
    world.cache.abort_prefetch("other")
    world.arrive("a")
    assert world.cache.statistics().skipped["prefetch_no_host_room"] == 1
    assert backend.lookups == 3  # one each for the prefix, `other`, and `a`


def test_a_request_whose_prefix_is_evicted_while_it_waits_for_room_follows_one_that_fetches_the_prefix() -> None:
    world, backend = waiting_for_room()
    backend.reads.clear()
    world.cache.prefetch_from_storage("prefix", prompt(*range(1, 6)))
    world.cache.abort_prefetch("other")
    world.until(lambda: world.prefetch_of("a").state is State.FOLLOWING)
    backend.reads.set()
    for rid, key in (("prefix", prompt(*range(1, 6))), ("a", KEY)):
        world.arrive(rid)
        assert world.attempt(rid, key).storage_hit_tokens == 16


@pytest.mark.parametrize("seed", seeds(20))
def test_many_requests_with_random_prompts_all_end_and_find_as_many_pages_as_alone(seed: int) -> None:
    """Each request finds all stored pages of its prompt, except for a rest that is shorter than the threshold."""
    numbers = rng(seed)
    stored = [random_prompt(numbers) for _ in range(6)]
    backend = store_of(*stored)
    threshold_pages = numbers.choice([1, 2, 4])
    world = world_of(backend, threshold_pages=threshold_pages, operations_max=numbers.choice([1, 3, 64]))
    waiting = {str(number): random_prompt(numbers) for number in range(60)}
    alone = {rid: stored_pages(backend, key) for rid, key in waiting.items()}
    requests = len(waiting)
    for rid, key in waiting.items():
        world.cache.prefetch_from_storage(rid, key)
        if numbers.random() < 0.2:
            world.step()

    def all_begun() -> bool:
        for rid, key in list(waiting.items()):
            if world.cache.check_prefetch_progress(rid):
                found = world.attempt(rid, key).cached_tokens // 4
                assert found > alone[rid] - threshold_pages
                del waiting[rid]
        return not waiting

    world.until(all_begun)
    assert backend.lookups - requests <= requests  # `stored_pages` made one lookup for each request
    assert world.cache.statistics().prefetches_waiting == 0


def random_prompt(numbers: random.Random) -> RadixKey:
    """Return a prompt whose first pages often equal those of other prompts."""
    return prompt(*(10 * depth + numbers.choice([1, 1, 1, 2]) for depth in range(numbers.randint(2, 12))))


def stored_pages(backend: GatedBackend, key: RadixKey) -> int:
    return backend.batch_exists(key.page_keys(4, b"", 0, key.pages(4)), deadline=float("inf"))
