"""The admin surface's own work on a target: lookups over all tiers, and the steps of scrubbing, clearing and warming.

Each step of a warm-up reads one piece of one chain by `AdminTarget.warm`, so a job is cancelled, and its rate is
limited, between two pieces. One thread makes the steps of a job; no lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ..backends.tools.verify import RateLimit
from ..errors import AdminError
from ..units import counted
from .models import ClearRequest, Lookup, LookupRequest, PagePlace, Progress, ScrubRequest, WarmRequest
from .stores import Steps
from .target import AdminTarget, Chain, Places

# The most pages of an answer to a lookup by the first digits of a key.
MATCHES_MAX = 100
# The deadline for clearing a memory store, by one call of its backend.
_CLEAR_TIMEOUT_S = 60.0
_Found: TypeAlias = tuple[str, str, Chain] | str | None
# The most bytes of a piece. A piece takes an idle engine at least two polls, about 40 ms with vLLM, so smaller ones
# would be slower than most stores; larger ones would reserve more memory for pages that may not be in storage.
PIECE_BYTES = 64 << 20


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


def warm(target: AdminTarget, request: WarmRequest) -> Steps:
    """Read chains from storage into free memory; yield the progress after each piece. Raises AdminError at once for an
    invalid request, for chains that the target cannot read, and without storage or an open namespace."""
    if sum((bool(request.keys), bool(request.prompts), request.top_bytes is not None)) != 1:
        raise AdminError("invalid", "pass one of `keys`, `prompts` and `top_bytes`")
    chains: Sequence[Chain] = request.prompts or [[bytes.fromhex(key) for key in request.keys]]
    target.page_keys(chains[0])
    status = target.status()
    if not (status.attached and status.configured_stores):
        raise AdminError("unsupported", "warm: no storage is attached; attach or configure one")
    if not status.namespaces:
        raise AdminError("unknown_namespace", "warm: no namespace is open; start an engine first, which opens its own")
    namespaces = [one.namespace for one in status.namespaces if one.namespace.startswith(request.namespace)]
    if not namespaces:
        raise AdminError("unknown_namespace", "no open namespace begins with these digits; list the namespaces")
    return _warm(target, request, chains, namespaces)


def _warm(target: AdminTarget, request: WarmRequest, chains: Sequence[Chain], namespaces: Sequence[str]) -> Steps:
    rate, store, read_bytes, cut = request.rate_bytes_per_s, "", 0, 0
    limit = RateLimit(rate, target.clock)
    piece_bytes = 0 if request.dry_run else min(PIECE_BYTES, rate or PIECE_BYTES)
    wanted: set[tuple[str, bytes]] = set()  # and those of them that are, or have been, in memory
    warm: set[tuple[str, bytes]] = set()
    skipped: dict[str, None] = {}

    def progress() -> Progress:
        reasons = [f"the rest of {counted(cut, 'chain')} is not in storage, or cannot be read now"] if cut else []
        return Progress(store=store, pages=len(warm), total=len(wanted), bytes=read_bytes, skipped=[*reasons, *skipped])

    found: Iterator[_Found] = iter([("", namespace, chain) for chain in chains for namespace in namespaces])
    if request.top_bytes is not None:
        found = target.stores.hottest(namespaces, request.top_bytes)
    for one in found:
        if isinstance(one, str):
            skipped[f"{one}: cannot be listed"] = None
        elif one is not None:
            store, namespace, chain = one
            pages = [(namespace, key) for key in target.page_keys(chain)]
            wanted.update(pages)
            done = None
            while done is None or (done.read_pages and done.pages < len(pages) and piece_bytes):
                limit.wait(read_bytes)
                done = target.warm(namespace, chain, piece_bytes)
                read_bytes += done.page_bytes * len({*pages[done.pages - done.read_pages : done.pages]} - warm)
                warm.update(pages[: done.pages])
                yield progress()
            if not warm.issuperset(pages):
                if done.is_full and not request.dry_run:
                    skipped["memory is full, and a warm-up evicts nothing"] = None
                else:
                    cut += 1
        yield progress()
