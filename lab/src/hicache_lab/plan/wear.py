"""The bytes that each write policy writes to storage, and the time until they wear it.

Models, for one node; with several nodes only `write_through` is modelled, because a page then may be counted or held
back on another node than the one that needs it.

- **write_through**: all pages are stored when they are computed, unless L3 has them.
- **write_through_selective**: a page is copied to L2 and L3 when `selective_hits` requests have used it, so L2 and L3
  have the pages that as many earlier requests used. Leaves out that the other pages do not take room there, so it finds
  more than this in small tiers; that counts of old pages are forgotten; and `selective_first_share`.
- **write_back**: a page is stored when L1 evicts it, so pages that never left L1 are not written. Leaves out that L2
  has no copies of new pages, so it reaches further; that closing the cache writes the rest; and that a crash loses
  more.

All leave out that the cache stores one run in sixteen only while the store is slower than computing and few
requests wait for the device.
"""

from __future__ import annotations

import numpy as np

from .result import PlanInputs, Policy
from .reuse import Counts, Reuse
from .tiers import Costs, Split, TierPages

DAY_S = 86_400.0
_YEAR_DAYS = 365.0


def policies_of(
    reuse: Reuse, tiers: TierPages, has: Split, costs: Costs, inputs: PlanInputs
) -> dict[str, Policy | None]:
    """Return the write policies by name: None for one that is not modelled, and for all of them without a store."""
    names = ("write_through", "write_through_selective", "write_back")
    if tiers.storage == 0:
        return dict.fromkeys(names)
    # Pages that need no write: L3 has them, or they were not computed. Pages that cannot be hits count too.
    present = np.maximum(reuse.shared.nearer(tiers.storage), reuse.node.nearer(tiers.host_reach))
    hits = costs.hits(has)
    through = int((reuse.kv_pages - present).sum())
    if inputs.nodes > 1:
        return dict.fromkeys(names) | {"write_through": _policy(hits, through, reuse, costs, inputs)}
    selective_hits, selective = _selective(reuse, present, has, inputs.selective_hits)
    return {
        "write_through": _policy(hits, through, reuse, costs, inputs),
        "write_through_selective": _policy(costs.hits(selective_hits), selective, reuse, costs, inputs),
        "write_back": _policy(hits, through - reuse.unevicted_pages, reuse, costs, inputs),
    }


def _selective(reuse: Reuse, present: Counts, has: Split, times: int) -> tuple[Split, int]:
    """Return the pages that tiers have under `write_through_selective`, and the number of stored pages."""
    stored = reuse.node.used(times)
    host = np.maximum(has.device, np.minimum(has.host, stored))
    storage = np.maximum(host, np.minimum(has.storage, stored))
    # This request is one more use of all of its pages.
    due = reuse.kv_pages if times == 1 else reuse.node.used(times - 1)
    return Split(has.device, host, storage), int((due - np.minimum(stored, present)).sum())


def _policy(hits: Split, pages: int, reuse: Reuse, costs: Costs, inputs: PlanInputs) -> Policy:
    written_bytes = pages * costs.page_bytes
    per_day = None if reuse.duration_s is None else written_bytes * DAY_S / reuse.duration_s
    endurance = inputs.endurance_bytes
    tokens = {tier: pages * inputs.page_size for tier, pages in hits.by_tier().items()}
    return Policy(
        hit_tokens=tokens,
        written_bytes=written_bytes,
        written_bytes_per_day=per_day,
        years=endurance / per_day / _YEAR_DAYS if endurance is not None and per_day else None,
    )
