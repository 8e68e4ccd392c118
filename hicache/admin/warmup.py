"""The steps of a warm-up: chains are read from storage into free memory before requests need them.

Each step reads one piece of one chain by `AdminTarget.warm`, so a job is cancelled, and its rate is limited, between
two pieces. One thread makes the steps of a warm-up; no lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ..backends.tools.verify import RateLimit
from ..errors import AdminError
from ..units import counted
from .models import Progress, WarmRequest
from .stores import Steps
from .target import AdminTarget, Chain

_Found: TypeAlias = tuple[str, str, Chain] | str | None
# The most bytes of a piece. A piece takes an idle engine at least two polls, about 40 ms with vLLM, so smaller ones
# would be slower than most stores; larger ones would reserve more memory for pages that may not be in storage.
PIECE_BYTES = 64 << 20


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
    return _steps(target, request, chains, namespaces)


def _steps(
    target: AdminTarget, request: WarmRequest, chains: Sequence[Chain], namespaces: Sequence[str]
) -> Steps:
    rate, store, read_bytes, cut = request.rate_bytes_per_s, "", 0, 0
    limit = RateLimit(rate, target.clock)
    piece_bytes = 0 if request.dry_run else min(PIECE_BYTES, rate or PIECE_BYTES)
    wanted: set[tuple[str, bytes]] = set()  # and those of them that are, or have been, in memory
    warm: set[tuple[str, bytes]] = set()
    skipped: dict[str, None] = {}

    def progress() -> Progress:
        reasons = [f"the rest of {counted(cut, 'chain')} is not in storage, or cannot be read now"] if cut else []
        return Progress(
            store=store, pages=len(warm), total=len(wanted), bytes=read_bytes, skipped=[*reasons, *skipped]
        )

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
