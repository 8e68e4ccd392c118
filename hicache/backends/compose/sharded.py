"""A sharded set: each page on one of several parts, chosen by its key alone.

The part of a page is found by rendezvous hashing (Thaler and Ravishankar, 1998): every part's name gives each key a
number, and the part with the largest has the page. So a chain spreads evenly over all parts and is read from all of
them at once; all engines that give the parts the same names agree; and a part that is added or removed moves only the
pages that it wins or had. Those are misses until they are stored again. What a key says about its page's place must
not depend on the batch it comes in, so runs of neighbours cannot be kept together.

A lookup asks each part for its own keys of the prefix, in order. Each answers with the number before its first hole,
and the first hole of the whole is the smallest of their positions: exact, in one call of each part.

Parts that evict drop tails before heads if they know which page comes before which. The page before is mostly on
another part, so each part is told the last page before it on that part, while the header of the stored page names the
page that comes before in the chain: see ShardCodec. For the first page of a batch the part's last page is known if the
batch before it was stored through this object, and not too many others since; otherwise the parent is passed on as it
is, and counts as none.

A part that is down makes its pages ERROR and the prefix end before the first of them; the others go on.

Locking design: `_tails` and `_parents` guard themselves. During a verb the threads of a SupervisedPool and the caller
call one part each, on pages that are that part's alone, and fill in the answers of their own positions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import xxhash

from ...errors import InvalidInput
from ...frame import Damage, FrameCodec, FrameHeader, PageBuffer, TagStream, header_of
from ...supervised import SupervisedPool
from ..base import GetOutcome, SetOutcome, Usage, touch
from ..calls import parent_outside, parents_of
from ..chains import parent_in
from ..envelope import Touchable
from .composed import INTERNAL, ComposedBackend, Part

Answer = TypeVar("Answer")
Value = TypeVar("Value")

# Chains whose last pages are remembered. At some 100 bytes and 8 for each part they take a few MiB.
TAILS_MAX = 16_384
# Pages whose parents are known while they are stored, at some 200 bytes each: more than can be in flight at once.
PARENTS_MAX = 65_536


class Placement:
    """Which part has a page. Holds nothing that changes. REQUIRES: the names are different."""

    def __init__(self, names: Sequence[str]) -> None:
        self._seeds = [xxhash.xxh3_64_intdigest(name.encode()) for name in names]

    def part_of(self, key: bytes) -> int:
        """The number of the part whose name gives this key the largest hash."""
        scores = [xxhash.xxh3_64_intdigest(key, seed) for seed in self._seeds]
        return scores.index(max(scores))

    def positions(self, keys: Sequence[bytes]) -> dict[int, list[int]]:
        """Ascending positions of the keys of each part that has any."""
        found: dict[int, list[int]] = {}
        for position, key in enumerate(keys):
            found.setdefault(self.part_of(key), []).append(position)
        return found


class _Latest(Generic[Value]):
    """The entries by page key that were noted last; beyond `entries_max` the oldest go.

    Locking design: a lock is held while entries are noted or looked up. Values are never changed.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._lock = threading.Lock()
        self._entries: dict[bytes, Value] = {}  # the latest last

    def get(self, key: bytes, default: Value) -> Value:
        """Return the value of `key`, or `default` if it is not known."""
        with self._lock:
            return self._entries.get(key, default)

    def note(self, keys: Iterable[bytes], values: Iterable[Value]) -> None:
        """Remember a value for each key."""
        with self._lock:
            for key, value in zip(keys, values, strict=True):
                self._entries.pop(key, None)
                self._entries[key] = value
            while len(self._entries) > self._entries_max:
                del self._entries[next(iter(self._entries))]


class ShardCodec(FrameCodec):
    """The codec of all parts of a sharded set: as `codec`, but the parent that it seals is the page before in the chain
    and not the one before on that part, which is what the part gives it.

    `parents` are the pages before those that are being stored. A key names the whole prefix of its page, so calls that
    store a page at once agree on its parent.
    """

    def __init__(self, codec: FrameCodec) -> None:
        vars(self).update(vars(codec))  # one namespace, one set of keys and buffers: this is the same codec
        self._codec = codec
        self.parents = _Latest[bytes | None](PARENTS_MAX)

    def seal_buffers(self, key: bytes, page: PageBuffer, *, parent: bytes | None = None) -> list[memoryview]:
        """See FrameCodec. A copy of a page keeps the parent in its header; of a new one that is not stored through the
        set, such as a probe, `parent` counts."""
        before = self.parents.get(key, b"")
        if before == b"":
            header = FrameHeader.parse(header_of(page))
            before = parent if header is None or header.page_key != key else parent_in(header)
        return self._codec.seal_buffers(key, page, parent=before)

    def accept(
        self, key: bytes, page: PageBuffer, stored_bytes: int, arrived: TagStream | None = None
    ) -> Damage | None:
        """See FrameCodec."""
        return self._codec.accept(key, page, stored_bytes, arrived)


class ShardedBackend(ComposedBackend, Touchable):
    """Several backends with a share of the pages each. See the module's docstring, and ComposedBackend.

    Thread-safe; owns `parts`, which were opened with `codec` and of which there are at least two. Their names decide
    which pages they have: a part that is renamed is a new one. `tails_max` bounds the chains whose last pages are
    remembered. Raises InvalidInput for less than two parts, or for two of one name.
    """

    def __init__(self, codec: ShardCodec, parts: Sequence[Part], *, tails_max: int = TAILS_MAX) -> None:
        if len({part.name for part in parts}) != len(parts) or len(parts) < 2:
            raise InvalidInput(f"sharded: two or more parts of different names are needed, got {len(parts)}")
        super().__init__(codec, parts)
        self._parents = codec.parents
        self.placement = Placement(self._names)
        self._tails = _Latest[Mapping[int, bytes]](tails_max)  # by the end of a chain: its last page on each part
        # Two verbs at once find a thread each for every part but the one that they serve themselves.
        self._pool = SupervisedPool[Any](
            "shard", 2 * (len(parts) - 1), on_error=lambda: self._calls.count(errors=[INTERNAL])
        )

    def _on_parts(self, keys: Sequence[bytes], work: Callable[[int, list[int]], None]) -> None:
        """`work(part, positions)` for each part that has any of `keys`, at once; returns when all of them have."""
        shares = list(self.placement.positions(keys).items())
        self._pool.run(len(shares), lambda number: work(*shares[number]))

    def _ask_parts(
        self, keys: Sequence[bytes], failed: Answer, ask: Callable[[int, list[int]], list[Answer]]
    ) -> list[Answer]:
        """The answer for each key by the part that it belongs to; `failed` for those of a part that raises."""
        answers = [failed] * len(keys)

        def work(part: int, positions: list[int]) -> None:
            for position, answer in zip(positions, ask(part, positions), strict=True):
                answers[position] = answer

        self._on_parts(keys, work)
        return answers

    def prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope. One call of each part."""
        holes = [len(keys)]

        def look(part: int, positions: list[int]) -> None:
            hole = 0
            try:
                hole = self._parts[part].batch_exists([keys[p] for p in positions], deadline=deadline)
            finally:
                if hole < len(positions):
                    holes.append(positions[hole])

        self._on_parts(keys, look)
        return min(holes)

    def has(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Envelope. One call of each part."""

        def look(part: int, positions: list[int]) -> list[bool]:
            return self._parts[part].batch_has([keys[p] for p in positions], deadline=deadline)

        return self._ask_parts(keys, False, look)

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope. All parts at once."""

        def read(part: int, positions: list[int]) -> list[GetOutcome]:
            its, its_pages = [keys[p] for p in positions], [pages[p] for p in positions]
            return self._parts[part].batch_get(its, its_pages, deadline=deadline)

        return self._ask_parts(keys, GetOutcome.ERROR, read)

    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See Envelope. All parts at once, one call each."""
        before = {} if parent is None else self._tails.get(parent, {})
        lasts: dict[int, bytes] = {}

        def store(part: int, positions: list[int]) -> list[SetOutcome]:
            its, its_pages = [keys[p] for p in positions], [pages[p] for p in positions]
            last = parent_outside(its, before.get(part, parent))
            answers = self._parts[part].batch_set(its, its_pages, parent=last, deadline=deadline)
            lasts[part] = its[-1]
            return answers

        self._parents.note(keys, parents_of(keys, parent))
        outcomes = self._ask_parts(keys, SetOutcome.ERROR, store)
        self._tails.note(keys[-1:], [{**before, **lasts}])
        return outcomes

    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        """See Touchable. All parts at once."""
        missing: list[bytes] = []

        def note(part: int, positions: list[int]) -> None:
            missing.extend(touch(self._parts[part], [keys[p] for p in positions], deadline=deadline))

        self._on_parts(keys, note)
        return missing

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope. A page is asked for where it belongs, so one that another set of parts has left behind
        elsewhere stays until it is evicted there."""
        removed: list[int] = []

        def remove(part: int, positions: list[int]) -> None:
            removed.append(self._parts[part].delete([keys[p] for p in positions], deadline=deadline))

        self._on_parts(keys, remove)
        return sum(removed)

    def remove_all(self, deadline: float) -> int:
        """See Envelope. Clears all parts at once, also of pages that another set of parts has left behind."""
        removed: list[int] = []
        self._pool.run(len(self._parts), lambda part: removed.append(self._parts[part].clear(deadline=deadline)))
        return sum(removed)

    def measure(self) -> Usage:
        """See Envelope. The sum over the parts, with a capacity if all of them have one."""
        return Usage.total([part.usage() for part in self._parts])

    def _before_parts_close(self) -> None:
        self._pool.close()
