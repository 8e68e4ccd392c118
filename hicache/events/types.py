"""KV events as values.

`Stored` and `Removed` name pages by their page keys (`hicache.keys`). A scheduler does not hash keys for events: it
puts `StoredRun` and `RemovedRun` into a stream, and the reading thread computes the keys. All are named tuples,
because a scheduler creates one per change of its tree and a tuple costs a third of a dataclass.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

from ..keys import PAGE_KEY_BYTES, PageChain, split_keys

# `size_bytes` of an event is its approximate size in memory. Without tokens and keys it is this: the tuple, its
# dictionary entry and the object headers.
EVENT_OVERHEAD_BYTES = 256
# A page key as a separate object, with the reference to it.
_KEY_OBJECT_BYTES = PAGE_KEY_BYTES + 41


class Medium(enum.Enum):
    """A medium on which pages are stored."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


# The media's names on the wire, by `events.media`: those of vLLM, which Dynamo and llm-d know, and those of SGLang.
MEDIUM_NAMES = {
    "vllm": {Medium.DEVICE: "GPU", Medium.HOST: "CPU", Medium.STORAGE: "STORAGE"},
    "sglang": {Medium.DEVICE: "GPU", Medium.HOST: "CPU_PINNED", Medium.STORAGE: "EXTERNAL"},
}


class Origin(NamedTuple):
    """The owner of pages, as named by the engine: the LoRA adapter, the tenant's salt, the session whose turn stored
    the pages (other sessions may share them), and the engine's `extra_key`, which HiCache's own publisher does not
    send. Its repr hides all values."""

    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    extra_key: str | None = None

    def __repr__(self) -> str:
        return f"Origin({', '.join(name for name, value in self._asdict().items() if value is not None)})"


NO_ORIGIN = Origin()


class BlockLabels(NamedTuple):
    """Fields that an engine publishes with each block of a request: the adapter, and the kind of its KV cache."""

    lora_id: int | None = None
    lora_name: str | None = None
    spec_kind: str | None = None
    sliding_window: int | None = None


NO_LABELS = BlockLabels()


class PageBlocks(NamedTuple):
    """The blocks of an engine that form one page, for an engine that supplies the page keys.

    `hashes` are the engine's hashes of the blocks, 32 bytes each, joined. `parent` is the hash of the block before
    them; it is None if they begin a prompt. `tokens` are their tokens, uint32 little endian. `extra_keys` has one entry
    per block: the inputs other than tokens that its hash covers, as the engine publishes them. The repr hides all.
    """

    hashes: bytes
    parent: bytes | None
    tokens: bytes
    extra_keys: tuple[tuple[Any, ...] | None, ...]
    labels: BlockLabels = NO_LABELS

    def __repr__(self) -> str:
        return f"PageBlocks({len(self.hashes) // PAGE_KEY_BYTES} blocks)"

    @property
    def size_bytes(self) -> int:
        return EVENT_OVERHEAD_BYTES + len(self.hashes) + len(self.tokens)


class Stored(NamedTuple):
    """A run of consecutive pages is now on `medium`.

    `keys` are their page keys in the order of the chain. `parent` is the key of the page before the first; it is None
    if the run begins a prompt, and then `seed` is the start of the chain: empty, or a 32-byte digest of adapter and
    salt. `tokens` is the hashed sequence, uint32 little endian, with `page_size` positions per page and 4 bytes per
    position, or 8 if a position is a pair of tokens (bigrams, as in EAGLE). It is empty if tokens are withheld, or
    unknown because the engine supplies the page keys. Then `blocks` may have the engine's blocks of each page, None for
    a page whose blocks are unknown; it is empty if all are.
    """

    medium: Medium
    keys: tuple[bytes, ...]
    parent: bytes | None
    seed: bytes
    tokens: bytes
    page_size: int
    origin: Origin = NO_ORIGIN
    blocks: tuple[PageBlocks | None, ...] = ()

    def __repr__(self) -> str:
        tokens = f"{len(self.tokens)} bytes of tokens" if self.tokens else "no tokens"
        return f"Stored({self.medium.value}, {len(self.keys)} pages of {self.page_size}, {tokens})"

    @property
    def position_bytes(self) -> int:
        """Return the bytes per position: 4, or 8 for bigrams; 0 without tokens."""
        return len(self.tokens) // (len(self.keys) * self.page_size)

    @property
    def size_bytes(self) -> int:
        return EVENT_OVERHEAD_BYTES + len(self.tokens) + _KEY_OBJECT_BYTES * len(self.keys) + _blocks_bytes(self.blocks)

    def part(self, begin: int, end: int) -> Stored:
        """Return the event of the pages `begin ... end - 1` of this run."""
        page_bytes = len(self.tokens) // len(self.keys)
        tokens = self.tokens[begin * page_bytes : end * page_bytes]
        parent, seed = (self.keys[begin - 1], b"") if begin else (self.parent, self.seed)
        keys, blocks = self.keys[begin:end], self.blocks[begin:end]
        return self._replace(keys=keys, parent=parent, seed=seed, tokens=tokens, blocks=blocks)


class Removed(NamedTuple):
    """The pages `keys` are no longer on `medium`."""

    medium: Medium
    keys: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        return EVENT_OVERHEAD_BYTES + _KEY_OBJECT_BYTES * len(self.keys)


@dataclass(frozen=True, slots=True)
class Cleared:
    """All pages were removed from every medium, or their state is unknown."""

    size_bytes: ClassVar[int] = EVENT_OVERHEAD_BYTES


Event: TypeAlias = Stored | Removed | Cleared


class StoredRun(NamedTuple):
    """A `Stored` of `pages` pages whose keys may not be hashed yet.

    `keys` are the page keys, 32 bytes each, or a chain that ends with them and contains their parent. With keys,
    `prior` is the parent or the chain that contains it; it is a seed if the run `begins` a prompt."""

    medium: Medium
    pages: int
    keys: bytes | PageChain
    prior: bytes | PageChain
    begins: bool
    tokens: bytes
    page_size: int
    origin: Origin = NO_ORIGIN
    blocks: tuple[PageBlocks | None, ...] = ()

    def resolve(self) -> Stored:
        """Return the event, with its keys hashed. Any thread."""
        prior, keys = _resolved(self.keys, self.pages, self.prior)
        parent, seed = (None, prior) if self.begins else (prior, b"")
        return Stored(self.medium, keys, parent, seed, self.tokens, self.page_size, self.origin, self.blocks)

    @property
    def size_bytes(self) -> int:
        return EVENT_OVERHEAD_BYTES + len(self.tokens) + _KEY_OBJECT_BYTES * self.pages + _blocks_bytes(self.blocks)


class RemovedRun(NamedTuple):
    """A `Removed` of `pages` pages whose keys may not be hashed yet, as in `StoredRun`."""

    medium: Medium
    pages: int
    keys: bytes | PageChain

    def resolve(self) -> Removed:
        """Return the event, with its keys hashed. Any thread."""
        return Removed(self.medium, _resolved(self.keys, self.pages, b"")[1])

    @property
    def size_bytes(self) -> int:
        return EVENT_OVERHEAD_BYTES + _KEY_OBJECT_BYTES * self.pages


def _blocks_bytes(blocks: tuple[PageBlocks | None, ...]) -> int:
    return sum(page.size_bytes for page in blocks if page is not None)


def _resolved(keys: bytes | PageChain, pages: int, prior: bytes | PageChain) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the parent (or seed) and the keys. A chain may begin before the run, in pages that were split off."""
    if isinstance(keys, bytes):
        return prior if isinstance(prior, bytes) else prior.keys()[-1], tuple(split_keys(keys))
    found = keys.keys()
    above = len(found) - pages
    return found[above - 1] if above else keys.prior_key(), tuple(found[above:])


Recorded: TypeAlias = StoredRun | RemovedRun | Event


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """Counters since the start. `slow` counts batches that at least one subscriber did not get, `gaps` how often events
    were dropped before they were published, `refused` unlisted keys and malformed requests.
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
    """The interface of a publisher for the owner of a stream; `hicache.events.publisher` implements it."""

    def close(self, timeout_s: float) -> object:
        """Publish the remaining events and stop. Blocks for up to `timeout_s`."""

    def statistics(self) -> PublisherStatistics:
        """Return the counters. Any thread."""
