"""The admin surface's own work on a target: lookups over all tiers, and the steps of scrubbing and clearing."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import AdminError
from .models import ClearRequest, Lookup, LookupRequest, PagePlace, Progress, ScrubRequest
from .stores import Steps
from .target import AdminTarget, Places

# The most pages of an answer to a lookup by the first digits of a key.
MATCHES_MAX = 100
# The deadline for clearing a memory store, by one call of its backend.
_CLEAR_TIMEOUT_S = 60.0


def look_up(target: AdminTarget, request: LookupRequest) -> Lookup:
    """Return the locations of pages in the memory of `target` and in each open store. Blocks up to the timeout.

    Stores with open breakers, and those that fail, are among the `unknown`.
    """
    asked = [bool(request.keys), request.prefix is not None, request.tokens is not None]
    if sum(asked) != 1:
        raise AdminError("invalid", "pass one of `keys`, `prefix` and `tokens`")
    deadline = target.clock() + request.timeout_s
    memory = target.memory_places(request, deadline)
    places: Places = {place: list(names) for place, names in memory.places.items()}
    complete = memory.complete
    if request.prefix is not None:
        complete &= _find_stored(target, request, places, deadline)
    keys = memory.keys or list(dict.fromkeys(key for _, key in places))
    unknown = _ask_stores(target, request.namespace, keys, places, deadline)
    pages = [PagePlace(namespace=space, key=key.hex(), places=names) for (space, key), names in places.items()]
    if request.prefix is None:
        found = {key for _, key in places}
        pages += [PagePlace(namespace="", key=key.hex(), places=[]) for key in keys if key not in found]
        order = {key.hex(): number for number, key in enumerate(keys)}
        pages.sort(key=lambda page: order[page.key])
    return Lookup(pages=pages, complete=complete, unknown=sorted(unknown))


def _find_stored(target: AdminTarget, request: LookupRequest, places: Places, deadline: float) -> bool:
    """Add the stored pages whose keys begin with the prefix; return True if all were checked."""
    for found in target.stores.matching(None, request.prefix or "", request.namespace):
        if target.clock() >= deadline:
            return False
        if found is not None:
            if len(places) >= MATCHES_MAX:
                return False
            name, space, key = found
            names = places.setdefault((space.hex(), key), [])
            if name not in names:
                names.append(name)
    return True


def _ask_stores(
    target: AdminTarget, namespace: str, keys: Sequence[bytes], places: Places, deadline: float
) -> set[str]:
    """Add the stores that have `keys`; return the names of those that did not answer."""
    unknown: set[str] = set()
    for store in target.live_stores() if keys else ():
        if not store.namespace.startswith(namespace):
            continue
        errors = sum(store.backend.statistics().errors.values())
        for key, is_stored in zip(keys, store.backend.batch_has(keys, deadline=deadline), strict=True):
            names = places.setdefault((store.namespace, key), []) if is_stored else []
            if is_stored and store.name not in names:
                names.append(store.name)
        if sum(store.backend.statistics().errors.values()) != errors:
            unknown.add(store.name)
    return unknown


def scrub(target: AdminTarget, request: ScrubRequest) -> Steps:
    """Verify all pages; yield the progress after each. Raises AdminError at once for an unknown store."""
    named = target.stores.require(request.store)
    if not named:
        raise AdminError("unsupported", "scrub: the configuration has no section `storage`; add one and restart")
    return target.stores.scrub(request.store, request.rate_bytes_per_s, request.remove)


def clear(target: AdminTarget, request: ClearRequest) -> Steps:
    """Remove pages; yield the progress after each. Raises AdminError at once for an invalid request."""
    if (request.where == "store") is not (request.store is not None):
        raise AdminError("invalid", "pass `store` if `where` is `store`, and leave it out otherwise")
    target.stores.require(request.store)
    return _clear(target, request)


def _clear(target: AdminTarget, request: ClearRequest) -> Steps:
    last = Progress()
    if request.where != "pool":
        for step in target.stores.clear(request.store, request.namespace):
            last = step
            yield last
        for store in target.live_stores():
            # A memory store; other stores only contain pages that were stored since.
            if request.store in (None, store.name) and store.namespace.startswith(request.namespace):
                removed = store.backend.clear(deadline=target.clock() + _CLEAR_TIMEOUT_S)
                last = last.model_copy(update={"store": store.name, "removed": last.removed + removed})
                yield last
        target.stores_cleared(request.namespace)
    if request.where != "store":
        # Memory comes last: a page that is read from a store while that is being cleared enters memory.
        removed = target.clear_memory(request.namespace)
        yield last.model_copy(update={"store": "memory", "removed": last.removed + removed})
