"""A page that does not lie in one frame: its payload is in the memory of others, in parts.

Everything that moves a page takes a `PageBuffer`: a frame, or a `PageView`. Both are a list of buffers in the order of
the stored page, which stores that scatter and gather move without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .header import HEADER_BYTES


@dataclass(frozen=True, slots=True)
class PageView:
    """One page in foreign memory: `header`, 256 bytes that the caller keeps beside it, and `parts`, its payload in the
    order of the frame. All are contiguous writable bytes; the parts together have `codec.payload_bytes`.

    As with a frame, whoever writes the payload unseals the page first: `unseal(header)`.
    REQUIRES: nothing overlaps, within a page and between the pages of a call.
    """

    header: memoryview
    parts: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of header and payload."""
        return self.header.nbytes + sum(part.nbytes for part in self.parts)

    def gather(self, frame: memoryview) -> None:
        """Copy header and payload to the head of `frame`. REQUIRES: it has `nbytes` bytes or more."""
        start = 0
        for part in (self.header, *self.parts):
            frame[start : start + part.nbytes] = part
            start += part.nbytes

    def scatter(self, frame: memoryview) -> None:
        """Fill header and payload from the head of `frame`. REQUIRES: as `gather`."""
        start = 0
        for part in (self.header, *self.parts):
            part[:] = frame[start : start + part.nbytes]
            start += part.nbytes


PageBuffer: TypeAlias = memoryview | PageView


def header_of(page: PageBuffer) -> memoryview:
    """Return the 256 bytes of a page's header."""
    return page.header if isinstance(page, PageView) else page[:HEADER_BYTES]


def first_bytes(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    """Return the buffers of the first `size` bytes of `buffers`: all of them if they have no more."""
    found: list[memoryview] = []
    for buffer in buffers:
        if size <= 0:
            break
        found.append(buffer if buffer.nbytes <= size else buffer[:size])
        size -= buffer.nbytes
    return found


def fill(buffers: Sequence[memoryview], data: bytes | bytearray | memoryview) -> list[memoryview]:
    """Copy `data` to the start of `buffers` and return the buffers of the bytes behind it. REQUIRES: it fits."""
    start = 0
    for buffer in first_bytes(buffers, len(data)):
        buffer[:] = data[start : start + buffer.nbytes]
        start += buffer.nbytes
    return without_first(buffers, start)


def without_first(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    """Return the buffers of all but the first `size` bytes: what remains after a short transfer."""
    for number, buffer in enumerate(buffers):
        if size < buffer.nbytes:
            return [buffer[size:], *buffers[number + 1 :]] if size else list(buffers[number:])
        size -= buffer.nbytes
    return []
