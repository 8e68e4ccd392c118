"""Behaviour specific to sharded sets: placement, first hole, chains spread over parts, added and removed parts."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.compose import Levels, Part, Shards
from hicache.backends.compose.sharded import TAILS_MAX, Placement, ShardCodec
from hicache.errors import InvalidInput
from hicache.frame import FrameHeader
from hicache_lab.conformance import (
    HIT,
    MISS,
    STORED,
    full_frames,
    load,
    make_keys,
    memory_store,
    memory_subject,
    soon,
    store_chain,
)
from tests.seeds import rng, seeds

from .._troubled import CODEC, Troubled
from ._parts import OPENED, PAGE, named, settle, stores_of


class World:
    """A sharded set of memory parts."""

    def __init__(self, parts: int = 3, *, part_pages: int | None = None, tails_max: int = TAILS_MAX) -> None:
        capacity = None if part_pages is None else part_pages * PAGE
        codec = ShardCodec(CODEC)
        self.parts = [Troubled(capacity) for _ in range(parts)]
        self.backend = Shards(codec, named(*stores_of(self.parts, codec)), tails_max=tails_max)
        OPENED.append(self.backend)
        self.store = memory_subject(self.backend, self.parts[0])

    def part_of(self, key: bytes) -> int:
        return self.backend.placement.part_of(key)


def test_each_page_is_only_on_the_part_of_its_key() -> None:
    world, keys = World(), make_keys(60)
    store_chain(world.store, keys)
    for key in keys:
        having = [number for number, part in enumerate(world.parts) if part.peek(CODEC.namespace, key)]
        assert having == [world.part_of(key)]


def test_placement_depends_on_names_and_not_on_their_order() -> None:
    names, keys = ["north", "east", "south"], make_keys(300)
    one, other = Placement(names), Placement(names[::-1])
    assert all(names[one.part_of(key)] == names[::-1][other.part_of(key)] for key in keys)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_a_new_part_takes_its_share_and_moves_no_other_page(parts: int) -> None:
    names, keys = [f"part-{number}" for number in range(parts + 1)], make_keys(4000)
    small, large = Placement(names[:-1]), Placement(names)
    moved = [key for key in keys if small.part_of(key) != large.part_of(key)]
    assert all(large.part_of(key) == parts for key in moved), "only to the new part"
    assert abs(len(moved) / len(keys) - 1 / (parts + 1)) < 0.05


def test_a_page_of_another_set_of_parts_is_a_miss_and_can_be_stored_again() -> None:
    world, keys = World(3), make_keys(40)
    store_chain(world.store, keys)
    codec = ShardCodec(CODEC)
    larger = Shards(codec, [*named(*stores_of(world.parts, codec)), Part("new", memory_store(codec))])
    store = memory_subject(larger, world.parts[0])
    outcomes = load(store, keys)
    assert set(outcomes) == {HIT, MISS}
    assert outcomes.count(MISS) == sum(larger.placement.part_of(key) == 3 for key in keys)
    assert set(store_chain(store, keys)) == {STORED, SetOutcome.PRESENT}
    assert load(store, keys) == [HIT] * 40
    larger.close()


@given(present=st.lists(st.booleans(), max_size=40), parts=st.integers(2, 6))
def test_the_first_hole_is_exact_for_any_pages_and_any_number_of_parts(present: Sequence[bool], parts: int) -> None:
    world, keys = World(parts), make_keys(len(present))
    for key, is_there in zip(keys, present, strict=True):
        if is_there:
            store_chain(world.store, [key])
    expected = list(present).index(False) if False in present else len(present)
    assert world.backend.batch_exists(keys, deadline=soon()) == expected
    assert all(len(part.called("find")) <= 1 for part in world.parts)
    world.backend.close()
    OPENED.clear()


def test_a_part_that_is_down_ends_the_prefix_at_its_first_page_and_heals() -> None:
    world, keys = World(), make_keys(30)
    store_chain(world.store, keys)
    down = world.part_of(keys[4])
    world.parts[down].down = True
    mine = [world.part_of(key) == down for key in keys]
    assert world.backend.batch_exists(keys, deadline=soon()) == mine.index(True)
    assert load(world.store, keys) == [GetOutcome.ERROR if its else HIT for its in mine]
    more = make_keys(30, "more")
    outcomes = store_chain(world.store, more, keys[-1])
    assert outcomes == [SetOutcome.ERROR if world.part_of(key) == down else STORED for key in more]
    world.parts[down].down = False
    assert world.backend.batch_exists(keys, deadline=soon()) == 30
    assert load(world.store, keys) == [HIT] * 30


def test_a_hanging_part_is_abandoned_at_the_deadline_and_the_others_answer() -> None:
    world, keys = World(), make_keys(12)
    slow = world.part_of(keys[3])
    world.parts[slow].hanging = True
    frames = full_frames(CODEC, keys)
    # Long enough for the other parts on a busy machine; the hanging one always takes all of it.
    outcomes = world.backend.batch_set(keys, frames, parent=None, deadline=soon(2.0))
    assert outcomes == [SetOutcome.ERROR if world.part_of(key) == slow else STORED for key in keys]
    world.parts[slow].released.set()


def test_the_parent_on_a_part_is_its_previous_page_across_batches() -> None:
    world, keys = World(), make_keys(48)
    for start in range(0, 48, 8):
        store_chain(world.store, keys[start : start + 8], keys[start - 1] if start else None)
    for number, part in enumerate(world.parts):
        mine = [key for key in keys if world.part_of(key) == number]
        linked = [pair for verb, batch, parent in part.calls if verb == "set" for pair in pairwise([parent, *batch])]
        assert linked == list(pairwise([None, *mine]))
    for before, key in pairwise([bytes(32), *keys]):
        header = FrameHeader.parse(world.parts[world.part_of(key)].peek(CODEC.namespace, key) or b"")
        assert header is not None and header.parent_key == before, "the header names the parent in the chain"


def test_a_promotion_inside_a_part_keeps_the_parent_in_the_header() -> None:
    codec, keys = ShardCodec(CODEC), make_keys(12)
    tops, bottoms = [Troubled(), Troubled()], [Troubled(), Troubled()]
    levels = [Levels(codec, named(*stores_of(both, codec))) for both in zip(tops, bottoms, strict=True)]
    backend = Shards(codec, named(*levels))
    store_chain(memory_subject(Shards(codec, named(*stores_of(bottoms, codec))), bottoms[0]), keys)
    codec.parents._entries.clear()  # as after a restart
    assert load(memory_subject(backend, tops[0]), keys) == [HIT] * 12
    for part in levels:
        settle(part)
    for before, key in pairwise([bytes(32), *keys]):
        header = FrameHeader.parse(tops[backend.placement.part_of(key)].peek(CODEC.namespace, key) or b"")
        assert header is not None and header.parent_key == before
    backend.close()


@pytest.mark.usefixtures("threads_switch_often")
def test_a_parent_stays_known_while_other_calls_store_the_same_page() -> None:
    parents, keys = ShardCodec(CODEC).parents, make_keys(50)
    parents.note(keys, keys)

    def note_again_and_again() -> None:
        for _ in range(3000):
            parents.note(keys, keys)

    with ThreadPoolExecutor(1) as pool:
        noting = pool.submit(note_again_and_again)
        while not noting.done():
            assert None not in [parents.get(key, None) for key in keys]


def kept_of_old(world: World, seed: int, new_pages: int) -> list[list[bool]]:
    """Store a chain in batches, then a new one. Return which pages of the old chain each part still has."""
    old = make_keys(30, f"old {seed}")
    for start in range(0, 30, 6):
        store_chain(world.store, old[start : start + 6], old[start - 1] if start else None)
    store_chain(world.store, make_keys(new_pages, f"new {seed}"))
    return [
        [part.peek(CODEC.namespace, key) is not None for key in old if world.part_of(key) == number]
        for number, part in enumerate(world.parts)
    ]


@pytest.mark.parametrize("seed", seeds(5))
def test_full_parts_drop_tails_before_heads(seed: int) -> None:
    world = World(part_pages=16)
    for kept in kept_of_old(world, seed, rng(seed).randrange(18, 24)):
        assert kept == sorted(kept, reverse=True), "each part keeps a prefix of its pages"
    for part in world.parts:
        part.check()


def test_without_links_across_batches_heads_are_evicted_first() -> None:
    """The control of the test above: without remembered tails, a chain looks like many short chains."""
    kept = kept_of_old(World(part_pages=16, tails_max=0), 0, 22)
    assert any(part != sorted(part, reverse=True) for part in kept)


def test_usage_is_a_sum_with_a_capacity_if_all_parts_have_one() -> None:
    world, keys = World(part_pages=40), make_keys(20)
    store_chain(world.store, keys)
    usage = world.backend.usage()
    assert (usage.pages, usage.bytes, usage.capacity_bytes) == (20, 20 * PAGE, 120 * PAGE)
    open_ended = Shards(ShardCodec(CODEC), named(*stores_of([Troubled(), Troubled(PAGE)])))
    assert open_ended.usage().capacity_bytes is None
    open_ended.close()


def test_a_single_part_and_equal_names_are_refused() -> None:
    with pytest.raises(InvalidInput):
        Shards(ShardCodec(CODEC), named(memory_store(CODEC)))
    with pytest.raises(InvalidInput):
        Shards(ShardCodec(CODEC), [Part("same", memory_store(CODEC)), Part("same", memory_store(CODEC))])
