"""UseMemory: how many requests have used a page, even after the page was evicted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hicache.cache import uses
from hicache.cache.uses import UseMemory
from hicache.keys import RadixKey
from hicache.radix import UseHistory
from tests.cache.world import GEOMETRY, prompt

PAGE_BYTES = 4 * GEOMETRY.page_size


def memory(uses_max: int = 4) -> UseMemory:
    return UseMemory(PAGE_BYTES, uses_max)


def counts(memory: UseMemory, rid: str | None, key: RadixKey, pages: int | None = None) -> list[int]:
    """Let request `rid` use `pages` pages of `key`, by default all; return the uses of each."""
    pages = key.pages(GEOMETRY.page_size) if pages is None else pages
    found = memory.note(rid, key, pages)
    return [found.of_run(page, pages)[0] for page in range(pages)]


def test_each_request_counts_once_for_each_page() -> None:
    m = memory()
    assert counts(m, "a", prompt(1, 2)) == [1, 1]
    assert counts(m, "b", prompt(1, 2, 3)) == [2, 2, 1]
    assert counts(m, "c", prompt(1)) == [3]
    assert counts(m, None, prompt(1, 2, 3, 4)) == [4, 3, 2, 1]
    assert counts(m, None, prompt(1, 2)) == [4, 4]  # uses above the maximum are not counted


def test_pages_with_equal_uses_are_one_step() -> None:
    m = memory()
    m.note("a", prompt(1, 2, 3), 3)
    assert m.note("b", prompt(1, 2, 3, 4, 5), 5) == UseHistory(0, ((3, 2), (5, 1)))
    assert m.note("c", prompt(9), 0) == UseHistory(0)


def test_a_page_is_identified_by_all_tokens_up_to_its_end() -> None:
    m = memory()
    m.note("a", prompt(1, 2, 3), 3)
    others = [(7, 2, 3), (2, 1, 3), (2, 3), (1, 1, 1), (1, 0, 0), (0, 0, 0)]
    for other in (*(prompt(*pages) for pages in others), prompt(1, 2, 3, salt="tenant")):
        assert max(counts(m, None, other)[1:]) == 1, other
        assert counts(m, None, other)[-1] == 2


def test_a_request_that_begins_again_does_not_count_twice() -> None:
    m = memory()
    assert m.note("a", prompt(1, 2, tail=0), 0, begins=True) == UseHistory(0)
    assert m.note("a", prompt(1, tail=0), 1) == UseHistory(0, ((1, 1),))  # in chunks
    assert m.note("a", prompt(1, 2, 3), 3) == UseHistory(1, ((3, 1),))
    assert m.note("a", prompt(1, 2, 3), 1, begins=True) == UseHistory(3, ((1, 1),))  # preempted: fewer hits than before
    assert m.note("a", prompt(1, 2, 3, 4), 4) == UseHistory(3, ((4, 1),))
    assert m.note("a", prompt(1, 2), 1, begins=True).known_pages == 4  # without its generated tokens
    assert counts(m, "b", prompt(1, 2, 3)) == [2, 2, 2]


@pytest.mark.parametrize("other", [prompt(5, 6), prompt(1), prompt(1, 3), prompt(1, 2, salt="tenant")])
def test_another_request_with_the_same_id_counts_by_itself(other: RadixKey) -> None:
    m = memory()
    m.note("a", prompt(1, 2), 2, begins=True)
    assert m.note("a", other, 1, begins=True).known_pages == 0


def test_a_page_whose_slot_was_taken_counts_if_pages_after_it_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    key = RadixKey.of(list(range(4 * 4000)))
    m = memory()
    m.note("a", key, 4000)
    m._slots[::2] = 0
    known = counts(m, "b", key)
    assert known[:3980] == [2] * 3980


def test_the_memory_is_bounded() -> None:
    m = memory()
    slots = m._slots.nbytes
    for number in range(uses.REQUESTS_MAX + 100):
        m.note(f"r{number}", prompt(number), 1)
    assert len(m._requests) == uses.REQUESTS_MAX and m._slots.nbytes == slots == 4 << uses.SLOTS_LOG2
    assert m.note("r0", prompt(0), 1).known_pages == 0
    assert m.note(f"r{uses.REQUESTS_MAX}", prompt(uses.REQUESTS_MAX), 1).known_pages == 1


def test_collisions_of_new_pages_with_known_ones_are_rare() -> None:
    m = memory()
    m.note("a", RadixKey.of(list(range(4 * 200_000))), 200_000)
    wrong = sum(counts(m, None, RadixKey.of(list(range(start, start + 400))))[0] - 1 for start in range(1, 4000, 4))
    assert wrong <= 1


def test_with_first_share_all_new_pages_of_some_requests_have_enough_uses_at_once() -> None:
    m = UseMemory(PAGE_BYTES, 3, first_share=0.25)
    chosen = []
    for number in range(1000):
        key = prompt(1, number + 2, number, number)
        m.note(f"r{number}", key, 2)
        found = m.note(f"r{number}", key, 4)  # in parts
        assert found.steps in (((4, 3),), ((1, min(number + 1, 3)), (4, 1)), ((4, 1),)), number
        chosen.append(found.steps == ((4, 3),))
    assert 200 < sum(chosen) < 300
    again = UseMemory(PAGE_BYTES, 3, first_share=0.25)
    again.note("first", prompt(1), 1)
    others = [again.note(None, prompt(1, number + 2), 2).steps == ((2, 3),) for number in range(1, 1000)]
    assert others == chosen[1:]  # the choice depends neither on the process nor on the order


def test_pages_chosen_by_first_share_still_count_one_use() -> None:
    m = UseMemory(PAGE_BYTES, 3, first_share=1.0)
    assert m.note("a", prompt(1, 2), 2).steps == ((2, 3),)
    m._first_below = 0
    assert m.note("b", prompt(1, 2), 2).steps == ((2, 2),)


def test_clear_forgets_all_uses() -> None:
    m = memory()
    m.note("a", prompt(1), 1)
    m.clear()
    assert m.note("a", prompt(1), 1) == UseHistory(0, ((1, 1),))


@pytest.mark.parametrize("position_bytes", [8, 32])
def test_bigrams_and_given_page_keys_are_counted_too(position_bytes: int) -> None:
    bigram = position_bytes == 8
    one, two = (
        RadixKey.of([*range(9), last], bigram=True) if bigram
        else RadixKey.of_hashes([bytes([page]) * 32 for page in (1, 2, last)])
        for last in (50, 60)
    )
    m = UseMemory(32, 4)
    pages = len(one.tokens) // 32
    m.note("a", one, pages)
    found = m.note("b", two, pages)
    assert found.steps == (((pages, 2),) if bigram else ((2, 2), (3, 1)))


def test_the_same_pages_have_the_same_hashes_in_each_process() -> None:
    """Otherwise ranks would count the uses of different pages."""
    program = (
        "from hicache.cache.uses import UseMemory\nfrom hicache.keys import RadixKey\n"
        "print(UseMemory(256, 2)._hashes(RadixKey.of(range(640), cache_salt='a'), 10).tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
            capture_output=True, timeout=300,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
