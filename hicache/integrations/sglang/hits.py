"""Which prefixes of a prompt can be restored if a model has several pools: SGLang's hit policies.

    all_pages        each page of the prefix
    trailing_pages   the last pages of the prefix, as many as the transfer has keys: a sliding window, or one state. So
                     5 pages may be restorable while 4 and 3 are not

SGLang 0.5.23 also defines `block_groups`, but makes no such transfer, and its own stores reject it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...errors import InvalidInput
from ..store import PoolStorage
from .identity import KV

ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"


class PoolTransfer(Protocol):
    """The used fields of SGLang's PoolTransfer. In a lookup, only the number of `keys` counts, or they are None."""

    name: str
    keys: Sequence[str] | None
    host_indices: torch.Tensor | None
    hit_policy: str


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
    keys: Sequence[bytes], kv_pages: int, wanted: Sequence[tuple[PoolTransfer, PoolStorage]], deadline: float
) -> PoolHits:
    """Return what the pools of a prompt allow whose first `kv_pages` pages are stored. Blocks until `deadline`. Raises
    InvalidInput for an unknown policy."""
    pools = {KV: kv_pages} if kv_pages else {}
    lengths: Sequence[int] = range(1, kv_pages + 1)
    for transfer, store in wanted:
        if not lengths:
            break
        allowed = _allowed(transfer, keys[:kv_pages], store, deadline)
        lengths = [length for length in lengths if length in allowed]
        if allowed:
            pools[transfer.name] = max(allowed)
    return PoolHits(lengths, pools)


def _allowed(transfer: PoolTransfer, keys: Sequence[bytes], store: PoolStorage, deadline: float) -> set[int]:
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
