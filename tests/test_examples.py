"""The examples run and print the documented results."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from hicache.cache.recorder import EventRecorder
from hicache.config import EventsConfig
from hicache.events import EventStream
from hicache.events.publisher import EventPublisher
from hicache.keys import RadixKey
from hicache.policies import POLICIES
from hicache.radix import RadixTree

pytestmark = pytest.mark.long

TIMEOUT_S = 500


def test_embed_hits_the_device_and_after_a_restart_storage(repository: Path, tmp_path: Path) -> None:
    outputs = [
        subprocess.run(
            [sys.executable, str(repository / "examples" / "embed.py"), str(tmp_path)],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        ).stdout
        for _ in range(2)
    ]
    hits = [
        [tuple(map(int, re.findall(r"(\d+)(?: tokens)? from", line))) for line in out.splitlines()] for out in outputs
    ]
    assert hits[0] == [(0, 0, 0), (0, 0, 0), (496, 0, 0), (496, 0, 0)]
    assert hits[1] == [(0, 0, 496), (0, 0, 496), (496, 0, 0), (496, 0, 0)]


def test_two_engines_share_a_daemon_that_is_killed_and_restarted(repository: Path) -> None:
    command = [sys.executable, str(repository / "examples" / "two_engines.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            shown, errors = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its daemon and engines too
            raise
    assert process.returncode == 0, shown + errors
    before, _, after = shown.partition("The daemon is killed with SIGKILL")
    assert re.findall(r"second .* (\d+) of them from the daemon", before) == ["592"] * 3
    assert re.findall(r"second .* (\d+) of them from the daemon", after)[-1] == "592"
    assert "DIFFER" not in shown


def test_follow_events_shows_the_pages_of_an_engine(repository: Path) -> None:
    stream = EventStream(1 << 20)
    tree = RadixTree(16, POLICIES["lru"], observer=EventRecorder(stream))
    tree.insert(RadixKey.of(range(64), cache_salt="alice"), np.arange(4, dtype=np.int32))
    options = EventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    with EventPublisher(stream, options) as publisher:
        assert publisher.replay_endpoint is not None
        command = [
            sys.executable, str(repository / "examples" / "follow_events.py"), publisher.endpoint,
            publisher.replay_endpoint, "--seconds", str(2 * TIMEOUT_S), "--page-size", "16", "--tenant", "alice",
            "--prompt", *map(str, range(40)),
        ]
        last = "4 pages on the device, 0 on the host, 0 of them in storage; 32 tokens of the prompt on the device"
        code, shown = read_until(last, command)
    assert shown[-1:] == [last]
    assert code == -signal.SIGTERM, "the program ended by itself"


def read_until(last: str, command: list[str]) -> tuple[int, list[str]]:
    """Run a program until it prints the line `last`, at most TIMEOUT_S. Return its exit code and its lines."""
    shown: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        limit = threading.Timer(TIMEOUT_S, process.kill)  # the kill also ends its output
        limit.start()
        try:
            assert process.stdout is not None
            while last not in shown and (line := process.stdout.readline()):
                shown.append(line.rstrip("\n"))
        finally:
            limit.cancel()
            process.terminate()
    return process.returncode, shown


def run_example(repository: Path, name: str, *arguments: str) -> list[str]:
    """Run an example and return its lines. Warnings are errors, as in the tests."""
    command = [sys.executable, "-W", "error", str(repository / "examples" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout.splitlines()


def test_a_router_sends_a_prompt_to_the_engine_that_has_it_and_counts_on_the_shared_store(repository: Path) -> None:
    shown = run_example(repository, "routing.py")
    found = [re.findall(r"engine (\w+):|(\d+) on its|(\d+) with|(\d+) served", line) for line in shown[:-1]]
    assert [tuple(filter(None, map("".join, each))) for each in found] == [
        ("one", "0", "0", "0"), ("two", "0", "0", "0"), ("one", "320", "320", "320"), ("two", "320", "320", "320"),
        ("two", "0", "320", "320"),
    ]


def test_a_conversation_reuses_pages_up_to_the_last_token_until_the_weights_change(repository: Path) -> None:
    shown = run_example(repository, "conversation.py")
    assert [line for line in shown if "of prompt" in line] == [
        "warm-up: 200 tokens of prompt, 0 of them cached",
        "turn-1: 245 tokens of prompt, 192 of them cached",
        "turn-2: 295 tokens of prompt, 274 of them cached",  # 245 and 29 of the answer: not whole pages
        "again: 245 tokens of prompt, 240 of them cached",
        "new weights: 245 tokens of prompt, 0 of them cached",
    ]
    assert "pinned: 12 pages; after L1 was emptied, on the host: 17 of 18 pages" in shown
    assert "pin: ended, sessions: 0" in shown


def test_own_forward_gives_the_same_result_from_the_host(repository: Path) -> None:
    assert run_example(repository, "own_forward.py") == [
        "computed: 0 of 500 tokens from the cache",
        "loaded: 496 of 500 tokens from the cache",
        "the same result: True",
    ]


def test_token_slots_hits_a_cached_prompt_and_misses_an_evicted_one(repository: Path) -> None:
    cached = [int(line.split()[2]) for line in run_example(repository, "token_slots.py")]
    assert cached == [0, 48, 0, 0, 0, 0]


def test_own_blocks_hits_the_host_and_after_a_restart_storage(repository: Path, tmp_path: Path) -> None:
    hits = ["480 of 500 tokens from the cache"] * 2
    cold = ["0 of 500 tokens from the cache", "192 of 500 tokens from the cache"]  # the prompts have 6 pages in common
    for first, sources in ((cold, "1152 tokens from the host, 0"), (hits, "1152 tokens from the host, 768")):
        shown = run_example(repository, "own_blocks.py", str(tmp_path))
        assert [line.split(": ")[1] for line in shown] == [*first, *hits, f"{sources} from storage"]


def test_all_ranks_have_the_same_hits(repository: Path, tmp_path: Path) -> None:
    for first in ("0 tokens from the device, 0 from storage", "0 tokens from the device, 496 from storage"):
        shown = run_example(repository, "ranks.py", str(tmp_path))
        for rank in ("rank 0", "rank 1"):
            found = [line.split(": ")[1] for line in shown if line.startswith(rank)]
            assert found == [first, "496 tokens from the device, 0 from storage"]
        assert all("L1 of 128 pages" in line for line in shown)
