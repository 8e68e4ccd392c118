"""What happens to cached pages, as values.

`Stored` and `Removed` name pages by their page keys (`hicache.keys`). `Batch`, `Gap` and `Snapshot` are what a reader
of an `EventStream` gets. The events are named tuples and not data classes: a scheduler makes one per change of its
tree, and a tuple costs a third.
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
    def prior(self) -> bytes:
        """What the first key is chained from; `page_keys(tokens, ..., prior)` gives `keys` again."""
        return self.seed if self.parent is None else self.parent

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
    """All pages are gone, from every medium."""

    @property
    def size_bytes(self) -> int:
        """About what the event takes in memory."""
        return EVENT_OVERHEAD_BYTES


Event: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive events; `first` is the sequence number of the first. Empty if nothing has happened."""

    first: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """The `count` events from number `first` on were dropped before they were read: what they changed is unknown."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole tree as it was after all events below number `first`, parents before children."""

    first: int
    events: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """Counters since the start, and the replay buffer now. `slow` counts batches that some subscriber did not get,
    `gaps` how often events were dropped before they were published, `refused` keys that are not on the list and
    requests that are none.
    """

    alive: bool
    batches: int
    events: int
    bytes: int
    slow: int
    gaps: int
    snapshots: int
    replays: int
    refused: int
    replay_batches: int
    replay_bytes: int
    errors: dict[str, int]


class Publisher(Protocol):
    """Who takes a stream elsewhere, as the owner of the stream sees it; `hicache.events.publisher` has one."""

    def close(self, timeout_s: float) -> object:
        """Publish what is in the stream and end. Blocks for up to `timeout_s`."""

    def statistics(self) -> PublisherStatistics:
        """A snapshot of the counters. Any thread."""
