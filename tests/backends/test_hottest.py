"""The hottest chains of a store, compared with a slow reference on random forests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import pytest

from hicache.backends.base import PageId, StoredPage
from hicache.backends.stored import StoredPages
from hicache.backends.tools.hottest import HottestChains
from hicache.frame import HEADER_BYTES, NO_PARENT, FrameCodec
from hicache_lab.conformance import NAMESPACE, OTHER_NAMESPACE, forged, make_keys
from tests.seeds import rng, seeds

KEYS = make_keys(30)
A, B = NAMESPACE, OTHER_NAMESPACE
Chain: TypeAlias = tuple[bytes, list[bytes]]


@cache
def header(namespace: bytes, key: bytes, parent: bytes | None, size: int) -> bytes:
    """Return the header of a page with a payload of `size` bytes."""
    return forged(FrameCodec(namespace, size), key, parent or NO_PARENT)[:HEADER_BYTES]


@dataclass
class Forest:
    """A store of pages with parents, sizes and last uses. Counts the headers that are read."""

    pages_by_id: dict[PageId, tuple[PageId | None, int, float | None]] = field(default_factory=dict)
    reads: int = 0

    def add(self, key: bytes, parent: bytes | None, used_s: float | None, size: int = 64, space: bytes = A) -> None:
        self.pages_by_id[space, key] = None if parent is None else (space, parent), size, used_s

    def bytes_of(self, where: PageId) -> int:
        return FrameCodec(where[0], self.pages_by_id[where][1]).frame_bytes

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        for where, (_, _, used_s) in self.pages_by_id.items():
            if where[0].hex().startswith(namespace):
                yield StoredPage(*where, self.bytes_of(where), used_s)

    def read_start(self, page: StoredPage, bytes_max: int, deadline: float) -> tuple[bytes, None] | None:
        if page.id not in self.pages_by_id:
            return None
        self.reads += 1
        parent, size, _ = self.pages_by_id[page.id]
        return header(page.namespace, page.key, None if parent is None else parent[1], size)[:bytes_max], None

    def write(self, pages: Any) -> None:
        raise NotImplementedError

    def remove(self, *arguments: Any) -> tuple[int, Sequence[str]]:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""


def chosen(top_bytes: int, *forests: Forest, spaces: Sequence[bytes] = (A,)) -> list[list[Chain]]:
    """Return the hottest chains of each store."""
    hottest = HottestChains(top_bytes)
    return [[one for one in hottest.of(StoredPages(forest, "forest"), spaces) if one] for forest in forests]


def one_store(top_bytes: int, forest: Forest) -> list[list[bytes]]:
    (chains,) = chosen(top_bytes, forest)
    return [keys for _, keys in chains]


def path_of(forest: Forest, where: PageId) -> list[PageId] | None:
    """Return the path from a root; None with a missing page or a cycle."""
    path: list[PageId] = []
    at: PageId | None = where
    while at is not None:
        if at in path or at not in forest.pages_by_id:
            return None
        path.append(at)
        at = forest.pages_by_id[at][0]
    return path[::-1]


def reference(forest: Forest, top_bytes: int, spaces: Sequence[bytes]) -> list[Chain]:
    """As `HottestChains` on one store, without bounds: sorts all pages, and walks every path from its root."""
    all_pages = [where for where in forest.pages_by_id if where[0] in spaces]
    all_pages.sort(key=lambda where: (forest.pages_by_id[where][2] or 0.0, where), reverse=True)
    newer_bytes = [sum(map(forest.bytes_of, all_pages[:number])) for number in range(len(all_pages))]
    newest = [page for page, before in zip(all_pages, newer_bytes, strict=True) if before < top_bytes]
    taken: list[PageId] = []
    for where in newest:
        for page in path_of(forest, where) or ():
            if page not in taken:
                if sum(map(forest.bytes_of, taken)) + forest.bytes_of(page) > top_bytes:
                    break
                taken.append(page)
    ends = [page for page in taken if not any(forest.pages_by_id[other][0] == page for other in taken)]
    return [(end[0], [key for _, key in path_of(forest, end) or ()]) for end in ends]


def random_forest(dice: random.Random) -> Forest:
    """Return pages whose parents are random pages: also missing ones, descendants and themselves."""
    forest = Forest()
    for space in (A, B):
        for number in range(dice.randrange(25)):
            keys = KEYS[: number or 1] if dice.random() < 0.9 else KEYS
            parent = None if dice.random() < 0.2 else dice.choice(keys)
            used_s = None if dice.random() < 0.1 else float(dice.randrange(6))
            forest.add(KEYS[number], parent, used_s, dice.choice((64, 5000, 9000)), space)
    return forest


@pytest.mark.parametrize("seed", seeds(300))
def test_the_chains_are_those_of_a_walk_over_all_pages(seed: int) -> None:
    dice = rng(seed)
    forest = random_forest(dice)
    spaces = dice.choice(([A], [B], [A, B]))
    top_bytes = dice.choice((1, 4096, 20_000, 60_000, 1 << 20))
    (found,) = chosen(top_bytes, forest, spaces=spaces)
    assert found == reference(forest, top_bytes, spaces)
    distinct = {(space, key) for space, keys in found for key in keys}
    assert sum(map(forest.bytes_of, distinct)) <= top_bytes
    assert forest.reads <= 2 * len(forest.pages_by_id)


PAGE = FrameCodec(A, 64).frame_bytes


def test_the_newest_page_comes_first_with_its_whole_prefix() -> None:
    forest = Forest()
    a, b, c, d = KEYS[:4]
    forest.add(a, None, 1.0)  # a - b - c, whose end was used last, and d
    forest.add(b, a, 2.0)
    forest.add(c, b, 9.0)
    forest.add(d, None, 5.0)
    assert one_store(4 * PAGE, forest) == [[a, b, c], [d]]
    assert one_store(3 * PAGE, forest) == [[a, b, c]]
    # Two pages fit: a prefix of the hottest chain, and not the other one.
    assert one_store(2 * PAGE, forest) == [[a, b]]
    assert one_store(PAGE - 1, forest) == []


def test_of_chains_with_one_hot_head_the_one_with_the_newer_end_comes_first() -> None:
    forest = Forest()
    head, old, new = KEYS[:3]
    forest.add(head, None, 9.0)
    forest.add(old, head, 1.0)
    forest.add(new, head, 2.0)
    assert one_store(3 * PAGE, forest) == [[head, new], [head, old]]


def test_pages_without_a_time_of_use_come_last() -> None:
    forest = Forest()
    forest.add(KEYS[0], None, None)
    forest.add(KEYS[1], None, 0.5)
    assert one_store(2 * PAGE, forest) == [[KEYS[1]], [KEYS[0]]]
    assert one_store(PAGE, forest) == [[KEYS[1]]]


def test_a_chain_with_a_missing_page_and_a_cycle_are_skipped() -> None:
    forest = Forest()
    a, b, c, d, e = KEYS[:5]
    forest.add(b, a, 9.0)  # a is missing
    forest.add(c, d, 8.0)
    forest.add(d, c, 7.0)
    forest.add(e, None, 1.0)
    assert one_store(1 << 20, forest) == [[e]]


def test_a_second_store_adds_only_pages_that_the_first_one_lacks() -> None:
    first, second = Forest(), Forest()
    a, b, c = KEYS[:3]
    for forest in (first, second):
        forest.add(a, None, 2.0)
    second.add(b, a, 3.0)
    second.add(c, b, 1.0)
    assert chosen(2 * PAGE, first, second) == [[(A, [a])], [(A, [a, b])]]
    assert chosen(PAGE, first, second) == [[(A, [a])], []]
