"""What becomes of the pages of one batch: chunk by chunk to the network and back, codes into outcomes.

Locking design: a batch belongs to the thread of its verb. `Parts` are shared, and nothing here changes them but the
road, which is one reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...frame import Damage, FrameCodec
from ..base import GetOutcome, SetOutcome
from ..calls import parents_of
from . import codes
from .client import Client
from .lanes import Lane, Roads
from .options import MIB
from .runner import Runner

# One library call moves about so much, some 10 to 100 ms: far more work than the call itself is, and soon enough over
# for the deadline to be looked at.
_CHUNK_BYTES = 128 * MIB
# A full store evicts in the background, and has room after some 10 ms if it can evict anything.
FULL_WAIT_S = 0.02
FULL_TRIES = 25


class Names:
    """The keys of one namespace's pages in the store: `prefix`, the namespace, "/", the page key, in hexadecimal."""

    def __init__(self, prefix: str, namespace: bytes) -> None:
        self._start = f"{prefix}{namespace.hex()}/"

    def of(self, keys: Sequence[bytes]) -> list[str]:
        """The names of `keys`."""
        return [self._start + key.hex() for key in keys]


@dataclass(frozen=True, slots=True)
class Parts:
    """What batches work with."""

    codec: FrameCodec
    names: Names
    client: Client
    roads: Roads
    runner: Runner

    @property
    def chunk_pages(self) -> int:
        """Pages of one library call."""
        return max(1, _CHUNK_BYTES // self.codec.frame_bytes)

    def ask(self, call: Callable[[], list[int]], deadline: float) -> list[int] | str:
        """What a library call that touches no frame says, or the class of error if it says nothing in time."""
        if time.monotonic() >= deadline:
            return "deadline"
        result = self.runner.run(call, deadline, late=lambda: None)
        if result is None or any(map(codes.is_slow, result)):
            self.roads.slow = True
        return "timeout" if result is None else result

    def moved(self, result: list[int] | None) -> list[int] | str:
        """`result` of a call that moves pages, or the class of error if it has none. Frames are copied from a slow
        failure until pages have been moved again: that the master answers says nothing of the owners of pages."""
        if result is None or any(map(codes.is_slow, result)):
            self.roads.slow = True
        elif any(code >= 0 for code in result):
            self.roads.slow = False
        return "timeout" if result is None else result


class Reads:
    """One `batch_get`: `outcomes` by position, and what is to be counted."""

    def __init__(self, parts: Parts, keys: Sequence[bytes], frames: Sequence[memoryview], deadline: float) -> None:
        self.outcomes = [GetOutcome.ERROR] * len(keys)
        self.errors: list[str] = []
        self.corrupt: list[str] = []
        self._parts = parts
        self._keys = keys
        self._frames = frames
        self._deadline = deadline

    def run(self) -> None:
        """Read all pages, as far as the deadline allows."""
        start, count = 0, len(self._keys)
        while start < count:
            if time.monotonic() >= self._deadline:
                self.errors += ["deadline"] * (count - start)
                return
            with self._parts.roads.lane(self._frames[start : start + self._parts.chunk_pages], self._deadline) as lane:
                if lane is None:
                    self.errors += ["staging"] * (count - start)
                    return
                self._read(start, lane)
                start += len(lane.buffers)

    def _read(self, start: int, lane: Lane) -> None:
        keys = self._keys[start : start + len(lane.buffers)]
        names = self._parts.names.of(keys)
        sizes = [self._parts.codec.frame_bytes] * len(names)
        found = self._parts.moved(
            lane.run(lambda: self._parts.client.get(names, lane.addresses, sizes), self._deadline)
        )
        if isinstance(found, str):
            self.errors += [found] * len(keys)
            return
        damaged: list[str] = []
        for index, code in enumerate(found):
            outcome = self._judge(keys[index], names[index], lane, index, code)
            self.outcomes[start + index] = outcome
            if outcome is GetOutcome.CORRUPT:
                damaged.append(names[index])
        if damaged:
            self._remove(damaged)

    def _judge(self, key: bytes, name: str, lane: Lane, index: int, code: int) -> GetOutcome:
        if code in codes.MISSES:
            return GetOutcome.MISS
        reason: str | None
        if code >= 0:
            damage: Damage | None = Damage.SIZE
            if self._parts.codec.fits(code):
                lane.fetch(index, code)
                damage = self._parts.codec.accept(key, lane.buffers[index], code)
            if damage is not None and damage.is_misfit:
                self.errors.append(damage.value)
                return GetOutcome.MISS
            reason = damage
        elif code == codes.CHECKSUM:
            reason = "checksum"
        elif code == codes.BAD_PARAMETER and self._is_too_long(name):
            reason = "size"
        else:
            self.errors.append(codes.class_of(code))
            return GetOutcome.ERROR
        if reason is None:
            return GetOutcome.HIT
        self.corrupt.append(str(reason))
        return GetOutcome.CORRUPT

    def _is_too_long(self, name: str) -> bool:
        """Whether the library has refused a page because it is longer than a frame."""
        found = self._parts.ask(lambda: self._parts.client.sizes([name]), self._deadline)
        return not isinstance(found, str) and found[0] > self._parts.codec.frame_bytes

    def _remove(self, names: list[str]) -> None:
        """Remove damaged pages, in spite of the lease that reading them has granted. What another process has stored
        under the name since then goes too: the store cannot tell."""
        found = self._parts.ask(lambda: self._parts.client.remove(names, force=True), self._deadline)
        if isinstance(found, str):
            self.errors.append(found)
        else:
            self.errors += [codes.class_of(code) for code in found if code < 0 and code not in codes.MISSES]


class Writes:
    """One `batch_set`: `outcomes` by position, and what is to be counted.

    Pages are stored head first; behind one that was turned away nothing is left that was not there before.
    """

    def __init__(
        self,
        parts: Parts,
        keys: Sequence[bytes],
        frames: Sequence[memoryview],
        parent: bytes | None,
        deadline: float,
    ) -> None:
        self.errors: list[str] = []
        self._parts = parts
        self._keys = keys
        self._frames = frames
        self._parents = parents_of(keys, parent)
        self._deadline = deadline
        self._known: dict[bytes, SetOutcome] = {}
        self._full = False  # a page was turned away
        self._was_full = False  # the store had to make room, or was asked to

    def run(self) -> list[SetOutcome]:
        """Store all pages, as far as the deadline allows; one outcome per key."""
        # A key that comes twice is stored once: the library would call the second store a success too.
        places: dict[bytes, int] = {}
        for position, key in enumerate(self._keys):
            places.setdefault(key, position)
        first = list(places.values())
        for start in range(0, len(first), self._parts.chunk_pages):
            self._store(first[start : start + self._parts.chunk_pages])
        if self._was_full:
            self._settle(list(places))
        outcomes: list[SetOutcome] = []
        seen: set[bytes] = set()
        for key in self._keys:
            outcome = self._known[key]
            outcomes.append(SetOutcome.PRESENT if key in seen and outcome.is_stored else outcome)
            seen.add(key)
        return outcomes

    def _store(self, positions: list[int]) -> None:
        """Store the pages at `positions` that are not there."""
        keys = [self._keys[position] for position in positions]
        names = self._parts.names.of(keys)
        found = self._parts.ask(lambda: self._parts.client.exist(names), self._deadline)
        if isinstance(found, str):
            self._fail(keys, found)
            return
        missing: list[int] = []
        for position, key, code in zip(positions, keys, found, strict=True):
            if code == 1:
                self._known[key] = SetOutcome.PRESENT
            elif code < 0:
                self._fail([key], codes.class_of(code))
            elif self._full:
                self._known[key] = SetOutcome.REJECTED
            else:
                missing.append(position)
        while missing:
            missing = missing[self._send(missing) :]
            if missing:
                self._hold_chain()

    def _send(self, positions: list[int]) -> int:
        """Store the first pages at `positions`, as many as there is memory for on the way; how many are done."""
        keys = [self._keys[position] for position in positions]
        if self._full:
            self._known.update(dict.fromkeys(keys, SetOutcome.REJECTED))
            return len(keys)
        if time.monotonic() >= self._deadline:
            self._fail(keys, "deadline")
            return len(keys)
        codec, frames, parents = self._parts.codec, self._frames, self._parents
        sealed = [codec.seal(self._keys[at], frames[at], parent=parents[at]) for at in positions]
        with self._parts.roads.lane(sealed, self._deadline) as lane:
            if lane is None:
                self._fail(keys, "staging")
                return len(keys)
            lane.load()
            self._put(keys[: len(lane.buffers)], lane)
            return len(lane.buffers)

    def _put(self, keys: list[bytes], lane: Lane) -> None:
        """Store what is on the lane. A full store is asked again until it has made room, or has none to make."""
        names = self._parts.names.of(keys)
        left = list(range(len(keys)))
        for _ in range(FULL_TRIES):
            found = self._parts.moved(lane.run(self._call(names, lane, left), self._deadline))
            if isinstance(found, str):
                self._fail([keys[index] for index in left], found)
                return
            for index, code in zip(left, found, strict=True):
                self._note(keys[index], code)
            left = [index for index, code in zip(left, found, strict=True) if code == codes.NO_ROOM]
            if not left:
                return
            if time.monotonic() + FULL_WAIT_S >= self._deadline:
                break
            self._hold_chain()
            time.sleep(FULL_WAIT_S)
        self._full = True

    def _hold_chain(self) -> None:
        """Grant leases to the chain's pages so far, so that it is not they that are evicted for the pages behind."""
        head = [key for key, outcome in self._known.items() if outcome.is_stored]
        if self._parents[0] is not None:
            head.append(self._parents[0])
        names = self._parts.names.of(head)
        if names:  # without an answer there is no lease, and `_settle` finds out what that did
            self._parts.ask(lambda: self._parts.client.exist(names), self._deadline)

    def _call(self, names: list[str], lane: Lane, indices: list[int]) -> Callable[[], list[int]]:
        some = [names[index] for index in indices]
        addresses = [lane.addresses[index] for index in indices]
        sizes = [lane.buffers[index].nbytes for index in indices]
        return lambda: self._parts.client.put(some, addresses, sizes)

    def _note(self, key: bytes, code: int) -> None:
        if code == codes.OK:
            self._known[key] = SetOutcome.STORED
        elif code == codes.PRESENT:
            self._known[key] = SetOutcome.PRESENT
        elif code == codes.NO_ROOM:
            self._was_full = True
            self._known[key] = SetOutcome.REJECTED
        else:
            self._fail([key], codes.class_of(code))

    def _settle(self, chain: list[bytes]) -> None:
        """Have nothing of ours behind the first hole: a page that was turned away, or evicted for those behind it."""
        stored = [key for key in chain if self._known[key].is_stored]
        names = self._parts.names.of(stored)
        found = self._parts.ask(lambda: self._parts.client.exist(names), self._deadline)
        if isinstance(found, str):
            self.errors.append(found)
            return
        gone = {key for key, code in zip(stored, found, strict=True) if code == 0}
        self._known.update(dict.fromkeys(gone, SetOutcome.REJECTED))
        hole = next((i for i, key in enumerate(chain) if self._known[key] is SetOutcome.REJECTED), len(chain))
        behind = [key for key in chain[hole:] if self._known[key] is SetOutcome.STORED]
        if behind:
            self._withdraw(behind)

    def _withdraw(self, keys: list[bytes]) -> None:
        """Remove pages that this batch has stored, though a question about them has granted leases."""
        names = self._parts.names.of(keys)
        found = self._parts.ask(lambda: self._parts.client.remove(names, force=True), self._deadline)
        if isinstance(found, str):
            self.errors.append(found)
            return
        for key, code in zip(keys, found, strict=True):
            if code == codes.OK or code in codes.MISSES:
                self._known[key] = SetOutcome.REJECTED

    def _fail(self, keys: Sequence[bytes], reason: str) -> None:
        self._known.update(dict.fromkeys(keys, SetOutcome.ERROR))
        self.errors += [reason] * len(keys)
