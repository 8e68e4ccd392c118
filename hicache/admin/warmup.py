"""The steps of a warm-up: chains are read from storage into free memory before requests need them.

Each step reads one piece of one chain by `AdminTarget.warm`, so a job is cancelled, and its rate is limited, between
two pieces. One thread makes the steps of a warm-up; no lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..backends.tools.verify import RateLimit
from ..errors import AdminError
from ..units import counted
from .models import Progress, WarmRequest
from .stores import Steps
from .target import AdminTarget, Chain, Warmed

_Found: TypeAlias = tuple[str, str, Chain] | str | None
# The most bytes of a piece. A piece takes an idle engine at least three polls, about 60 ms with vLLM, so smaller ones
# would be slower than most stores; larger ones would occupy more of the memory and the workers of prefetches.
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


@dataclass(slots=True)
class _Tally:
    """Counts wanted pages. Invariant: `pages` is the number of values True in `wanted`, of pages that have been in
    memory, or would have been after the pieces of a dry run; `read_bytes` are those of the pages that were read for it.
    `cut` counts the chains whose rest is missing; `full` are namespaces."""

    is_dry: bool
    pages: int = 0
    read_bytes: int = 0
    cut: int = 0
    full: set[str] = field(default_factory=set)
    unlisted: list[str] = field(default_factory=list)
    wanted: dict[tuple[str, bytes], bool] = field(default_factory=dict)

    def want(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Count the pages of a chain as wanted."""
        for key in keys:
            self.wanted.setdefault((namespace, key), False)

    def add(self, namespace: str, keys: Sequence[bytes], done: Warmed) -> None:
        """Count the pages of a wanted chain after a piece."""
        for number, key in enumerate(keys[: done.pages]):
            page = namespace, key
            if self.wanted[page]:
                continue
            if number >= done.pages - done.read_pages:
                if self.is_dry and self.read_bytes + done.page_bytes > done.free_bytes:
                    break
                self.read_bytes += done.page_bytes
            self.wanted[page] = True
            self.pages += 1

    def end(self, namespace: str, keys: Sequence[bytes], done: Warmed) -> None:
        """Count the end of a chain."""
        if not all(self.wanted[namespace, key] for key in keys):
            if done.free_bytes - (self.read_bytes if self.is_dry else 0) < done.page_bytes:
                self.full.add(namespace)
            else:
                self.cut += 1

    def progress(self, store: str) -> Progress:
        """Return the progress so far."""
        reasons = [f"{name}: cannot be listed" for name in self.unlisted]
        if self.cut:
            reasons.append(f"the rest of {counted(self.cut, 'chain')} is not in storage, or cannot be read now")
        if self.full:
            reasons.append("memory is full, and a warm-up evicts nothing")
        return Progress(
            store=store, pages=self.pages, total=len(self.wanted), bytes=self.read_bytes, skipped=reasons
        )


def _steps(
    target: AdminTarget, request: WarmRequest, chains: Sequence[Chain], namespaces: Sequence[str]
) -> Steps:
    rate, tally, store = request.rate_bytes_per_s, _Tally(request.dry_run), ""
    limit = RateLimit(rate, target.clock)
    piece_bytes = 0 if request.dry_run else min(PIECE_BYTES, rate or PIECE_BYTES)
    found: Iterator[_Found] = iter([("", namespace, chain) for chain in chains for namespace in namespaces])
    if request.top_bytes is not None:
        found = target.stores.hottest(namespaces, request.top_bytes)
    for one in found:
        if one is None or isinstance(one, str):
            if len(tally.full) == len(namespaces):
                return  # the next store would be listed in vain
            tally.unlisted += [] if one is None else [one]
        else:
            store, namespace, chain = one
            keys = target.page_keys(chain)
            tally.want(namespace, keys)
            done = None
            while done is None or (done.read_pages and done.pages < len(keys) and not request.dry_run):
                limit.wait(tally.read_bytes)
                done = target.warm(namespace, chain, piece_bytes)  # of a full memory, what it has
                tally.add(namespace, keys, done)
                yield tally.progress(store)
            tally.end(namespace, keys, done)
        yield tally.progress(store)
