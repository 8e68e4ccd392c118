"""Pages as bodies of requests, for memory that the daemon does not share. Both sides verify each page.

    read     one byte per key for its outcome, then the frames of the hits in order
    write    the keys, then the frames
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...frame import TagStream
from ..base import GetOutcome, SetOutcome
from ..errors import ErrorKind, StoreError
from ..http import PIECE_BYTES, Connection
from ..pages import PageReads, PageWrites
from .client import DaemonClient, kinds_of, list_of

# The reason of a damaged page that the daemon has found and removed.
_BY_DAEMON = "daemon"
# The outcome of a page, as one byte of the reply to `read`.
OUTCOME_BYTES = {outcome: outcome.value[:1].upper().encode() for outcome in GetOutcome}
_OUTCOMES = {byte[0]: outcome for outcome, byte in OUTCOME_BYTES.items()}


def read_pages(client: DaemonClient, path: str, reads: PageReads[bool], positions: Sequence[int]) -> None:
    """Read pages directly into their buffers and settle each of them. Raises StoreError; settled pages stay settled. A
    damaged page is `found` if the daemon had accepted it and its header is that of the page."""
    size = reads.codec.frame_bytes

    def take(connection: Connection, length: int, until: float) -> None:
        outcomes = [_OUTCOMES.get(byte) for byte in connection.read_exactly(min(length, len(positions)), until)]
        if None in outcomes or length != len(positions) + outcomes.count(GetOutcome.HIT) * size:
            raise StoreError(ErrorKind.PROTOCOL, "the reply has other pages than requested")

        def accept(position: int) -> None:
            arrived: TagStream | None = reads.stream() if size > PIECE_BYTES else None
            connection.read_into(reads.buffers(position), until, arrived)
            is_ours = reads.codec.is_sealed(reads.keys[position], reads.pages[position])
            reads.accept(position, size, is_ours or None, arrived)

        settle_reads(reads, positions, outcomes, (), accept)

    client.receive_pages(path, [reads.keys[position] for position in positions], take, deadline=reads.deadline)


def write_pages(client: DaemonClient, path: str, writes: PageWrites, positions: Sequence[int]) -> None:
    """Send pages directly from their buffers and settle each of them. Raises StoreError."""
    body = [memoryview(b"".join(writes.keys[position] for position in positions))]
    for position in positions:
        body += writes.sealed(position)
    parent = writes.parents[positions[0]]
    query: dict[str, object] = {"keys": len(positions), "copies": str(writes.is_copy(positions[0])).lower()}
    if parent is not None:
        query["parent"] = parent.hex()
    answer = client.send_pages(path, query, body, deadline=writes.deadline)
    settle_writes(writes, positions, list_of(answer, "outcomes", len(positions)), kinds_of(answer, 4 * len(positions)))


def settle_reads(
    reads: PageReads[bool], positions: Sequence[int], words: Sequence[str | None], kinds: Sequence[str],
    accept: Callable[[int], None],
) -> None:
    """Report the daemon's outcomes `words` of pages, hits by `accept`, and its errors `kinds`."""
    errors = iter(kinds)
    for position, word in zip(positions, words, strict=True):
        if word == GetOutcome.HIT:
            accept(position)
        elif word == GetOutcome.MISS:
            reads.miss(position)
        elif word == GetOutcome.CORRUPT:
            reads.damage(position, _BY_DAEMON, False)
        else:
            reads.fail(position, next(errors, ErrorKind.SERVER_ERROR))
    reads.errors += errors


def settle_writes(writes: PageWrites, positions: Sequence[int], words: Sequence[str], kinds: Sequence[str]) -> None:
    """Report the daemon's outcomes `words` of pages, and its errors `kinds`."""
    errors = iter(kinds)
    for position, word in zip(positions, words, strict=True):
        if word == SetOutcome.STORED:
            writes.stored(position)
        elif word == SetOutcome.PRESENT:
            writes.present(position)
        elif word == SetOutcome.REJECTED:
            writes.reject(position)
        else:
            writes.fail(position, next(errors, ErrorKind.SERVER_ERROR))
    writes.errors += errors


def parts_of(count: int, parts: int, pages_max: int, breaks: Sequence[int] = ()) -> list[range]:
    """Cut `count` positions into `parts` runs of about the same length, or more if one would have over `pages_max`
    pages. A run does not reach over one of the positions in `breaks`."""
    length = max(1, min(pages_max, -(-count // parts)))
    found: list[range] = []
    starts = sorted({0, *breaks})
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        found += [range(first, min(first + length, end)) for first in range(start, end, length)]
    return found
