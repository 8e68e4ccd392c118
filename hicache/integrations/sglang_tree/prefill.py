"""Measures how fast SGLang computes prompts, which break-even compares with copies and reads.

A sample is one prefill batch without a load and without decoding: from `begins`, before its forward, to `ended`, after
the work of the step was queued. On CUDA the times are events on the stream of the forwards, so that waiting for earlier
forwards does not count; they are read when they have passed. On a CPU the forward runs between the two calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

# Samples whose events have not passed; more than the forwards that SGLang has in flight.
_SAMPLES_MAX = 8


class Prefilled(Protocol):
    """The used fields of SGLang's request: a step computes its tokens from `prefix_len` to `extend_end`, which is None
    after a retraction."""

    prefix_len: int
    extend_end: int | None


class PrefillClock:
    """Calls `record(tokens, seconds)` for each sample. `event` records a timed event after the queued forwards; None on
    a CPU."""

    def __init__(
        self, record: Callable[[int, float], None], event: Callable[[], torch.cuda.Event] | None = None
    ) -> None:
        self._record = record
        self._event = event
        self._requests: list[Prefilled] = []
        self._tokens = 0
        self._began: Any = None
        self._samples: deque[tuple[int, Any, Any]] = deque(maxlen=_SAMPLES_MAX)

    def add(self, request: Prefilled) -> None:
        """Note that the next batch computes tokens of `request`."""
        self._requests.append(request)

    def begins(self, *, loads: bool) -> None:
        """Note that the batch is complete. `loads`: its forward waits for a load, so it is not a sample."""
        tokens = sum(max(0, (one.extend_end or 0) - one.prefix_len) for one in self._requests)
        self._requests.clear()
        self._tokens = 0 if loads else tokens
        self._began = self._now() if self._tokens else None

    def leave_out(self) -> None:
        """Note that the batch also decodes (`--enable-mixed-chunk`), so it is not a sample."""
        self._began = None

    def ended(self) -> None:
        """Note that the forward of the batch was queued, or on a CPU has run."""
        if self._began is not None:
            self._samples.append((self._tokens, self._began, self._now()))
            self._began = None
        while self._samples and (seconds := self._seconds(*self._samples[0][1:])) is not None:
            self._record(self._samples.popleft()[0], seconds)

    def _now(self) -> Any:
        return time.perf_counter() if self._event is None else self._event()

    def _seconds(self, began: Any, ended: Any) -> float | None:
        """Return the time between two points, None if it is not known yet."""
        if self._event is None:
            return float(ended - began)
        return began.elapsed_time(ended) / 1000 if ended.query() else None
