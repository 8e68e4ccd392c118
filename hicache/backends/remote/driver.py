"""The `remote` driver: pages of a storage daemon (docs/backends/remote.md).

For pages in memory that the daemon shares, requests contain frame numbers: it reads and writes the frames itself. Other
pages are bodies of requests, over several connections. The daemon knows namespaces and memories as long as it runs; if
it does not know one, the backend registers it and repeats the request once, so that a daemon can be restarted under its
engines.

Locking design: `_memories` and `_body_pages_max` are replaced as a whole. Calls run on their callers' threads; the
threads of a SupervisedPool also transfer bodies, each page by one of them. A frame of shared memory belongs to the
daemon until it has answered, or `SharedFrames.fence` has returned.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ... import tracing
from ...arguments import instance
from ...clock import SYSTEM_CLOCK, Clock
from ...config.remote_storage import RemoteStorageOptions
from ...errors import BackendError, BackendUnavailable, ConfigError
from ...frame import FrameCodec, PageBuffer, TagKind, frame_bytes
from ...shared_memory import find
from ...supervised import SupervisedPool
from ..base import GetOutcome, SetOutcome, StoredPage, Usage
from ..driver import Answer, Incidents
from ..errors import ErrorKind, StoreError
from ..pages import PageReads, PageWrites
from .bodies import parts_of, read_pages, settle_reads, settle_writes, write_pages
from .client import CONFIGURED, DaemonClient, Refused, explain, kinds_of, list_of, number_of, open_access
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
# Zeroing the memory of a large engine takes the daemon seconds.
_CREATE_S = 60.0
# Counting a namespace may require a listing of its store.
_USAGE_S = 60.0


class RemoteDriver:
    """Pages of a daemon. See the module's docstring; `Driver` describes each function. Errors are of `ErrorKind`,
    including those of the daemon's stores. A damaged page is `found` if the daemon had accepted it.

    Pages are sent as plain frames with a checksum; the daemon's configuration determines how they are stored. The
    constructor raises ConfigError for a codec with another tag, a key or compression, and for an unreadable secret;
    BackendUnavailable if no daemon answers, BackendError if it rejects this client. Blocks for one request, at most for
    `options.open_timeout`.
    """

    def __init__(self, codec: FrameCodec, options: RemoteStorageOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.codec = codec
        self.options = instance("options", options, RemoteStorageOptions)
        if codec.tag_kind is not TagKind.XXH3_128 or codec.transforms:
            raise ConfigError(
                "remote storage: tag, keys and compression belong to the daemon; move integrity and storage_format "
                "from this configuration to the daemon's"
            )
        self._client = DaemonClient(open_access(options), clock)
        self._path = _path_of(codec.namespace)
        self._as_engine = f"{self._path}?engine={secrets.token_hex(8)}"
        self._memories: tuple[SharedFrames, ...] = ()
        self._body_pages_max = 1
        self._errors_lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        try:
            self._open_namespace(math.inf)
        except StoreError as error:
            self._client.close()
            access = self._client.access
            is_final = isinstance(error, Refused) and error.status != 503 and not error.retry_after_s
            kind = BackendError if is_final else BackendUnavailable
            why = explain(error, CONFIGURED, access.server)
            raise kind(f"remote storage at {access.where}: {why}") from error
        self._pool = SupervisedPool[Any]("remote", options.connections - 1, clock=clock)

    def _count(self, kind: str) -> None:
        with self._errors_lock:
            self._errors[kind] += 1

    def incidents(self) -> Incidents:
        """See HasIncidents. Failures to share memory; its pages are sent as bodies."""
        with self._errors_lock:
            return Incidents(dict(self._errors))

    def register_memory(self, memory: memoryview) -> None:
        """Let the daemon map `memory` if it is shared memory of this process; other memory is sent as bodies. See
        RegistersMemory. If the daemon cannot map it, an error is counted."""
        found = find(memory)
        if self._client.access.lock is None or found is None or found[0].layout.processes:
            return  # the daemon is on another host, or cannot open the memory by its name
        shared = SharedFrames(found[0], self._client)
        try:
            shared.attach(self._clock() + _ATTACH_S)
        except StoreError as error:
            self._count(error.kind)
        self._memories += (shared,)

    def find_prefix(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> tuple[int, Sequence[str]]:
        stored, kinds = 0, list[str]()
        for some in _batches(keys):
            answer, more = self._ask("exists", namespace, some, deadline)
            found = number_of(answer, "pages", len(some))
            stored += found
            kinds += more
            if found < len(some):
                break
        return stored, kinds

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> Iterator[Answer]:
        return self._flags("has", namespace, keys, deadline, unknown=False)

    def touch(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[Answer]:
        """See Touches. Applies to the daemon's pool and its stores."""
        return list(self._flags("touch", namespace, keys, deadline, unknown=True))

    def _flags(
        self, verb: str, namespace: bytes, keys: Sequence[bytes], deadline: float, *, unknown: bool
    ) -> Iterator[Answer]:
        """Yield the answer for each key. The daemon does not tell which key an error belongs to, so the errors stand in
        the place of answers that say nothing."""
        for some in _batches(keys):
            answer, kinds = self._ask(verb, namespace, some, deadline)
            errors = iter(kinds)
            for there in list_of(answer, "stored", len(some)):
                flag = there is not False if unknown else there is True
                yield next(errors, flag) if flag is unknown else flag

    def read(self, pages: PageReads[bool]) -> None:
        def read(run: FrameRun) -> None:
            words, kinds = self._ask_frames("get", run, pages.keys[run.part], {}, pages.deadline)
            positions = range(run.part.start, run.part.stop)
            settle_reads(pages, positions, words, kinds, lambda at: pages.accept_verified(at, True))

        rest = self._by_frames(pages.pages, pages.deadline, (), read)
        self._move(rest, (), lambda part: read_pages(self._client, f"{self._path}/read", pages, part), pages.deadline)

    def write(self, pages: PageWrites) -> None:
        breaks = pages.breaks

        def write(run: FrameRun) -> None:
            before = pages.parents[run.part.start]
            fields = {"parent": None if before is None else before.hex()}
            words, kinds = self._ask_frames("set", run, pages.keys[run.part], fields, pages.deadline)
            settle_writes(pages, range(run.part.start, run.part.stop), words, kinds)

        def send(part: Sequence[int]) -> None:
            if not pages.is_full:
                write_pages(self._client, f"{self._path}/write", pages, part)

        rest = self._by_frames(pages.pages, pages.deadline, breaks, write)
        self._move(rest, breaks, send, pages.deadline)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[bool] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver. The daemon has removed the damaged pages that it found itself."""
        removed, kinds = 0, list[str]()
        if found is not None:
            removed = found.count(False)
            keys = [key for key, was_accepted in zip(keys, found, strict=True) if was_accepted]
        for some in _batches(keys):
            answer, more = self._ask("delete", namespace, some, deadline)
            removed += number_of(answer, "pages", len(some))
            kinds += more
        return removed, kinds

    def clear(self, namespace: bytes, deadline: float) -> tuple[int, Sequence[str]]:
        answer, kinds = self._ask("clear", namespace, (), deadline)
        return number_of(answer, "pages"), kinds

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver. A daemon does not list its pages; `clear` does not need it."""
        raise StoreError(ErrorKind.UNSUPPORTED)

    def measure(self) -> Usage:
        deadline = self._clock() + _USAGE_S
        answer = self._again(lambda: self._client.call("GET", f"{self._path}/usage", deadline=deadline), deadline)
        capacity = None if answer.get("capacity_bytes") is None else number_of(answer, "capacity_bytes")
        return Usage(number_of(answer, "pages"), number_of(answer, "bytes"), capacity)

    def close(self) -> None:
        """See Driver. Releases the namespace, so that the daemon may close its store after the last engine."""
        for shared in self._memories:
            shared.detach()
        with contextlib.suppress(StoreError):
            self._client.call("DELETE", self._as_engine, deadline=self._clock() + _LEAVE_S)
        self._pool.close()
        self._client.close()

    # Requests

    def _open_namespace(self, deadline: float) -> None:
        """Register this namespace with the daemon, within `options.open_timeout`. Raises StoreError."""
        codec, deadline = self.codec, min(deadline, self._clock() + self.options.open_timeout)
        fields = {"payload_bytes": codec.payload_bytes, "weights_epoch": codec.weights_epoch, "label": codec.label}
        answer = self._client.call("PUT", self._as_engine, fields, deadline=deadline)
        if answer.get("frame_bytes") != codec.frame_bytes:
            raise StoreError(ErrorKind.PROTOCOL, "the daemon has frames of another size")
        self._body_pages_max = max(1, min(number_of(answer, "body_pages_max"), _BODY_BYTES // codec.frame_bytes))

    def _again(self, request: Callable[[], T], deadline: float, reattach: Callable[[], None] = lambda: None) -> T:
        """Make a request. If the daemon does not know the namespace or memory, register it and repeat once."""
        try:
            return request()
        except Refused as error:
            if not error.is_unknown:
                raise
        self._open_namespace(deadline)
        reattach()
        return request()

    def _ask(
        self, verb: str, namespace: bytes, keys: Sequence[bytes], deadline: float
    ) -> tuple[Mapping[str, Any], list[str]]:
        """Return the reply to a verb without pages, and the kinds of its errors. Raises StoreError."""
        path = f"{_path_of(namespace)}/{verb}"
        answer = self._again(lambda: self._client.call("POST", path, {}, keys, deadline=deadline), deadline)
        return answer, kinds_of(answer, 4 * len(keys or (b"",)))

    def _ask_frames(
        self, verb: str, run: FrameRun, keys: Sequence[bytes], fields: Mapping[str, object], deadline: float
    ) -> tuple[list[str], list[str]]:
        """Let the daemon move pages between its store and frames. Return their outcomes, and the kinds of the errors.
        After this returns or raises, the daemon no longer accesses the frames. Raises StoreError."""
        shared, mapping = run.shared, run.mapping

        def request() -> Mapping[str, Any]:
            asked = {"memory": shared.memory.name, "mapping": mapping, "frames": run.numbers, **fields}
            with shared.fenced(mapping):
                return self._client.call(
                    "POST", f"{self._path}/{verb}", asked, keys, deadline=deadline, may_repeat=False
                )

        def reattach() -> None:
            nonlocal mapping
            shared.forget(mapping)
            mapping = shared.attach(deadline) or mapping

        answer = self._again(request, deadline, reattach)
        outcomes, errors = list_of(answer, "outcomes", len(keys)), kinds_of(answer, 4 * len(keys))
        known = tuple(GetOutcome if verb == "get" else SetOutcome)
        if not all(word in known for word in outcomes):  # a word may be unhashable
            raise StoreError(ErrorKind.PROTOCOL, "the answer has an outcome that does not exist")
        return outcomes, errors

    def _by_frames(
        self, pages: Sequence[PageBuffer], deadline: float, breaks: Sequence[int], move: Callable[[FrameRun], None]
    ) -> list[int]:
        """Transfer the pages in memory that the daemon has mapped, in runs that do not reach over one of the positions
        in `breaks`. Return the positions of the others."""
        if not self._memories:
            return list(range(len(pages)))
        rest: list[int] = []
        for part, shared, numbers in frame_runs(self._memories, pages, KEYS_MAX, breaks):
            mapping = None
            try:
                mapping = None if shared is None else shared.attach(deadline)
            except Refused as error:
                self._count(error.kind)
            if shared is None or mapping is None:
                rest += range(part.start, part.stop)
            else:
                move(FrameRun(part, shared, mapping, numbers))
        return rest

    def _move(
        self, positions: Sequence[int], breaks: Sequence[int], move: Callable[[Sequence[int]], None], deadline: float
    ) -> None:
        """Transfer the pages at `positions` as bodies, in parallel parts of consecutive pages. Raises StoreError for
        the first failure."""
        gaps = [
            at for at in range(1, len(positions)) if positions[at] != positions[at - 1] + 1 or positions[at] in breaks
        ]
        parts = parts_of(len(positions), self.options.connections, self._body_pages_max, gaps)
        failures: list[StoreError] = []

        def move_one(number: int) -> None:
            part = positions[parts[number].start : parts[number].stop]
            try:
                self._again(lambda: move(part), deadline)
            except StoreError as error:
                failures.append(error)

        self._pool.run(len(parts), tracing.carried(move_one))
        if failures:
            raise failures[0]


def create_memory(options: RemoteStorageOptions, name: str, shape: bytes, payload_bytes: int, pages: int) -> None:
    """Let the daemon create shared memory `name` with frames for that many pages of the shape with this digest; the
    caller opens it next. Blocks while the daemon zeroes the memory. Raises BackendUnavailable without a reply,
    BackendError if the daemon rejects it."""
    client = DaemonClient(open_access(options))
    fields = {"frame_bytes": frame_bytes(payload_bytes), "pages": pages, "shape": shape.hex()}
    try:
        client.call("GET", "/livez", deadline=client.clock() + options.open_timeout)  # it does not hang
        client.call("PUT", f"/v1/memory/{name}", fields, deadline=client.clock() + _CREATE_S)
    except StoreError as error:
        kind = BackendError if isinstance(error, Refused) else BackendUnavailable
        where = f"host.shared: the daemon at {client.access.where} does not create the memory {name!r}"
        why = explain(error, CONFIGURED, client.access.server)
        raise kind(f"{where}: {why}; or set host.shared.owner to engine") from error
    finally:
        client.close()


def _path_of(namespace: bytes) -> str:
    return f"/v1/namespaces/{namespace.hex()}"


def _batches(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(keys), KEYS_MAX):
        yield keys[start : start + KEYS_MAX]
