"""The orders in which pages are removed and copied, checked on random chains."""

from __future__ import annotations

import hashlib
import random

import pytest

from hicache.backends.base import StoredPage
from hicache.backends.chains import Chains
from tests.seeds import rng, seeds

NAMESPACES = [bytes([number]) * 32 for number in (1, 2)]


def page(name: str, used_s: float | None = 0.0, size: int = 10, namespace: bytes = NAMESPACES[0]) -> StoredPage:
    return StoredPage(namespace, hashlib.sha256(name.encode()).digest(), size, used_s)


def chain(chains: Chains, names: str, used_s: float) -> None:
    """Add pages `a`, `ab`, `abc` ... for "abc", so that chains with a common beginning share pages."""
    for end in range(1, len(names) + 1):
        parent = page(names[: end - 1]).key if end > 1 else None
        chains.add(page(names[:end], used_s), parent)


def keys(*names: str) -> list[bytes]:
    return [page(name).key for name in names]


def test_the_tail_of_the_oldest_chain_goes_first_and_a_shared_head_last() -> None:
    chains = Chains()
    chain(chains, "ax", used_s=1.0)
    chain(chains, "ay", used_s=2.0)
    assert [one.key for one in chains.tails_first()] == keys("ax", "ay", "a")


def test_the_chain_used_last_comes_first_head_before_tail() -> None:
    chains = Chains()
    chain(chains, "old", used_s=1.0)
    chain(chains, "new", used_s=2.0)
    assert [one.key for one, _ in chains.heads_first()] == keys("n", "ne", "new", "o", "ol", "old")


def test_heads_tails_and_orphans_are_counted() -> None:
    chains = Chains()
    chain(chains, "abc", used_s=1.0)
    assert (chains.heads(), chains.tails(), chains.orphans(), len(chains), chains.bytes) == (1, 1, 0, 3, 30)
    chains.discard((NAMESPACES[0], page("ab").key))
    assert (chains.heads(), chains.tails(), chains.orphans(), len(chains), chains.bytes) == (1, 2, 1, 2, 20)
    chains.check()


def test_equal_keys_of_two_namespaces_are_independent() -> None:
    chains = Chains()
    chain(chains, "ab", used_s=1.0)
    chains.add(page("a", 5.0, namespace=NAMESPACES[1]), None)
    assert (chains.heads(), chains.tails()) == (2, 2)


@pytest.mark.parametrize("circle", ["a", "ab", "abc"])
def test_pages_in_a_cycle_are_yielded_too(circle: str) -> None:
    """No engine creates such pages, but any process that may write the store can."""
    chains = Chains()
    for position, name in enumerate(circle):
        chains.add(page(name), page(circle[position - 1]).key)
    chains.check()
    assert sorted(one.key for one in chains.tails_first()) == sorted(keys(*circle))
    assert sorted(one.key for one, _ in chains.heads_first()) == sorted(keys(*circle))


def test_a_listing_moves_the_last_use_only_forward() -> None:
    chains = Chains()
    chains.add(page("a", 5.0), None)
    assert chains.renew(page("a", 9.0, size=7)) and chains.renew(page("a", 3.0, size=7))
    (found,) = chains.tails_first()
    assert (found.used_s, found.bytes, chains.bytes) == (9.0, 7, 7)
    assert not chains.renew(page("b"))
    chains.keep(set())
    assert (len(chains), chains.bytes) == (0, 0)


def test_an_unread_page_begins_a_chain_until_its_parent_is_read() -> None:
    chains = Chains()
    head, tail = page("a"), page("ab")
    chains.add(head, None)
    chains.add(tail, None, is_unread=True)
    assert (chains.unread(), chains.heads(), chains.tails()) == ([tail], 2, 2)
    chains.check()
    chains.read(tail.id, head.key)
    assert (chains.unread(), chains.heads(), chains.tails()) == ([], 1, 1)
    assert [one.key for one in chains.tails_first()] == keys("ab", "a")
    chains.check()


def test_a_page_that_was_read_without_a_parent_or_as_its_own_begins_a_chain() -> None:
    chains = Chains()
    for name, parent in (("a", None), ("b", page("b").key)):
        chains.add(page(name), None, is_unread=True)
        chains.read(page(name).id, parent)
    assert (chains.unread(), chains.heads(), chains.tails()) == ([], 2, 2)
    chains.check()


def test_a_page_that_is_added_again_or_discarded_is_no_longer_unread() -> None:
    chains = Chains()
    for name in "ab":
        chains.add(page(name), None, is_unread=True)
    chains.add(page("a"), page("x").key)
    assert [one.key for one in chains.unread()] == keys("b") and chains.orphans() == 1
    chains.discard(page("b").id)
    assert chains.unread() == []
    chains.check()


def test_a_listing_keeps_what_was_read_and_what_was_not() -> None:
    chains = Chains()
    chains.add(page("a"), None)
    chains.add(page("ab"), None, is_unread=True)
    assert chains.renew(page("a", 5.0)) and chains.renew(page("ab", 6.0, size=7))
    assert chains.unread() == [page("ab", 6.0, size=7)]
    chains.keep({page("a").id})
    assert (chains.unread(), len(chains)) == ([], 1)
    chains.check()


def test_the_time_that_the_last_listing_showed_is_kept_beside_the_last_use() -> None:
    """The time of a listing comes from another clock than uses."""
    chains, (one, other) = Chains(), (page("a", 9.0), page("b", 9.0))
    assert chains.listed_s(one.id) is None
    chains.add(one, None, 3.0)
    chains.add(other, None)
    assert (chains.listed_s(one.id), chains.listed_s(other.id)) == (3.0, None)
    assert chains.renew(page("a", 4.0), 4.0) and chains.renew(other)
    assert (chains.listed_s(one.id), chains.listed_s(other.id)) == (4.0, None)
    assert {found.key: found.used_s for found in chains.tails_first()} == {one.key: 9.0, other.key: 9.0}
    chains.add(one, None, 8.0)
    chains.discard(one.id)
    assert chains.listed_s(one.id) is None


def test_a_listing_without_a_use_keeps_the_known_one() -> None:
    chains = Chains()
    chains.add(page("a", 9.0), None, 3.0)
    assert chains.renew(page("a", None), 3.0)
    (found,) = chains.tails_first()
    assert found.used_s == 9.0


@pytest.mark.parametrize("seed", seeds(20))
def test_random_chains_are_removed_tails_first_and_copied_heads_first(seed: int) -> None:
    dice, chains = rng(seed), Chains()
    parents = grow(chains, dice)
    chains.check()
    gone: set[bytes] = set()
    order = list(chains.tails_first())
    for one in order:
        left = {key for key in parents if key not in gone}
        tails = {key for key in left if not any(parents[other] == key for other in left)}
        used = {other.key: other.used_s or 0.0 for other in order}
        assert one.key in tails and used[one.key] == min(used[key] for key in tails)
        gone.add(one.key)
    assert gone == set(parents)
    come: set[bytes] = set()
    for one, parent in chains.heads_first():
        assert parents[one.key] == parent and (parent is None or parent in come or parent not in parents)
        come.add(one.key)
    assert come == set(parents)


@pytest.mark.parametrize("seed", seeds(20))
def test_kept_pages_and_those_before_them_come_after_all_others(seed: int) -> None:
    dice, chains = rng(seed), Chains()
    parents = grow(chains, dice)
    kept = {key for key in parents if dice.random() < 0.3}
    order = [one.key for one in chains.tails_first(lambda where: where[1] in kept)]
    assert sorted(order) == sorted(parents)
    above = set[bytes | None](kept)
    for key in reversed([one.key for one, _ in chains.heads_first()]):
        if key in above:
            above.add(parents[key])
    assert not above.isdisjoint(order[-1:]) and above.isdisjoint(order[: sum(key not in above for key in order)])
    assert all(parents[key] not in order[:place] for place, key in enumerate(order))


@pytest.mark.parametrize("seed", seeds(20))
def test_each_change_of_a_listed_time_is_in_one_prompt_and_prompts_go_down_one_chain(seed: int) -> None:
    dice, chains = rng(seed), Chains()
    parents = grow(chains, dice)
    assert [*chains.uses()] == [], "no time was listed"
    used = {key: dice.random() for key in sorted(parents) if dice.random() < 0.5}
    for key, used_s in used.items():
        assert chains.renew(StoredPage(NAMESPACES[0], key, 10, used_s), used_s)
    prompts = [[key for _, key in prompt] for prompt in chains.uses()]
    assert sorted(key for prompt in prompts for key in prompt) == sorted(used)
    for prompt in prompts:
        chain: list[bytes] = []
        above: bytes | None = prompt[-1]
        while above is not None:
            chain.insert(0, above)
            above = parents.get(above)
        assert [key for key in chain if key in prompt] == prompt
    assert not {prompt[-1] for prompt in prompts} & {parents[key] for key in used}
    for key, used_s in used.items():
        assert chains.renew(StoredPage(NAMESPACES[0], key, 10, 2.0), used_s)
    assert [*chains.uses()] == [], "a use that no listing shows, of one engine, does not count"


def test_the_used_part_of_a_shared_head_belongs_to_the_prompt_that_was_used_first() -> None:
    chains = Chains()
    for number, name in enumerate(["a", "ab", "aby", "abx"]):
        chains.add(page(name, 10.0 - number), page(name[:-1]).key if name[1:] else None, 1.0)
    assert [[key for _, key in prompt] for prompt in chains.uses()] == [keys("a", "ab", "abx"), keys("aby")]


def grow(chains: Chains, dice: random.Random) -> dict[bytes, bytes | None]:
    """Add about forty pages in random order and discard some; return the parent of each remaining page."""
    names = {"".join(dice.choice("ab") for _ in range(dice.randrange(1, 7))) for _ in range(40)}
    some = sorted({name[:end] for name in names for end in range(1, len(name) + 1)})
    dice.shuffle(some)
    parents: dict[bytes, bytes | None] = {}
    for name in some:
        used_s = None if dice.random() < 0.1 else dice.random()
        parents[page(name).key] = parent = page(name[:-1]).key if len(name) > 1 else None
        is_unread = dice.random() < 0.5
        chains.add(page(name, used_s), None if is_unread else parent, is_unread=is_unread)
        if is_unread:
            chains.check()
            chains.read(page(name).id, parent)
        if dice.random() < 0.2:
            chains.discard((NAMESPACES[0], page(name).key))
            del parents[page(name).key]
    return parents
