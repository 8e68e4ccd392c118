"""Stack distances agree with an LRU cache of every size that evicts page by page."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

import pytest

from hicache.errors import InvariantError
from hicache_lab.plan.distances import Known, StackDistances
from hicache_lab.plan.pages import PathSource
from hicache_lab.traces.synthetic import synthetic_trace
from lab.tests.plan.world import items, path
from tests.seeds import seeds

# The pages of a path, root first, by names that imply the pages before them.
Pages = tuple[tuple[int, ...], ...]


def pages_of(ids: tuple[int, ...]) -> Pages:
    """The pages of a path with one id for each page."""
    return tuple(ids[: end + 1] for end in range(len(ids)))


class BruteForce:
    """A list of all pages, the most recently used first."""

    def __init__(self) -> None:
        self.stack: list[tuple[int, ...]] = []
        self.uses: Counter[tuple[int, ...]] = Counter()
        self.deepest: dict[tuple[int, ...], int] = {}

    def use(self, pages: Pages) -> list[tuple[int, int]]:
        """The distances and uses of the known pages; then move all to the top."""
        places = {page: place for place, page in enumerate(self.stack)}
        known = [(places[page], self.uses[page]) for page in pages if page in places]
        self.stack = [*pages, *(page for page in self.stack if page not in set(pages))]
        self.uses.update(pages)
        for place, page in enumerate(self.stack):
            self.deepest[page] = max(place, self.deepest.get(page, 0))
        return known


def by_page(known: list[Known]) -> list[tuple[int, int]]:
    """Distance and uses of each known page."""
    return [(first + i, uses) for first, pages, uses in known for i in range(pages)]


def random_ids(numbers: random.Random, used: list[tuple[int, ...]]) -> tuple[int, ...]:
    """A path that leaves or continues an earlier one anywhere. Some adjacent pages have one id."""
    base = numbers.choice(used[-12:]) if used and numbers.random() < 0.85 else ()
    kept = base[: numbers.choice([len(base), numbers.randint(0, len(base))])]
    new = [numbers.randrange(-3, 4) for _ in range(numbers.choice([0, 1, 3, 8]))]
    return (*kept, *new) or (0,)


@pytest.mark.parametrize("seed", seeds(20))
def test_distances_are_places_in_the_stack_of_an_lru_cache(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_lab.plan.distances._SLOTS_MIN", 16)  # so that slots run out often
    numbers = random.Random(seed)
    ours, brute, used = StackDistances(uses_max=255), BruteForce(), list[tuple[int, ...]]()
    for _ in range(150):
        ids = random_ids(numbers, used)
        used.append(ids)
        assert by_page(ours.use(path(ids))) == brute.use(pages_of(ids))
        ours.check()
        assert ours.pages == len(brute.stack)
    for depth in (*range(100), 10_000):
        assert ours.never_deeper(depth) == sum(deepest < depth for deepest in brute.deepest.values())


@pytest.mark.parametrize("page_size", [64, 512])
def test_hits_are_those_of_an_lru_cache_of_every_size(page_size: int) -> None:
    source = PathSource(page_size)
    paths = [source.take(one) for one in synthetic_trace(150, 3)]
    stack = StackDistances()
    known = [by_page(stack.use(one)) for one in paths]
    stack.check()
    for size in (0, 1, 7, 50, 300, 2000, stack.pages):
        assert [sum(place < size for place, _ in one) for one in known] == lru_hits(paths, size)


def lru_hits(paths: list[bytes], size: int) -> list[int]:
    """The hits of an LRU cache of `size` pages."""
    cached: OrderedDict[tuple[int, int], None] = OrderedDict()
    names: dict[tuple[int, int], int] = {}
    hits = []
    for one in paths:
        pages, name = [], -1
        for id_ in ids_of(one):
            name = names.setdefault((name, id_), len(names))
            pages.append((name, id_))
        hits.append(sum(page in cached for page in pages))
        for page in reversed(pages):
            cached[page] = None
            cached.move_to_end(page)
        while len(cached) > size:
            cached.popitem(last=False)
    return hits


def ids_of(one: bytes) -> list[int]:
    """The id of each page of a path."""
    pairs = items(one)
    starts = [0, *(end for _, end in pairs)]
    return [id_ for (id_, end), start in zip(pairs, starts, strict=False) for _ in range(start, end)]


def test_uses_are_counted_up_to_the_limit() -> None:
    stack = StackDistances(uses_max=2)
    assert [stack.use(path((1, 2))) for _ in range(4)] == [[], [(0, 2, 1)], [(0, 2, 2)], [(0, 2, 2)]]


def test_a_run_is_split_where_a_path_leaves_it() -> None:
    stack = StackDistances()
    stack.use(path((1, 2, 3, 4)))
    assert stack.use(path((1, 2, 9))) == [(0, 2, 1)]
    # 1 and 2 are at the top, then 9; 3 and 4 were used before.
    assert stack.use(path((1, 2, 3, 4))) == [(0, 2, 1), (3, 2, 1)]


def test_check_finds_pages_that_no_run_has() -> None:
    stack = StackDistances()
    stack.use(path((1, 2)))
    stack._add(1, 1)
    with pytest.raises(InvariantError, match="other pages than its runs"):
        stack.check()
