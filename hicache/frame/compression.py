"""Compression of payloads by zstd (https://facebook.github.io/zstd, RFC 8878).

KV in 16-bit floats compresses badly: bytes that vary little (sign and exponent) alternate with noise. Split into two
byte planes it compresses better and expands faster; lab/benchmarks/tags.py measures both.

Stored data cannot make a reader allocate memory: a zstd frame must declare the exact length of the page and a window
within the bound, and is expanded into a buffer of that length.

Locking design: zstd's contexts belong to one thread each (`threading.local`). zstd works without the interpreter lock.
"""

from __future__ import annotations

import functools
import importlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MissingPackage, install_hint

if TYPE_CHECKING:
    from types import ModuleType

# Higher levels need a core per 50 MB/s, and save one percent more.
_LEVEL = 1
# The largest window that a reader accepts; levels up to 12 write at most 4 MiB.
WINDOW_BYTES_MAX = 8 << 20
_contexts = threading.local()


@dataclass(frozen=True, slots=True)
class Compression:
    """The compression of payloads by zstd: whether 16-bit elements are first split into byte planes, which helps for
    float16 and bfloat16, and is harmful for other dtypes."""

    byte_planes: bool = True


def is_available() -> bool:
    """True if the package `zstandard` is installed."""
    return _zstandard() is not None


def require_zstandard() -> None:
    """Raise MissingPackage if the package is not installed."""
    if not is_available():
        raise MissingPackage(f"compression: the package zstandard is missing; {install_hint('compression')}")


def compress(payload: memoryview) -> bytes:
    """Return `payload` as one zstd frame that declares its length. REQUIRES: `require_zstandard`."""
    if not hasattr(_contexts, "compressor"):
        _contexts.compressor = importlib.import_module("zstandard").ZstdCompressor(level=_LEVEL)
    packed: bytes = _contexts.compressor.compress(payload)
    return packed


def expand(packed: memoryview, payload: memoryview) -> bool:
    """Fill `payload` from the zstd frame in `packed`. Return False if `packed` is not exactly one such frame.

    Allocates at most the window bound. REQUIRES: `is_available`; the two buffers do not overlap.
    """
    zstandard: Any = _zstandard()
    try:
        found = zstandard.get_frame_parameters(packed)
        if found.content_size != len(payload) or found.window_size > max(WINDOW_BYTES_MAX, len(payload)):
            return False
        if not hasattr(_contexts, "expander"):
            _contexts.expander = zstandard.ZstdDecompressor()
        with _contexts.expander.stream_reader(packed, closefd=False) as reader:
            return bool(reader.readinto(payload) == len(payload))
    except zstandard.ZstdError:
        return False


def split_planes(payload: memoryview, planes: memoryview) -> None:
    """Write all first bytes of the 16-bit elements of `payload`, then all second bytes, to `planes`."""
    elements = np.frombuffer(payload, dtype="<u2")
    first, second = _halves(planes)
    # Numpy casts and shifts whole words faster than it copies every second byte.
    np.copyto(first, elements, casting="unsafe")
    np.copyto(second, elements >> 8, casting="unsafe")


def join_planes(planes: memoryview, payload: memoryview) -> None:
    """Reverse `split_planes`."""
    elements = np.frombuffer(payload, dtype="<u2")
    first, second = _halves(planes)
    np.copyto(elements, second)
    np.left_shift(elements, 8, out=elements)
    np.bitwise_or(elements, first, out=elements)


def _halves(planes: memoryview) -> tuple[Any, Any]:
    both = np.frombuffer(planes, dtype=np.uint8)
    return both[: both.size // 2], both[both.size // 2 :]


@functools.cache
def _zstandard() -> ModuleType | None:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None
