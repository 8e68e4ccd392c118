"""Slots of new tokens, token by token in plain Python: the reference for every implementation of `SlotKernels`.

Shared by the tests and by `_interpreted_slots`, which runs in a separate process.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from hicache.tiers import PageAllocator, PagedTokenToKVPoolAllocator
from hicache.tiers.token_allocator import SlotKernels

PAGE_SIZES = (1, 2, 3, 4, 16, 48, 64, 128, 256)
# Longer than any real prompt, so that an overflow of 32 bits is detected.
FAR = 1 << 40


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one call: per request the tokens before and after, and the last slot of its prefix."""

    page_size: int
    prefix_lens: list[int]
    seq_lens: list[int]
    last_loc: list[int]

    @property
    def extend_tokens(self) -> int:
        return sum(self.seq_lens) - sum(self.prefix_lens)


def random_batch(numbers: random.Random, *, decode: bool = False) -> Batch:
    """Return prefixes that are empty, end with a page or inside one, or are very long, extended by zero tokens to some
    pages."""
    size = numbers.choice(PAGE_SIZES)
    longest = numbers.choice([1, size, 3 * size + 1, 1500])
    prefix_lens, seq_lens, last_loc = [], [], []
    for _ in range(numbers.randint(0, 8)):
        prefix = numbers.choice([0, size, numbers.randrange(4 * size), FAR + numbers.randrange(size)])
        prefix_lens.append(prefix)
        seq_lens.append(prefix + (1 if decode else numbers.choice([0, 1, numbers.randint(0, longest)])))
        page = numbers.choice([numbers.randint(1, 1000), FAR // size])
        last_loc.append(page * size + (prefix - 1) % size if prefix else -1)
    return Batch(size, prefix_lens, seq_lens, last_loc)


def shuffled_pages(seed: int, capacity: int) -> PageAllocator:
    """Return a device pool's free list in an order that depends only on `seed`."""
    pages = PageAllocator(capacity, first=1)
    taken = pages.alloc(capacity)
    assert taken is not None
    pages.free(np.random.default_rng(seed).permutation(taken))
    return pages


def expected_slots(batch: Batch, pages: PageAllocator) -> list[int]:
    """Return the slots; allocates a page whenever a token needs one."""
    slots = []
    for prefix, seq, slot in zip(batch.prefix_lens, batch.seq_lens, batch.last_loc, strict=True):
        for position in range(prefix, seq):
            if position % batch.page_size:
                slot += 1  # noqa: PLW2901  the previous slot is the whole state
            else:
                page = pages.alloc(1)
                assert page is not None
                slot = int(page[0]) * batch.page_size  # noqa: PLW2901
            slots.append(slot)
    return slots


def require_equal(
    kernels: SlotKernels, seed: int, batch: Batch, device: str = "cpu", *, decode: bool = False,
    last_loc_dtype: torch.dtype = torch.int64,
) -> None:
    """Raise AssertionError if `kernels` return a wrong slot for `batch`."""
    capacity = batch.extend_tokens + 1
    allocator = PagedTokenToKVPoolAllocator(shuffled_pages(seed, capacity), batch.page_size, device, debug=True,
                                            kernels=kernels)
    last_loc = torch.tensor(batch.last_loc, dtype=last_loc_dtype, device=device)
    prefix_lens, seq_lens = torch.tensor(batch.prefix_lens).long(), torch.tensor(batch.seq_lens).long()
    if decode:
        slots = allocator.alloc_decode(seq_lens, last_loc)
    else:
        slots = allocator.alloc_extend(prefix_lens, seq_lens, last_loc, batch.extend_tokens)
    naive = shuffled_pages(seed, capacity)
    assert slots is not None and slots.dtype == torch.int64
    assert slots.tolist() == expected_slots(batch, naive), f"seed {seed}: {batch}"
    assert allocator.pages.free_pages == naive.free_pages


def compare(kernels: SlotKernels, seed: int, cases: int, device: str = "cpu") -> None:
    """Compare `cases` random batches for extend, and as many for decode."""
    numbers = random.Random(seed)
    for _ in range(cases):
        require_equal(kernels, seed, random_batch(numbers), device)
        require_equal(kernels, seed, random_batch(numbers, decode=True), device, decode=True)


def compare_extremes(kernels: SlotKernels, *, requests: int) -> None:
    """Compare no requests, many requests, more tokens than a program handles at a time, and the largest 32-bit
    `last_loc`."""
    require_equal(kernels, 0, Batch(16, [], [], []))
    require_equal(kernels, 0, Batch(64, [30, 0], [5000, 2049], [64 * 7 + 29, -1]))
    ends = [16 * page + 4 for page in range(requests)]
    require_equal(kernels, 0, Batch(16, [5] * requests, [13] * requests, ends))
    step = Batch(16, [5] * requests, [6] * requests, ends)
    last = Batch(3, [2], [3], [(1 << 31) - 1])
    for decode in (False, True):
        require_equal(kernels, 0, step, decode=decode, last_loc_dtype=torch.int32)
        require_equal(kernels, 0, last, decode=decode, last_loc_dtype=torch.int32)
