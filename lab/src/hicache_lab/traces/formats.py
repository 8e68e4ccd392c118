"""The formats of traces: how the fields of one line become a request. docs/traces.md describes them.

- **Mooncake**: the traces published with Mooncake (Qin et al., FAST '25), and the traces that HiCache writes. Two
  optional fields are HiCache's own: `block_tokens`, if blocks do not have 512 tokens, and `session`.
- **Mooncake with sessions**: as Dynamo's `dynamo.replay` (docs.nvidia.com/dynamo, "Mocker Trace Replay") and AIPerf
  (docs.nvidia.com/aiperf, "Trace Replay with Mooncake Traces") have added them: `session_id`, and the recorded think
  time `delay`. `hash_ids` are those of the whole prompt of each turn.
- **Qwen-Bailian**: the public traces of Alibaba's service (Wang et al., ATC '25), with 16-token blocks. Each hash is
  that of one block alone, so that equal hashes may follow different prefixes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeAlias

from hicache.errors import InvalidInput

from .request import (
    BLOCK_TOKENS,
    BLOCK_TOKENS_MAX,
    BLOCK_TOKENS_MIN,
    HASH_ID_MAX,
    LENGTH_MAX,
    TIMESTAMP_MS_MAX,
    TraceRequest,
)

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_BAILIAN_FIELDS = ("chat_id", "parent_chat_id")
_BAILIAN_BLOCK_TOKENS = 16
# Other names that Dynamo accepts.
_SAME = {"created_time": "timestamp", "input_tokens": "input_length", "output_tokens": "output_length",
         "delay_ms": "delay"}
# The time of an answer is not recorded. So many tokens per millisecond are usual.
_OUTPUT_TOKENS_PER_MS = 0.05

# Makes a request from the fields of a line, its index, and the file and line for errors. Raises InvalidInput.
LineParser: TypeAlias = Callable[[Mapping[str, Any], int, str], TraceRequest]


class TraceFormat(StrEnum):
    """The format of a trace. All lines of a file have the same one."""

    MOONCAKE = "Mooncake"
    SESSIONS = "Mooncake with sessions"
    BAILIAN = "Qwen-Bailian"


def format_of(fields: Mapping[str, Any]) -> TraceFormat:
    """Return the format of a line with these fields."""
    if all(name in fields for name in _BAILIAN_FIELDS):
        return TraceFormat.BAILIAN
    return TraceFormat.SESSIONS if "session_id" in fields else TraceFormat.MOONCAKE


def parser_of(fields: Mapping[str, Any]) -> LineParser:
    """Return a parser for a trace whose first line has these fields. REQUIRES: it gets all lines in order."""
    return _PARSERS[format_of(fields)]()


class MooncakeParser:
    """Parses the lines of a trace in the format of Mooncake."""

    def __init__(self) -> None:
        self._block_tokens: int | None = None  # of the first line

    def __call__(self, fields: Mapping[str, Any], index: int, where: str) -> TraceRequest:
        """Return the request of the next line. Raises InvalidInput with the field."""
        _require(fields, FIELDS, where)
        if "parent_chat_id" in fields:
            raise InvalidInput(
                f"{where}: has the field parent_chat_id of the {TraceFormat.BAILIAN} format, but the first line is in "
                f"the {TraceFormat.MOONCAKE} format; use one format per file"
            )
        timestamp = _number(fields["timestamp"], TIMESTAMP_MS_MAX, f"{where}: timestamp", "milliseconds")
        input_length, output_length = _lengths(fields, where)
        size = self._size(fields, where)
        ids, blocks = _list(fields["hash_ids"], where), -(-input_length // size)
        if len(ids) != blocks:
            raise InvalidInput(
                f"{where}: hash_ids has {len(ids)} blocks, but input_length {input_length} makes {blocks} "
                f"of {size} tokens"
            )
        _require_ids(ids, where)
        session = fields.get("session")
        if session is not None:
            _integer(session, 0, HASH_ID_MAX, f"{where}: session")
        return TraceRequest(index, timestamp, input_length, output_length, tuple(ids), size, session)

    def _size(self, fields: Mapping[str, Any], where: str) -> int:
        size = fields.get("block_tokens", BLOCK_TOKENS)
        if size != self._block_tokens or type(size) is not int:
            _integer(size, BLOCK_TOKENS_MIN, BLOCK_TOKENS_MAX, f"{where}: block_tokens")
            if self._block_tokens is not None:
                raise InvalidInput(
                    f"{where}: block_tokens is {size}, but {self._block_tokens} in the lines before; use one size per "
                    "file"
                )
            self._block_tokens = size
        return int(size)


class SessionsParser:
    """Parses the lines of a trace of sessions. The turns of a session are in order, but times of the lines are not.

    A turn without `timestamp` begins `delay` after the end of the turn before, at the usual speed of an answer. Its
    memory grows by an entry for each session.
    """

    def __init__(self) -> None:
        self._parse = MooncakeParser()
        self._sessions: dict[str | int, int] = {}
        self._end_ms: dict[int, float] = {}  # of the last turn, by session

    def __call__(self, fields: Mapping[str, Any], index: int, where: str) -> TraceRequest:
        """Return the request of the next line. Raises InvalidInput with the field."""
        found = {_SAME.get(name, name): value for name, value in fields.items()}
        if str(found.get("context_mode", "")).startswith("deltas"):
            raise InvalidInput(f"{where}: context_mode: only whole prompts can be read; convert the turns to them")
        name = found.get("session_id")
        if name is None:
            return self._parse({**found, "session": None}, index, where)
        if type(name) not in (str, int):
            raise InvalidInput(f"{where}: session_id must be text, got {_shown(name)}")
        session = self._sessions.setdefault(name, len(self._sessions))
        end_ms = self._end_ms.get(session)
        if found.get("timestamp") is None and end_ms is not None:
            found["timestamp"] = end_ms + _number(found.get("delay") or 0, TIMESTAMP_MS_MAX, f"{where}: delay",
                                                  "milliseconds")
        request = self._parse({**found, "session": session}, index, where)
        self._end_ms[session] = request.timestamp_ms + request.output_length / _OUTPUT_TOKENS_PER_MS
        return request


class BailianParser:
    """Parses the lines of a Qwen-Bailian trace. Its memory grows by an entry for each chat."""

    def __init__(self) -> None:
        self._roots: dict[int, int] = {}  # the first chat of the conversation, by chat

    def __call__(self, fields: Mapping[str, Any], index: int, where: str) -> TraceRequest:
        """Return the request of the next line. Raises InvalidInput with the field."""
        _require(fields, (*_BAILIAN_FIELDS, *FIELDS), where)
        time_s = _number(fields["timestamp"], TIMESTAMP_MS_MAX // 1000, f"{where}: timestamp", "seconds")
        input_length, output_length = _lengths(fields, where)
        hashes = _list(fields["hash_ids"], where)
        whole, partial = divmod(input_length, _BAILIAN_BLOCK_TOKENS)
        if len(hashes) not in (whole, whole + bool(partial)):
            raise InvalidInput(
                f"{where}: hash_ids has {len(hashes)} blocks, but input_length {input_length} makes {whole} whole "
                f"blocks of {_BAILIAN_BLOCK_TOKENS} tokens"
            )
        _require_ids(hashes, where)
        if partial and len(hashes) == whole:
            # Not a hash of the file, so that the block is not equal to any other. Not -1, whose hash is that of -2.
            hashes = [*hashes, -2 - index]
        # Chains the hashes. Python's hash of integers is the same in each process.
        ids = tuple(itertools.accumulate(hashes, lambda before, own: hash((before, own)) & HASH_ID_MAX, initial=0))
        return TraceRequest(
            index, round(1000 * time_s, 3), input_length, output_length, ids[1:], _BAILIAN_BLOCK_TOKENS,
            self._root(fields, where),
        )

    def _root(self, fields: Mapping[str, Any], where: str) -> int:
        """Return the first chat of the conversation: of a chat whose parent is not in the file, the parent."""
        chat = _integer(fields["chat_id"], 0, HASH_ID_MAX, f"{where}: chat_id")
        parent = _integer(fields["parent_chat_id"], -1, HASH_ID_MAX, f"{where}: parent_chat_id")
        root = chat if parent == -1 else self._roots.get(parent, parent)
        self._roots[chat] = root
        return root


_PARSERS: Mapping[TraceFormat, Callable[[], LineParser]] = {
    TraceFormat.MOONCAKE: MooncakeParser, TraceFormat.SESSIONS: SessionsParser, TraceFormat.BAILIAN: BailianParser,
}


def _require(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in names:
        if name not in fields:
            raise InvalidInput(f"{where}: {name} is missing")


def _lengths(fields: Mapping[str, Any], where: str) -> tuple[int, int]:
    return (
        _integer(fields["input_length"], 1, LENGTH_MAX, f"{where}: input_length"),
        _integer(fields["output_length"], 0, LENGTH_MAX, f"{where}: output_length"),
    )


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidInput(f"{where}: hash_ids must be a list, got {_shown(value)}")
    return value


def _require_ids(ids: list[Any], where: str) -> None:
    """Check all ids at once, which is four times as fast as one by one, and find the invalid one only if there is one.
    """
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > HASH_ID_MAX):
        for i, value in enumerate(ids):
            _integer(value, 0, HASH_ID_MAX, f"{where}: hash_ids[{i}]")


def _number(value: Any, high: int, what: str, unit: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= high:
        raise InvalidInput(f"{what} must be {unit} from 0 to {high}, got {_shown(value)}")
    return value  # type: ignore[no-any-return]


def _integer(value: Any, low: int, high: int, what: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidInput(f"{what} must be a whole number from {low} to {high}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return ascii(value)[:60]
