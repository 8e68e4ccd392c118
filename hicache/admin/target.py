"""AdminTarget: what the admin surface asks of the thing that it stands for, a daemon or an embedded cache.

Methods are called on threads of the admin surface, several at once, and may block for seconds; none is called on an
engine's scheduler thread. Each raises AdminError for a request that cannot be done, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ..backends.guard import Direction, Override
from .models import LookupRequest, PinRequest, PinStatus, Quota, Status
from .stores import ConfiguredStores, LiveStore

# Names of tiers and stores by (namespace in hexadecimal, page key).
Places: TypeAlias = dict[tuple[str, bytes], list[str]]


@dataclass(frozen=True, slots=True)
class MemoryPlaces:
    """What a lookup found in memory. `keys` are those that were asked for, in their order, none for a lookup by prefix;
    `complete` False: there are more, or the time was over."""

    keys: Sequence[bytes]
    places: Mapping[tuple[str, bytes], Sequence[str]]
    complete: bool


class AdminTarget(Protocol):
    """See the module's docstring. Namespaces are digests in hexadecimal; a prefix stands for all that begin with it."""

    @property
    def stores(self) -> ConfiguredStores:
        """The stores that the configuration names."""

    def live_stores(self) -> Sequence[LiveStore]:
        """Return the stores that are open, of each namespace in the order in which they are read."""

    def status(self) -> Status:
        """Return a snapshot."""

    def memory_places(self, request: LookupRequest, deadline: float) -> MemoryPlaces:
        """Return which pages are in memory. Changes nothing, not even recency."""

    def clear_memory(self, namespace: str) -> int:
        """Remove pages of namespaces from memory; return how many. Pages in use stay until they are not."""

    def stores_cleared(self, namespace: str) -> None:
        """Take note that pages of namespaces were removed from stores."""

    def pin(self, request: PinRequest) -> PinStatus:
        """Keep a chain in memory, as far as it is there."""

    def unpin(self, pin: str) -> None:
        """End a pin."""

    def pins(self) -> Sequence[PinStatus]:
        """Return the pins that hold."""

    def attach(self, store: str | None) -> None:
        """Use the configured storage, or one store of it alone. Returns before it is open."""

    def detach(self) -> None:
        """Use no storage. The backends are closed once no call of them is in flight."""

    def override(self, store: str | None, direction: Direction, mode: Override) -> None:
        """Force the breaker of a store, or of all, now and for stores that are opened later."""

    def quotas(self) -> Sequence[Quota]:
        """Return the quotas that are set."""

    def set_quota(self, namespace: str, quota_bytes: int | None) -> None:
        """Set the quota of a namespace, or remove it."""
