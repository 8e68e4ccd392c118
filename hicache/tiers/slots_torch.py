"""Compute the slot of each new token in vectorised PyTorch: for devices without Triton, and as its reference in tests.

Both functions mutate only `out`, do not wait for the device, and take int64 tensors on one device (`last_loc` may be
int32). `hicache.tiers.slots_triton` has the same two functions. Their common interface is `SlotKernels` in
`hicache.tiers.token_allocator`, which describes the arguments.
"""

from __future__ import annotations

import torch


def extend_slots(
    requests: torch.Tensor, last_loc: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, page_size: int
) -> None:
    """See `SlotKernels.extend_slots`.

    New tokens form runs of consecutive slots: one run in the old partial page of each request (maybe empty), and one in
    each new page. In a run, slot minus position in `out` is constant. So this difference is added where the run begins
    and subtracted where it ends, and a cumulative sum gives all slots. This needs no division per token and does not
    depend on the order of the runs. No step runs on several threads, which would wait longer than they work.
    """
    prefix_lens, seq_lens, token_starts, page_starts = requests.unbind(1)
    page = torch.arange(len(pages), device=out.device)
    # The request of each new page: the last one whose pages begin at or before it.
    begun = page_starts.new_zeros(len(pages) + 1).index_add_(0, page_starts, torch.ones_like(page_starts))
    owner = torch.cumsum(begun[:-1], 0) - 1
    old_pages = (prefix_lens + page_size - 1) // page_size
    tokens_before = (page + (old_pages - page_starts)[owner]) * page_size
    begin = torch.cat((token_starts, tokens_before + (token_starts - prefix_lens)[owner]))
    in_old_page = torch.minimum(old_pages * page_size, seq_lens) - prefix_lens
    in_new_page = (seq_lens[owner] - tokens_before).clamp(max=page_size)
    end = begin + torch.cat((in_old_page, in_new_page))
    difference = torch.cat((last_loc.long() + 1, pages * page_size)) - begin
    steps = out.new_ones(len(out) + 1)
    steps[0] = 0
    steps.index_add_(0, begin, difference).index_add_(0, end, difference, alpha=-1)
    torch.cumsum(steps[:-1], 0, out=out)


def decode_slots(first_slots: torch.Tensor, last_loc: torch.Tensor, out: torch.Tensor) -> None:
    """See `SlotKernels.decode_slots`."""
    torch.where(first_slots < 0, last_loc.long() + 1, first_slots, out=out)
