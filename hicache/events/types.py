"""What happens to cached pages, as values.

`Stored` and `Removed` name pages by their page keys (`hicache.keys`). They are named tuples and not data classes: a
scheduler makes one per change of its tree, and a tuple costs a third.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from ..keys import PAGE_KEY_BYTES

# What an event weighs beside its tokens and keys: the tuple, its place in a dictionary and the heads of its parts.
EVENT_OVERHEAD_BYTES = 256
# A page key as an object of its own, with the reference to it.
_KEY_OBJECT_BYTES = PAGE_KEY_BYTES + 41


class Medium(enum.Enum):
    """Where pages lie."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Stored(NamedTuple):
    """A run of consecutive pages is now on `medium`.

    `keys` are their page keys in the order of the chain. `parent` is the key of the page before the first, None where
    the run begins a prompt; then `seed` is what the chain starts from: empty, or a 32-byte digest of adapter and salt.
    `tokens` is the sequence that was hashed, uint32 little endian, `page_size` positions a page and 4 bytes a position,
    or 8 where a position is a pair of tokens (bigrams, as EAGLE has them); empty if they are withheld, or not known
    because the engine gives the page keys.
    """

    medium: Medium
    keys: tuple[bytes, ...]
    parent: bytes | None
    seed: bytes
    tokens: bytes
    page_size: int

    def __repr__(self) -> str:
        tokens = f"{len(self.tokens)} bytes of tokens" if self.tokens else "no tokens"
        return f"Stored({self.medium.value}, {len(self.keys)} pages of {self.page_size}, {tokens})"

    @property
    def position_bytes(self) -> int:
        """4, or 8 for bigrams; 0 without tokens."""
        return len(self.tokens) // (len(self.keys) * self.page_size)

    @property
    def size_bytes(self) -> int:
        """About what the event takes in memory."""
        return EVENT_OVERHEAD_BYTES + len(self.tokens) + _KEY_OBJECT_BYTES * len(self.keys)


class Removed(NamedTuple):
    """The pages `keys` are no longer on `medium`; what was known to continue them has left it before."""

    medium: Medium
    keys: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        """About what the event takes in memory."""
        return EVENT_OVERHEAD_BYTES + _KEY_OBJECT_BYTES * len(self.keys)


@dataclass(frozen=True, slots=True)
class Cleared:
    """All pages are gone, from every medium, or where they are is unknown."""

    @property
    def size_bytes(self) -> int:
        """About what the event takes in memory."""
        return EVENT_OVERHEAD_BYTES


Event: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """Counters since the start. `slow` counts batches that some subscriber did not get, `gaps` how often events were
    dropped before they were published, `refused` keys that are not on the list and malformed requests.
    """

    alive: bool
    batches: int
    events: int
    slow: int
    gaps: int
    replays: int
    refused: int
    errors: dict[str, int]


class Publisher(Protocol):
    """Publishes a stream, as the owner of the stream sees it; `hicache.events.publisher` has one."""

    def close(self, timeout_s: float) -> object:
        """Publish what is in the stream and end. Blocks for up to `timeout_s`."""

    def statistics(self) -> PublisherStatistics:
        """A snapshot of the counters. Any thread."""
