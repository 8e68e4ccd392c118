"""The file `history.json`, which keeps the history of a daemon's page across restarts.

It is beside the Unix socket. The daemon holds the lock of that directory, so no other daemon uses the file. Its content
is that of `/history`. It is written to another file that then replaces it, so it is always whole. Processes of this
user may write it, so it is checked like a request; a file that cannot be used is an empty history.

Locking design: everything runs on the event loop's thread. One task loads, then saves, so no two of them overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from pathlib import Path

import aiofiles
import aiofiles.os
from pydantic import BaseModel, ConfigDict, ValidationError

from .history import Fault, History, Sample

logger = logging.getLogger(__name__)

# A killed daemon loses at most this time of its history.
SAVE_S = 60.0
# More than three times a full history.
BYTES_MAX = 512 << 10


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    columns: list[str]
    rows: list[Sample]
    faults: list[Fault]


class HistoryFile:
    """The file at `path` of `history`, saved every `interval_s`."""

    def __init__(self, path: Path, history: History, interval_s: float = SAVE_S) -> None:
        self._path = path
        self._history = history
        self._interval_s = interval_s
        self._has_failed = False

    async def load(self) -> None:
        """Restore the history of the last run, if there is one. Logs one line if the file cannot be used."""
        try:
            async with aiofiles.open(self._path, "rb", opener=_open) as file:
                content = await file.read(BYTES_MAX + 1)
            saved = _parsed(content)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            logger.warning("daemon: %s cannot be used, so the page's plots start empty: %s", self._path, reason)
        else:
            self._history.restore(saved.rows, saved.faults)

    async def save(self) -> None:
        """Replace the file by the history of now. Logs the first of consecutive failures."""
        content = await asyncio.to_thread(lambda: json.dumps(self._history.as_json()).encode())  # takes milliseconds
        new = self._path.with_suffix(".new")
        try:
            async with aiofiles.open(new, "wb", opener=_open) as file:
                await file.write(content)
                await file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            await aiofiles.os.replace(new, self._path)
        except OSError as error:
            if not self._has_failed:
                logger.warning("daemon: %s cannot be written, so a restart clears the page's plots: %s",
                               self._path, error.strerror)
            self._has_failed = True
        else:
            self._has_failed = False

    async def keep(self, ending: asyncio.Event) -> None:
        """Save once per interval, and a last time at `ending`."""
        while not ending.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await ending.wait()
            await self.save()


def _open(path: str, flags: int) -> int:
    """Open a file of this user only; neither wait for a pipe nor follow a link."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)


def _parsed(content: bytes) -> _Saved:
    """Raises ValueError, without the content: labels are untrusted text."""
    if len(content) > BYTES_MAX:
        raise ValueError(f"it has more than {BYTES_MAX} bytes")
    try:
        saved = _Saved.model_validate_json(content)
    except ValidationError as error:
        raise ValueError("it is damaged, or of another version") from error
    numbers = (value for row in saved.rows for value in (*row[:-1], *row.missed.values()))
    values = (*numbers, *(fault.count for fault in saved.faults))
    if saved.columns != list(Sample._fields) or min(values, default=0) < 0:
        raise ValueError("it is of another version, or not a history")
    return saved
