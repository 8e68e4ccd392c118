"""Memory mappings: the address of a view, and mapping all pages of a mapping ahead of use with several threads.

The kernel zeroes each page that it maps, at a few GiB/s per thread, so a pool of hundreds of GiB would take minutes on
one thread.

Locking design: the parts of a mapping are disjoint, and each belongs to one thread. The caller waits for all threads.
A thread holds a view of its part, so the memory cannot be unmapped before the thread has finished.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .units import GIB, format_size

logger = logging.getLogger(__name__)

# A multiple of every huge page (2 MiB on x86-64, up to 512 MiB on arm64). One part takes a thread a few tenths of a
# second, and Ctrl-C waits for the parts in flight.
PART_BYTES = GIB
# About as many threads as saturate the memory bandwidth of one NUMA node.
THREADS_MAX = 8
# How often a log line shows the progress of a start that takes minutes.
PROGRESS_S = 5.0
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not yet named by the mmap module
# The smallest page of every Linux; larger ones are touched more than once.
_PAGE_BYTES = 4096


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a view."""
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))  # takes a fifth of the time


def populate(mapping: mmap.mmap) -> bool:
    """Request huge pages and map every page for writing, without changing a byte. Blocks and logs its progress.

    Return False if the kernel cannot map all of it ahead of use (before Linux 5.14, for example). The other pages are
    then mapped when they are first touched.
    """
    _ask_for_huge_pages(mapping)
    return in_parts(mapping, populate_part)


def populate_zeroed(mapping: mmap.mmap) -> None:
    """Map every page of a mapping that contains only zeros. Pages that `populate` cannot map are touched by writing
    zeros. Blocks. REQUIRES: no other thread and no other process writes to the mapping.
    """
    _ask_for_huge_pages(mapping)
    in_parts(mapping, lambda part: populate_part(part) or touch(part))


def zeroed(size_bytes: int) -> memoryview:
    """Return private memory of zeros whose pages are mapped, see `populate_zeroed`. Blocks. Raises OSError."""
    if not size_bytes:
        return memoryview(b"")
    mapping = mmap.mmap(-1, size_bytes)
    populate_zeroed(mapping)
    return memoryview(mapping)


def in_parts(
    mapping: mmap.mmap, work: Callable[[memoryview], bool], *, part_bytes: int = PART_BYTES,
    interval_s: float = PROGRESS_S,
) -> bool:
    """Return True if `work` returns True for all parts of a mapping. A part that fails does not stop the other parts.

    Parts end at addresses that are multiples of `part_bytes`, and `work` runs on several threads of this call if there
    is more than one part. Blocks; a log line every `interval_s` seconds shows the progress. KeyboardInterrupt ends the
    call when the parts in flight have ended. Raises what `work` raises, after all parts.
    """
    whole = memoryview(mapping)
    first_cut = part_bytes - address_of(whole) % part_bytes
    cuts = [0, *range(first_cut, whole.nbytes, part_bytes), whole.nbytes]
    parts = [whole[first:last] for first, last in itertools.pairwise(cuts)]
    if len(parts) == 1:
        return work(whole)
    threads = min(THREADS_MAX, len(os.sched_getaffinity(0)), len(parts))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="hicache-populate")
    try:
        sizes = {pool.submit(work, part): part.nbytes for part in parts}
        del parts  # drops the futures and their views, so that the caller can unmap the memory
        log_s = time.monotonic() + interval_s
        for future in sizes:  # one by one: `futures.wait` locks all, and after KeyboardInterrupt may keep some locked
            while not future.done():
                with contextlib.suppress(TimeoutError):
                    future.exception(max(0.0, log_s - time.monotonic()))
                if time.monotonic() >= log_s:
                    done_bytes = sum(size for one, size in sizes.items() if one.done())
                    logger.info("host memory: %s of %s mapped", format_size(done_bytes), format_size(whole.nbytes))
                    log_s += interval_s
        return all([future.result() for future in sizes])
    finally:
        pool.shutdown(cancel_futures=True)


def touch(part: memoryview) -> bool:
    """Write a zero into each page of `part`. Return True."""
    np.frombuffer(part, dtype=np.uint8)[::_PAGE_BYTES] = 0
    return True


def populate_part(part: memoryview) -> bool:
    """Map every page of `part` for writing, without changing a byte. Return False if the kernel cannot do it."""
    return _advise(part, _MADV_POPULATE_WRITE)


def _ask_for_huge_pages(mapping: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(memoryview(mapping), mmap.MADV_HUGEPAGE)  # may fail; small pages work too


def _advise(part: memoryview, advice: int) -> bool:
    # Not `mmap.madvise`: it holds the interpreter's lock, for seconds if the memory is large.
    madvise = ctypes.CDLL(None).madvise
    return int(madvise(ctypes.c_void_p(address_of(part)), ctypes.c_size_t(part.nbytes), advice)) == 0
