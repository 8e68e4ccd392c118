"""Warm-ups: pages that are read from storage to L2 for an operator, before a request wants them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from hicache.backends.base import Direction, GetOutcome
from hicache.backends.calls import Call
from hicache.cache.break_even import BreakEven, Rates
from hicache.cache.tiered import Warming
from hicache.config import TransferConfig
from hicache.config.integrity import IntegrityConfig
from hicache.controller import ReadOperation
from hicache.errors import InvalidInput
from hicache.frame import Compression, FrameCodec, PageBuffer
from hicache.keys import PAGE_KEY_BYTES, RadixKey
from tests.cache.host_world import HostWorld
from tests.cache.world import GEOMETRY, NAMESPACE, GatedBackend, World, codec, every_hit, filled, prefetch, prompt
from tests.seeds import rng, seeds
from tests.waiting import wait_for

KEY = prompt(*range(1, 9), tail=0)


def begin(world: World | HostWorld, key: RadixKey, pages_max: int = 1 << 20) -> Warming:
    """Begin a warm-up."""
    page_size = world.cache.page_size
    warming = world.cache.begin_warming(key, key.page_keys(page_size, key.seed, 0, key.pages(page_size)), pages_max)
    world.cache.check()
    return warming


def read_of(warming: Warming) -> ReadOperation:
    """Return the read of a warm-up that has one."""
    assert warming.read is not None
    return warming.read


def end(world: World | HostWorld, warming: Warming) -> int:
    """End a warm-up. Return how many pages have entered L2."""
    others = world.cache._l2.reserved_pages - (0 if warming.read is None else len(warming.read.host_pages))
    pages = world.cache.end_warming(warming)
    world.cache.check()
    assert world.cache._l2.reserved_pages == others
    return pages


def warm(world: World | HostWorld, key: RadixKey, pages_max: int = 1 << 20) -> int:
    """Run a warm-up on this thread. Return how many pages have entered L2."""
    warming = begin(world, key, pages_max)
    if warming.read is not None:
        world.controller.read_apart(warming.read)
    return end(world, warming)


class Blocked:
    """A warm-up whose read waits in the store, on a thread, until `finish`."""

    def __init__(self, world: World, backend: GatedBackend) -> None:
        self._world, self._backend = world, backend
        backend.reads.clear()
        self.warming = begin(world, KEY)
        self._thread = threading.Thread(target=world.controller.read_apart, args=(read_of(self.warming),))
        self._thread.start()
        assert backend.entered.wait(30)

    def finish(self) -> int:
        """Let the read end, and end the warm-up."""
        self._backend.reads.set()
        self._thread.join(30)
        return end(self._world, self.warming)


def test_a_request_after_a_warm_up_hits_l2_and_does_not_read_storage() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend)
    assert warm(world, KEY) == 8
    assert world.cache.tree.peek(KEY).host_pages == 8 and backend.pages_read == 8
    request = world.serve("a", prompt(*range(1, 9), 99))
    assert (request.host_hit_tokens, request.storage_hit_tokens, backend.pages_read) == (32, 0, 8)
    assert warm(world, KEY) == 0 and backend.pages_read == 8


def test_a_prompt_arrives_in_pieces_after_the_pages_in_memory() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend, config=every_hit(prefetch=prefetch(host_share=0.1)))
    world.serve("a", prompt(1, 2))
    assert [warm(world, KEY, 4) for _ in range(3)] == [4, 2, 0]
    assert begin(world, KEY).start_page == 8 and backend.pages_read == 6 + 2
    assert world.serve("b", KEY).storage_hit_tokens == 0


def test_a_slow_store_and_a_short_hit_are_warmed_although_they_do_not_pay() -> None:
    slow = Rates(prefill_tokens_per_s=1 << 30, storage_bytes_per_s=1024, host_bytes_per_s=1 << 30)
    rule, config = BreakEven(given=slow), every_hit(prefetch=prefetch(threshold_tokens=16))
    backend = filled(GatedBackend(), KEY, prompt(50, tail=0))
    world = World(backend=backend, config=config, break_even=rule)
    world.prefetch("a", prompt(*range(1, 9), 99))
    assert backend.pages_read == 0 and world.skipped == {"prefetch_does_not_pay": 1}
    assert not world.cache.prefetch_from_storage("b", prompt(50, 99))
    skipped = world.skipped
    assert warm(world, KEY) == 8 and warm(world, prompt(50, tail=0)) == 1
    assert world.skipped == skipped


@pytest.mark.parametrize(("used_pages", "arrives"), [(27, 5), (31, 1), (32, 0)])
def test_a_warm_up_takes_free_pages_and_evicts_none(used_pages: int, arrives: int) -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend, device_pages=64, host_pages=32)
    world.serve("a", prompt(*range(100, 100 + used_pages)))
    world.settle()
    assert world.host.allocator.free_pages == 32 - used_pages
    assert warm(world, KEY) == arrives
    assert world.cache.tree.peek(KEY).host_pages == arrives
    assert world.cache.statistics().evicted_pages.get("host", 0) == 0
    # A request is not limited to free pages: it evicts.
    request = world.serve("b", prompt(*range(1, 9), 99))
    assert request.storage_hit_tokens == 4 * (8 - arrives)


def test_a_request_for_the_same_pages_does_not_wait_for_a_warm_up() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend)
    warming = begin(world, KEY)
    assert world.serve("a", prompt(*range(1, 9), 99)).storage_hit_tokens == 32
    world.controller.read_apart(read_of(warming))
    assert end(world, warming) == 0  # L2 has these pages now
    world.settle()


def test_pages_whose_prefix_was_evicted_since_are_freed() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend)
    assert warm(world, KEY, 4) == 4
    warming = begin(world, KEY)
    world.controller.read_apart(read_of(warming))
    world.forget()
    assert end(world, warming) == 0
    assert world.host.allocator.used_pages == 0


def test_a_warm_up_ends_with_the_tree_that_it_was_for() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend)
    blocked = Blocked(world, backend)
    world.cache.clear()
    world.cache.check()
    assert blocked.finish() == 0 and world.host.allocator.used_pages == 0
    assert warm(world, KEY) == 8


def test_new_weights_end_a_warm_up() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend, open_storage=lambda epoch: GatedBackend(codec(epoch)))
    blocked = Blocked(world, backend)
    world.cache.update_weights(1)
    world.until(lambda: world.controller.gate.may(Direction.READ))
    assert blocked.finish() == 0 and world.host.allocator.used_pages == 0
    assert warm(world, KEY) == 0


class Closable(GatedBackend):
    """A store that notes its end, and whose breaker opens while `takes_calls` is False."""

    is_closed, takes_calls = False, True

    def may_pass(self, direction: Direction) -> bool:
        return self.takes_calls

    def close(self) -> None:
        self.is_closed = True


def test_a_detached_store_is_closed_after_the_read_and_its_pages_do_not_enter_l2() -> None:
    backend = filled(Closable(), KEY)
    backend.is_closed = False
    world = World(backend=backend)
    blocked = Blocked(world, backend)
    world.cache.storage.detach()
    for _ in range(20):
        world.step()
    assert not backend.is_closed
    assert blocked.finish() == 0 and world.host.allocator.used_pages == 0
    world.until(lambda: backend.is_closed)
    assert begin(world, KEY).read is None  # there is no store


@pytest.mark.parametrize("hangs", [False, True])
def test_a_closing_cache_waits_for_the_read_and_does_not_close_a_store_that_hangs(hangs: bool) -> None:
    backend = filled(Closable(), KEY)
    backend.is_closed = False
    world = World(backend=backend)
    world.leave()
    blocked = Blocked(world, backend)

    def answer_late() -> None:
        wait_for(lambda: world.controller.closed)
        backend.reads.set()

    late = threading.Thread(target=answer_late)
    if not hangs:
        late.start()
    assert world.cache.close(0.1 if hangs else 20.0) is not hangs
    assert backend.is_closed is not hangs
    world.cache.check()
    if not hangs:
        late.join(30)
    blocked.finish()


def test_without_reads_of_the_store_there_is_no_warm_up() -> None:
    backend = filled(Closable(), KEY)
    world = World(backend=backend)
    backend.takes_calls = False
    world.step()
    assert begin(world, KEY).read is None
    backend.takes_calls = True
    world.step()
    assert warm(world, KEY) == 8


class Answers(GatedBackend):
    """A store whose answers a test changes."""

    change: Callable[[list[GetOutcome], Sequence[PageBuffer]], None] | None = None

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        outcomes = super()._get(call, keys, pages)
        if self.change is not None:
            self.change(outcomes, pages)
        return outcomes


@pytest.mark.parametrize("outcome", [GetOutcome.CORRUPT, GetOutcome.MISS, GetOutcome.ERROR])
def test_a_page_that_is_not_a_hit_ends_the_piece(outcome: GetOutcome) -> None:
    backend = filled(Answers(), KEY)
    world = World(backend=backend, transfer=TransferConfig(storage_batch_pages=4))
    changed: list[int] = []

    def change(outcomes: list[GetOutcome], pages: Sequence[PageBuffer]) -> None:
        changed.append(len(outcomes))
        if len(changed) == 2:
            outcomes[1] = outcome

    backend.change = change
    assert warm(world, prompt(*range(1, 9), tail=0)) == 5 and changed == [4, 4]
    backend.change = None
    assert warm(world, KEY) == 3


@pytest.mark.parametrize("compression", [None, Compression()])
def test_pages_on_a_verified_l2_have_tags(compression: Compression | None) -> None:
    store = FrameCodec(NAMESPACE.digest, GEOMETRY.payload_bytes, compression=compression)
    backend = filled(GatedBackend(store), KEY)
    config = every_hit(integrity=IntegrityConfig(verify="load"))
    world = World(backend=backend, config=config, host_codec=codec)
    assert warm(world, KEY) == 8
    (node,) = [node for node in world.cache.tree.nodes() if node.host is not None]
    assert node.sealed and node.host is not None
    for key, page in zip(world.cache.tree.page_keys(node), node.host.tolist(), strict=True):
        assert codec().check(key, world.host.frame(page)) is None
    world.host.frame(int(node.host[6]))[300] ^= 4
    assert world.serve("a", prompt(*range(1, 9), 99)).host_hit_tokens == 24
    found = world.cache.statistics().verified_pages
    assert (found["sound"], found["damaged"]) == (6, 1)


@pytest.mark.parametrize("seed", seeds(20))
def test_warm_ups_among_requests_keep_the_cache_consistent(seed: int) -> None:
    dice = rng(seed)
    keys = [KEY, prompt(1, 2, 3, *range(20, 25), tail=0), prompt(*range(30, 36), tail=0)]
    world = World(backend=filled(GatedBackend(), *keys), device_pages=40, host_pages=24)
    begun: list[Warming] = []

    def end_one() -> None:
        warming = begun.pop(dice.randrange(len(begun)))
        if warming.read is not None:
            world.controller.read_apart(warming.read)
        end(world, warming)

    for number in range(60):
        key, action = dice.choice(keys), dice.randrange(8)
        if action < 2:
            begun.append(begin(world, key, dice.randrange(1, 6)))
        elif action < 4 and begun:
            end_one()
        elif action < 6:
            world.serve(str(number), key)
        else:
            (world.forget if action == 6 else world.cache.clear)()
    while begun:
        end_one()
    assert world.cache.warming_pages == 0
    world.close()


def test_a_cache_of_page_keys_is_warmed_by_page_keys() -> None:
    backend = GatedBackend()
    key = RadixKey.of_hashes([bytes([number]) * 32 for number in range(1, 6)])
    filler = HostWorld(backend=backend, position_bytes=PAGE_KEY_BYTES)
    filler.write("a", key)
    filler.close()
    world = HostWorld(backend=backend, position_bytes=PAGE_KEY_BYTES)
    assert warm(world, key.head(2)) == 2 and warm(world, key) == 3
    world.audit()
    backend.pages_read = 0
    assert world.load("b", key) == 5 and backend.pages_read == 0
    with pytest.raises(InvalidInput):
        world.cache.begin_warming(KEY, [], 1)
    world.close()
