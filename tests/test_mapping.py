"""Mappings whose pages are all mapped at once, in parts: what is mapped, what is left as it was, failures, progress."""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import re
import signal
import sys
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest

from hicache.mapping import address_of, in_parts, populate, populate_part, populate_zeroed, touch
from tests.log_records import messages_of
from tests.waiting import WAIT_S, wait_for

PAGE = mmap.PAGESIZE
PARTS = 8
PART = 64 * PAGE


def private(size: int = PARTS * PART) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def resident_pages(mapping: mmap.mmap) -> int:
    """Pages of the mapping that are in memory, as mincore says."""
    pages = (ctypes.c_ubyte * (len(mapping) // PAGE))()
    address = ctypes.c_void_p(address_of(memoryview(mapping)))
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapping)), pages) == 0
    return sum(page & 1 for page in pages)


def progress(caplog: pytest.LogCaptureFixture) -> list[str]:
    return messages_of(caplog, "mapping")


@pytest.fixture
def file_mapping(tmp_path: Path) -> mmap.mmap:
    """A shared mapping whose file ends in the middle: the kernel cannot map what is behind that."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * PARTS * PART)
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
        file.truncate(PARTS * PART // 2)
    return mapping


def test_every_page_is_mapped_and_keeps_its_bytes() -> None:
    mapping = private()
    assert resident_pages(mapping) == 0
    mapping[5 * PART : 5 * PART + 5] = b"hello"
    assert populate(mapping)
    assert resident_pages(mapping) == PARTS * PART // PAGE
    assert mapping.find(b"hello") == 5 * PART and mapping[:].count(0) == PARTS * PART - 5


def test_only_touched_pages_are_mapped() -> None:
    mapping = private()
    assert in_parts(mapping, lambda part: True, part_bytes=PART)
    assert resident_pages(mapping) == 0
    assert in_parts(mapping, touch, part_bytes=PART)
    assert resident_pages(mapping) == PARTS * PART // PAGE


def test_a_mapping_of_zeros_is_mapped_and_can_be_unmapped() -> None:
    mapping = private()
    populate_zeroed(mapping)
    assert resident_pages(mapping) == PARTS * PART // PAGE
    assert mapping[:].count(0) == PARTS * PART
    mapping.close()  # BufferError if a view were left


def test_parts_are_the_whole_mapping_and_end_at_multiples_of_their_size() -> None:
    mapping = private()
    parts: list[tuple[int, int]] = []

    def work(part: memoryview) -> bool:
        parts.append((address_of(part), part.nbytes))
        return True

    assert in_parts(mapping, work, part_bytes=PART)
    first = address_of(memoryview(mapping))
    ends = [address + size for address, size in sorted(parts)]
    assert [address for address, _ in sorted(parts)] == [first, *ends[:-1]] and ends[-1] == first + len(mapping)
    assert len(parts) in (PARTS, PARTS + 1) and not any(end % PART for end in ends[:-1])
    mapping.close()


def test_parts_run_side_by_side_on_threads_that_end_with_the_call() -> None:
    together = threading.Barrier(min(2, len(os.sched_getaffinity(0))))
    met = threading.Event()

    def work(part: memoryview) -> bool:
        if not met.is_set():
            together.wait(WAIT_S)
            met.set()
        return True

    assert in_parts(private(), work, part_bytes=PART)
    assert not any("hicache-populate" in thread.name for thread in threading.enumerate())


def test_a_part_that_the_kernel_cannot_map_is_reported(file_mapping: mmap.mmap) -> None:
    assert not populate(file_mapping)
    told: list[bool] = []

    def work(part: memoryview) -> bool:
        told.append(populate_part(part))
        return told[-1]

    assert not in_parts(file_mapping, work, part_bytes=PART)
    assert told.count(True) in (PARTS // 2, PARTS // 2 - 1, PARTS // 2 + 1)


def test_a_part_that_fails_does_not_stop_the_others() -> None:
    done: list[int] = []

    def work(part: memoryview) -> bool:
        done.append(part.nbytes)
        return len(done) != 2

    assert not in_parts(private(), work, part_bytes=PART)
    assert sum(done) == PARTS * PART


def test_an_error_of_a_part_arrives() -> None:
    def work(part: memoryview) -> bool:
        raise MemoryError

    mapping = private()
    with pytest.raises(MemoryError):
        in_parts(mapping, work, part_bytes=PART)


def test_progress_is_logged_while_it_takes_long_and_not_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hicache")
    done: list[int] = []

    def work(part: memoryview) -> bool:
        if done:
            wait_for(lambda: any(re.fullmatch(r"host memory: .* of 2\.0 MiB mapped", one) for one in progress(caplog)))
        done.append(part.nbytes)
        return True

    assert in_parts(private(), work, part_bytes=PART, interval_s=0.01)
    caplog.clear()
    assert in_parts(private(), touch, part_bytes=PART)
    assert not progress(caplog)


def test_ctrl_c_ends_it_after_the_parts_in_flight() -> None:
    main = threading.main_thread()
    if threading.current_thread() is not main or main.ident is None:
        pytest.skip("signals arrive on the main thread, and this test runs on another one")
    begun: list[int] = []
    numbers = itertools.count()
    ident = main.ident

    def caller_is_in(function: str) -> bool:
        """True if the call is in this function of its thread pool, and starts no thread."""
        names = [frame.name for frame in traceback.extract_stack(sys._current_frames()[ident])]
        return function in names and "submit" not in names

    def work(part: memoryview) -> bool:
        begun.append(part.nbytes)
        if next(numbers) == 0:  # two threads may both find two entries in `begun`
            wait_for(lambda: caller_is_in("wait"))
            signal.pthread_kill(ident, signal.SIGINT)
        wait_for(lambda: caller_is_in("shutdown"))
        np.frombuffer(part, dtype=np.uint8)[:] = 1
        return True

    mapping = private(1000 * PART)
    with pytest.raises(KeyboardInterrupt):
        in_parts(mapping, work, part_bytes=PART)
    assert 1 <= len(begun) < 1000
    assert mapping[:].count(1) == sum(begun), "no thread writes any more"
