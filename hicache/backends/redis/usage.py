"""The pages on a server: listed in steps of SCAN, or measured at a limited cost.

The cost of a full listing grows with all keys on the server, about a millisecond per thousand. So a measurement looks
at only about `SAMPLE_KEYS` keys per server. It is exact for servers with fewer keys, and an estimate beyond: the share
of pages in the sample is applied to all keys. SCAN walks in the order of the keys' hashes, so the sample is fair, with
a relative error of about 1 / sqrt(SAMPLE_KEYS).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ...clock import Clock
from ..base import PageId, StoredPage, Usage
from ..errors import ErrorKind, StoreError
from .channel import Channel, command
from .errors import ErrorReply
from .pool import Pool

SAMPLE_KEYS = 4096
_SCAN_COUNT = b"1024"
# The limit of SCAN steps in a measurement. Steps may be empty: in a table that has just shrunk, most are.
_SAMPLE_SCANS_MAX = 1024
# The limit of SCAN steps through a whole server: enough for a billion keys, and an end if the cursor never ends.
_SCANS_MAX = 1 << 20
# The lengths of this many pages are read; all pages of one model are equally long.
_LENGTHS_MAX = 512
# The Redis key of a page after the prefix: the namespace, a colon and the page key.
_NAME = re.compile(rb"([0-9a-f]{64}):([0-9a-f]{64})")
# A cursor and a count fit into 64 bits.
_COUNT = re.compile(rb"[0-9]{1,20}")
# A listed key may hold a value that is not a string, or may have moved to another node.
_NO_LENGTH = frozenset({ErrorKind.WRONG_TYPE, ErrorKind.MOVED, ErrorKind.ASK})


def listed(
    pool: Pool, prefix: bytes, namespace: str, deadline: Callable[[], float]
) -> Iterator[dict[bytes, PageId]]:
    """Yield the pages on a server, one dictionary per SCAN step: namespace and page key by Redis key. A page may occur
    twice.

    Yields only pages whose namespace digest starts with `namespace` (lower-case hexadecimal). Each step leases a
    connection and has its own deadline from `deadline()`. Raises StoreError.
    """
    cursor, head = b"0", prefix + namespace.encode()
    for _ in range(_SCANS_MAX):
        by = deadline()
        cursor, names = pool.run(functools.partial(scan, cursor=cursor, deadline=by, pattern=head + b"*"), by)
        matches = [(name, _NAME.fullmatch(name, len(prefix))) for name in names if name.startswith(head)]
        yield {
            name: (bytes.fromhex(match[1].decode()), bytes.fromhex(match[2].decode()))
            for name, match in matches if match
        }
        if cursor == b"0":
            return
    raise StoreError(ErrorKind.PROTOCOL, "SCAN does not end")


def described(
    names: Mapping[bytes, PageId], deadline: float, clock: Clock, channel: Channel
) -> list[StoredPage]:
    """Return the pages in `names` (as `listed` yields them) that still exist, with length and time of last use. Raises
    StoreError."""
    requests = [  # the idle time comes first: on old servers, reading the length counts as a use
        part
        for name in names
        for part in (command(b"OBJECT", b"IDLETIME", name), command(b"STRLEN", name), command(b"EXISTS", name))
    ]
    channel.send([b"".join(requests)], len(requests), deadline)
    lines = channel.read_lines(len(requests), deadline)
    now_s = clock.wall_s()
    pages = []
    for (namespace, key), idle, size, there in zip(names.values(), lines[::3], lines[1::3], lines[2::3], strict=True):
        if number(there):
            # A value that is not a string is listed without bytes. Under an LFU policy there are no idle times.
            length = number(size) or 0
            used_s = None if idle.startswith((b"-", b"$-1")) else now_s - (number(idle) or 0)
            pages.append(StoredPage(namespace, key, length, used_s))
    return pages


def scan(channel: Channel, cursor: bytes, deadline: float, pattern: bytes = b"*") -> tuple[bytes, list[bytes]]:
    """Make one step of SCAN; return the next cursor, b"0" at the end, and some keys. Raises StoreError."""
    match channel.call(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT, deadline=deadline):
        case ErrorReply() as error:
            raise error.failure
        case [bytes(following), list(found)] if _COUNT.fullmatch(following):
            return following, [name for name in found if isinstance(name, bytes)]
    raise StoreError(ErrorKind.PROTOCOL, "the reply to SCAN is not valid")


def measure(channel: Channel, prefix: bytes, deadline: float) -> Usage:
    """Count or estimate the pages on a server whose keys start with `prefix`. `capacity_bytes` is the server's
    maxmemory, None if it has none or does not report it. Raises StoreError."""
    total = channel.call(b"DBSIZE", deadline=deadline)
    if isinstance(total, ErrorReply):
        raise total.failure
    if not isinstance(total, int) or total < 0:
        raise StoreError(ErrorKind.PROTOCOL, "the reply to DBSIZE is not valid")
    # Other users' keys may be megabytes long, so only hashes are kept, and the keys of pages, which are short.
    seen: set[int] = set()
    ours: list[bytes] = []
    cursor = b"0"
    for _ in range(_SAMPLE_SCANS_MAX if total else 0):
        cursor, found = scan(channel, cursor, deadline)
        for name in found:
            if hash(name) not in seen and name.startswith(prefix) and _NAME.fullmatch(name, len(prefix)):
                ours.append(name)
            seen.add(hash(name))
        if cursor == b"0" or len(seen) >= SAMPLE_KEYS:
            break
    # Keys added during the scan may make the sample larger than the total.
    pages = len(ours) if cursor == b"0" else round(len(ours) * max(1.0, total / max(1, len(seen))))
    lengths = _lengths(channel, ours[:_LENGTHS_MAX], deadline)
    mean_bytes = sum(lengths) / len(lengths) if lengths else 0.0
    return Usage(pages, round(pages * mean_bytes), _limit(channel, deadline))


def _lengths(channel: Channel, names: Sequence[bytes], deadline: float) -> list[int]:
    if not names:
        return []
    channel.send([b"".join([command(b"STRLEN", name) for name in names])], len(names), deadline)
    lines = channel.read_lines(len(names), deadline)
    return [size for line in lines if (size := number(line)) is not None]


def number(line: bytes) -> int | None:
    """Return the number in the reply to STRLEN or EXISTS; None if the value is not a string or has moved to another
    node. Raises StoreError."""
    if line.startswith(b":") and _COUNT.fullmatch(line, 1):
        return int(line[1:])
    if not line.startswith(b"-"):
        raise StoreError(ErrorKind.PROTOCOL, "a reply is not a number")
    error = ErrorReply(line.removeprefix(b"-"))
    if error.kind in _NO_LENGTH:
        return None
    raise error.failure


def _limit(channel: Channel, deadline: float) -> int | None:
    text = channel.call(b"INFO", b"memory", deadline=deadline)
    if not isinstance(text, bytes):
        return None  # managed servers may forbid it
    for line in text.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"maxmemory" and _COUNT.fullmatch(value):
            return int(value) or None
    return None
