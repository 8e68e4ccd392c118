"""The log: its forms, its limit, and what a guard, a store and a cache write to it."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import shutil
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest

from hicache import HiCacheConfig, KVGeometry, Namespace
from hicache.backends.base import Direction
from hicache.backends.file import FileDriver
from hicache.backends.guard import Override
from hicache.backends.guard.admission import BreakerChange
from hicache.backends.guard.breaker import BreakerState, BreakerStatistics
from hicache.backends.guard.log import GuardLog
from hicache.backends.memory import MemoryDriver
from hicache.backends.store import Store
from hicache.cache import create_cache
from hicache.cache.report import LIMITS, DropLog, dropped
from hicache.cache.statistics import CacheStatistics
from hicache.config.guard import GuardConfig
from hicache.config.storage import FileStorageOptions
from hicache.controller.gate import StorageGate
from hicache.errors import BackendUnavailable
from hicache.frame import FrameCodec
from hicache.logs import LimitedLog, request_id, set_up_logging
from hicache.supervised import SupervisedPool
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import driver_of, memory_store, store_of
from hicache_lab.conformance.pages import NAMESPACE, PAYLOAD_BYTES, empty_frames, full_frames, make_keys, soon
from hicache_lab.faults import FaultyDriver
from hicache_lab.log_page import LogCall, entries, log_calls, page
from tests.tuned import tuned
from tests.waiting import wait_for


@pytest.fixture
def lines() -> io.StringIO:
    """What the package logs at INFO and above, as text."""
    stream = io.StringIO()
    set_up_logging("info", "text", stream)
    return stream


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def make_guard(clock: ManualClock) -> tuple[Store, FaultyDriver]:
    faults, codec = FaultyDriver(MemoryDriver(), clock=clock), FrameCodec(NAMESPACE, PAYLOAD_BYTES)
    options = tuned(GuardConfig, failures=2, backoff_min=10.0, backoff_max=10.0, retry_share=0.0)
    return Store(faults, codec, options, name="disk", clock=clock), faults


def test_a_line_says_when_where_and_what(lines: io.StringIO) -> None:
    logging.getLogger("hicache.somewhere").warning("page %d", 7)
    wanted = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING hicache\.somewhere: page 7\n"
    assert re.fullmatch(wanted, lines.getvalue())


def test_lines_of_a_request_carry_its_id() -> None:
    stream = io.StringIO()
    token = request_id.set("r-12")
    try:
        for form in ("text", "json"):
            set_up_logging("info", form, stream)
            logging.getLogger("hicache").info("served")
    finally:
        request_id.reset(token)
    text, structured = stream.getvalue().splitlines()
    assert text.endswith("served [request r-12]")
    entry = json.loads(structured)
    assert (entry["level"], entry["message"], entry["request"]) == ("info", "served", "r-12")


def test_json_keeps_an_exception_on_one_line() -> None:
    stream = io.StringIO()
    set_up_logging("info", "json", stream)
    try:
        raise KeyError("x\ny")
    except KeyError:
        logging.getLogger("hicache").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "KeyError" in json.loads(line)["exception"]


def test_lines_and_warnings_of_libraries_have_the_same_form_and_their_repeats_are_counted() -> None:
    stream, clock, library = io.StringIO(), ManualClock(), logging.getLogger("some.library")
    set_up_logging("info", "json", stream)
    for number in range(3):
        library.error("batch %d failed", number)  # the same line of code
    library.info("not of interest")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("a thing is old", DeprecationWarning, stacklevel=1)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["logger"], first["level"], first["message"]) == ("some.library", "error", "batch 0 failed")
    assert second["logger"] == "py.warnings" and "a thing is old" in second["message"]
    limited = LimitedLog(library, 10.0, clock)
    record = logging.LogRecord("some.library", logging.ERROR, "file.py", 7, "batch %d failed", (9,), None)
    assert [limited.admit(record) for _ in range(3)] == [True, False, False]
    clock.advance(10.0)
    assert limited.admit(record) and record.getMessage() == "batch 9 failed (and 2 more since the last line)"


def test_setting_up_twice_writes_each_line_once(lines: io.StringIO) -> None:
    set_up_logging("info", "text", lines)
    logging.getLogger("hicache").info("once")
    assert lines.getvalue().count("once") == 1


def test_a_limited_log_counts_the_lines_that_it_leaves_out(lines: io.StringIO, clock: ManualClock) -> None:
    limited = LimitedLog(logging.getLogger("hicache"), 10.0, clock)
    for _ in range(5):
        limited.warn("a", "damage %s", "tag")
    limited.warn("b", "other")
    clock.advance(10.0)
    limited.warn("a", "damage %s", "size")
    messages = [line.partition(": ")[2] for line in lines.getvalue().splitlines()]
    assert messages == ["damage tag", "other", "damage size (and 4 more since the last line)"]


def test_an_outage_and_an_override_are_two_log_lines_under_any_load(lines: io.StringIO, clock: ManualClock) -> None:
    guard, store = make_guard(clock)
    keys = make_keys(2)
    with_pages = empty_frames(guard.codec, 2)
    store.fail()
    try:
        for _ in range(200):
            guard.batch_get(keys, with_pages, deadline=soon())
        wait_for(lambda: "the breaker for reads opened" in lines.getvalue())
        store.fail(False)
        clock.advance(10.0)
        wait_for(lambda: guard.may_pass(Direction.READ))
        guard.batch_exists(keys, deadline=math.inf)
        wait_for(lambda: "are on again" in lines.getvalue())
        guard.override(Direction.WRITE, Override.OFF)
        wait_for(lambda: "the operator switched writes off" in lines.getvalue())
        guard.override(Direction.WRITE, Override.AUTO)
        wait_for(lambda: "writes are on again" in lines.getvalue())
    finally:
        guard.close()
    assert len([line for line in lines.getvalue().splitlines() if "writes" in line]) == 2
    off, on = [line for line in lines.getvalue().splitlines() if "reads" in line]
    assert "WARNING" in off
    assert "storage disk: the breaker for reads opened" in off
    assert "injected" in off
    assert re.search(r"INFO .*storage disk: reads are on again after 10\.0 s; \d+ calls were rejected", on)


def test_a_damaged_page_is_named_by_its_first_digits_with_the_reason(lines: io.StringIO) -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, label="llama")
    store = memory_store(codec)
    (key,) = make_keys(1)
    store.batch_set([key], full_frames(codec, [key]), parent=None, deadline=soon())
    driver_of(store, MemoryDriver).poke(NAMESPACE, key, bytes(codec.frame_bytes))
    store.batch_get([key], empty_frames(codec, 1), deadline=soon())
    (line,) = lines.getvalue().splitlines()
    assert f"page {key.hex()[:8]} of llama failed verification (not_a_frame)" in line
    assert line.endswith("was removed")
    assert key.hex() not in line


def config_for(folder: Path) -> HiCacheConfig:
    return HiCacheConfig.model_validate({
        "page_size": 16, "device": {"tokens": 256}, "host": {"tokens": 256},
        "storage": {"type": "file", "options": {"path": str(folder), "free_space_floor": "1MiB"}},
    })


NAMESPACE_OF_CACHE = Namespace(
    model="m", geometry=KVGeometry(layers=1, heads=1, head_dim=8, page_size=16, dtype="float32"), label="llama"
)


def test_a_cache_logs_its_setup_new_weights_and_its_end_in_one_line_each(lines: io.StringIO, tmp_path: Path) -> None:
    cache = create_cache(config_for(tmp_path / "pages"), NAMESPACE_OF_CACHE)
    cache.update_weights(7)
    wait_for(lambda: "storage is open" in lines.getvalue(), cache.poll)
    cache.close()
    text = lines.getvalue()
    setup = text.splitlines()[0]
    for part in ("L1 16 pages", "L2 16 pages", "storage file 10.0 GiB", "write_through", "'llama'", "weights epoch 0"):
        assert part in setup
    assert NAMESPACE_OF_CACHE.digest.hex()[:8] in setup
    assert str(tmp_path) not in setup
    assert text.count("new weights: epoch 7 replaces 0") == 1
    assert len(re.findall(r"INFO .*cache closed after \d+\.\d s", text)) == 1


def test_dropped_work_is_one_line_a_period_with_counts_since_the_last(lines: io.StringIO) -> None:
    counts = Counter({"prefetch_no_host_room": 5, "queue backup": 1204})
    log = DropLog(lambda: Counter(counts), period_s=0.01)
    try:
        wait_for(lambda: "1,204 stores: backup queue full (transfer.store_host_share" in lines.getvalue())
        assert "5 prefetches found no room on the host (host.size)" in lines.getvalue()
        counts["prefetch_no_host_room"] += 2
        wait_for(lambda: "2 prefetches found no room" in lines.getvalue())
    finally:
        log.close()
    assert lines.getvalue().count("1,204") == 1
    counts["queue load"] += 3
    log.close()
    assert "3 loads: load queue full" in lines.getvalue(), "the end is one more look"


def test_log_lines_of_a_lasting_overload_become_rarer() -> None:
    looks = Counter[str]()

    def counts() -> Counter[str]:
        looks["all"] += 1
        return Counter({"queue load": looks["all"]})

    log = DropLog(counts, period_s=10.0)
    try:
        pauses = [log._look() - time.monotonic() for _ in range(8)]
        assert [round(pause) for pause in pauses] == [10, 20, 40, 80, 160, 300, 300, 300]
        looks["all"] -= 1  # nothing new at the next look
        assert round(log._look() - time.monotonic()) == 10
        assert round(log._look() - time.monotonic()) == 10
    finally:
        log.close()


def test_every_limit_of_a_cache_is_described(tmp_path: Path) -> None:
    with create_cache(config_for(tmp_path / "pages"), NAMESPACE_OF_CACHE) as cache:
        state = cache.statistics()
    assert isinstance(state, CacheStatistics)
    assert set(dropped(state)) >= set(LIMITS)
    assert {reason for reason in dropped(state) if " " not in reason.removeprefix("queue ")} == set(LIMITS)
    assert not +dropped(state)


def test_storage_that_does_not_open_is_one_line_and_its_opening_another(
    lines: io.StringIO, clock: ManualClock
) -> None:
    tries: list[int] = []
    opened: list[bool] = []

    def open_backend() -> Store:
        tries.append(1)
        if not opened:
            raise BackendUnavailable("redis: 127.0.0.1 port 1: connection refused")
        return memory_store(FrameCodec(NAMESPACE, PAYLOAD_BYTES))

    gate = StorageGate(None, SupervisedPool, clock)
    gate.replace(open_backend)
    try:
        for attempts in (1, 2, 3):
            wait_for(lambda n=attempts: gate.slot.open_failures == n)  # type: ignore[misc]
            opened += [True] * (attempts == 3)
            clock.advance(1.0)
            gate.slot.advance()
        wait_for(lambda: gate.storage is not None)
    finally:
        assert gate.slot.end(5.0) and gate.slot.close()
    first, second = lines.getvalue().splitlines()
    assert "WARNING" in first and "storage cannot be opened" in first and "connection refused" in first
    assert second.endswith("storage is open")
    assert gate.slot.open_failures == len(tries) - 1


def test_reminders_of_a_long_outage_become_rarer(lines: io.StringIO) -> None:
    log = GuardLog("disk", ManualClock())
    state = BreakerStatistics(BreakerState.OPEN, Override.AUTO, "error", 1, 0, 0)
    log.changed([BreakerChange(Direction.READ, state, 0.5, 0.0, 0)], {"timeout": 3})
    for second in range(0, 3600, 5):
        log.still_off({Direction.READ: (float(second), second)}, {"timeout": 3 + second})
    off, *recalls = lines.getvalue().splitlines()
    assert "errors since the last line: timeout 3;" in off
    assert [int(found[1]) for line in recalls if (found := re.search(r"off for (\d+) s", line))] == [
        60, 180, 420, 900, 1800, 2700,
    ]
    assert "60 calls were rejected; errors since the last line: timeout 60" in recalls[0]


def test_a_removed_directory_says_what_to_do(lines: io.StringIO, tmp_path: Path) -> None:
    store = store_of(FileDriver, FrameCodec(NAMESPACE, PAYLOAD_BYTES), FileStorageOptions(path=tmp_path / "pages"))
    try:
        shutil.rmtree(tmp_path / "pages")
        for key in make_keys(2):
            store.batch_set([key], full_frames(store.codec, [key]), parent=None, deadline=soon())
    finally:
        store.close()
    assert lines.getvalue().count("its directory was moved, replaced or removed") == 1


@pytest.mark.parametrize(
    ("entries", "line"),
    [
        ({"free_space_floor": 900 << 40}, r"free_space_floor is 900.0 TiB, and the file system has [\d.]+ \w+ free"),
        ({"capacity": 900 << 40, "free_space_floor": 0}, r"capacity is 900.0 TiB, and the file system has [\d.]+ "),
        ({"capacity": 1 << 20, "free_space_floor": 0}, None),
    ],
    ids=["floor", "capacity", "both fit"],
)
def test_limits_that_the_volume_cannot_satisfy_are_a_warning_when_the_store_is_opened(
    lines: io.StringIO, tmp_path: Path, entries: dict[str, int], line: str | None
) -> None:
    options = FileStorageOptions(path=tmp_path / "pages", **entries)
    for _ in range(2):  # a daemon opens it for each namespace
        store_of(FileDriver, FrameCodec(NAMESPACE, PAYLOAD_BYTES), options).close()
    found = lines.getvalue().splitlines()
    assert len(found) == (line is not None)
    assert line is None or re.search(f"WARNING .*file store {tmp_path}/pages: {line}", found[0])


def test_every_line_of_the_log_is_on_the_page(repository: Path) -> None:
    calls = [call for call in log_calls(repository / "hicache") if call.message != "?" and call.level != "DEBUG"]
    assert len(calls) > 80  # the search finds what it should
    explained = entries(calls)
    assert not [start for start, found in explained.items() if not found], "no call writes it: remove the entry"
    assert not set(calls) - {call for found in explained.values() for call in found}, "add entries to log_page.py"
    assert (repository / "docs/logs.md").read_text() == page(repository / "hicache"), (
        "run: python -m hicache_lab.log_page > docs/logs.md"
    )


def test_a_line_without_an_entry_and_an_entry_without_a_line_show() -> None:
    calls = [LogCall("x.py:1", "INFO", "storage is ope"), LogCall("x.py:2", "INFO", "storage is open, at last")]
    assert {start: found for start, found in entries(calls).items() if found} == {"storage is open": calls[1:]}
