"""Hostile clients of a real daemon, beside a client that must be served all the time. docs/daemon.md has the results of
a longer run by `make hostile`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.shared_memory import path_of
from hicache_lab.faults import spoiled
from tests.seeds import fuzz_seed
from tests.waiting import wait_for

from .attacks import BOUNDS, FRAME_BYTES, OPEN, keys_of, open_namespace, send_raw
from .daemons import NAMESPACE, ROOT
from .hostile import GROWTH_MAX, Outcome, run
from .process import Daemon, Resources, answer_of, request

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The result of two rounds of all attacks. The first one is the warm-up."""
    folder = tmp_path_factory.mktemp("hostile") / "daemon"
    return run(folder, fuzz_seed(), lambda number: number < 2, lambda number: number > 0)


def test_a_well_behaved_client_is_served_during_all_attacks(outcome: Outcome) -> None:
    assert outcome.rounds == 2
    assert not outcome.failures and outcome.served > 100


def test_attacks_leave_no_memory_descriptors_or_threads_and_the_daemon_ends_cleanly(outcome: Outcome) -> None:
    assert outcome.faults() == []


def test_growth_is_detected() -> None:
    """The control of the test above."""
    warm = Resources(100 << 20, 20, 20)
    for most in (
        Resources(int((100 << 20) * GROWTH_MAX) + (1 << 20), 20, 20),
        Resources(0, 100, 0),
        Resources(0, 0, 100),
    ):
        assert len(Outcome(warm=warm, most=most, served=1, exit_code=0).faults()) == 1
    assert not Outcome(warm=warm, most=warm, served=1, exit_code=0).faults()


def test_the_bytes_of_a_rejected_request_are_freed_at_once(tmp_path: Path) -> None:
    """It must not wait for the next collection of cycles: 40 such heads once took 160 MiB until then."""
    head = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000 + b"\r\n"
    with Daemon(tmp_path / "heads", **BOUNDS) as daemon:
        for _ in range(3):
            send_raw(daemon, head)
        before = daemon.resources()
        for _ in range(40):
            assert send_raw(daemon, head) in {0, 431}
        assert daemon.resources().resident_bytes - before.resident_bytes < 16 << 20


# Engines that die while the daemon uses their frames

_ENGINE = """
import sys, time
from tests.daemon.attacks import FRAME_BYTES
from hicache.shared_memory import Layout, SharedMemory
shared = SharedMemory.open(sys.argv[1], Layout(0, 8, FRAME_BYTES, bytes(32)), deadline=time.monotonic() + 10)
print(*shared.identity, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon whose store takes a second for each call."""
    storage = spoiled({"type": "memory"}, latency="1s")
    with Daemon(tmp_path / "slow", storage, **BOUNDS) as daemon:
        open_namespace(daemon)
        yield daemon


@pytest.mark.parametrize("verb", ["get", "set"])
def test_an_engine_that_is_killed_while_its_frames_are_in_use_leaves_no_memory(slow: Daemon, verb: str) -> None:
    name, dice = f"dies-{os.getpid()}-{verb}", random.Random(1)
    engine = subprocess.Popen(
        [sys.executable, "-c", _ENGINE, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert engine.stdout is not None
    device, inode = map(int, engine.stdout.readline().split())
    body = {"frame_bytes": FRAME_BYTES, "pages": 8, "device": device, "inode": inode}
    assert slow.call("PUT", f"/v1/memory/{name}", body)[0] == 200
    transfer = {"keys": keys_of(8, dice), "memory": name, "frames": list(range(8)), "timeout_s": 5}
    with slow.connect() as sock:
        sock.sendall(request("POST", f"{OPEN}/{verb}", json.dumps(transfer).encode()))
        wait_for(lambda: _operations(slow) == [1])
        engine.kill()
        engine.communicate()
        # The daemon uses the frames, so they stay mapped and their file exists until the call has ended.
        assert _operations(slow) == [1] and path_of(name).exists()
        assert answer_of(sock)[0] == 200
    wait_for(lambda: _operations(slow) == [] and not path_of(name).exists())
    wait_for(lambda: f"memory {name}: its engine died" in slow.log)
    assert slow.call("POST", f"{OPEN}/{verb}", transfer)[0] == 404
    assert slow.end()[0] == 0


def _operations(daemon: Daemon) -> list[int]:
    return [client["operations"] for client in daemon.call("GET", "/statusz")[1]["clients"]]


def test_a_daemon_ends_cleanly_while_clients_are_hostile(tmp_path: Path) -> None:
    with Daemon(tmp_path / "ends", **BOUNDS) as daemon:
        open_namespace(daemon)
        socks = [daemon.connect() for _ in range(50)]
        body = json.dumps({"keys": keys_of(2, random.Random(1)), "timeout_s": 5}).encode()
        whole = request("POST", f"/v1/namespaces/{NAMESPACE}/exists", body)
        for number, sock in enumerate(socks):
            sock.sendall(whole[: number * len(whole) // 50])
        assert daemon.end()[0] == 0
        assert not daemon.socket.exists()
        for sock in socks:
            sock.close()
