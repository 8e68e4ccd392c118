"""Compute the slot of each new token with Triton kernels: one launch each, no data returns to the host.

The two functions have the same results as those of `hicache.tiers.slots_torch`. The tests compare them in Triton's
interpreter, which runs these kernels without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Tokens that a program handles at a time: 8 for each of its 128 threads, Triton's default.
_BLOCK = 1024


@triton.jit
def _extend_kernel(requests, last_loc, pages, out, page_size: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per request handles the request's new tokens block by block."""
    row = requests + tl.program_id(0) * 4
    prefix_len = tl.load(row)
    extend_len = tl.load(row + 1) - prefix_len
    request_out = out + tl.load(row + 2)
    request_pages = pages + tl.load(row + 3)
    behind = tl.load(last_loc + tl.program_id(0)).to(tl.int64) + 1
    old_pages = (prefix_len + page_size - 1) // page_size
    for start in range(0, extend_len, block):
        token = start + tl.arange(0, block)
        inside = token < extend_len
        position = prefix_len + token
        fresh = position // page_size - old_pages  # negative: still in the old partial page
        page = tl.load(request_pages + fresh, mask=inside & (fresh >= 0), other=0)
        slot = tl.where(fresh < 0, behind + token, page * page_size + position % page_size)
        tl.store(request_out + token, slot, mask=inside)


# By default Triton would compile again for a count of 1 and for multiples of 16.
@triton.jit(do_not_specialize=["count"])
def _decode_kernel(first_slots, last_loc, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program handles `block` requests."""
    request = tl.program_id(0) * block + tl.arange(0, block)
    inside = request < count
    first = tl.load(first_slots + request, mask=inside)
    last = tl.load(last_loc + request, mask=inside).to(tl.int64)
    tl.store(out + request, tl.where(first < 0, last + 1, first), mask=inside)


def extend_slots(
    requests: torch.Tensor, last_loc: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, page_size: int
) -> None:
    """See `SlotKernels.extend_slots`."""
    if len(requests):
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            _extend_kernel[(len(requests),)](requests, last_loc, pages, out, page_size=page_size, block=_BLOCK)


def decode_slots(first_slots: torch.Tensor, last_loc: torch.Tensor, out: torch.Tensor) -> None:
    """See `SlotKernels.decode_slots`."""
    if len(out):
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            grid = (triton.cdiv(len(out), _BLOCK),)
            _decode_kernel[grid](first_slots, last_loc, out, len(out), block=_BLOCK)
