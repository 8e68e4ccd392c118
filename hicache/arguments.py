"""Checks of callers' arguments: each returns the value in the form that the package works with, or raises InvalidInput.

A check only reads the value, and runs before the call changes any state. Messages name the argument and show numbers.
They never show text or objects, which may be prompts, salts or secrets.
"""

from __future__ import annotations

import math
import operator
import os
import re
import threading
from numbers import Real
from pathlib import Path
from typing import TypeVar

from .errors import InvalidInput

T = TypeVar("T")

# Whole numbers are stored in 64-bit fields of arrays and messages.
WHOLE_MAX = 2**63 - 1
# A thread cannot wait longer, and sums of such times do not overflow.
SECONDS_MAX = threading.TIMEOUT_MAX
# Names are hashed on the scheduler's thread, some 0.5 us per KiB.
NAME_BYTES_MAX = 64 << 10
# A label stands in log lines, tables, pages and metrics; the header of a page has room for 32 bytes.
LABEL_CHARACTERS_MAX = 64
# A folder of Hugging Face's cache: models--ORGANISATION--NAME/snapshots/COMMIT.
_HUB_SNAPSHOT = re.compile(r"(?:^|/)models--[^/]*?--([^/]+)/snapshots/[0-9a-f]{40}$")


def whole(name: str, value: object, least: int = 0, most: int = WHOLE_MAX) -> int:
    """Return `value` as an int from `least` to `most`. Accepts integers of any type (such as numpy's), except bool."""
    if type(value) is int:
        number = value
    else:
        try:
            number = operator.index(value)  # type: ignore[arg-type]  # the TypeError is the answer
        except TypeError as error:
            raise _bad(name, value, f"use a whole number from {least} to {most}") from error
    if isinstance(value, bool) or not least <= number <= most:
        raise _bad(name, value, f"use a whole number from {least} to {most}")
    return number


def number(name: str, value: object, *, most: float = SECONDS_MAX, positive: bool = False) -> float:
    """Return `value` as a float from 0 (`positive`: above 0) to `most`. Rejects bool and NaN."""
    try:
        real = float(value) if not isinstance(value, bool) and isinstance(value, Real) else math.nan
    except OverflowError:  # an int or a fraction beyond the range of float
        real = math.nan
    if not 0 <= real <= most or (positive and real == 0):  # also for NaN
        raise _bad(name, value, f"use a number {'above' if positive else 'from'} 0, at most {most:.4g}")
    return real


def instance(name: str, value: object, kind: type[T]) -> T:
    """Return `value`, an instance of `kind`."""
    if not isinstance(value, kind):
        raise _bad(name, value, f"pass a {kind.__name__}")
    return value


def instance_or_new(name: str, value: T | None, kind: type[T]) -> T:
    """Return `value`, an instance of `kind`, or a new instance with all defaults for None."""
    return kind() if value is None else instance(name, value, kind)


def file_path(name: str, value: object) -> Path:
    """Return `value`, text or an `os.PathLike` of text, as a path. Text must not be empty."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise InvalidInput(f"{name}: {_shown(value)} is not a path; pass text that is not empty, or a pathlib.Path")
    return Path(text)


def encoded(name: str, value: object, *, least: int = 1) -> bytes:
    """Return `value`, text of `least` to `NAME_BYTES_MAX` bytes, as UTF-8."""
    try:
        data = instance(name, value, str).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{name}: character {error.start} is half of a surrogate pair, which has no UTF-8; pass valid Unicode"
        ) from None
    if not least <= len(data) <= NAME_BYTES_MAX:
        raise InvalidInput(f"{name}: {len(data)} bytes of text; use {least} to {NAME_BYTES_MAX}")
    return data


def model_label(name: str) -> str:
    """Return a short label for a model: the last part of `name`, which is a folder, a name on a hub, or any text. For a
    snapshot in a hub's cache, this is the name of the model. At most `LABEL_CHARACTERS_MAX` printable characters,
    because the label is public: it never contains the folders above.
    """
    path = name.rstrip("/")
    snapshot = _HUB_SNAPSHOT.search(path)
    last = snapshot[1] if snapshot else path.rpartition("/")[2]
    return "".join(char if char.isprintable() else "?" for char in last.strip()[:LABEL_CHARACTERS_MAX])


def _bad(name: str, value: object, hint: str) -> InvalidInput:
    return InvalidInput(f"{name}: {_shown(value)} is not valid; {hint}")


def _shown(value: object) -> str:
    """Return a short name of `value`. Does not run code of its class, and does not print a long int in full."""
    if value is None or isinstance(value, bool) or type(value) is float:
        return str(value)
    if type(value) is int:
        return str(value) if value.bit_length() <= 128 else f"an int of {value.bit_length()} bits"
    return f"a value of type {type(value).__name__}"
