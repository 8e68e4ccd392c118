"""The sides of benchmarks: the loop that computes beside I/O, the rows of its table, and other projects' packages."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from hicache.clock import SYSTEM_CLOCK
from lab.benchmarks import _busy
from lab.benchmarks._busy import BusyProcess, BusyThread
from lab.benchmarks._peers import file_peers, find_package, redis_peers
from lab.benchmarks._table import rate, rate_rows
from lab.benchmarks.gil import measure, rows_of

WAIT_S = 60.0


def a_core() -> int:
    return min(os.sched_getaffinity(0))


def test_the_thread_computes_only_inside_the_context_and_ends_when_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed, before = threading.Event(), threading.active_count()
    monkeypatch.setattr(_busy, "step", computed.set)
    busy = BusyThread(a_core())
    assert not computed.is_set()
    with busy:
        assert computed.wait(WAIT_S)
    busy.close()
    assert threading.active_count() == before


def test_the_process_computes_only_inside_the_context_and_ends_when_it_is_closed() -> None:
    busy = BusyProcess(a_core())
    status = Path(f"/proc/{busy.pid}/status")

    def becomes(states: str) -> bool:
        end = SYSTEM_CLOCK() + WAIT_S
        while SYSTEM_CLOCK() < end:
            if status.read_text(encoding="ascii").partition("State:\t")[2][0] in states:
                return True
        return False

    assert becomes("T")
    with busy:
        assert becomes("R")
    assert becomes("T")
    busy.close()
    assert not status.exists()


def test_each_side_takes_its_turn_under_each_loop_and_removes_its_pages() -> None:
    calls: list[str] = []
    sides = {
        who: tuple(lambda what=f"{who} {verb}": calls.append(what) for verb in ("write", "read", "remove"))
        for who in ("ours", "plain")
    }
    times = measure(sides, {"idle": nullcontext(), "busy": nullcontext()}, seconds=0.0)  # type: ignore[arg-type]
    assert set(times) == {(verb, who, loop) for verb in ("write", "read") for who in sides for loop in ("idle", "busy")}
    assert calls.count("ours write") == calls.count("ours remove") == calls.count("plain write") > 0
    assert len({len(taken) for taken in times.values()}) == 1


def test_a_row_compares_what_each_side_keeps_of_its_rate_and_the_rates_while_busy() -> None:
    times = {(verb, who, loop): [seconds] for verb in ("write", "read") for (who, loop), seconds in {
        ("ours", "idle"): 1.0, ("ours", "busy"): 2.0, ("plain", "idle"): 1.0, ("plain", "busy"): 4.0,
    }.items()}
    kept, busy, *without_peer = rows_of("pages", 10**9, times, ("plain", "SGLang"))[:4]
    assert (kept.ours, kept.reference, kept.ratio, kept.goal) == ("0.500", "0.250", 2.0, None)
    assert (busy.ours, busy.reference, busy.ratio, busy.goal) == ("0.500 GB/s", "0.250 GB/s", 2.0, None)
    assert [(row.reference, row.ratio) for row in without_peer] == [(None, None)] * 2


def test_a_side_that_is_missing_has_rows_without_a_reference() -> None:
    rows = rate_rows("pages", 10**9, {"read ours": [1.0], "write ours": [0.1]}, 1.0, other="LMCache")
    assert {(row.ours, row.reference, row.ratio) for row in rows} == {
        ("1.00 GB/s", None, None), ("10.00 GB/s", None, None)}


@pytest.mark.parametrize(("seconds", "text"), [(1.0, "1.00 GB/s"), (2.0, "0.500 GB/s")])
def test_a_rate_below_one_gigabyte_has_one_digit_more(seconds: float, text: str) -> None:
    assert rate(10**9, seconds) == text


def test_a_package_is_found_in_the_directory_of_its_wheel_and_others_have_no_side(tmp_path: Path) -> None:
    assert find_package("sglang", str(tmp_path)) is None
    assert file_peers(str(tmp_path), tmp_path, [], 1) == {} == redis_peers(str(tmp_path), 1, [], 1)
    package = tmp_path / "wheel" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert find_package("sglang", str(tmp_path)) == package
