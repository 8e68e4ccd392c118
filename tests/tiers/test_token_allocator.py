"""Slots for tokens: their order, all or none, conservation, and the kernels against each other and a plain oracle."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch

from hicache.errors import InvalidInput, InvariantError
from hicache.tiers import Drafts, PageAllocator, PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator, slots_torch
from tests.seeds import rng, seeds

from ._children import run_child
from ._slots import PAGE_SIZES, Batch, compare, compare_extremes, require_equal

NOWHERE = -1  # the last slot of an empty prefix


def lens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def pool(allocator: PagedTokenToKVPoolAllocator) -> PageAllocator:
    assert isinstance(allocator.pages, PageAllocator)
    return allocator.pages


def paged(pages: int, page_size: int = 4, *, debug: bool = True) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(PageAllocator(pages, first=1), page_size, debug=debug)


def slots_of(slots: torch.Tensor | None) -> list[int]:
    assert slots is not None and slots.dtype == torch.int64
    return slots.tolist()


def test_whole_pages_are_allocated_in_order() -> None:
    assert slots_of(paged(8).alloc(8)) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert slots_of(TokenToKVPoolAllocator(PageAllocator(8, first=1)).alloc(3)) == [1, 2, 3]
    with pytest.raises(InvalidInput):
        paged(8).alloc(7)


def test_an_empty_batch_gets_no_slots() -> None:
    allocator = paged(2)
    assert slots_of(allocator.alloc_extend(lens(), lens(), lens(), 0)) == []
    assert slots_of(allocator.alloc_decode(lens(), lens())) == []
    assert slots_of(allocator.alloc_extend(lens(0, 3), lens(0, 3), lens(NOWHERE, 6), 0)) == []
    allocator.free(lens())
    assert allocator.available_tokens == 8


def test_any_slots_of_a_page_free_the_whole_page() -> None:
    allocator = paged(4)
    slots_of(allocator.alloc(16))
    allocator.free(torch.tensor([13, 5, 6, 12], dtype=torch.int32))
    assert allocator.available_tokens == 8
    assert slots_of(allocator.alloc(8)) == [4, 5, 6, 7, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("page_size", "wrong"),
    [
        *((4, wrong) for wrong in ([5, 5], [9], [4, 9], [0], [24], [-1], [4 << 32])),
        *((1, wrong) for wrong in ([3, 3], [8], [0], [9], [-1], [1 << 32])),
    ],
)
def test_a_free_repeated_or_foreign_slot_is_rejected_and_nothing_changes(page_size: int, wrong: list[int]) -> None:
    allocator = paged(5) if page_size == 4 else TokenToKVPoolAllocator(PageAllocator(8, first=1))
    slots_of(allocator.alloc(allocator.available_tokens))
    allocator.free(lens(8))
    with pytest.raises(InvariantError):
        allocator.free(lens(*wrong))
    assert allocator.available_tokens == page_size
    pool(allocator).check()


def test_without_debug_a_slot_passed_twice_frees_one_page() -> None:
    allocator = paged(4, debug=False)
    slots_of(allocator.alloc(16))
    allocator.free(lens(5, 5))
    assert allocator.available_tokens == 4
    with pytest.raises(InvariantError):
        allocator.free(lens(6))


def test_in_debug_a_wrong_end_of_a_prefix_is_rejected_and_nothing_changes() -> None:
    for debug in (True, False):
        allocator = paged(4, debug=debug)
        slots_of(allocator.alloc(4))
        if debug:
            with pytest.raises(InvariantError, match=r"requests \[1\]"):
                allocator.alloc_extend(lens(4, 3), lens(5, 4), lens(99, 5), 2)
            with pytest.raises(InvariantError, match="last_loc"):
                allocator.alloc_decode(lens(4), lens(7))
            assert allocator.available_tokens == 12
        else:
            assert slots_of(allocator.alloc_decode(lens(4), lens(7))) == [8], "a slot of a page of another request"


@pytest.mark.parametrize(
    ("prefix_lens", "seq_lens", "last_loc", "extend_tokens"),
    [
        (lens(2), lens(1), lens(5), -1),
        (lens(0), lens(4), lens(NOWHERE), 5),
        (lens(0), lens(4, 4), lens(NOWHERE), 8),
        (lens(0), lens(4), lens(NOWHERE, NOWHERE), 4),
        (lens(-1), lens(4), lens(NOWHERE), 5),
        (torch.zeros(1), lens(4), lens(NOWHERE), 4),
        (lens(0), torch.full((1, 1), 4), lens(NOWHERE), 4),
        (lens(0), torch.full((1,), 4, device="meta"), lens(NOWHERE), 4),
        (lens(0), lens(4), torch.full((1,), -1, device="meta"), 4),
    ],
)
def test_contradictory_arguments_are_rejected(
    prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor, extend_tokens: int
) -> None:
    allocator = paged(4)
    with pytest.raises(InvalidInput):
        allocator.alloc_extend(prefix_lens, seq_lens, last_loc, extend_tokens)
    assert allocator.available_tokens == 16


def drafts_of(
    allocator: PagedTokenToKVPoolAllocator, prefix: list[int], seq: list[int], last_loc: list[int]
) -> Drafts:
    drafts = allocator.alloc_drafts(lens(*prefix), lens(*seq), lens(*last_loc), sum(seq) - sum(prefix))
    assert drafts is not None
    return drafts


def test_pages_that_hold_only_rejected_drafts_are_freed_and_a_partial_page_is_continued() -> None:
    allocator = paged(8)
    slots_of(allocator.alloc(4))  # page 1: six tokens of the first request are in pages 1 and 2
    slots_of(allocator.alloc_extend(lens(4), lens(6), lens(7), 2))
    drafts = drafts_of(allocator, [6, 0], [13, 5], [9, NOWHERE])
    assert slots_of(drafts.slots) == [10, 11, 12, 13, 14, 15, 16, 20, 21, 22, 23, 24]
    drafts.keep(lens(7, 0))
    assert pool(allocator).used_pages == 2
    assert slots_of(allocator.alloc_extend(lens(7, 0), lens(9, 1), lens(10, NOWHERE), 3)) == [11, 12, 16]


@pytest.mark.parametrize("page_size", [1, 4])
def test_all_drafts_or_none_may_be_kept_and_only_once(page_size: int) -> None:
    allocator = paged(8, page_size) if page_size > 1 else TokenToKVPoolAllocator(PageAllocator(8, first=1))
    kept, dropped = (drafts_of(allocator, [0], [page_size + 1], [NOWHERE]) for _ in range(2))
    kept.keep(lens(page_size + 1))
    dropped.keep(lens(0))
    assert pool(allocator).used_pages == 2
    again = drafts_of(allocator, [0], [page_size + 1], [NOWHERE])
    assert slots_of(again.slots) == slots_of(dropped.slots)
    dropped.keep(lens(0))
    for drafts, length in ((kept, 0), (dropped, 1)):
        with pytest.raises(InvalidInput, match="keep"):
            drafts.keep(lens(length))
    assert pool(allocator).used_pages == 4


@pytest.mark.parametrize("wrong", [lens(2, 0), lens(3, 6), lens(3), lens(3, 0, 0), torch.zeros(2), lens(-1, 0)])
def test_wrong_lengths_of_kept_drafts_are_rejected_and_nothing_changes(wrong: torch.Tensor) -> None:
    allocator = paged(8)
    drafts = drafts_of(allocator, [3, 0], [8, 5], [6, NOWHERE])
    with pytest.raises(InvalidInput):
        drafts.keep(wrong)
    assert pool(allocator).used_pages == 3
    drafts.keep(lens(3, 0))
    assert pool(allocator).used_pages == 0


class World:
    """Requests that begin, extend, decode, draft and finish over one small pool; the slots of each are kept in a list.
    Others go on between the drafts of some requests and their verification.
    """

    def __init__(self, numbers: random.Random) -> None:
        self.numbers = numbers
        self.size = numbers.choice(PAGE_SIZES[:5])
        pages = PageAllocator(numbers.randint(1, 24), first=1)
        self.allocator = PagedTokenToKVPoolAllocator(pages, self.size, debug=True)
        self.requests: list[list[int]] = []
        self.drafting: list[tuple[Drafts, list[list[int]], list[int]]] = []  # drafts, their requests, tokens before

    def draft(self) -> None:
        chosen = [self.requests.pop(self.numbers.randrange(len(self.requests)))
                  for _ in range(self.numbers.randint(0, len(self.requests)))] + [[]]
        before = [len(slots) for slots in chosen]
        grow = [self.numbers.choice([0, 1, self.numbers.randint(0, 3 * self.size)]) for _ in chosen]
        after = [old + new for old, new in zip(before, grow, strict=True)]
        others, self.requests = self.requests, chosen
        free = self.free_order()
        drafts = self.allocator.alloc_drafts(lens(*before), lens(*after), self._ends(), sum(grow))
        if drafts is not None and self.numbers.random() < 0.3:
            drafts.keep(lens(*before))
            assert self.free_order() == free, "as if there had been no drafts"
            drafts = self.allocator.alloc_drafts(lens(*before), lens(*after), self._ends(), sum(grow))
        self.requests = others + chosen
        self._hand_out(None if drafts is None else drafts.slots, [0] * len(others) + grow)
        if drafts is not None:
            self.requests = others
            self.drafting.append((drafts, chosen, before))

    def verify(self) -> None:
        if self.drafting:
            drafts, chosen, before = self.drafting.pop(self.numbers.randrange(len(self.drafting)))
            kept = [self.numbers.randint(old, len(slots)) for old, slots in zip(before, chosen, strict=True)]
            drafts.keep(lens(*kept))
            for slots, count in zip(chosen, kept, strict=True):
                del slots[count:]
            self.requests += chosen

    def free_order(self) -> list[int]:
        """Return the free pages in the order in which they will be allocated."""
        twin = copy.deepcopy(pool(self.allocator))
        pages = twin.alloc(twin.free_pages)
        assert pages is not None
        return [int(page) for page in pages]

    def everyone(self) -> list[list[int]]:
        return self.requests + [slots for _, chosen, _ in self.drafting for slots in chosen]

    def extend(self) -> None:
        if self.numbers.random() < 0.5:
            self.requests.append([])
        grow = [self.numbers.choice([0, 1, self.numbers.randint(0, 4 * self.size)]) for _ in self.requests]
        before = [len(slots) for slots in self.requests]
        after = [old + new for old, new in zip(before, grow, strict=True)]
        self._hand_out(self.allocator.alloc_extend(lens(*before), lens(*after), self._ends(), sum(grow)), grow)

    def decode(self) -> None:
        after = [len(slots) + 1 for slots in self.requests]
        self._hand_out(self.allocator.alloc_decode(lens(*after), self._ends()), [1] * len(after))

    def finish(self) -> None:
        ended = [self.requests.pop(self.numbers.randrange(len(self.requests)))
                 for _ in range(self.numbers.randint(0, len(self.requests)))]
        with self.allocator.free_group():
            for slots in ended:
                self.numbers.shuffle(slots)
                self.allocator.free(lens(*slots))

    def _ends(self) -> torch.Tensor:
        return lens(*(slots[-1] if slots else NOWHERE for slots in self.requests))

    def _hand_out(self, slots: torch.Tensor | None, grow: list[int]) -> None:
        before = self.used_pages()
        pages = [(-(-len(old) // self.size), -(-(len(old) + new) // self.size))
                 for old, new in zip(self.requests, grow, strict=True)]
        needed = before + sum(after - now for now, after in pages)
        assert (slots is None) == (needed > self.allocator.pages.capacity), "None if and only if there is no room"
        assert slots is not None or before == pool(self.allocator).used_pages
        rest = slots_of(slots) if slots is not None else []
        for request, count in zip(self.requests, grow if rest else [0] * len(grow), strict=True):
            request.extend(rest[:count])
            del rest[:count]
        assert not rest

    def used_pages(self) -> int:
        return sum(-(-len(slots) // self.size) for slots in self.everyone())

    def check(self) -> None:
        """Check that no slot has two owners, the tokens of a page are in order, and no page is lost."""
        every = [slot for slots in self.everyone() for slot in slots]
        assert len(set(every)) == len(every)
        for slots in self.everyone():
            assert all(slot % self.size == token % self.size for token, slot in enumerate(slots))
            pages = [slot // self.size for slot in slots]
            assert all(pages[i] == pages[i - i % self.size] for i in range(len(pages)))
        assert 0 not in {slot // self.size for slot in every}, "page 0 is padding"
        assert pool(self.allocator).used_pages == self.used_pages()
        assert self.allocator.available_tokens == (self.allocator.pages.capacity - self.used_pages()) * self.size
        pool(self.allocator).check()


@pytest.mark.parametrize("seed", seeds(20))
def test_no_slot_has_two_owners_and_none_is_lost(seed: int) -> None:
    world = World(rng(seed))
    for _ in range(60):
        world.numbers.choice([world.extend, world.decode, world.decode, world.draft, world.verify, world.finish])()
        world.check()


@pytest.mark.parametrize("seed", seeds(10))
def test_pytorch_gives_the_slots_of_the_token_by_token_oracle(seed: int) -> None:
    compare(slots_torch, seed, 200)


def test_pytorch_gives_the_same_slots_for_batches_of_extreme_size() -> None:
    compare_extremes(slots_torch, requests=5000)


class OneOff:
    """Kernels with a mistake in one place: a new page begins with its second slot."""

    def extend_slots(
        self, requests: torch.Tensor, last_loc: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, page_size: int
    ) -> None:
        slots_torch.extend_slots(requests, last_loc, pages, out, page_size)
        if len(pages):
            out[out == pages[-1] * page_size] += 1

    def decode_slots(self, first_slots: torch.Tensor, last_loc: torch.Tensor, out: torch.Tensor) -> None:
        slots_torch.decode_slots(first_slots + (first_slots >= 0), last_loc, out)


def test_the_comparison_finds_one_wrong_slot() -> None:
    batch = Batch(4, [0, 3], [9, 4], [NOWHERE, 6])
    require_equal(slots_torch, 0, batch)
    with pytest.raises(AssertionError):
        require_equal(OneOff(), 0, batch)
    with pytest.raises(AssertionError):
        require_equal(OneOff(), 0, Batch(4, [4], [5], [7]), decode=True)


@pytest.mark.long
def test_triton_gives_the_same_slots_for_batches_of_extreme_size(repository: Path) -> None:
    assert run_child(repository, "_interpreted_slots", TRITON_INTERPRET="1") == "all equal\n"


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(4))
def test_triton_gives_the_same_slots_in_its_interpreter(repository: Path, seed: int) -> None:
    assert run_child(repository, "_interpreted_slots", str(seed), TRITON_INTERPRET="1") == "all equal\n"


@pytest.mark.long
def test_the_triton_kernels_compile_for_a_gpu(repository: Path, tmp_path: Path) -> None:
    printed = run_child(repository, "_compiled_slots", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert printed == "compiled\n"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", seeds(4))
def test_triton_gives_the_same_slots_on_a_gpu(seed: int) -> None:
    from hicache.tiers import slots_triton  # noqa: PLC0415  only where there is a GPU to compile for

    compare(slots_triton, seed, 200, "cuda")
