"""A sharded set: each page is on one of several parts, chosen only by its key.

Rendezvous hashing (Thaler and Ravishankar, 1998) finds the part of a page: each part's name gives the key a score, and
the part with the highest score has the page. So a chain spreads evenly over all parts and is read from all of them in
parallel. All engines that give the parts the same names agree. Adding or removing a part moves only the pages that it
gains or had; they are misses until stored again. The part of a page must not depend on its batch, so neighbouring pages
cannot be kept together.

A lookup sends each part its own keys of the prefix, in chain order. Each part returns its count before the first hole;
the first hole of the prefix is the earliest of these. The result is exact and takes one call per part.

A part that evicts can drop tails before heads only if it knows each page's parent. The parent in the chain is usually
on another part. Therefore each part gets the previous page on that same part as parent, while the header of the stored
page names the parent in the chain (see ShardCodec). For the first page of a batch, the part's previous page is known if
this object stored the preceding batch and not too many batches since. Otherwise the chain's parent is passed on, which
the part treats as none.

If a part is down, its pages are ERROR and a prefix ends before the first of them; the other parts still work.

Locking design: `_tails` and `_parents` guard themselves. During a verb, the threads of a SupervisedPool and the caller
each call one part, on that part's pages only, and write the answers of their own positions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import xxhash

from ... import tracing
from ...errors import InvalidInput
from ...frame import FrameCodec, FrameHeader, PageBuffer, header_of
from ...supervised import SupervisedPool
from ..base import GetOutcome, SetOutcome, Usage
from ..calls import Call, parent_outside, parents_of
from ..chains import parent_in
from .composed import Composed, Part

Answer = TypeVar("Answer")
Value = TypeVar("Value")

# Chains whose last pages are remembered. Each takes about 100 bytes plus 8 per part, so all take a few MiB.
TAILS_MAX = 16_384
# Pages whose parents are remembered while they are stored, about 200 bytes each: more than can be in flight at once.
PARENTS_MAX = 65_536


class Placement:
    """Decides which part has a page. Immutable. REQUIRES: the names are different."""

    def __init__(self, names: Sequence[str]) -> None:
        self._seeds = [xxhash.xxh3_64_intdigest(name.encode()) for name in names]

    def part_of(self, key: bytes) -> int:
        """Return the number of the part whose name gives `key` the highest score."""
        scores = [xxhash.xxh3_64_intdigest(key, seed) for seed in self._seeds]
        return scores.index(max(scores))

    def positions(self, keys: Sequence[bytes]) -> dict[int, list[int]]:
        """Return the ascending positions of the keys, by part; parts without keys are left out."""
        found: dict[int, list[int]] = {}
        for position, key in enumerate(keys):
            found.setdefault(self.part_of(key), []).append(position)
        return found


class _Latest(Generic[Value]):
    """The latest entries by page key; beyond `entries_max` the oldest are dropped.

    Locking design: a lock is held while entries are noted or looked up. Values are never changed.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self._lock = threading.Lock()
        self._entries: dict[bytes, Value] = {}  # the latest last

    def get(self, key: bytes, default: Value) -> Value:
        """Return the value of `key`, or `default` if there is none."""
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
    """The codec of all parts of a sharded set. It works as `codec`, but the header gets the parent in the chain. The
    parent that a part passes is ignored: it is the previous page on that part.

    `parents` maps each page being stored to its parent. A key identifies the whole prefix of its page, so concurrent
    calls that store the same page agree on its parent.
    """

    def __init__(self, codec: FrameCodec) -> None:
        vars(self).update(vars(codec))  # shares namespace, secret keys and buffers: this acts as the same codec
        self._codec = codec
        self.parents = _Latest[bytes | None](PARENTS_MAX)

    def parent_of(self, key: bytes, page: PageBuffer, parent: bytes | None) -> bytes | None:
        """See FrameCodec. For a page not stored through the set: a copy keeps the parent in its header; a new page,
        such as a probe's, gets `parent`."""
        before = self.parents.get(key, b"")
        if before == b"":
            header = FrameHeader.parse(header_of(page))
            before = parent if header is None or header.page_key != key else parent_in(header)
        return self._codec.parent_of(key, page, before)


class Shards(Composed):
    """Several parts, each with a share of the pages. See the module's docstring, and Composed.

    Thread-safe. Owns `parts`, which were opened with `codec`. A part's name decides which pages it has, so a renamed
    part counts as a new one. `tails_max` limits the chains whose last pages are remembered. Raises InvalidInput for
    fewer than two parts or equal names.
    """

    def __init__(self, codec: ShardCodec, parts: Sequence[Part], *, tails_max: int = TAILS_MAX) -> None:
        if len({part.name for part in parts}) != len(parts) or len(parts) < 2:
            raise InvalidInput(
                f"sharded: the {len(parts)} parts are too few or have equal names; use two or more different names"
            )
        super().__init__(codec, parts)
        self._parents = codec.parents
        self.placement = Placement(self._names)
        self._tails = _Latest[Mapping[int, bytes]](tails_max)  # by last page of a chain: its last page on each part
        # Enough threads for two verbs at once; each verb serves one part on its caller's thread.
        self._pool = SupervisedPool[Any]("shard", 2 * (len(parts) - 1))

    def _on_parts(self, keys: Sequence[bytes], work: Callable[[int, list[int], list[bytes]], None]) -> None:
        """Call `work(part, positions, its keys)` in parallel for each part with any of `keys`, until all have ended."""
        shares = list(self.placement.positions(keys).items())

        def share(number: int) -> None:
            part, positions = shares[number]
            work(part, positions, [keys[p] for p in positions])

        self._pool.run(len(shares), tracing.carried(share))

    def _ask_parts(
        self, keys: Sequence[bytes], failed: Answer, ask: Callable[[int, list[int], list[bytes]], list[Answer]]
    ) -> list[Answer]:
        """Return the answer for each key from its part; `failed` for the keys of a part that raises."""
        answers = [failed] * len(keys)

        def work(part: int, positions: list[int], its: list[bytes]) -> None:
            for position, answer in zip(positions, ask(part, positions, its), strict=True):
                answers[position] = answer

        self._on_parts(keys, work)
        return answers

    def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
        """See Verbs. One call per part."""
        holes = [len(keys)]

        def look(part: int, positions: list[int], its: list[bytes]) -> None:
            hole = 0
            try:
                hole = self._parts[part].batch_exists(its, deadline=call.deadline, errors=call.report)
            finally:
                if hole < len(positions):
                    holes.append(positions[hole])

        self._on_parts(keys, look)
        return min(holes)

    def _has(self, call: Call, keys: Sequence[bytes]) -> list[bool]:
        """See Verbs. One call per part."""
        return self._ask_parts(keys, False, lambda part, positions, its: self._parts[part].batch_has(
            its, deadline=call.deadline, errors=call.report
        ))

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        """See Verbs. Reads all parts in parallel."""
        return self._ask_parts(keys, GetOutcome.ERROR, lambda part, positions, its: self._parts[part].batch_get(
            its, [pages[p] for p in positions], deadline=call.deadline, errors=call.report
        ))

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        """See Verbs. Writes all parts in parallel, with one call each."""
        before = {} if parent is None else self._tails.get(parent, {})
        lasts: dict[int, bytes] = {}

        def store(part: int, positions: list[int], its: list[bytes]) -> list[SetOutcome]:
            last = parent_outside(its, before.get(part, parent))
            answers = self._parts[part].batch_set(
                its, [pages[p] for p in positions], parent=last, deadline=call.deadline, errors=call.report
            )
            lasts[part] = its[-1]
            return answers

        self._parents.note(keys, parents_of(keys, parent))
        outcomes = self._ask_parts(keys, SetOutcome.ERROR, store)
        self._tails.note(keys[-1:], [{**before, **lasts}])
        return outcomes

    def _touch(self, call: Call, keys: list[bytes]) -> list[bytes]:
        """See Verbs. Calls all parts in parallel."""
        missing: list[bytes] = []
        self._on_parts(keys, lambda part, positions, its: missing.extend(
            self._parts[part].batch_touch(its, deadline=call.deadline, errors=call.report)
        ))
        return missing

    def _delete(self, call: Call, keys: list[bytes]) -> int:
        """See Verbs. Removes a page only from its own part: if a different set of parts stored it elsewhere, that copy
        stays until it is evicted."""
        removed: list[int] = []
        self._on_parts(keys, lambda part, positions, its: removed.append(
            self._parts[part].delete(its, deadline=call.deadline, errors=call.report)
        ))
        return sum(removed)

    def _clear(self, call: Call) -> int:
        """See Verbs. Clears all parts in parallel, including pages that a different set of parts stored."""
        removed: list[int] = []
        self._pool.run(len(self._parts), lambda part: removed.append(
            self._parts[part].clear(deadline=call.deadline, errors=call.report)
        ))
        return sum(removed)

    def _measure(self) -> Usage:
        """See Verbs. Returns the sum over the parts, with a capacity if all parts have one."""
        return Usage.total([part.usage() for part in self._parts])

    def _before_parts_close(self) -> None:
        self._pool.close()
