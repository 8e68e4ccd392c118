"""The `remote` backend: pages of a storage daemon (docs/backends/remote.md).

For pages in memory that the daemon shares, requests contain frame numbers: it reads and writes the frames itself. Other
pages are bodies of requests, over several connections. The daemon knows namespaces and memories as long as it runs; if
it does not know one, the backend registers it and repeats the request once, so that a daemon can be restarted under its
engines.

Locking design: `_memories` and `_body_pages_max` are replaced as a whole. The verbs run on their callers' threads; the
threads of a SupervisedPool also transfer bodies, each page by one of them. A frame of shared memory belongs to the
daemon until it has answered, or `SharedFrames.fence` has returned.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ...arguments import instance
from ...config.remote_storage import RemoteStorageOptions
from ...errors import BackendError, BackendUnavailable, ConfigError
from ...frame import Damage, FrameCodec, PageBuffer, TagKind
from ...shared_memory import find
from ...supervised import SupervisedPool
from ..base import GetOutcome, SetOutcome, Usage
from ..calls import parent_outside, parents_of, runs
from ..envelope import Touchable
from ..errors import ErrorKind, StoreError
from ..pages import PageReads, PageWrites
from ..store import SETTLE_S
from .access import open_access
from .bodies import BY_DAEMON, parts_of, read_pages, write_pages
from .causes import CONFIGURED, explain
from .client import DaemonClient, Refused, kinds_of, list_of, number_of
from .frames import FrameRun, SharedFrames, frame_runs

T = TypeVar("T")
# Keys in one request; the protocol allows more.
KEYS_MAX = 8192
# Bytes of page bodies in one request: large enough to amortize its cost, small enough for several connections.
_BODY_BYTES = 32 << 20
# Mapping the memory of a large engine takes the daemon seconds.
_ATTACH_S = 30.0
# A daemon that does not answer the release of a namespace in this time is left without it.
_LEAVE_S = 1.0
# Counting a namespace may require a listing of its store.
_USAGE_S = 60.0


class RemoteBackend(Touchable):
    """Pages of a daemon. See the module's docstring; `StorageBackend` describes each verb. Errors are counted by
    `ErrorKind`, including those of the daemon's stores. The child of a fork rejects every verb (`errors["forked"]`).

    Pages are sent as plain frames with a checksum; the daemon's configuration determines how they are stored. The
    constructor raises ConfigError for a codec with another tag, a key or compression, and for an unreadable secret;
    BackendUnavailable if no daemon answers, BackendError if it rejects this client. Blocks for one request, at most for
    `open_timeout`.
    """

    def __init__(self, codec: FrameCodec, options: RemoteStorageOptions) -> None:
        super().__init__(codec)
        self.options = instance("options", options, RemoteStorageOptions)
        if codec.tag_kind is not TagKind.XXH3_128 or codec.transforms:
            raise ConfigError(
                "remote storage: tag, keys and compression belong to the daemon; move integrity and storage_format "
                "from this configuration to the daemon's"
            )
        self._client = DaemonClient(open_access(options))
        self._path = f"/v1/namespaces/{codec.namespace.hex()}"
        self._as_engine = f"{self._path}?engine={secrets.token_hex(8)}"
        self._memories: tuple[SharedFrames, ...] = ()
        self._body_pages_max = 1
        try:
            self._open_namespace(math.inf)
        except StoreError as error:
            self._client.close()
            access = self._client.access
            is_final = isinstance(error, Refused) and error.status != 503 and not error.retry_after_s
            kind = BackendError if is_final else BackendUnavailable
            why = explain(error, CONFIGURED, access.server)
            raise kind(f"remote storage at {access.where}: {why}") from error
        self._pool = SupervisedPool[Any]("remote", options.connections - 1)
        _opened.add(self)

    def register_memory(self, memory: memoryview) -> None:
        """Let the daemon map `memory` if it is shared memory of this process; other memory is sent as bodies. See
        MemoryRegistration. If the daemon cannot map it, an error is counted."""
        found = find(memory)
        if self._client.access.lock is None or found is None or found[0].layout.processes:
            return  # the daemon is on another host, or cannot open the memory by its name
        shared = SharedFrames(found[0], self._client)
        try:
            shared.attach(time.monotonic() + _ATTACH_S)
        except StoreError as error:
            self.count(error.kind)
        self._memories += (shared,)

    # Called by the envelope

    def prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope."""
        stored = 0
        for some in _batches(keys):
            found = number_of(self._ask("exists", some, deadline), "pages", len(some))
            stored += found
            if found < len(some):
                break
        return stored

    def has(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Envelope."""
        found: list[bool] = []
        for some in _batches(keys):
            stored = list_of(self._ask("has", some, deadline), "stored", len(some))
            found += [one is True for one in stored]
        return found

    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        """See Touchable. Applies to the daemon's pool and its stores."""
        missing: list[bytes] = []
        for some in _batches(keys):
            stored = list_of(self._ask("touch", some, deadline), "stored", len(some))
            missing += [key for key, there in zip(some, stored, strict=True) if there is False]
        return missing

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope."""
        outcomes = [GetOutcome.ERROR] * len(keys)
        corrupt: list[str] = []
        damaged: list[bytes] = []

        def read(run: FrameRun) -> None:
            words = self._ask_frames("get", run, keys[run.part], {}, deadline)
            for at, word in zip(range(run.part.start, run.part.stop), words, strict=True):
                outcome = GetOutcome(word)
                if outcome is GetOutcome.HIT and not self.codec.is_sealed(keys[at], pages[at]):
                    outcome = GetOutcome.CORRUPT
                    corrupt.append(Damage.HEADER)
                    damaged.append(keys[at])
                elif outcome is GetOutcome.CORRUPT:
                    corrupt.append(BY_DAEMON)
                outcomes[at] = outcome

        rest = self._by_frames(pages, deadline, read)
        if rest:
            reads = PageReads[bool](self.codec, [keys[at] for at in rest], [pages[at] for at in rest], deadline)
            failure = self._move(
                len(reads), (), lambda part: read_pages(self._client, f"{self._path}/read", reads, part), deadline
            )
            for at, outcome in zip(rest, reads.finish(failure), strict=True):
                outcomes[at] = outcome
            self.count(*reads.errors)
            corrupt += reads.corrupt
            damaged += [one.key for one in reads.damaged if one.found]
        self._calls.count(corrupt=corrupt)
        if damaged:
            self._remove_damaged(damaged)
        return outcomes

    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See Envelope."""
        outcomes = [SetOutcome.ERROR] * len(keys)
        parents = parents_of(keys, parent)

        def above(part: slice) -> bytes | None:
            return parent_outside(keys[part], parents[part.start])

        def write(run: FrameRun) -> None:
            before = above(run.part)
            fields = {"parent": None if before is None else before.hex()}
            words = self._ask_frames("set", run, keys[run.part], fields, deadline)
            outcomes[run.part] = map(SetOutcome, words)

        rest = self._by_frames(pages, deadline, write)
        for part in runs(rest):
            outcomes[part] = self._send(PageWrites(self.codec, keys[part], pages[part], above(part), deadline))
        return outcomes

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope."""
        return sum(number_of(self._ask("delete", some, deadline), "pages", len(some)) for some in _batches(keys))

    def remove_all(self, deadline: float) -> int:
        """See Envelope."""
        return number_of(self._ask("clear", (), deadline), "pages")

    def measure(self) -> Usage:
        """See Envelope."""
        deadline = time.monotonic() + _USAGE_S
        answer = self._again(
            lambda: self._client.call("GET", f"{self._path}/usage", deadline=deadline), deadline
        )
        has_limit = answer.get("capacity_bytes") is not None
        capacity = number_of(answer, "capacity_bytes") if has_limit else None
        return Usage(number_of(answer, "pages"), number_of(answer, "bytes"), capacity)

    def shut(self) -> None:
        """See Envelope. Releases the namespace, so that the daemon may close its store after the last engine."""
        for shared in self._memories:
            shared.detach()
        with contextlib.suppress(StoreError):
            self._client.call("DELETE", self._as_engine, deadline=time.monotonic() + _LEAVE_S)
        self._pool.close()
        self._client.close()

    # Requests

    def _open_namespace(self, deadline: float) -> None:
        """Register this namespace with the daemon, within `open_timeout`. Raises StoreError."""
        codec, deadline = self.codec, min(deadline, time.monotonic() + self.options.open_timeout)
        fields = {
            "payload_bytes": codec.payload_bytes, "weights_epoch": codec.weights_epoch, "label": codec.label,
        }  # fmt: skip
        answer = self._client.call("PUT", self._as_engine, fields, deadline=deadline)
        if answer.get("frame_bytes") != codec.frame_bytes:
            raise StoreError(ErrorKind.PROTOCOL, "the daemon has frames of another size")
        self._body_pages_max = max(1, min(number_of(answer, "body_pages_max"), _BODY_BYTES // codec.frame_bytes))

    def _again(self, request: Callable[[], T], deadline: float, reattach: Callable[[], None] = lambda: None) -> T:
        """Make a request. If the daemon does not know the namespace or memory, register it and repeat the request
        once."""
        try:
            return request()
        except Refused as error:
            if not error.is_unknown:
                raise
        self._open_namespace(deadline)
        reattach()
        return request()

    def _ask(self, verb: str, keys: Sequence[bytes], deadline: float) -> Mapping[str, Any]:
        """Return the reply to a verb without pages, and count its errors. Raises StoreError."""
        answer = self._again(
            lambda: self._client.call("POST", f"{self._path}/{verb}", {}, keys, deadline=deadline), deadline
        )
        self.count(*kinds_of(answer, 4 * len(keys or (b"",))))
        return answer

    def _ask_frames(
        self, verb: str, run: FrameRun, keys: Sequence[bytes], fields: Mapping[str, object], deadline: float
    ) -> list[str]:
        """Let the daemon move pages between its store and frames. Return their outcomes; errors are counted. After this
        returns or raises, the daemon no longer accesses the frames. Raises StoreError."""
        shared, mapping = run.shared, run.mapping

        def request() -> Mapping[str, Any]:
            asked = {"memory": shared.memory.name, "mapping": mapping, "frames": run.numbers, **fields}
            with shared.fenced(mapping):
                answer = self._client.call(
                    "POST", f"{self._path}/{verb}", asked, keys, deadline=deadline, may_repeat=False
                )
            return answer

        def reattach() -> None:
            nonlocal mapping
            shared.forget(mapping)
            mapping = shared.attach(deadline) or mapping

        answer = self._again(request, deadline, reattach)
        outcomes, errors = list_of(answer, "outcomes", len(keys)), kinds_of(answer, 4 * len(keys))
        known = GetOutcome if verb == "get" else SetOutcome
        if not all(word in set(known) for word in outcomes):
            raise StoreError(ErrorKind.PROTOCOL, "the answer has an outcome that does not exist")
        missing = outcomes.count(known.ERROR) - len(errors)
        self.count(*errors, *[ErrorKind.SERVER_ERROR] * missing)
        return outcomes

    def _by_frames(
        self, pages: Sequence[PageBuffer], deadline: float, do: Callable[[FrameRun], None]
    ) -> Sequence[int]:
        """Transfer the pages in memory that the daemon has mapped. Return the positions of the others."""
        if not self._memories:
            return range(len(pages))
        rest: list[int] = []
        for part, shared, numbers in frame_runs(self._memories, pages, KEYS_MAX):
            mapping = None
            try:
                mapping = None if shared is None else shared.attach(deadline)
            except Refused as error:
                self.count(error.kind)
            if shared is None or mapping is None:
                rest += range(part.start, part.stop)
            else:
                do(FrameRun(part, shared, mapping, numbers))
        return rest

    def _send(self, writes: PageWrites) -> list[SetOutcome]:
        """Store pages by their bodies. Errors are counted."""
        breaks = [at for at in range(1, len(writes)) if writes.parents[at] != writes.keys[at - 1]]

        def write(part: range) -> None:
            if not writes.is_full:
                write_pages(self._client, f"{self._path}/write", writes, part)

        outcomes = writes.finish(self._move(len(writes), breaks, write, writes.deadline))
        self.count(*writes.errors)
        return outcomes

    def _move(
        self, count: int, breaks: Sequence[int], move: Callable[[range], None], deadline: float
    ) -> str:
        """Transfer that many pages as bodies, in parallel parts; return the kind of the first failure, or an empty
        text.
        """
        parts = parts_of(count, self.options.connections, self._body_pages_max, breaks)
        failures: list[str] = []

        def move_one(number: int) -> None:
            try:
                self._again(lambda: move(parts[number]), deadline)
            except StoreError as error:
                failures.append(error.kind)

        self._pool.run(len(parts), move_one)
        return failures[0] if failures else ""

    def _remove_damaged(self, keys: Sequence[bytes]) -> None:
        """Remove pages that are damaged although the daemon accepted them. Failures are counted."""
        try:
            self._ask("delete", keys, time.monotonic() + SETTLE_S)
        except StoreError as error:
            self.count(error.kind)

    def after_fork(self) -> None:
        """Reject verbs in the child of a fork: the connections belong to the parent."""
        self._calls.after_fork()


def _batches(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(keys), KEYS_MAX):
        yield keys[start : start + KEYS_MAX]


_opened: weakref.WeakSet[RemoteBackend] = weakref.WeakSet()


def _after_fork() -> None:
    for backend in list(_opened):
        backend.after_fork()


os.register_at_fork(after_in_child=_after_fork)
