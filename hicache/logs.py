"""Logging: formatters for programs, and rate-limited log lines.

The package writes only to loggers below `hicache`. A program, such as `hicache serve`, calls `set_up_logging`, which
also covers the lines of libraries; an engine that embeds a cache keeps its own set-up.

Locking design: `LimitedLog` has a lock, which is held for a few instructions. `request_id` is a context variable.
"""

from __future__ import annotations

import contextvars
import json
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from .clock import SYSTEM_CLOCK

# The ID of the request that a thread or task serves; the daemon sets it.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("hicache_request_id", default="")
# How often a LimitedLog writes a line of one kind.
LIMIT_S = 10.0
# How often a library's line is written: it repeats what it cannot do, such as exporting spans, for each batch.
LIBRARY_LIMIT_S = 60.0
# Kinds that a LimitedLog remembers; all others count as one kind.
KINDS_MAX = 256
# A whole page key, or a secret of 32 bytes, in the message of another package's exception.
_WHOLE_KEY = re.compile(r"(?<![0-9a-fA-F])([0-9a-fA-F]{8})[0-9a-fA-F]{56}(?![0-9a-fA-F])")


def shortened(text: str) -> str:
    """Return `text` with each run of 64 hexadecimal digits cut to 8."""
    return _WHOLE_KEY.sub(r"\1...", text)


class TextFormatter(logging.Formatter):
    """A line for people: time in UTC, level, logger, message, and the request if there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and below it a traceback if there is one."""
        request = request_id.get()
        text = super().format(record)
        head, newline, rest = shortened(text).partition("\n")
        return f"{head} [request {request}]{newline}{rest}" if request else f"{head}{newline}{rest}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the first line. Line breaks in the message are escaped, so a message cannot forge a log line."""
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (UTC, ISO 8601), `level`, `logger`, `message`, and `request` and `exception` if
    there are any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{second}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id.get():
            entry["request"] = request_id.get()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return shortened(json.dumps(entry, ensure_ascii=True))


def set_up_logging(level: str = "info", form: str = "text", stream: TextIO | None = None) -> None:
    """Write the package's records of `level` and above, and warnings and errors of libraries (those of the module
    `warnings` too), to `stream` (default: standard error) in the format `form`, `text` or `json`. A library's line is
    written at most every `LIBRARY_LIMIT_S`.

    For programs. Replaces the set-up of an earlier call.
    """
    logger, root = logging.getLogger("hicache"), logging.getLogger()
    formatter = JsonFormatter() if form == "json" else TextFormatter()
    for one in (logger, root):
        for handler in [handler for handler in one.handlers if handler.get_name() == "hicache"]:
            one.removeHandler(handler)
        handler = logging.StreamHandler(sys.stderr if stream is None else stream)
        handler.set_name("hicache")
        handler.setFormatter(formatter)
        one.addHandler(handler)
    logger.propagate = False
    logger.setLevel(level.upper())
    handler.setLevel(logging.WARNING)
    handler.addFilter(LimitedLog(root, LIBRARY_LIMIT_S).admit)
    logging.captureWarnings(True)


class LimitedLog:
    """Writes a line of each kind at most every `period_s` seconds, with the number of omitted lines."""

    def __init__(
        self, logger: logging.Logger, period_s: float = LIMIT_S, clock: Callable[[], float] = SYSTEM_CLOCK
    ) -> None:
        self._logger = logger
        self._period_s = period_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # when the last line was written, and lines left out since

    def warn(self, kind: str, message: str, *values: object) -> None:
        """Write `message` with its `values`, unless a line of this kind was written a moment ago."""
        omitted = self._omitted(kind)
        if omitted:
            message, values = f"{message} (and %d more since the last line)", (*values, omitted)
        if omitted is not None:
            self._logger.warning(message, *values)

    def admit(self, record: logging.LogRecord) -> bool:
        """A filter of a handler: True unless a record of the same line of code was admitted a moment ago."""
        omitted = self._omitted(f"{record.pathname}:{record.lineno}")
        if omitted:
            record.msg, record.args = f"{record.getMessage()} (and {omitted} more since the last line)", None
        return omitted is not None

    def _omitted(self, kind: str) -> int | None:
        """Return how many lines of this kind were left out since the last one; None if one was written a moment ago."""
        now_s = self._clock()
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
                kind = ""
            written_s, omitted = self._kinds.get(kind, (-math.inf, 0))
            if now_s - written_s < self._period_s:
                self._kinds[kind] = (written_s, omitted + 1)
                return None
            self._kinds[kind] = (now_s, 0)
        return omitted
