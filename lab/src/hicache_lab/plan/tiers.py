"""Divides the pages of requests among tiers, and decides which of them are fetched.

Tiers have the most recently used pages. L1 has those with a distance on the node below its size S1. L2 has copies of
pages on L1, but at most half of L2 (`write_through`), so both together reach to the larger of S2 and S1 + S2 / 2. L3
has all pages with a distance among all requests below its size, because uses on L1 and L2 refresh it.

A hit is fetched by the rules of the cache: `prefetch.threshold_tokens` and `load_back_threshold_tokens`, and break-even
with the speeds given here instead of measured ones (`hicache/cache/break_even.py`), by the times in `Costs`. No
request waits for the device, so the plan fetches the least that the cache fetches under any load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from hicache.config import HiCacheConfig

from ..speeds import Speeds
from ..tier_names import TIERS
from .result import PlanInputs, Size, TierUse
from .reuse import Counts, Reuse

Seconds: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPages:
    """The sizes of the tiers in pages; of L1 and L2 on each node. `storage` None is without a limit."""

    device: int
    host: int
    storage: int | None

    @property
    def host_reach(self) -> int:
        """The pages of L1 and L2 together. See the module's docstring."""
        return max(self.host, self.device + self.host // 2)

    def more(self, tier: str, pages: int) -> TierPages:
        """Return the sizes with a larger tier. Storage without a limit stays so."""
        size = getattr(self, tier)
        return self if size is None else replace(self, **{tier: size + pages})


@dataclass(frozen=True, slots=True)
class Split:
    """Pages of each request, root first: L1 has those before `device`, L2 those from there to before `host`, and L3
    those from there to before `storage`. 0 <= device <= host <= storage."""

    device: Counts
    host: Counts
    storage: Counts

    def by_tier(self) -> dict[str, int]:
        """Return the pages of all requests by tier."""
        parts = (self.device, self.host - self.device, self.storage - self.host)
        return {tier: int(part.sum()) for tier, part in zip(TIERS, parts, strict=True)}


def found(reuse: Reuse, tiers: TierPages) -> Split:
    """Return the pages that the tiers have and that can be hits."""
    most = reuse.reusable_pages
    device = np.minimum(reuse.node.nearer(tiers.device), most)
    host = np.minimum(reuse.node.nearer(tiers.host_reach), most)
    return Split(device, host, np.maximum(host, np.minimum(reuse.shared.nearer(tiers.storage), most)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The times of operations of one request, for arrays of pages and tokens."""

    speeds: Speeds
    page_size: int
    page_bytes: int

    @property
    def computes(self) -> bool:
        """True if the time of computing is known."""
        return self.speeds.compute.tokens_per_s is not None or self.speeds.compute.pairs_per_s is not None

    def compute_s(self, first_page: Counts, tokens: Counts) -> Seconds:
        """Return the seconds for computing the tokens that follow the first pages of a prompt."""
        seconds = self.speeds.compute.prefill_s(cast(Any, first_page * self.page_size), cast(Any, tokens))
        # Without a rate, `prefill_s` returns one 0.
        return np.zeros(len(tokens)) + cast(Seconds, seconds)

    def copy_s(self, pages: Counts) -> Seconds:
        """Return the seconds of one copy from host to device; 0 without pages."""
        seconds = self.speeds.host_fixed_s + pages * (self.page_bytes / self.speeds.host_bytes_per_s)
        return np.where(pages > 0, seconds, 0.0)

    def read_s(self, pages: Counts) -> Seconds:
        """Return the seconds of reading pages from storage, one operation for each page."""
        storage = self.speeds.storage
        rounds = -(-pages // storage.parallel)
        return rounds * storage.fixed_s + pages * (self.page_bytes / storage.read_bytes_per_s)

    def hits(self, has: Split) -> Split:
        """Return the pages of `has` that are fetched. A refused part is computed, so the parts after it are too.
        Without a rate of prefill, only the thresholds refuse hits, as in the cache."""
        config = HiCacheConfig()
        from_storage = has.storage - has.host
        reads = from_storage * self.page_size >= config.prefetch.threshold_tokens
        if self.computes:
            reads &= self.read_s(from_storage) + self.copy_s(from_storage) <= self.compute_s(
                has.host, from_storage * self.page_size
            )
        storage = np.where(reads, has.storage, has.host)
        copied = storage - has.device
        copies = copied * self.page_size >= config.load_back_threshold_tokens
        if self.computes:
            copies &= self.copy_s(copied) <= self.compute_s(has.device, copied * self.page_size)
        return Split(has.device, np.where(copies, has.host, has.device), np.where(copies, storage, has.device))


def costs(inputs: PlanInputs) -> Costs:
    """Return the times of operations of a system."""
    return Costs(
        speeds=inputs.speeds, page_size=inputs.page_size, page_bytes=inputs.page_size * inputs.model.token_bytes
    )


def tier_pages(inputs: PlanInputs) -> TierPages:
    """Return the sizes of tiers in whole pages."""
    page_bytes = inputs.page_size * inputs.model.token_bytes
    return TierPages(
        device=inputs.device_bytes // page_bytes,
        host=inputs.host_bytes // page_bytes,
        storage=None if inputs.storage_bytes is None else inputs.storage_bytes // page_bytes,
    )


def size_of(pages: int, inputs: PlanInputs) -> Size:
    """Return the tokens and bytes of pages."""
    tokens = pages * inputs.page_size
    return Size(tokens=tokens, bytes=tokens * inputs.model.token_bytes)


def uses_of_tiers(has: Split, hits: Split, page_size: int, prompt_tokens: int) -> dict[str, TierUse]:
    """Return the found and the fetched tokens by tier."""
    hit_pages = hits.by_tier()
    return {
        tier: TierUse(
            found_tokens=pages * page_size,
            hit_tokens=hit_pages[tier] * page_size,
            share=hit_pages[tier] * page_size / prompt_tokens,
        )
        for tier, pages in has.by_tier().items()
    }
