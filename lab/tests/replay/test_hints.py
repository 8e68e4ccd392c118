"""Hints in replays: what the sessions of a trace send, what it changes, and that nothing changes without them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from hicache.cache import tiered
from hicache.errors import ConfigError, InvalidInput
from hicache_lab.replay.hints import HintErrors, HintMaker
from hicache_lab.replay.job import ReplayJob
from hicache_lab.replay.processes import start_engines
from hicache_lab.replay.report import html_report
from hicache_lab.replay.result import ReplayResult, merged
from hicache_lab.traces.request import TraceRequest
from hicache_lab.traces.routing import Routing
from hicache_lab.traces.trace import read_trace
from lab.benchmarks._table import Row
from lab.benchmarks.eviction import PAGE_SIZE, Run, copies, in_pages, workload
from lab.benchmarks.hints import KINDS, replayed, rows_of
from lab.tests.cli.test_replay_command import invoke
from lab.tests.replay.test_report import Page
from lab.tests.replay.world import go, job, request, small_config, started

# Twelve sessions of agents, most of whose pauses are seconds and some are minutes.
SESSIONS = Path(__file__).parent.parent / "traces/sessions.jsonl"
SMALL = ("--virtual", "--device-tokens", "12288", "--host-tokens", "12288", "--set", "storage=null",
         "--set", "eviction_policy=lru", "--running-max", "1")


def session_job(hints: str | None, **options: Any) -> ReplayJob:
    config = small_config(storage=None, device=12288, host=12288, eviction_policy="lru")
    usual: dict[str, Any] = {"config": config, "trace": SESSIONS, "virtual": True, "speed_up": 1.0, "running_max": 1}
    return ReplayJob(**usual | options, hints=None if hints is None else HintErrors.parse(hints))


def run(one: ReplayJob) -> ReplayResult:
    with closing(start_engines(one)) as engines:
        for _ in engines.run():
            pass
        return engines.result()


def hits(result: ReplayResult) -> int:
    return sum(result.tokens.hits.values())


class Recorder:
    """In place of a cache: the hints that it got."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any], str | None]] = []

    def hint(self, envelope: dict[str, Any], rid: str | None = None) -> None:
        (action,) = envelope["actions"]
        self.sent.append((action["action_type"], action["payload"], rid))


def turn(index: int, session: int | None, at_s: float) -> TraceRequest:
    return replace(request(index, [index], at_ms=int(1000 * at_s)), session=session)


TURNS = [turn(0, 7, 0), turn(1, 8, 1), turn(2, 7, 60), turn(3, None, 61), turn(4, 8, 201)]


def sent(errors: str, turns: list[TraceRequest] = TURNS) -> list[tuple[str, dict[str, Any], str | None]]:
    """The hints of requests that each take two seconds."""
    recorder, now_s = Recorder(), [0.0]
    maker = HintMaker(recorder, HintErrors.parse(errors), turns, 0,  # type: ignore[arg-type]
                      lambda one: one.timestamp_ms / 1000, lambda: now_s[0])
    for one in turns:
        maker.submitted(f"r{one.index}", one)
        now_s[0] = one.timestamp_ms / 1000 + 2
        maker.ended(one)
    return recorder.sent


# The hints


@pytest.mark.parametrize("text", ["exact", "noise", "error=3", "error=1.5", "missing=0.5"])
def test_errors_are_shown_as_they_are_written(text: str) -> None:
    assert str(HintErrors.parse(text)) == text


@pytest.mark.parametrize("text", ["", "exact=2", "noise ", "error", "error=0.5", "error=-1", "missing=2", "error=1..2"])
def test_other_errors_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"exact, noise, error=3|at least 1"):
        HintErrors.parse(text)


def test_a_session_names_its_requests_and_says_when_it_returns_or_that_it_has_ended() -> None:
    assert sent("exact") == [
        ("session.turn", {"session_id": "7"}, "r0"), ("session.wait", {"session_id": "7", "expected_s": 58.0}, None),
        ("session.turn", {"session_id": "8"}, "r1"), ("session.wait", {"session_id": "8", "expected_s": 198.0}, None),
        ("session.turn", {"session_id": "7"}, "r2"), ("kv.release", {"session_id": "7"}, None),
        ("session.turn", {"session_id": "8"}, "r4"), ("kv.release", {"session_id": "8"}, None),
    ]


def test_noise_is_the_time_of_some_request_and_no_end_of_a_session() -> None:
    found = [payload["expected_s"] for action, payload, _ in sent("noise") if action != "session.turn"]
    assert len(found) == 2 and set(found) <= {60.0, 200.0}


def test_missing_hints_are_not_sent() -> None:
    assert [action for action, _, _ in sent("missing=1")] == ["session.turn"] * 4


def test_wrong_times_have_the_given_mean_error() -> None:
    turns = [turn(index, index % 40, 10 * index) for index in range(4000)]
    waits = [payload["expected_s"] for action, payload, _ in sent("error=3", turns) if action == "session.wait"]
    assert len(waits) == 3960
    assert math.exp(fmean(abs(math.log(wait / 398)) for wait in waits)) == pytest.approx(3, rel=0.05)


def test_a_trace_that_does_not_say_when_a_session_returns_is_refused(tmp_path: Path) -> None:
    once = [turn(0, 1, 0), turn(1, 2, 1)]
    for trace in (once, [turn(0, None, 0), turn(1, None, 5)], [turn(0, 1, 3), turn(1, 1, 3)]):
        one = job(tmp_path, trace, small_config(), virtual=True, speed_up=1.0, hints=HintErrors())
        with pytest.raises(InvalidInput, match="does not say when a session returns; use one with"):
            run(one)


def test_hints_need_the_recorded_times() -> None:
    with pytest.raises(ConfigError, match="add --speed-up 1"):
        session_job("exact", speed_up=None)


# Replays


@pytest.mark.long
def test_exact_hints_add_hits_and_noise_does_not_cost_any() -> None:
    none, exact, noise, missing = (hits(run(session_job(kind))) for kind in (None, "exact", "noise", "missing=0.5"))
    assert exact > 1.05 * none
    assert noise >= 0.99 * none
    assert none < missing < exact


@pytest.mark.long
def test_the_report_has_the_outcomes_of_hints_by_action() -> None:
    result = run(session_job("exact"))
    assert result.setup.hints == "exact" and result.hints is not None
    assert result.hints["session.turn"] == {"accepted": 74, "deferred": 74}
    assert set(result.hints) == {"session.turn", "session.wait", "kv.release"}
    assert ReplayResult.from_json(result.to_json().encode()) == result
    assert "Hints: exact" in (page := Page(html_report(result)).text) and "session.wait" in page
    assert merged([result, result]).hints["session.turn"] == {"accepted": 148, "deferred": 148}


@pytest.mark.long
def test_a_session_does_not_return_to_an_engine_that_does_not_serve_it() -> None:
    kept = run(session_job("exact", processes=2, routing=Routing.SESSION)).hints
    turns = run(session_job("exact", processes=2)).hints
    assert kept is not None and turns is not None
    # 12 sessions end once; of those that both engines serve, each engine sees an end.
    assert sum(kept["kv.release"].values()) <= 12 < sum(turns["kv.release"].values()) <= 24


@pytest.mark.long
def test_a_replay_in_real_time_sends_hints_too() -> None:
    with started(session_job("exact", virtual=False, speed_up=1e6)) as replay:
        result = go(replay).result()
    assert result.hints is not None and result.hints["session.turn"]["accepted"] == 74
    assert result.wrong_bytes == 0 < result.checked_bytes


# Without hints


class NoHints:
    """In place of the executor of hints: it knows neither requests nor sessions, and fails if it gets a hint."""

    is_used = is_busy = False
    device: object = None

    def __init__(self, *parts: object) -> None: ...

    def waits(self, _rid: str) -> bool:
        return False

    def note(self, _rid: str, _key: object) -> None: ...

    def ends(self, _rid: str, *, completed: bool = True) -> None: ...

    def clear(self) -> None: ...

    def check(self) -> None: ...


@pytest.mark.long
@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_without_hints_a_report_is_the_same_as_from_a_cache_that_cannot_execute_any(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Byte for byte, and no report names hints. The control: with hints it is another one."""
    config = small_config(storage="memory", device=12288, host=12288, eviction_policy=policy)
    plain = run(session_job(None, config=config))
    hinted = run(session_job("exact", config=config))
    monkeypatch.setattr(tiered, "HintExecutor", NoHints)
    without = run(session_job(None, config=config))
    assert plain.to_json() == without.to_json() and html_report(plain) == html_report(without)
    assert "hint" not in plain.to_json() and "hint" not in html_report(plain).lower()
    assert hinted.tokens.hits != plain.tokens.hits and '"hints"' in hinted.to_json()


# The command


@pytest.mark.long
def test_the_command_shows_the_outcomes_of_hints_only_if_there_are_some(tmp_path: Path) -> None:
    code, output = invoke("replay", str(SESSIONS), *SMALL, "--speed-up", "1", "--hints", "error=3", "--json",
                          str(tmp_path / "hinted.json"))
    assert code == 0 and "hints, error=3" in output and "session.wait" in output, output
    assert json.loads((tmp_path / "hinted.json").read_text())["setup"]["hints"] == "error=3"
    code, output = invoke("replay", str(SESSIONS), *SMALL, "--speed-up", "1", "--json", str(tmp_path / "plain.json"))
    assert code == 0 and "hint" not in output
    assert "hint" not in (tmp_path / "plain.json").read_text()
    code, output = invoke("replay", "diff", str(tmp_path / "plain.json"), str(tmp_path / "hinted.json"))
    assert code == 0 and "error=3" in output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hints", "often", "--speed-up", "1"), "write exact, noise, error=3 or missing=0.5"),
        (("--hints", "exact"), "add --speed-up 1"),
    ],
)
def test_wrong_options_say_what_to_do(options: tuple[str, ...], said: str) -> None:
    code, output = invoke("replay", str(SESSIONS), *SMALL, *options)
    assert code == 2 and said in output


def test_the_synthetic_trace_has_no_sessions() -> None:
    code, output = invoke("replay", *SMALL, "--requests", "9", "--speed-up", "1", "--hints", "exact")
    assert code == 2 and "does not say when a session returns" in output


# The benchmark


def test_copies_of_a_trace_in_pages_have_their_own_sessions_and_times(tmp_path: Path) -> None:
    pages = in_pages(read_trace(SESSIONS))
    assert len({each.session for each in pages}) == 12
    doubled = copies(pages, 2, 5000)
    assert len({each.session for each in doubled}) == 24
    assert len({(each.session, each.hash_ids[0]) for each in doubled}) == 24
    of = workload("sessions", doubled, tmp_path, apart_ms=None)
    assert [each.timestamp_ms for each in read_trace(of.trace)] == [each.timestamp_ms for each in doubled]


@pytest.mark.long
def test_a_benchmark_of_exact_hints_has_more_hits(tmp_path: Path) -> None:
    of = workload("sessions", in_pages(read_trace(SESSIONS)), tmp_path, apart_ms=None)
    run_ = Run(of.trace, 12288 // PAGE_SIZE, 12288 // PAGE_SIZE)
    none, exact, noise = (replayed(run_, kind, 0) for kind in ("no hints", "exact", "noise"))
    assert exact > none and noise >= 0.99 * none


def test_rows_compare_wrong_times_with_exact_ones_and_noise_with_no_hints() -> None:
    run_ = Run(Path("trace"), 1, 2)
    hits_of = dict(zip(((run_, kind) for kind in KINDS), (800, 900, 860, 796, 850), strict=True))
    *optimum, wrong, noise = rows_of("1/2", run_, hits_of, 1000)
    assert [row.ratio for row in optimum] == [0.8, 0.9, 0.86, 0.796, 0.85]
    assert wrong == Row("1/2: error=3, added, of exact", "60", "100", 0.6, 0.5)
    assert noise == Row("1/2: noise, of no hints", "796", "800", 0.995, 0.99)
    little = list(rows_of("1/2", run_, hits_of | {(run_, "exact"): 807}, 1000))
    assert little[-2].goal is None


@pytest.mark.long
def test_the_benchmark_makes_its_tables(repository: Path) -> None:
    command = [sys.executable, "-m", "lab.benchmarks", "hints", str(SESSIONS), "--smallest"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nwhat ") == 2 and done.stdout.count("error=3, added") == 2
