"""The memory of engines on this host that the daemon has mapped, and the operations on its frames.

While a call of the daemon reads or writes frames, other code must not use them, even if the engine has lost its
connection or has died. So each call counts as an operation of its mapping, and a mapping is only removed without
operations:

    attach   maps the memory of an engine, or creates it for one; first removes an older mapping of that name
    detach   rejects new operations, waits for those in flight, unmaps
    tend     does the same, and removes the file, for memory that engines no longer have open

A mapping has a random `id`. If a call waits while its memory is detached and attached again, its id refers to the old
mapping, and it is rejected.

Locking design: `_changed` guards the table and the fields of all mappings; files are opened, mapped and unmapped
without it. Threads of calls start and end operations; any thread attaches and detaches. A name in `_opening` belongs to
one thread.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
from collections.abc import Iterator, Sequence

from ..backends.errors import ErrorKind
from ..clock import SYSTEM_CLOCK, Clock
from ..errors import CapacityError, SharedMemoryError
from ..mapping import populate
from ..shared_memory import Layout, Role, SharedMemory
from .protocol import AttachMemory, Refused
from .statistics import ClientStatistics

# An engine opens the memory that was created for it within this time.
_JOIN_S = 60.0
# Limits of all mappings together: more than the memory of today's hosts, which costs page tables only, and more than
# the engines of a host.
BYTES_MAX = 8 << 40
COUNT_MAX = 256


class Mapping:
    """The frames of one engine. Belongs to `Memories`."""

    def __init__(self, name: str, request: AttachMemory, memory: SharedMemory, clock: Clock) -> None:
        self._clock = clock
        self.name = name
        self.request = request
        self.id = secrets.token_hex(16)
        self.memory = memory
        self.operations = 0
        self.is_leaving = False
        self._join_until_s = clock() + _JOIN_S if request.identity is None else -math.inf

    def holds(self, request: AttachMemory) -> bool:
        """Return True if a request means this memory. An engine for which it was created may later send its
        identity."""
        same = self.request.frame_bytes == request.frame_bytes and self.request.pages == request.pages
        return same and request.identity in (None, self.memory.identity) and request.shape in (None, self.request.shape)

    def has_joined(self) -> bool:
        """Return True if an engine has the memory open. Does not block."""
        if not self.memory.has_others():
            return False
        self._join_until_s = -math.inf  # no longer waiting for the engine
        return True

    def is_alive(self) -> bool:
        """Return True if an engine has the memory open, or is expected to open it. Does not block."""
        return self.has_joined() or self._clock() < self._join_until_s


class Memories:
    """All mappings, by name. See the module's docstring.

    Invariant: the memory of a mapping in the table is mapped; `_opening` has the bytes of those that are being opened.
    """

    def __init__(self, bytes_max: int = BYTES_MAX, count_max: int = COUNT_MAX, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._bytes_max = bytes_max
        self._count_max = count_max
        self._changed = threading.Condition()
        self._mappings: dict[str, Mapping] = {}
        self._opening: dict[str, int] = {}

    def attach(self, name: str, request: AttachMemory, deadline: float) -> Mapping:
        """Map the memory of an engine, or return the existing mapping of the same open memory. Blocks for operations on
        an older memory of that name. Raises Refused."""
        size_bytes = request.frame_bytes * request.pages
        with self._table() as gone:
            while (known := self._mappings.get(name)) is not None:  # another thread may add one while this one waits
                if known.holds(request) and not known.is_leaving and known.has_joined():
                    return known
                self._take_out(known, deadline, gone)
            if name in self._opening:
                raise Refused(503, ErrorKind.BUSY, "memory: another call is attaching this name; try again", 1)
            if len(self._mappings) + len(self._opening) >= self._count_max:
                raise Refused(503, ErrorKind.BUSY, "memory: too many are mapped; run a second daemon", 5)
            mapped = (one.request.frame_bytes * one.request.pages for one in self._mappings.values())
            if sum(self._opening.values()) + sum(mapped) + size_bytes > self._bytes_max:
                raise Refused(413, ErrorKind.NO_SPACE, "memory: the limit would be exceeded; run a second daemon")
            self._opening[name] = size_bytes
        mapping = None
        try:
            mapping = Mapping(name, request, _open(name, request, deadline), self._clock)
        finally:
            with self._changed:
                del self._opening[name]
                if mapping is not None:
                    self._mappings[name] = mapping
        return mapping

    def find(self, name: str, mapping_id: str | None) -> Mapping:
        """Return the mapping of that name and, unless None, of that id. Does not wait. Raises Refused (404)."""
        with self._changed:
            found = self._mappings.get(name)
            if found is None or found.is_leaving or (mapping_id is not None and found.id != mapping_id):
                raise _not_attached()
            return found

    @contextlib.contextmanager
    def frames(self, mapping: Mapping, numbers: Sequence[int], frame_bytes: int) -> Iterator[list[memoryview]]:
        """Yield frames of a mapping for one operation, and keep them mapped until its end. Raises Refused for wrong
        numbers and sizes, and for a mapping that is being removed."""
        request = mapping.request
        if request.frame_bytes != frame_bytes:
            raise Refused(
                409, ErrorKind.BAD_REQUEST,
                f"memory: its frames have {request.frame_bytes} bytes, those of the namespace {frame_bytes}",
            )
        if numbers and not 0 <= min(numbers) <= max(numbers) < request.pages:
            raise Refused(422, ErrorKind.BAD_REQUEST, f"frames: a number is not below {request.pages}")
        if len(set(numbers)) != len(numbers):
            raise Refused(422, ErrorKind.BAD_REQUEST, "frames: a number occurs twice")
        with self._changed:
            if mapping.is_leaving:
                raise _not_attached()
            mapping.operations += 1
        whole = mapping.memory.frames
        lent = [whole[number * frame_bytes : (number + 1) * frame_bytes] for number in numbers]
        try:
            yield lent
        finally:
            for view in (*lent, whole):
                # Memory with views cannot be unmapped; a backend that keeps a view keeps it mapped.
                with contextlib.suppress(BufferError):
                    view.release()
            with self._changed:
                mapping.operations -= 1
                self._changed.notify_all()

    def detach(self, name: str, deadline: float) -> None:
        """Reject new operations on a memory, wait for those in flight, unmap. No effect if it is not mapped. Blocks.

        Raises Refused (503) if operations are still in flight at the deadline; new ones are rejected even then.
        """
        with self._table() as gone:
            mapping = self._mappings.get(name)
            if mapping is not None:
                self._take_out(mapping, deadline, gone)

    def tend(self) -> list[str]:
        """Unmap the memory that engines no longer have open and remove its file, unless operations are in flight;
        return the names. Does not wait."""
        with self._table() as gone:
            for mapping in list(self._mappings.values()):
                if mapping.is_alive():
                    continue
                mapping.is_leaving = True
                if not mapping.operations and mapping.memory.unlink_if_left():
                    self._take_out(mapping, 0.0, gone)
        return [mapping.name for mapping in gone]

    def statistics(self) -> tuple[ClientStatistics, ...]:
        """Return a snapshot of all mappings. Does not wait."""
        with self._changed:
            return tuple(
                ClientStatistics(name, one.request.pages, one.request.frame_bytes, one.operations, one.is_alive())
                for name, one in self._mappings.items()
            )

    def close(self, deadline: float) -> None:
        """Detach all. Memory with operations in flight stays mapped until the process ends. Blocks until `deadline`."""
        with self._table() as gone:
            for mapping in list(self._mappings.values()):
                with contextlib.suppress(Refused):
                    self._take_out(mapping, deadline, gone)

    @contextlib.contextmanager
    def _table(self) -> Iterator[list[Mapping]]:
        """Hold `_changed`. Mappings that the block removes are unmapped after it: freeing large memory takes seconds,
        and the event loop must not wait for that."""
        gone: list[Mapping] = []
        try:
            with self._changed:
                yield gone
        finally:
            for mapping in gone:
                with contextlib.suppress(BufferError):  # then the last view of it unmaps it
                    mapping.memory.close()

    def _take_out(self, mapping: Mapping, deadline: float, gone: list[Mapping]) -> None:
        """Remove a mapping. REQUIRES: `_changed` is held, by `_table`; it is released while this waits."""
        mapping.is_leaving = True
        if not self._clock.wait_for(self._changed, lambda: not mapping.operations, deadline):
            raise Refused(503, ErrorKind.LEASED, "memory: operations on its frames are in flight; try again", 1)
        name = mapping.name
        if self._mappings.get(name) is not mapping:
            return  # another thread was faster
        del self._mappings[name]
        if mapping.request.identity is None:
            mapping.memory.unlink_if_left()  # an engine that has it open may attach it again by its name
        gone.append(mapping)


def _not_attached() -> Refused:
    return Refused(404, ErrorKind.NO_SEGMENT, "memory: is not attached; PUT /v1/memory/NAME and try again")


def _open(name: str, request: AttachMemory, deadline: float) -> SharedMemory:
    """Map the memory. Raises Refused if it does not match the request."""
    try:
        if request.identity is None:
            layout = Layout(0, request.pages, request.frame_bytes, bytes.fromhex(request.shape or ""))
            return SharedMemory.open(name, layout, deadline=deadline, role=Role.DAEMON)
        memory = SharedMemory.attach(name, identity=request.identity, deadline=deadline)
    except SharedMemoryError as error:
        raise Refused(409, ErrorKind.CONFLICT, str(error)) from error
    except CapacityError as error:
        raise Refused(413, ErrorKind.NO_SPACE, str(error)) from error
    layout = memory.layout
    if (layout.pages, layout.frame_bytes) != (request.pages, request.frame_bytes) or not memory.has_others():
        memory.close()
        raise Refused(409, ErrorKind.CONFLICT, "memory: the file has other pages, or no engine has it open; open it")
    populate(memory.mapping)
    return memory
