"""Rows of requests and slots of drafts: SGLang's ReqToTokenPool, and allocations that can be taken back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache.errors import CapacityError, InvalidInput
from hicache.tiers import PageAllocator, PagedTokenToKVPoolAllocator, RequestToTokenPool, token_slots


def test_rows_are_allocated_for_a_whole_batch_or_not_at_all() -> None:
    rows = RequestToTokenPool(requests=4, context_tokens=16)
    assert rows.table.shape == (4, 16) and rows.table.dtype == torch.int32 and not rows.table.any()
    three = rows.alloc(3)
    assert three is not None and len(set(three)) == 3 and rows.free_rows == 1
    assert rows.alloc(2) is None and rows.free_rows == 1
    rows.free(three[1])
    assert rows.free_rows == 2
    with pytest.raises(InvalidInput):
        rows.free(three[1])


def test_done_otherwise_the_caller_keeps_a_row_from_chunk_to_chunk() -> None:
    """SGLang's alloc takes requests, and skips those that have a row. Here a row is the caller's until `free`."""
    rows = RequestToTokenPool(requests=1, context_tokens=16)
    row = rows.alloc(1)
    assert row is not None and rows.alloc(0) == [] and rows.alloc(1) is None
    rows.write(row[0], np.array([2], np.int32), 4)
    rows.write(row[0], np.array([7, 5], np.int32), 4, first_page=1)
    assert rows.table[0, :12].tolist() == token_slots(np.array([2, 7, 5], np.int32), 4).tolist()


def test_two_requests_with_a_common_prefix_have_its_slots_in_both_rows() -> None:
    rows = RequestToTokenPool(requests=2, context_tokens=10)
    both = rows.alloc(2)
    assert both is not None
    first, second = both
    rows.write(first, np.array([3, 1], np.int32), 4)
    rows.write(second, np.array([3, 6], np.int32), 4)
    assert rows.table[first, :8].tolist() == [12, 13, 14, 15, 4, 5, 6, 7]
    assert rows.table[second, :8].tolist() == [12, 13, 14, 15, 24, 25, 26, 27]
    with pytest.raises(CapacityError):
        rows.write(first, np.array([3, 1, 4, 5], np.int32), 4)


def test_slots_of_rejected_drafts_are_allocated_again_as_if_there_had_been_none() -> None:
    """SGLang's alloc_token_slots(backup_state=True): the state before a draft can be restored."""
    allocator = PagedTokenToKVPoolAllocator(PageAllocator(9, first=1), 4)
    assert allocator.alloc_extend(torch.tensor([0]), torch.tensor([6]), torch.tensor([-1]), 6) is not None
    drafts = allocator.alloc_drafts(torch.tensor([6]), torch.tensor([15]), torch.tensor([9]), 9)
    assert drafts is not None and drafts.slots.tolist() == list(range(10, 19)) and allocator.available_tokens == 5 * 4
    drafts.keep(torch.tensor([6]))
    assert allocator.available_tokens == 7 * 4
    again = allocator.alloc_extend(torch.tensor([6]), torch.tensor([9]), torch.tensor([9]), 3)
    assert again is not None and again.tolist() == [10, 11, 12]


def test_accepted_drafts_keep_their_slots() -> None:
    allocator = PagedTokenToKVPoolAllocator(PageAllocator(9, first=1), 4)
    drafts = allocator.alloc_drafts(torch.tensor([0]), torch.tensor([9]), torch.tensor([-1]), 9)
    assert drafts is not None
    drafts.keep(torch.tensor([5]))
    assert allocator.available_tokens == 7 * 4
    more = allocator.alloc_decode(torch.tensor([6]), drafts.slots[4:5])
    assert more is not None and more.tolist() == [9]
