"""AdminTarget: the interface of a daemon or an embedded cache for the admin surface.

Threads of the admin surface call the methods, several at the same time; they may block for seconds, and are not called
on an engine's scheduler thread. Each raises AdminError for an impossible request, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ..backends.base import Direction
from ..backends.guard import Override
from ..clock import Clock
from ..hints import HintsEnvelope, Outcome
from .models import Explanation, LookupRequest, PinRequest, PinStatus, Quota, Status, TokenPrefix
from .stores import ConfiguredStores, LiveStore

# Names of tiers and stores by (namespace in hexadecimal, page key).
Places: TypeAlias = dict[tuple[str, bytes], list[str]]
# Page keys, root first, or the tokens of a prompt.
Chain: TypeAlias = Sequence[bytes] | TokenPrefix


@dataclass(frozen=True, slots=True)
class MemoryPlaces:
    """The result of a lookup in memory. `keys` are the requested ones in order, empty for a lookup by prefix;
    `complete` False: there are more, or the time was over."""

    keys: Sequence[bytes]
    places: Mapping[tuple[str, bytes], Sequence[str]]
    complete: bool


@dataclass(frozen=True, slots=True)
class Warmed:
    """The result of a piece of a warm-up: the first `pages` of the chain are in memory, the last `read_pages` of them
    since this piece. `is_full`: no page of `page_bytes` fits into memory without an eviction."""

    pages: int
    read_pages: int
    page_bytes: int
    is_full: bool


class AdminTarget(Protocol):
    """See the module's docstring. Namespaces are digests in hexadecimal; a prefix means all that begin with it."""

    @property
    def clock(self) -> Clock:
        """The clock of deadlines."""

    @property
    def stores(self) -> ConfiguredStores:
        """The configured stores."""

    def live_stores(self) -> Sequence[LiveStore]:
        """Return the open stores, for each namespace in the order of reads."""

    def status(self) -> Status:
        """Return a snapshot."""

    def memory_places(self, request: LookupRequest, deadline: float) -> MemoryPlaces:
        """Return the locations of pages in memory. Changes nothing, not even recency."""

    def clear_memory(self, namespace: str) -> int:
        """Remove pages of namespaces from memory; return their number. Pages in use stay until their last use ends."""

    def stores_cleared(self, namespace: str) -> None:
        """Record that pages of namespaces were removed from stores."""

    def page_keys(self, chain: Chain) -> Sequence[bytes]:
        """Return the page keys of a chain for `warm`. Raises AdminError for chains that cannot be read into memory."""

    def warm(self, namespace: str, chain: Chain, bytes_max: int) -> Warmed:
        """Read the next pages of a chain from storage into free memory: at most `bytes_max`, but at least one page.
        Evicts nothing. For 0, read nothing, and count all stored pages as read. `namespace` is a whole digest."""

    def pin(self, request: PinRequest) -> PinStatus:
        """Keep those pages of a chain that are in memory."""

    def unpin(self, pin: str) -> None:
        """End a pin."""

    def pins(self) -> Sequence[PinStatus]:
        """Return the active pins."""

    def explain(self, rid: str | None, last: int, prompt: LookupRequest | None = None) -> Explanation:
        """Return where tokens came from, with the account of `rid`, the last accounts, or that of a `prompt` now."""

    def hint(self, envelope: HintsEnvelope) -> Sequence[Outcome]:
        """Carry out hints that do not come with a request. Return an outcome for each action."""

    def attach(self, store: str | None) -> None:
        """Use the configured storage, or only one store of it. Returns before it is open."""

    def detach(self) -> None:
        """Stop using storage. The backends are closed after their last call."""

    def override(self, store: str | None, direction: Direction, mode: Override) -> None:
        """Force the breaker of a store, or of all, also for stores that are opened later."""

    def quotas(self) -> Sequence[Quota]:
        """Return the quotas."""

    def set_quota(self, namespace: str, quota_bytes: int | None) -> None:
        """Set the quota of a namespace, or remove it."""
