"""The pages that an adaptive store keeps: its shadows see whole requests."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.backends.order import OPEN_MAX, AdaptivePages
from hicache_lab.conformance import make_keys


def no_parent(key: bytes) -> None:
    return None


class Seen:
    """Stands in for the tournament, and records its uses."""

    def __init__(self) -> None:
        self.uses: list[list[int]] = []

    def use(self, keys: Sequence[int]) -> None:
        self.uses.append(list(keys))


def recorded(pages: AdaptivePages) -> list[list[int]]:
    seen = Seen()
    pages._tournament = seen  # type: ignore[assignment]
    return seen.uses


def end_all(pages: AdaptivePages) -> None:
    for number in range(OPEN_MAX):
        pages.use(make_keys(1, f"later {number}"))


def test_the_batches_of_a_request_count_as_one_use() -> None:
    """Also with other requests in between."""
    pages, one, two = AdaptivePages(1000), make_keys(6, "one"), make_keys(4, "two")
    uses = recorded(pages)
    pages.use(one[:2])
    pages.use(two[:2])
    pages.use(one[2:4], one[1])
    pages.use(two[2:], two[1])
    pages.use(one[4:], one[3])
    end_all(pages)
    assert uses == [[*map(pages._number, two)], [*map(pages._number, one)]]


def test_a_repeated_request_counts_again() -> None:
    pages, keys = AdaptivePages(1000), make_keys(3)
    uses = recorded(pages)
    pages.use(keys)
    pages.use(keys)
    pages.use([])
    end_all(pages)
    assert uses == [[*map(pages._number, keys)]] * 2


def test_an_endless_chain_takes_bounded_memory() -> None:
    pages, keys = AdaptivePages(1000), make_keys(10_000)
    uses = recorded(pages)
    for number, key in enumerate(keys):
        pages.use([key], keys[number - 1] if number else None)
    assert len(uses) == 2
    assert len(pages._open) <= OPEN_MAX


def test_no_page_is_kept_while_lru_is_the_best() -> None:
    """A store evicts in this order anyway."""
    pages, keys = AdaptivePages(1000), make_keys(3)
    pages.use(keys)
    end_all(pages)
    assert not any(pages.keeps(key, no_parent) for key in keys)
    pages._tournament._best = 1
    assert all(pages.keeps(key, no_parent) for key in keys)
