"""The order of eviction: least recently used first, tails before heads, also after random additions and removals."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from hicache.backends.order import PAGES_AT_ONCE, AdaptivePages, EvictionOrder
from hicache.errors import InvariantError
from hicache_lab.conformance import make_keys
from tests.seeds import rng, seeds


def chain(order: EvictionOrder, keys: list[bytes], parent: bytes | None = None) -> None:
    for key, above in zip(keys, [parent, *keys], strict=False):
        order.add(key, above)
    order.use(keys)


def drained(order: EvictionOrder) -> list[bytes]:
    found: list[bytes] = []
    while (oldest := order.oldest()) is not None:
        order.discard(oldest[0])
        found.append(oldest[0])
    return found


class Keeping(AdaptivePages):
    """Keeps these pages."""

    def __init__(self, kept: Collection[bytes]) -> None:
        super().__init__(1)
        self.kept = kept

    def keeps(self, key: bytes, parent_of: Callable[[bytes], bytes | None]) -> bool:
        return key in self.kept


def victims(order: EvictionOrder, before: float) -> list[bytes]:
    found: list[bytes] = []
    while (victim := order.victim(before)) is not None:
        order.discard(victim)
        found.append(victim)
    return found


def test_the_tail_of_the_oldest_chain_goes_first() -> None:
    order, old, new = EvictionOrder(), make_keys(3, "old"), make_keys(3, "new")
    chain(order, old)
    chain(order, new)
    assert drained(order) == [*reversed(old), *reversed(new)]


def test_the_use_of_a_tail_keeps_its_head() -> None:
    order, old, new = EvictionOrder(), make_keys(3, "old"), make_keys(3, "new")
    chain(order, old)
    chain(order, new)
    order.use(old[2:])
    assert drained(order) == [*reversed(new), *reversed(old)]


def test_a_shared_head_goes_after_all_its_tails() -> None:
    order, head = EvictionOrder(), make_keys(2, "head")
    tails = [make_keys(2, f"tail {number}") for number in range(3)]
    chain(order, head)
    for tail in tails:
        chain(order, tail, head[-1])
    assert drained(order)[-2:] == [head[1], head[0]]


def test_a_page_stored_again_takes_its_place_in_the_chain() -> None:
    order, (one, two, three) = EvictionOrder(), make_keys(3)
    chain(order, [one, two, three])
    order.discard(two)
    chain(order, [two], one)
    order.check()
    assert drained(order) == [three, two, one]


def test_an_added_page_that_was_not_used_is_out_of_order() -> None:
    """The control of `check`."""
    order, (one, two) = EvictionOrder(), make_keys(2)
    order.add(one, None)
    order.add(two, one)
    with pytest.raises(InvariantError):
        order.check()


def test_a_long_use_is_made_in_parts_between_which_pages_may_leave() -> None:
    order, keys, other = EvictionOrder(), make_keys(3 * PAGES_AT_ONCE, "long"), make_keys(2, "other")
    chain(order, keys)
    chain(order, other)
    parts = order.uses(keys[-1:])
    for gone in (keys[-1], other[-1]):
        next(parts)
        order.discard(gone)
    assert sum(1 for _ in parts) >= 3
    order.check()
    assert drained(order) == [other[0], *keys[-2::-1]]


def test_kept_pages_are_evicted_after_the_others_and_their_tails_before_their_heads() -> None:
    kept, other, new = make_keys(4, "kept"), make_keys(2, "other"), make_keys(3, "new")
    for adaptive, first in ((None, kept), (Keeping(kept), other)):
        order = EvictionOrder(adaptive=adaptive)
        chain(order, kept)
        chain(order, other)
        since = order.now()
        chain(order, new)
        last = other if first is kept else kept
        assert victims(order, since) == [*reversed(first), *reversed(last)]
        assert list(order.keys()) == [*reversed(new)], "pages used since then are not victims"
        order.check()


@pytest.mark.parametrize("pages", [10, 1000])
def test_a_batch_can_evict_all_older_pages_although_all_are_kept(pages: int) -> None:
    old, used = make_keys(pages, "old"), make_keys(3, "used")
    order = EvictionOrder(adaptive=Keeping([*old, *used]))
    chain(order, old[: pages // 2])
    for key in [*old[pages // 2 :], *used]:
        chain(order, [key])
    since = order.now()
    first = [order.victim(since) for _ in range(2)]
    order.use(used)
    found = victims(order, since)
    assert first[0] in found and set(found) == set(old)
    of_chain = [key for key in found if key in old[: pages // 2]]
    assert of_chain == old[: pages // 2][::-1], "tails before heads"


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("with_cycles", [False, True])
@pytest.mark.parametrize("seed", seeds(5))
def test_random_use_keeps_the_order(seed: int, with_cycles: bool, is_adaptive: bool) -> None:
    """With pages in cycles, the test checks at least that all pages can be evicted."""
    dice = rng(seed)
    keys = make_keys(30)
    order = EvictionOrder(adaptive=Keeping(dice.sample(keys, 15)) if is_adaptive else None)
    since = order.now()
    for _ in range(1000):
        action = dice.randrange(5)
        key = dice.choice(keys)
        if action == 0 and not order.keys() & {key}:
            above = [other for other in keys if other != key] if with_cycles else keys[: keys.index(key)]
            chain(order, [key], dice.choice([None, *above]))
        elif action == 1:
            order.discard(key)
        elif action == 2:
            since = order.now() if dice.randrange(2) else since
            if (victim := order.victim(since)) is not None:
                order.discard(victim)
        else:
            order.use(dice.sample(keys, 4))
        if not with_cycles:
            order.check()
    known = set(order.keys())
    assert set(victims(order, order.now())) == known
