"""The log: its forms, its limit, and what a guard, a store and a cache write to it."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache import HiCacheConfig, KVGeometry, Namespace
from hicache.backends.faults import FaultyBackend
from hicache.backends.guard import Direction, GuardedBackend, Override
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing.pages import NAMESPACE, PAYLOAD_BYTES, empty_frames, full_frames, make_keys, soon
from hicache.cache import HiRadixCache, create_cache
from hicache.cache.report import DropLog, dropped
from hicache.cache.statistics import CacheStatistics
from hicache.config.guard import GuardConfig
from hicache.frame import FrameCodec
from hicache.logs import LimitedLog, request_id, set_up_logging
from tests.waiting import wait_for


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What the package logs at INFO and above, as text."""
    logger = logging.getLogger("hicache")
    state = logger.level, logger.propagate, list(logger.handlers)
    stream = io.StringIO()
    set_up_logging("info", "text", stream)
    yield stream
    logger.setLevel(state[0])
    logger.propagate, logger.handlers = state[1], state[2]


def make_guard(failures: int = 2) -> tuple[GuardedBackend, FaultyBackend]:
    store = FaultyBackend(MemoryBackend(FrameCodec(NAMESPACE, PAYLOAD_BYTES)))
    options = GuardConfig(failures=failures, backoff_min="10ms", backoff_max="20ms", retry_share=0)
    return GuardedBackend(store, options, name="disk"), store


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


def test_setting_up_twice_writes_each_line_once(lines: io.StringIO) -> None:
    set_up_logging("info", "text", lines)
    logging.getLogger("hicache").info("once")
    assert lines.getvalue().count("once") == 1


def test_a_limited_log_counts_the_lines_that_it_leaves_out(lines: io.StringIO) -> None:
    now_s = 100.0
    limited = LimitedLog(logging.getLogger("hicache"), 10.0, clock=lambda: now_s)
    for _ in range(5):
        limited.warn("a", "damage %s", "tag")
    limited.warn("b", "other")
    now_s += 10.0
    limited.warn("a", "damage %s", "size")
    messages = [line.partition(": ")[2] for line in lines.getvalue().splitlines()]
    assert messages == ["damage tag", "other", "damage size (and 4 more like it since the last such line)"]


def test_an_outage_is_two_lines_whatever_the_load(lines: io.StringIO) -> None:
    guard, store = make_guard()
    keys = make_keys(2)
    with_pages = empty_frames(guard.codec, 2)
    store.fail()
    try:
        for _ in range(200):
            guard.batch_get(keys, with_pages, deadline=soon())
        wait_for(lambda: "is off" in lines.getvalue())
        store.fail(False)
        wait_for(lambda: guard.may_pass(Direction.READ) and not guard.batch_exists(keys, deadline=soon()))
        wait_for(lambda: "is on again" in lines.getvalue())
    finally:
        guard.close()
    off, on = [line for line in lines.getvalue().splitlines() if "reading" in line]
    assert "WARNING" in off
    assert "storage disk: reading is off: the breaker has opened" in off
    assert "injected" in off
    assert re.search(r"INFO .*storage disk: reading is on again after \d+\.\d s; \d+ calls were not made", on)


def test_an_override_is_a_line_of_its_own(lines: io.StringIO) -> None:
    guard, _ = make_guard()
    try:
        guard.override(Direction.WRITE, Override.OFF)
        wait_for(lambda: "writing is off: the operator" in lines.getvalue())
        guard.override(Direction.WRITE, Override.AUTO)
        wait_for(lambda: "writing is on again" in lines.getvalue())
    finally:
        guard.close()


def test_a_damaged_page_is_named_by_its_first_digits_with_the_reason(lines: io.StringIO) -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, label="llama")
    store = MemoryBackend(codec)
    (key,) = make_keys(1)
    store.batch_set([key], full_frames(codec, [key]), parent=None, deadline=soon())
    store.poke(key, bytes(codec.frame_bytes))
    store.batch_get([key], empty_frames(codec, 1), deadline=soon())
    (line,) = lines.getvalue().splitlines()
    assert f"page {key.hex()[:8]} is not the page that was stored (not_a_frame)" in line
    assert "llama" in line
    assert key.hex() not in line


def config_for(folder: Path) -> HiCacheConfig:
    return HiCacheConfig.model_validate({
        "page_size": 16, "device": {"tokens": 256}, "host": {"tokens": 256},
        "storage": {"type": "file", "options": {"path": str(folder), "free_space_floor": "1MiB"}},
    })  # fmt: skip


NAMESPACE_OF_CACHE = Namespace(
    model="m", geometry=KVGeometry(layers=1, heads=1, head_dim=8, page_size=16, dtype="float32"), label="llama"
)


def test_a_cache_says_at_its_start_what_it_is_made_of(lines: io.StringIO, tmp_path: Path) -> None:
    create_cache(config_for(tmp_path / "pages"), NAMESPACE_OF_CACHE).close()
    (line,) = lines.getvalue().splitlines()
    for part in ("L1 16 pages", "L2 16 pages", "storage file", "write_through", "'llama'", "weights epoch 0"):
        assert part in line
    assert NAMESPACE_OF_CACHE.digest.hex()[:8] in line
    assert str(tmp_path) not in line


def test_dropped_work_is_one_line_a_period_with_counts_since_the_last(lines: io.StringIO, tmp_path: Path) -> None:
    with create_cache(config_for(tmp_path / "pages"), NAMESPACE_OF_CACHE) as cache:
        assert isinstance(cache, HiRadixCache)
        state = cache.statistics()
        assert isinstance(state, CacheStatistics)
        assert not +dropped(state)
        log = DropLog(cache.statistics, period_s=0.01)
        try:
            cache._counters.skipped["prefetch_no_host_room"] += 5
            wait_for(lambda: "prefetch_no_host_room 5" in lines.getvalue())
            cache._counters.skipped["prefetch_no_host_room"] += 2
            cache._counters.skipped["load_too_short"] += 9
            wait_for(lambda: "prefetch_no_host_room 2" in lines.getvalue())
        finally:
            log.close()
    assert "load_too_short" not in lines.getvalue(), "that is a decision, and not a limit"
