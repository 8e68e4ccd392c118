"""The speeds of a machine, from which a replay in virtual time and a plan compute how long each operation takes.

    an operation on bytes     fixed_s + bytes / bandwidth
    a prefill                 tokens / rate + attended pairs / pair rate

A device serves the bytes of its operations one after the other, at its whole bandwidth; the fixed times of up to
`parallel` operations overlap. A pair is a token and one token before it, or itself: attention over a prompt of n tokens
computes n (n + 1) / 2 of them. Without a rate of pairs, the time of attention is part of the time per token.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hicache.config.files import open_regular
from hicache.errors import ConfigError
from hicache.units import parse_duration, parse_size

# A report of `hicache doctor` has a few KiB.
_REPORT_BYTES_MAX = 1 << 20
_PARALLEL_MAX = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSpeed:
    """How fast the engine computes prompts. `tokens_per_s` None means that computing takes no time."""

    tokens_per_s: float | None = None
    pairs_per_s: float | None = None

    def prefill_s(self, first: int, tokens: int) -> float:
        """Return the seconds for computing `tokens` tokens after the first `first` ones of a prompt."""
        seconds = tokens / self.tokens_per_s if self.tokens_per_s else 0.0
        if self.pairs_per_s:
            end = first + tokens
            seconds += (end * (end + 1) - first * (first + 1)) / 2 / self.pairs_per_s
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpeed:
    """The speed of a store: bytes per second in each direction, and seconds per operation besides them. With one of
    `links`, as of one disk, writes take time from reads; with two, each direction has its own."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    fixed_s: float = 0.0
    parallel: int = 4
    links: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """All speeds of one node. `host_bytes_per_s` is that of copies between device and host, in each direction, and
    `host_fixed_s` the time of a copy besides its bytes. `storage` is shared by all nodes."""

    compute: ComputeSpeed = ComputeSpeed()
    host_bytes_per_s: float = 25e9
    host_fixed_s: float = 20e-6
    storage: StorageSpeed = StorageSpeed(read_bytes_per_s=3e9, write_bytes_per_s=1e9, fixed_s=100e-6)


def storage_speed(text: str, base: StorageSpeed = Speeds().storage) -> StorageSpeed:
    """Return the speed of a store from text such as `read=3GB/s,write=1GB/s,fixed=100us,parallel=4,links=2`. What the
    text does not name is that of `base`. Raises ValueError."""
    found: dict[str, float | int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in ("read", "write", "fixed", "parallel", "links"):
            raise ValueError(f"{part[:40]!r} is not one of read=, write=, fixed=, parallel= and links=")
        if name in found:
            raise ValueError(f"{name} appears twice")
        found[name] = _value(name, value)
    names = {"read": "read_bytes_per_s", "write": "write_bytes_per_s", "fixed": "fixed_s"}
    changes: dict[str, Any] = {names.get(name, name): value for name, value in found.items()}
    return replace(base, **changes)


def bandwidth(text: str) -> float:
    """Return the bytes per second of `3GB/s`. Raises ValueError."""
    if not text.endswith("/s"):
        raise ValueError(f"{text[:40]!r} is not a bandwidth; write it like 3GB/s or 800MiB/s")
    size = float(parse_size(text.removesuffix("/s")))
    if size <= 0:
        raise ValueError("a bandwidth must be above zero")
    return size


def _value(name: str, text: str) -> float | int:
    if name == "fixed":
        return float(parse_duration(text))
    if name == "parallel":
        if not text.isdecimal() or not 1 <= int(text) <= _PARALLEL_MAX:
            raise ValueError(f"parallel must be a whole number from 1 to {_PARALLEL_MAX}")
        return int(text)
    if name == "links":
        if text not in ("1", "2"):
            raise ValueError("links must be 1, of one disk, or 2")
        return int(text)
    return bandwidth(text)


def measured_storage(path: Path) -> StorageSpeed:
    """Return the speed of the first store in a report of `hicache doctor --json`: the fixed time is that of a call with
    as many pages as the longest read.

    Raises ConfigError for another file, and for a report without a store that was read.
    """
    try:
        with open_regular(path) as file:
            report = json.loads(file.read(_REPORT_BYTES_MAX))
        rows = [row["figures"] for row in report["rows"]]
        figures = next(found for found in rows if {"read_page_s", "write_bytes_per_s"} <= found.keys())
        read = float(figures["page"]) / float(figures["read_page_s"])
        write, fixed_s = float(figures["write_bytes_per_s"]), float(figures["read_fixed_s"])
        parallel = int(figures["read_pages"])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except StopIteration as error:
        raise ConfigError(f"{path}: has no store that was read and written; check a configuration with one") from error
    except (ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError) as error:
        raise ConfigError(f"{path}: is not a report of `hicache doctor --json`") from error
    if not all(math.isfinite(value) and value > 0 for value in (read, write, parallel)) or not 0 <= fixed_s < math.inf:
        raise ConfigError(f"{path}: the speeds of the store are not positive numbers")
    return StorageSpeed(read_bytes_per_s=read, write_bytes_per_s=write, fixed_s=fixed_s, parallel=parallel)
