"""Nodes: processes that write, read and evict pages in a directory that they share.

    python -m tests.shared_mounts.node

One process imports everything once and forks a child for each line of standard input, a `Job` as JSON; it answers with
the child's number. Each child opens its store as an engine does, and writes lines of JSON to the file of its job: one
when the store is open, one for each trouble as it is found, and a `Report` at the end, also after SIGTERM. A page's
bytes follow from its key, so every read is compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import numpy as np

from hicache.backends import limit
from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.file.system import CREATE_FLAGS
from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.shared_files import SharedFilesDriver, lease
from hicache.backends.shared_files.writes import SharedFileWrites
from hicache.backends.storage import Storage
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config.storage import SharedFilesStorageOptions
from hicache.errors import BackendError
from hicache.frame import HEADER_BYTES, FrameCodec

NAMESPACE = hashlib.sha256(b"shared mounts").digest()
BATCH = 8
Say: TypeAlias = "Callable[[Mapping[str, Any]], None]"
# A node that was rejected does not ask again at once.
_PAUSE_S = 0.02
# How far back a node reads the chains of the other one.
_RECENT = 30
# The control writes pages in such pieces, with pauses: on a busy machine the other node seldom runs during a write.
_PIECE_BYTES = 512
_PIECE_PAUSE_S = 0.002


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one child. `seconds` 0 works until a signal. `chains` 0 writes a new chain each time, as engines do
    with new prompts; otherwise both nodes write the same ones. `is_hasty` has the times of leases and sweeps
    shortened, so that a short test has many of them."""

    path: str
    report: str
    name: str = "a"
    backend: str = "shared_files"
    seed: int = 0
    seconds: float = 0.0
    chains: int = 0
    page_bytes: int = 8192
    capacity_bytes: int = 1 << 20
    is_hasty: bool = False
    deadline_s: float = 20.0


@dataclass(slots=True)
class Report:
    """What a node did. `wrong` are hits with other bytes than their keys', `corrupt` pages that the store found damaged
    itself."""

    stored: int = 0
    hits: int = 0
    misses: int = 0
    rejected: int = 0
    errors: int = 0
    corrupt: int = 0
    wrong: int = 0
    evicted: int = 0
    set_s: float = 0.0  # median of a batch whose pages were all stored
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def troubles(self) -> int:
        """The pages that were damaged or failed."""
        return self.errors + self.corrupt + self.wrong


def make_codec(page_bytes: int) -> FrameCodec:
    return FrameCodec(NAMESPACE, page_bytes - HEADER_BYTES)


def chain(name: str, count: int = BATCH) -> list[bytes]:
    """Return the keys of a chain."""
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]


def payload(key: bytes, size_bytes: int) -> bytes:
    """Return the bytes of a page: each part of it is different, and different from that part of other pages."""
    words = -(-size_bytes // 32) * 8
    places = np.arange(words, dtype=np.uint32) * np.uint32(2654435761)
    return (np.tile(np.frombuffer(key, np.uint32), words // 8) ^ places).tobytes()[:size_bytes]


def frames(codec: FrameCodec, keys: Sequence[bytes] = (), *, empty: int = 0) -> list[memoryview]:
    """Return the pages of `keys`, or `empty` pages of zeros."""
    made = [memoryview(bytearray(codec.frame_bytes)) for _ in range(len(keys) + empty)]
    for key, frame in zip(keys, made, strict=False):
        frame[HEADER_BYTES : HEADER_BYTES + codec.payload_bytes] = payload(key, codec.payload_bytes)
    return made


def read_pages(store: Storage, keys: Sequence[bytes], deadline_s: float = 20.0) -> Counter[str]:
    """Read pages and compare them; return how many had each outcome, and how many hits were `wrong`."""
    codec = store.codec
    pages = frames(codec, empty=len(keys))
    found = store.batch_get(keys, pages, deadline=time.monotonic() + deadline_s)
    outcomes = Counter(str(outcome) for outcome in found)
    for key, page, outcome in zip(keys, pages, found, strict=True):
        body = page[HEADER_BYTES : HEADER_BYTES + codec.payload_bytes]
        outcomes["wrong"] += outcome is GetOutcome.HIT and body != payload(key, codec.payload_bytes)
    return outcomes


class _WritesInPlace(SharedFileWrites):
    def _write(self, name: str, data: memoryview, used_s: float | None) -> str:
        temporary = super()._write(name, data, used_s)
        with contextlib.suppress(FileExistsError):
            file = self._system.open(name, CREATE_FLAGS, dir_fd=self._root.fd)
            for start in range(0, len(data), _PIECE_BYTES):
                self._system.pwritev(file, [data[start : start + _PIECE_BYTES]], start)
                time.sleep(_PIECE_PAUSE_S)
            self._system.close(file)
        return temporary


class InPlace(SharedFilesDriver):
    """The control: a page is visible under its name while it is written, and stays so after a kill."""

    def __init__(self, codec: FrameCodec | None, options: SharedFilesStorageOptions) -> None:
        super().__init__(codec, options)
        self._writes = _WritesInPlace(self._system, self._root, self._files, self._calls, SYSTEM_CLOCK)


def open_store(job: Job, clock: Clock = SYSTEM_CLOCK) -> Storage:
    """Open a store as an engine does: with its limit and its guard. Raises BackendError."""
    options = {"path": job.path, "capacity": job.capacity_bytes, "free_space_floor": 0}
    return open_spec(BackendSpec(job.backend, options), make_codec(job.page_bytes), clock)


class _Node:
    """One child at work."""

    def __init__(self, job: Job, say: Say) -> None:
        self._job = job
        self._say = say
        self._dice = random.Random(job.seed)
        self._set_s: list[float] = []
        self.report = Report()
        self.is_ended = False
        self._store = open_store(job)
        say({"open": os.getpid()})

    def work(self) -> None:
        """Write and read in turns until the end; then close the store."""
        end_s = time.monotonic() + self._job.seconds if self._job.seconds else math.inf
        turn = 0
        while time.monotonic() < end_s and not self.is_ended:
            turn += 1
            self._write(turn)
            self._read(turn)
            if self._job.chains and not turn % 17:
                some = chain(self._some(turn))[self._dice.randrange(BATCH) :]
                self._store.delete(some, deadline=time.monotonic() + self._job.deadline_s)
        found, report = self._store.statistics(), self.report
        report.evicted, report.kinds = found.evicted_pages, {**found.errors, **found.corrupt}
        report.set_s = statistics.median(self._set_s) if self._set_s else 0.0
        self._store.close()

    def _some(self, turn: int) -> str:
        """Return the name of a chain that another node may have written."""
        if self._job.chains:
            return f"{self._dice.randrange(self._job.chains)}"
        other = "b" if self._job.name == "a" else "a"
        return f"{other} {self._dice.randint(max(1, turn - _RECENT), turn)}"

    def _write(self, turn: int) -> None:
        keys = chain(self._some(turn) if self._job.chains else f"{self._job.name} {turn}")
        pages = frames(self._store.codec, keys)
        began_s = time.monotonic()
        outcomes = self._store.batch_set(keys, pages, parent=None, deadline=began_s + self._job.deadline_s)
        if set(outcomes) == {SetOutcome.STORED}:
            self._set_s.append(time.monotonic() - began_s)
        self.report.stored += outcomes.count(SetOutcome.STORED)
        self.report.rejected += outcomes.count(SetOutcome.REJECTED)
        self._count("errors", outcomes.count(SetOutcome.ERROR))
        if SetOutcome.REJECTED in outcomes:
            time.sleep(_PAUSE_S)

    def _read(self, turn: int) -> None:
        outcomes = read_pages(self._store, chain(self._some(turn)), self._job.deadline_s)
        self.report.hits += outcomes[GetOutcome.HIT]
        self.report.misses += outcomes[GetOutcome.MISS]
        self._count("errors", outcomes[GetOutcome.ERROR])
        self._count("corrupt", outcomes[GetOutcome.CORRUPT])
        self._count("wrong", outcomes["wrong"])

    def _count(self, trouble: str, pages: int) -> None:
        if pages:
            setattr(self.report, trouble, getattr(self.report, trouble) + pages)
            found = self._store.statistics()
            self._say({"trouble": trouble, "pages": pages, "kinds": {**found.errors, **found.corrupt}})


def _hasten() -> None:
    """Make leases short and sweeps frequent."""
    lease.LEASE_S, lease.URGENT_S, lease.BEAT_S = 1.0, 0.3, 0.1
    limit.PAUSE_S = 0.1


def _child(job: Job) -> None:
    with open(job.report, "a", buffering=1, encoding="utf-8") as lines:

        def say(line: Mapping[str, Any]) -> None:
            lines.write(json.dumps(line) + "\n")

        if job.is_hasty:
            _hasten()
        try:
            node = _Node(job, say)
        except BackendError as error:
            say({"refused": str(error)})
            return

        def end(*_: Any) -> None:
            node.is_ended = True

        signal.signal(signal.SIGTERM, end)
        node.work()
        say({"report": asdict(node.report)})


def main() -> None:
    """Serve jobs until the end of standard input; then kill the children that still run."""
    children: list[int] = []
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets ended children
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(0)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _child(Job(**json.loads(line)))
                status = 0
            finally:
                if status:
                    traceback.print_exc()
                os._exit(status)
        children.append(pid)
        print(pid, flush=True)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
