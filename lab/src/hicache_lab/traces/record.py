"""Records a trace from the log of an engine, without prompts.

Each block of a prompt is hashed together with the block before it and a random salt, which exists only in the memory of
one recording. The trace has no hashes, but numbers in the order of their first appearance. So nothing in a trace can be
compared with a guessed prompt or with another trace.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hicache.errors import InvalidInput

from .engine_logs import SGLANG_LEVEL, SGLANG_TEXT, VLLM_LEVEL, Arrival, Event, Output, events
from .request import LENGTH_MAX, TraceRequest

BLOCK_TOKENS_DEFAULT = 64
# A prompt of a million tokens, with its text, takes some 15 MB.
LOG_LINE_BYTES_MAX = 1 << 25
# Requests that wait for their output, or for that of an earlier request: more than an engine runs and queues. Each
# needs 8 bytes per block.
PENDING_MAX = 8192
_SALT_BYTES = 32
_DIGEST_BYTES = 16
_ABSURD = f"its output has not 0 to {LENGTH_MAX:,} tokens"
_NO_IDS = "the token ids of the prompt are empty or not whole numbers"


@dataclass(slots=True)
class _Pending:
    """A request in the order of arrival. Without `blocks`, `missing` says why."""

    name: str
    time_s: float
    missing: str
    tokens: int = 0
    blocks: tuple[int, ...] = ()
    output_tokens: int | None = None
    is_done: bool = False


class Recorder:
    """Makes the requests of one trace from the lines of a log.

    Memory grows by an entry for each distinct block; at most `PENDING_MAX` requests wait for their output. For one
    thread.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._numbers: dict[bytes, int] = {}  # of blocks, by their chained hash
        self._pending: deque[_Pending] = deque()
        self._open: dict[str, _Pending] = {}
        self._newest = ""
        self._count = 0
        self._first_s = 0.0
        self._last_ms = 0
        # Lines that are not of a request, requests without token ids by the reason, and requests without an output.
        self.other_lines = 0
        self.left_out: Counter[str] = Counter()
        self.without_output = 0

    def requests(self, lines: Iterable[bytes]) -> Iterator[TraceRequest]:
        """Yield the requests of a log in the order of arrival, each when its output is known, the rest at the end.

        Raises InvalidInput at the end if no request has token ids; the message says what to do.
        """
        for line in lines:
            found = events(line)
            self.other_lines += not found
            for event in found:
                self._take(event)
            while self._pending and (self._pending[0].is_done or len(self._pending) > PENDING_MAX):
                yield from self._ended(self._pending.popleft())
        while self._pending:
            yield from self._ended(self._pending.popleft())
        if not self._count:
            reasons = [reason for reason, _ in self.left_out.most_common(1)] or [f"{VLLM_LEVEL}, or {SGLANG_LEVEL}"]
            raise InvalidInput(f"log: no request has token ids; {reasons[0]}")

    def _take(self, event: Event) -> None:
        if isinstance(event, Arrival):
            # vLLM logs a second line for each request, which counts only if the first one is not logged.
            if event.missing != VLLM_LEVEL or (event.request not in self._open and event.request != self._newest):
                self._arrive(event)
            return
        request = self._open.get(event.request)
        if request is not None:
            self._add(request, event)

    def _arrive(self, event: Arrival) -> None:
        request = _Pending(event.request, event.time_s, event.missing)
        if event.token_ids is not None:
            self._fill(request, event.token_ids)
        # Only the ids of a text can still come.
        request.is_done = not request.blocks and request.missing != SGLANG_TEXT
        self._pending.append(request)
        self._open[event.request] = request
        self._newest = event.request

    def _add(self, request: _Pending, event: Output) -> None:
        if not request.blocks and event.prompt_ids is not None:
            self._fill(request, event.prompt_ids)
        request.output_tokens = (request.output_tokens or 0) + event.tokens
        if event.is_last:
            request.is_done = True
            del self._open[event.request]

    def _fill(self, request: _Pending, token_ids: list[Any]) -> None:
        """Set the blocks of a prompt, or the reason why it has none."""
        try:
            tokens = array("q", token_ids).tobytes()
        except (TypeError, OverflowError):
            tokens = b""
        request.missing = "" if tokens else _NO_IDS
        request.tokens = len(tokens) // 8
        request.blocks = tuple(self._blocks(tokens))

    def _blocks(self, tokens: bytes) -> Iterator[int]:
        digest, size = b"", 8 * self._block_tokens
        for start in range(0, len(tokens), size):
            block = digest + tokens[start : start + size]
            digest = hashlib.blake2b(block, key=self._salt, digest_size=_DIGEST_BYTES).digest()
            yield self._numbers.setdefault(digest, len(self._numbers))

    def _ended(self, request: _Pending) -> Iterator[TraceRequest]:
        if self._open.get(request.name) is request:
            del self._open[request.name]
        if not request.blocks or not 0 <= (request.output_tokens or 0) <= LENGTH_MAX:
            self.left_out[request.missing or _ABSURD] += 1
            return
        if not self._count:
            self._first_s = request.time_s
        # Several processes of an engine may write their lines slightly out of order.
        self._last_ms = max(self._last_ms, round(1000 * (request.time_s - self._first_s)))
        self.without_output += request.output_tokens is None
        yield TraceRequest(
            self._count, self._last_ms, request.tokens, request.output_tokens or 0, request.blocks, self._block_tokens
        )
        self._count += 1
