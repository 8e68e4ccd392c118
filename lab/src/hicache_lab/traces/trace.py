"""Reads and writes request traces: one JSON object per line and request.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

`timestamp` is milliseconds since the start of the trace, lengths are tokens. `hash_ids` names the prompt in blocks of
512 tokens: equal ids mean equal blocks after equal prefixes. A partial last block has its own id. Unknown fields are
ignored. This is the format of the traces published with Mooncake; `formats` has the others that can be read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

from hicache.config.files import open_regular
from hicache.errors import InvalidInput

from .formats import FIELDS, TraceFormat, format_of, parser_of
from .request import BLOCK_TOKENS, TraceRequest

# A prompt of a million tokens takes some 20 KB, in 16-token blocks 0.7 MB; a file with a longer line is not a trace.
LINE_BYTES_MAX = 1 << 20
# Requests of a trace; one day of a busy cluster has some ten million.
REQUESTS_MAX = 10**9


def read_trace(path: Path, requests_max: int | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of a trace file in order, at most `requests_max`. The first line determines the format.

    Reads the file line by line, but a trace of sessions as a whole, because its lines are not in the order of time.
    Raises InvalidInput with file, line and field for a file that is not a trace, and for an empty one.
    """
    if requests_max == 0:
        return
    lines = _objects(path)
    first = next(lines)
    parse = parser_of(first[1])
    numbered = enumerate(itertools.chain([first], lines))
    requests = (parse(fields, index, where) for index, (where, fields) in numbered)
    if format_of(first[1]) is TraceFormat.SESSIONS:
        in_order = sorted(requests, key=attrgetter("timestamp_ms"))
        requests = (replace(request, index=index) for index, request in enumerate(in_order))
    yield from itertools.islice(requests, requests_max)


def trace_format(path: Path) -> TraceFormat:
    """Return the format of a trace file. Raises InvalidInput as `read_trace` does."""
    _, fields = next(_objects(path))
    return format_of(fields)


def line_count(path: Path | None) -> int | None:
    """Return the largest possible number of requests of a trace; None if it cannot be read, and for None."""
    if path is None:
        return None
    with contextlib.suppress(OSError), open_regular(path) as lines:
        return min(REQUESTS_MAX, sum(1 for _ in lines)) or None
    return None


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write a trace, replace the file when the trace is complete, and return the number of requests.

    Raises InvalidInput if it cannot be written. After any error the file is unchanged, and a partial trace is removed.
    """
    # Resolve links, so that a link stays and its target is replaced.
    target = Path(os.path.realpath(path))
    # A path that is still a link is part of a loop.
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise InvalidInput(f"trace {path}: cannot be written: the path is not a regular file")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    count = 0
    try:
        with partial.open("w", encoding="ascii") as lines:
            for request in requests:
                lines.write(as_line(request) + "\n")
                count += 1
        partial.replace(target)
    except OSError as error:
        raise InvalidInput(f"trace {path}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return count


def as_line(request: TraceRequest) -> str:
    """Return one request as a line of a trace in the format of Mooncake, without the line end. A default is omitted."""
    values = (request.timestamp_ms, request.input_length, request.output_length, request.hash_ids)
    fields: dict[str, Any] = dict(zip(FIELDS, values, strict=True))
    if request.block_tokens != BLOCK_TOKENS:
        fields["block_tokens"] = request.block_tokens
    if request.session is not None:
        fields["session"] = request.session
    return json.dumps(fields)


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON object of each line that is not blank, with the file and line for errors."""
    is_empty = True
    try:
        with open_regular(path) as lines:
            for number, line in _bounded(lines, path):
                if not line.isspace():
                    is_empty = False
                    where = f"trace {path}, line {number}"
                    yield where, _object(line, where)
    except OSError as error:
        raise InvalidInput(f"trace {path}: cannot be read: {error.strerror}; check the path") from error
    if is_empty:
        raise InvalidInput(f"trace {path}: is empty; use a file with at least one request")


def _bounded(lines: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    for number in itertools.count(1):
        line = lines.readline(LINE_BYTES_MAX + 1)
        if len(line) > LINE_BYTES_MAX:
            raise InvalidInput(
                f"trace {path}, line {number}: is longer than {LINE_BYTES_MAX} bytes; check that the file is a "
                "request trace"
            )
        if not line:
            return
        yield number, line


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = _DECODER.decode(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: expected one JSON object a line: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidInput(f"{where}: expected a JSON object, got {type(fields).__name__}")
    return fields


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field appears twice")
    return fields


# `json.loads` would make one for each line.
_DECODER = json.JSONDecoder(object_pairs_hook=_without_repetition)
