"""Request traces in the public Mooncake format: one JSON object per line and request.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

`timestamp` is milliseconds since the start of the trace, lengths are tokens. `hash_ids` names the prompt in blocks of
512 tokens: equal ids mean equal blocks after equal prefixes. A partial last block has its own id. Other fields are
ignored. The format is that of the traces published with Mooncake (Qin et al., FAST '25).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...config.files import open_regular
from ...errors import InvalidInput

BLOCK_TOKENS = 512
# A prompt of a million tokens takes some 20 KB; a file with a longer line is not a trace.
LINE_BYTES_MAX = 1 << 20
# The largest position of a page key, far above any context.
LENGTH_MAX = 1 << 24
# Requests of a trace; one day of a busy cluster has some ten million.
REQUESTS_MAX = 10**9
# Thirty thousand years: up to here a time in microseconds is exact.
TIMESTAMP_MS_MAX = 10**15
HASH_ID_MAX = (1 << 63) - 1
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `index` is its index in the trace, from 0; `hash_ids` are `ceil(input_length / block_tokens)` ids.
    Equal ids mean equal blocks after equal prefixes. `session` is equal for the requests of one conversation, if the
    trace names it."""

    index: int
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS
    session: int | None = None

    @property
    def whole_blocks(self) -> int:
        """The number of whole blocks of the prompt."""
        return self.input_length // self.block_tokens

    @property
    def new_tokens(self) -> int:
        """The number of tokens that an engine generates, at least one."""
        return max(1, self.output_length)

    @property
    def kv_tokens(self) -> int:
        """The number of tokens with KV at the end of the request: all except the last one."""
        return self.input_length + self.new_tokens - 1


def read_trace(path: Path, requests_max: int | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of a trace file in order, at most `requests_max`. Reads the file line by line.

    Raises InvalidInput with file, line and field for a file that is not a trace, and for an empty one.
    """
    index = 0
    try:
        with open_regular(path) as lines:
            for number, line in _bounded(lines, path):
                if requests_max is not None and index >= requests_max:
                    return
                if line.strip():
                    yield _request(line, index, f"trace {path}, line {number}")
                    index += 1
    except OSError as error:
        raise InvalidInput(f"trace {path}: cannot be read: {error.strerror}; check the path") from error
    if index == 0:
        raise InvalidInput(f"trace {path}: is empty; use a file with at least one request")


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
    """Return one request as a line of a trace, without the line end."""
    values = (request.timestamp_ms, request.input_length, request.output_length, request.hash_ids)
    return json.dumps(dict(zip(FIELDS, values, strict=True)))


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


def _request(line: bytes, index: int, where: str) -> TraceRequest:
    try:
        fields = json.loads(line, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: expected one JSON object a line: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidInput(f"{where}: expected a JSON object, got {type(fields).__name__}")
    for name in FIELDS:
        if name not in fields:
            raise InvalidInput(f"{where}: {name} is missing")
    timestamp = fields["timestamp"]
    if type(timestamp) not in (int, float) or not 0 <= timestamp <= TIMESTAMP_MS_MAX:
        raise InvalidInput(
            f"{where}: timestamp must be milliseconds from 0 to {TIMESTAMP_MS_MAX}, got {_shown(timestamp)}"
        )
    input_length = _integer(fields["input_length"], 1, LENGTH_MAX, f"{where}: input_length")
    output_length = _integer(fields["output_length"], 0, LENGTH_MAX, f"{where}: output_length")
    ids = fields["hash_ids"]
    if not isinstance(ids, list):
        raise InvalidInput(f"{where}: hash_ids must be a list, got {_shown(ids)}")
    blocks = -(-input_length // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise InvalidInput(
            f"{where}: hash_ids has {len(ids)} blocks, but input_length {input_length} makes {blocks} "
            f"of {BLOCK_TOKENS} tokens"
        )
    hash_ids = tuple(_integer(value, 0, HASH_ID_MAX, f"{where}: hash_ids[{i}]") for i, value in enumerate(ids))
    return TraceRequest(index, timestamp, input_length, output_length, hash_ids)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field appears twice")
    return fields


def _integer(value: Any, low: int, high: int, what: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidInput(f"{what} must be a whole number from {low} to {high}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return ascii(value)[:60]
