"""The programs of docs/traces.md that convert public traces make traces that HiCache reads, with the reuse of these."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_lab.traces.request import TraceRequest
from hicache_lab.traces.trace import read_trace
from tests.test_documented_python import PROGRAMS

SESSIONS, MESSAGES, LENGTHS = (program.source for program in PROGRAMS if program.page == "docs/traces.md")


def converted(program: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[TraceRequest]:
    """Run a program in a folder and return the requests of the trace that it writes."""
    monkeypatch.chdir(folder)
    exec(compile(program, name, "exec"), {"__name__": "__main__"})
    return list(read_trace(folder / name))


def test_sessions_of_kv_cache_tester_keep_their_reuse_and_share_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = converted(SESSIONS, "agents.jsonl", tmp_path, monkeypatch)
    assert [(one.session, one.timestamp_ms) for one in trace] == [
        (session, 60_000 * session + at_ms) for session in (0, 1) for at_ms in (0, 4000, 6500, 9000)
    ]
    first, second, sub_agent, branch = (one.hash_ids for one in trace[:4])
    assert [one.input_length for one in trace[:4]] == [150, 192, 64, 193] and trace[0].block_tokens == 64
    assert second[:2] == first[:2] and first[2] != second[2], "a partial block has no hash"
    assert branch[0] == first[0] and branch[2] != second[2], "an equal block after another prefix has other KV"
    assert not set(sub_agent) & {*first, *second, *branch}
    assert not {i for one in trace[:4] for i in one.hash_ids} & {i for one in trace[4:] for i in one.hash_ids}


def test_messages_of_lmcache_share_the_blocks_of_equal_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = converted(MESSAGES, "agents.jsonl", tmp_path, monkeypatch)
    # The second turn of a session comes 2.5 s after an answer of 100 tokens at 50 tokens/s.
    assert [(one.timestamp_ms, one.input_length) for one in trace] == [(0, 70), (4500, 140), (60_000, 70)]
    first, later, other = (one.hash_ids for one in trace)
    assert other == first and later[0] == first[0] and later[1] != first[1] and len(later) == 3


def test_tables_of_lengths_have_no_reuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = converted(LENGTHS, "load.jsonl", tmp_path, monkeypatch)
    assert [(round(one.timestamp_ms), one.input_length, one.output_length, one.hash_ids) for one in trace] == [
        (0, 600, 44, (0, 1)), (1000, 512, 109, (2,)), (1319, 1, 5, (3,))
    ]
