"""What happens to cached pages, as values.

`Stored` and `Removed` name pages by their page keys (`hicache.keys`). A scheduler does not hash keys for events: it
puts `StoredRun` and `RemovedRun` into a stream, and the thread that reads them finds the keys. All are named tuples and
not data classes: a scheduler makes one per change of its tree, and a tuple costs a third.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from ..keys import PAGE_KEY_BYTES, PageChain, split_keys

# What an event weighs beside its tokens and keys: the tuple, its place in a dictionary and the heads of its parts.
EVENT_OVERHEAD_BYTES = 256
# A page key as an object of its own, with the reference to it.
_KEY_OBJECT_BYTES = PAGE_KEY_BYTES + 41


class Medium(enum.Enum):
    """Where pages lie."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Origin(NamedTuple):
    """Whose pages these are, as far as the engine has told: the LoRA adapter, the tenant's salt, and the session whose
    turn has stored the pages, which other sessions may share. Its repr shows no salt and no session."""

    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None

    def __repr__(self) -> str:
        return f"Origin({', '.join(name for name, value in self._asdict().items() if value is not None)})"


NO_ORIGIN = Origin()


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
    origin: Origin = NO_ORIGIN

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
    """The pages `keys` are no longer on `medium`."""

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


class StoredRun(NamedTuple):
    """A `Stored` of `pages` pages whose keys may not be hashed yet. `keys` are the page keys, 32 bytes each, or a chain
    that ends with them and knows what they are chained from. Beside keys, `prior` is that, or the chain that has it: a
    seed if the run `begins` a prompt."""

    medium: Medium
    pages: int
    keys: bytes | PageChain
    prior: bytes | PageChain
    begins: bool
    tokens: bytes
    page_size: int
    origin: Origin = NO_ORIGIN

    def resolve(self) -> Stored:
        """The event itself. Any thread; hashes what is not hashed yet."""
        prior, keys = _resolved(self.keys, self.pages, self.prior)
        parent, seed = (None, prior) if self.begins else (prior, b"")
        return Stored(self.medium, keys, parent, seed, self.tokens, self.page_size, self.origin)

    @property
    def size_bytes(self) -> int:
        """As of `Stored`."""
        return EVENT_OVERHEAD_BYTES + len(self.tokens) + _KEY_OBJECT_BYTES * self.pages


class RemovedRun(NamedTuple):
    """A `Removed` of `pages` pages whose keys may not be hashed yet, as of `StoredRun`."""

    medium: Medium
    pages: int
    keys: bytes | PageChain

    def resolve(self) -> Removed:
        """The event itself. Any thread; hashes what is not hashed yet."""
        return Removed(self.medium, _resolved(self.keys, self.pages, b"")[1])

    @property
    def size_bytes(self) -> int:
        """As of `Removed`."""
        return EVENT_OVERHEAD_BYTES + _KEY_OBJECT_BYTES * self.pages


def _resolved(keys: bytes | PageChain, pages: int, prior: bytes | PageChain) -> tuple[bytes, tuple[bytes, ...]]:
    """What the keys are chained from, and the keys. A chain may begin above the run, in pages that were split off."""
    if isinstance(keys, bytes):
        return prior if isinstance(prior, bytes) else prior.keys()[-1], tuple(split_keys(keys))
    found = keys.keys()
    above = len(found) - pages
    return found[above - 1] if above else keys.prior_key(), tuple(found[above:])


Recorded: TypeAlias = StoredRun | RemovedRun | Event


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
