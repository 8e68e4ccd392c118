"""Slots for the tokens of an engine, on top of the pages of one pool.

A slot is a token's row in the layers' buffers: `page * page_size + offset`. The scheduler chooses pages on the host,
where their free list is. The kernels of `SlotKernels` compute the slots on the device. Nothing here waits for the
device unless its docstring says so.

Invariant: every allocated slot belongs to a page that the `PageSource` counts as used. It has no other state, so the
source's `check()` covers it. Owned by the scheduler thread, like the pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..arguments import instance, whole
from ..errors import InvalidInput, InvariantError
from ..types import NO_PAGES, PageIds
from .allocator import PageSource
from .device import known_device, token_slots
from .upload import upload

Lengths = npt.NDArray[np.int64]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class SlotKernels(Protocol):
    """Computes slots from page ids on the device. All tensors are int64 on it (`last_loc` may be int32); mutates `out`.
    """

    def extend_slots(
        self, requests: torch.Tensor, last_loc: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, page_size: int
    ) -> None:
        """Write the slots of all new tokens, request by request, into `out`.

        A row of `requests` `[n, 4]` is: tokens before, tokens after, index of the request's first slot in `out`, and
        index of its first new page in `pages`. `last_loc` `[n]` is the slot of its last token before.
        """

    def decode_slots(self, first_slots: torch.Tensor, last_loc: torch.Tensor, out: torch.Tensor) -> None:
        """Write one slot per request into `out` `[n]`: `first_slots`, or `last_loc + 1` where that is negative."""


class PagedTokenToKVPoolAllocator:
    """Allocates and frees slots for an engine. A request fills its last page before it gets another page.

    A page belongs to one request (or to the tree), so any of its slots frees it as a whole: freeing half of its slots
    now and the other half later is a double free.

    `debug` detects more caller errors (see the methods), but waits for the device each time. `kernels` computes the
    slots: by default Triton on CUDA, PyTorch elsewhere.
    """

    def __init__(
        self, pages: PageSource, page_size: int, device: torch.device | str = "cpu", *,
        debug: bool = False, kernels: SlotKernels | None = None,
    ) -> None:
        if not isinstance(pages, PageSource):
            raise InvalidInput(
                f"token allocator: pages of type {type(pages).__name__}; pass a `PageAllocator` or `cache.page_source`"
            )
        self.pages = pages
        self.page_size = whole("token allocator: page_size", page_size, 1)
        self.device = known_device(device)
        self.debug = debug
        self._kernels = kernels if kernels is not None else _kernels_of(self.device)

    @property
    def available_tokens(self) -> int:
        """The tokens that fit into free pages. A request's partial last page may hold a few more."""
        return self.pages.free_pages * self.page_size

    def free_group(self) -> AbstractContextManager[None]:
        """Collect all frees inside the block and apply them at its end. Raises as `PageAllocator.free_group` does."""
        return self.pages.free_group()

    def alloc(self, tokens: int) -> torch.Tensor | None:
        """Return slots for `tokens` tokens in whole pages, int64 `[tokens]`, or None if there is no room.

        Atomic: None changes nothing. Raises InvalidInput if `tokens` is not a multiple of the page size.
        """
        tokens = whole("token allocator: tokens", tokens)
        if tokens % self.page_size:
            raise InvalidInput(f"token allocator: {tokens} tokens are not whole pages of {self.page_size}")
        pages = self.pages.alloc(tokens // self.page_size)
        if pages is None:
            return None
        with self._given_back_on_error(pages):
            return upload(token_slots(pages, self.page_size), self.device)

    def alloc_extend(
        self, prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor, extend_tokens: int
    ) -> torch.Tensor | None:
        """Return slots for the tokens `prefix_lens[i] .. seq_lens[i]` of each request i, int64 `[extend_tokens]`,
        request by request; or None if there is no room. Atomic: None changes nothing.

        A request continues its partial page after `last_loc[i]`, the slot of its token `prefix_lens[i] - 1`, then fills
        new pages in the order of the free list; the last page may stay partial. If the prefix ends with a page (or is
        empty), `last_loc[i]` is ignored.

        REQUIRES: lengths are integers in host memory, `[requests]`; `last_loc` is on the device. Raises InvalidInput,
        and changes nothing, if the lengths contradict each other or `extend_tokens`; with `debug`, InvariantError if a
        `last_loc` is not the end of the prefix.
        """
        drafts = self.alloc_drafts(prefix_lens, seq_lens, last_loc, extend_tokens)
        return None if drafts is None else drafts.slots

    def alloc_drafts(
        self, prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor, extend_tokens: int
    ) -> Drafts | None:
        """Allocate as `alloc_extend` for tokens that may be rejected, as those of a draft model: `keep` of the result
        takes their pages back."""
        prefix, seq = _lengths(prefix_lens), _lengths(seq_lens)
        if prefix.shape != seq.shape or (prefix > seq).any():
            raise InvalidInput("alloc_extend: seq_lens must match prefix_lens, and be at least as long in each request")
        extend = seq - prefix
        if int(extend.sum()) != whole("alloc_extend: extend_tokens", extend_tokens):
            raise InvalidInput(f"alloc_extend: the lengths give {int(extend.sum())} tokens, not {extend_tokens}")
        last_loc = self._last_loc(last_loc, prefix)
        fresh = -(-seq // self.page_size) - -(-prefix // self.page_size)
        pages = self.pages.alloc(int(fresh.sum()))
        if pages is None:
            return None
        rows = np.stack((prefix, seq, np.cumsum(extend) - extend, np.cumsum(fresh) - fresh), axis=1)
        with self._given_back_on_error(pages):
            # One upload for both. Rows come first, so that the pages after them are aligned to 16 bytes.
            packed = upload(np.concatenate((rows.reshape(-1), pages)), self.device)
            requests, new_pages = packed[: rows.size].view(-1, 4), packed[rows.size :]
            out = torch.empty(extend_tokens, dtype=torch.int64, device=self.device)
            self._kernels.extend_slots(requests, last_loc, new_pages, out, self.page_size)
            return Drafts(self, out, prefix, seq, pages)

    def alloc_decode(self, seq_lens: torch.Tensor, last_loc: torch.Tensor) -> torch.Tensor | None:
        """Return one slot per request, int64 `[requests]`, for the last of its `seq_lens[i]` tokens; or None if there
        is no room. Atomic: None changes nothing.

        Equal to `alloc_extend` from `seq_lens - 1`; REQUIRES and Raises as there, and every length is at least 1.
        """
        position = _lengths(seq_lens) - 1
        if len(position) and int(position.min()) < 0:
            raise InvalidInput("alloc_decode: seq_lens count the new token, so they are at least 1")
        last_loc = self._last_loc(last_loc, position)
        opens_page = position % self.page_size == 0
        pages = self.pages.alloc(int(np.count_nonzero(opens_page)))
        if pages is None:
            return None
        first_slots = np.full(len(position), -1, dtype=np.int64)
        first_slots[opens_page] = pages.astype(np.int64) * self.page_size
        with self._given_back_on_error(pages):
            out = torch.empty(len(position), dtype=torch.int64, device=self.device)
            self._kernels.decode_slots(upload(first_slots, self.device), last_loc, out)
            return out

    def free(self, slots: torch.Tensor) -> None:
        """Free the pages of `slots` (integers, `[tokens]`, in any order).

        Slots on the device must be copied to the host, which waits for the device; pass a host tensor if possible.
        Raises InvariantError, and changes nothing, if the page of a slot is free already; with `debug`, and for pages
        of one token, also if a slot is passed twice in one call.
        """
        pages = _integers("slots", slots).cpu().numpy() // self.page_size
        # Checked before the cast to int32, which would wrap around.
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < self.pages.first + self.pages.capacity:
            raise InvariantError("free: a slot is outside the pool")
        pages = pages.astype(np.int32)
        if self.page_size > 1:
            if self.debug and len(torch.unique(slots)) != len(slots):
                raise InvariantError("double free: a slot is named twice in one call")
            # Slots of a page are mostly adjacent. Dropping these repeats first leaves little to sort.
            pages = np.unique(pages[np.diff(pages, prepend=-1) != 0])
        self.pages.free(pages)

    @contextmanager
    def _given_back_on_error(self, pages: PageIds) -> Iterator[None]:
        """Free the pages if the block raises, such as when the device has no memory for the slots."""
        try:
            yield
        except BaseException:
            self.pages.free(pages)
            raise

    def _last_loc(self, last_loc: torch.Tensor, prefix: Lengths) -> torch.Tensor:
        """Return `last_loc` as the kernels need it. Raises as `alloc_extend` does."""
        if _integers("last_loc", last_loc).shape != prefix.shape or last_loc.device.type != self.device.type:
            raise InvalidInput(f"token allocator: last_loc must have a slot per request, on {self.device}")
        if self.debug:
            behind = last_loc.cpu().numpy().astype(np.int64) + 1 - prefix
            wrong = (prefix % self.page_size != 0) & (behind % self.page_size != 0)
            if wrong.any():
                requests = np.flatnonzero(wrong)[:8].tolist()
                raise InvariantError(f"token allocator: last_loc is not where the prefix ends, requests {requests}")
        return last_loc.contiguous()


class Drafts:
    """Tokens of requests that may be rejected. `slots` is that of `alloc_extend`. Without `keep`, all are kept."""

    def __init__(
        self, allocator: PagedTokenToKVPoolAllocator, slots: torch.Tensor, prefix: Lengths, seq: Lengths, pages: PageIds
    ) -> None:
        self.slots = slots
        self._allocator, self._prefix, self._seq, self._pages = allocator, prefix, seq, pages

    def keep(self, seq_lens: torch.Tensor) -> None:
        """Keep the first `seq_lens[i]` tokens of each request i, and free the new pages that hold only others; the
        `prefix_lens` keep none. Does not wait for the device. Rejected slots of a request's last page stay its own: the
        next `alloc_extend` or `alloc_decode` after the kept tokens returns them again.

        Freed pages are the next ones to be allocated, in their old order. So if all tokens are rejected and nothing
        else was allocated or freed since, the next slots are those without drafts. Prefixes that were evicted to make
        room for the drafts do not come back. Like each free, it comes after the fence of the forward that used them.

        REQUIRES: `seq_lens` are integers in host memory, `[requests]`, and the freed pages were not freed or shared
        since. Raises InvalidInput, and changes nothing, if a length is below the request's prefix or above its drafts;
        at a second call, unless it keeps the same tokens.
        """
        kept, size = _lengths(seq_lens), self._allocator.page_size
        if kept.shape != self._prefix.shape or (kept < self._prefix).any() or (kept > self._seq).any():
            raise InvalidInput("keep: seq_lens must be from each request's prefix_lens to the seq_lens of its drafts")
        held, last, end = (-(-lens // size) for lens in (self._prefix, kept, self._seq))
        runs = np.stack((last - held, end - last), axis=1).reshape(-1)  # new pages: kept, rejected, by request
        rejected = np.repeat(np.tile([False, True], len(kept)), runs)
        self._allocator.pages.free(self._pages[rejected])
        self._prefix, self._seq, self._pages = kept, kept, NO_PAGES


class TokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """An allocator with pages of one token: a slot is a page id. Pages are never partial, so `alloc` suffices."""

    def __init__(self, pages: PageSource, device: torch.device | str = "cpu") -> None:
        super().__init__(pages, 1, device)


def _kernels_of(device: torch.device) -> SlotKernels:
    if device.type == "cuda":
        from . import slots_triton  # noqa: PLC0415  comes with torch for CUDA only

        return slots_triton
    from . import slots_torch  # noqa: PLC0415

    return slots_torch


def _lengths(lens: torch.Tensor) -> Lengths:
    if _integers("lengths", lens).device.type != "cpu":
        raise InvalidInput(f"token allocator: lengths on {lens.device}; pass a tensor in host memory")
    lengths = lens.numpy().astype(np.int64)
    if len(lengths) and int(lengths.min()) < 0:
        raise InvalidInput("token allocator: a length is negative")
    return lengths


def _integers(name: str, values: torch.Tensor) -> torch.Tensor:
    if instance(f"token allocator: {name}", values, torch.Tensor).ndim != 1 or values.dtype not in _INTEGERS:
        raise InvalidInput(
            f"token allocator: {name} of {values.dtype} in {values.ndim} dimensions; pass integers in one dimension"
        )
    return values
