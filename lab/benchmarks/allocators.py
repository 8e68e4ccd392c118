"""Token slots on the scheduler thread and the CPU: extend, decode and free; and the bare free list of pages.

    python -m lab.benchmarks.allocators

The reference is the simplest implementation: a free list in a tensor. Allocation takes a slice of it, free concatenates
to it, with a loop over the requests. It does not detect double frees. Both sides take turns in the same run; each
result is the best of many runs, with the median in brackets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hicache.tiers import PageAllocator, PagedTokenToKVPoolAllocator

from ._table import Row, alternate, print_table, reduced, row

PAGE = 64
POOL_PAGES = reduced(32_768, 1024)
RUNS = 100
# The goal where the reference does the same work without checking arguments and double frees.
UNCHECKED = 2.0


class CatAllocator:
    """The reference."""

    def __init__(self) -> None:
        self._free = torch.arange(1, POOL_PAGES + 1)
        self._offsets = torch.arange(PAGE)

    def alloc_extend(
        self, prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor, extend_tokens: int
    ) -> torch.Tensor:
        slots = []
        for prefix, seq, last in zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
            held = -(-prefix // PAGE)
            rest = min(held * PAGE, seq) - prefix
            fresh = self.alloc_pages(-(-seq // PAGE) - held)[:, None] * PAGE + self._offsets
            slots += [last + 1 + self._offsets[:rest], fresh.view(-1)[: seq - prefix - rest]]
        return torch.cat(slots)[:extend_tokens]

    def alloc_decode(self, seq_lens: torch.Tensor, last_loc: torch.Tensor) -> torch.Tensor:
        opens_page = seq_lens % PAGE == 1
        slots = last_loc + 1
        slots[opens_page] = self.alloc_pages(int(opens_page.sum())) * PAGE
        return slots

    def free(self, slots: torch.Tensor) -> None:
        self.free_pages(torch.unique(slots // PAGE))

    def alloc_pages(self, count: int) -> torch.Tensor:
        pages, self._free = self._free[:count], self._free[count:]
        return pages

    def free_pages(self, pages: torch.Tensor) -> None:
        self._free = torch.cat((pages, self._free))


def extend_rows(what: str, requests: int, prefix: int, extend: int, goal: float | None) -> list[Row]:
    """Extend the same batch repeatedly, as if it were new each time, and free the new slots."""
    ours, reference = PagedTokenToKVPoolAllocator(PageAllocator(POOL_PAGES, first=1), PAGE), CatAllocator()
    prefix_lens, seq_lens = torch.full((requests,), prefix), torch.full((requests,), prefix + extend)
    last_loc = torch.arange(requests) * PAGE + (prefix - 1) % PAGE
    slots: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def alloc(side: PagedTokenToKVPoolAllocator | CatAllocator, given: list[torch.Tensor]) -> None:
        new = side.alloc_extend(prefix_lens, seq_lens, last_loc, requests * extend)
        assert new is not None
        given.append(new)

    allocs = alternate(RUNS, [lambda: alloc(ours, slots[0]), lambda: alloc(reference, slots[1])])
    # Only the new pages: the requests' earlier partial pages are not from this pool.
    fresh = [iter([new.view(requests, extend)[:, -prefix % PAGE :].reshape(-1) for new in given]) for given in slots]
    frees = alternate(RUNS, [lambda: ours.free(next(fresh[0])), lambda: reference.free(next(fresh[1]))])
    return [row(f"extend {what}", allocs, goal), row(f"free   {what}", frees, UNCHECKED)]


def decode_row(requests: int) -> Row:
    """One decode step of requests with evenly spread lengths, so that one in 64 opens a page."""
    ours, reference = PagedTokenToKVPoolAllocator(PageAllocator(POOL_PAGES, first=1), PAGE), CatAllocator()
    seq_lens = torch.arange(requests) + 1000
    last_loc = torch.arange(requests) * PAGE + (seq_lens - 2) % PAGE
    times = alternate(
        RUNS, [lambda: ours.alloc_decode(seq_lens, last_loc), lambda: reference.alloc_decode(seq_lens, last_loc)]
    )
    return row(f"decode {requests} requests", times, UNCHECKED)


def page_rows() -> Iterator[Row]:
    """Take 128 pages and return 128 older ones, by page ids, as the tree does."""
    ours, reference = PageAllocator(POOL_PAGES, first=1), CatAllocator()
    times = alternate(RUNS * 20, [cycle(ours.alloc, ours.free), cycle(reference.alloc_pages, reference.free_pages)])
    yield row("128 pages, out and back", times, UNCHECKED)


def cycle(alloc: Callable[[int], Any], free: Callable[[Any], None]) -> Callable[[], None]:
    """Return an action that returns the pages taken 64 calls ago and takes new ones."""
    held = deque(alloc(128) for _ in range(64))

    def turn() -> None:
        free(held.popleft())
        held.append(alloc(128))

    return turn


def run() -> list[Row]:
    """Return all rows."""
    return [
        *extend_rows("1 request, 8192 tokens", 1, 0, 8192, None),
        *extend_rows("16 requests, 512 tokens each", 16, 100, 512, 1.0),
        *extend_rows("256 requests, 32 tokens each", 256, 100, 32, 0.5),
        decode_row(256),
        decode_row(4096),
        *page_rows(),
    ]


def main() -> None:
    """Print the table."""
    title = f"Allocators (page size {PAGE}; reference: a free list in a tensor; ratio = ours : reference time)"
    print_table(title, run())


if __name__ == "__main__":
    main()
