"""Which prefixes of a prompt can be restored if a model has several pools: SGLang's hit policies.

    all_pages        each page of the prefix
    trailing_pages   the last pages of the prefix, as many as the transfer has keys: a sliding window, or one state. So
                     5 pages may be restorable while 4 and 3 are not
    block_groups     a second form of the KV, in blocks of several pages. It does not limit the prefix, and reports the
                     pages that its leading complete blocks cover

SGLang 0.5.23 defines `block_groups`, but makes no such transfer, and its own stores reject it. Here the keys of a block
are those of its last pages: SGLang's key of a page names all tokens before it, but not those after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...errors import InvalidInput
from ..store import PoolStorage
from .identity import KV

ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"


class Transfer(Protocol):
    """The used fields of SGLang's PoolTransfer. In a lookup, `keys` are placeholders, of which only the number counts,
    or None."""

    @property
    def name(self) -> str:
        """The pool."""

    @property
    def keys(self) -> Sequence[str] | None:
        """The keys of the pages."""

    @property
    def host_indices(self) -> torch.Tensor | None:
        """The tokens of the pages in the pool."""

    @property
    def hit_policy(self) -> str:
        """One of the policies above."""

    @property
    def block_pages(self) -> int:
        """The pages of a block."""

    @property
    def group_pages(self) -> int:
        """The keys of a block."""


@dataclass(frozen=True, slots=True)
class PoolHits:
    """The result of a lookup: the lengths of the prefixes that can be restored, in ascending order, and how many pages
    each pool has. A pool without pages, or after the pool that ended the search, is not in `pools`."""

    lengths: Sequence[int]
    pools: dict[str, int]

    @property
    def pages(self) -> int:
        """The longest prefix that can be restored."""
        return self.lengths[-1] if self.lengths else 0


def find_hits(
    keys: Sequence[bytes], kv_pages: int, wanted: Sequence[tuple[Transfer, PoolStorage]], deadline: float
) -> PoolHits:
    """Return what the pools of a prompt allow whose first `kv_pages` pages are stored. Blocks until `deadline`. Raises
    InvalidInput for an unknown policy."""
    pools = {KV: kv_pages} if kv_pages else {}
    lengths: Sequence[int] = range(1, kv_pages + 1)
    for transfer, store in wanted:
        if transfer.hit_policy == BLOCK_GROUPS:
            covered = _blocks(transfer, keys, store, deadline)
        elif not lengths:
            continue
        else:
            allowed = _allowed(transfer, keys[:kv_pages], store, deadline)
            covered = max(allowed, default=0)
            lengths = [length for length in lengths if length in allowed]
        if covered:
            pools[transfer.name] = covered
    return PoolHits(lengths, pools)


def _allowed(transfer: Transfer, keys: Sequence[bytes], store: PoolStorage, deadline: float) -> set[int]:
    """Return the lengths of prefixes of `keys` that the policy of a pool allows."""
    if transfer.hit_policy == ALL_PAGES:
        return set(range(1, store.lookup(keys, deadline) + 1))
    if transfer.hit_policy != TRAILING_PAGES:
        raise InvalidInput(f"sglang: the hit policy {str(transfer.hit_policy)[:40]!r} is not known to HiCache")
    needed, run, allowed = max(1, len(transfer.keys or ())), 0, set()
    for length, is_stored in enumerate(store.has(keys, deadline), 1):
        run = run + 1 if is_stored else 0
        if run >= min(needed, length):
            allowed.add(length)
    return allowed


def _blocks(transfer: Transfer, keys: Sequence[bytes], store: PoolStorage, deadline: float) -> int:
    """Return the number of pages in the leading complete blocks."""
    pages, group = transfer.block_pages, transfer.group_pages
    if not 1 <= group <= pages:
        raise InvalidInput(f"sglang: {group} keys for a block of {pages} pages of pool {transfer.name}; use 1 or more")
    ends = range(pages, len(keys) + 1, pages)
    found = store.lookup([key for end in ends for key in keys[end - group : end]], deadline)
    return found // group * pages
