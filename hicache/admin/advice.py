"""What to change so that fewer prompt tokens are computed: a sentence for each reason."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from ..ghosts import Kind, Reason
from .models import Cause, Explanation

_NOTHING = "Nothing to change."
_SLOW = "The store is slower than computing: use a faster store, or a larger `host.size`."
_DATE = ("Most prompts with new tokens equal another one up to token {} and differ from there on. If something that "
         "changes in each call, such as a date, stands there, move it to the end of the prompt.")
# By reason, or by reason and detail.
ADVICE: Mapping[Reason | Kind, str] = {
    **dict.fromkeys((Reason.NEW, Reason.EVICTED, Reason.OTHER_WEIGHTS, Reason.UNSHARED, Reason.TAIL), _NOTHING),
    (Reason.EVICTED, "device"): "L1 is too small, and L2 had no copy: raise `device.size` and `host.size`.",
    (Reason.EVICTED, "host"): "L2 is too small: raise `host.size`, or add a section `storage`.",
    (Reason.EVICTED, "storage"): "The store removes pages too early: raise `storage.options.capacity`.",
    (Reason.NOT_STORED, "policy"): "Use `write_policy: write_through`, or lower `selective_hits`.",
    (Reason.NOT_STORED, "not_worth"): f"{_SLOW} `break_even.writes: always` stores every page.",
    (Reason.NOT_STORED, "queue"): "Writes are too slow: raise `transfer.store_host_share`, or use a faster store.",
    (Reason.NOT_STORED, "no_room"): "L2 had no room for pages that were to be stored: raise `host.size`.",
    (Reason.NOT_STORED, "full"): "Storage is full: raise `storage.options.capacity`, or lower its `free_space_floor`.",
    **dict.fromkeys((Reason.NOT_STORED, Reason.UNAVAILABLE), "A store failed or was paused: see `hicache ctl status`."),
    Reason.LATE: "Lookups wait: raise `transfer.lookup_workers`, `transfer.io_workers` and `prefetch.timeout_base`.",
    (Reason.LATE, "read"): "Reads are cut off: raise `prefetch.timeout_base` and `prefetch.timeout_per_1024_tokens`.",
    (Reason.LATE, "verification"): "Loads wait until L2 is verified: use `integrity.verify: read`.",
    Reason.NOT_WORTH: "Nothing to change, unless the store can be faster: fetching would have taken longer.",
    Reason.NO_ROOM: "L2 had no room for pages from storage: raise `host.size`, then `prefetch.host_share`.",
    Reason.DAMAGED: "Pages failed verification: `hicache ctl scrub` finds the store; test its disks and memory.",
    Reason.EXPIRED: "Raise `storage.options.max_age`.",
}


def advise(found: Explanation) -> list[tuple[Cause, str]]:
    """Return the three largest reasons of `found`, each with what to change."""
    causes = sorted(found.total.computed, key=lambda one: -one.tokens)
    return [(one, _advice(one, found)) for one in causes if one.reason != Reason.TAIL][:3]


def _advice(cause: Cause, found: Explanation) -> str:
    kind = cause.reason, cause.detail
    if kind == (Reason.LATE, "read") and 0 < found.storage_tokens_per_s < found.prefill_tokens_per_s:
        return _SLOW
    new = [one for one in found.accounts if one.diverged_at is not None]
    early = [one.diverged_at for one in new if one.diverged_at and 4 * one.diverged_at < one.tokens]
    if cause.reason == Reason.NEW and 2 * len(early) > len(new):
        return _DATE.format(int(median(early)))
    text = ADVICE.get(kind) or ADVICE[cause.reason]
    return text if found.unit == "tokens" else text.replace("host.size", "daemon.pool")
