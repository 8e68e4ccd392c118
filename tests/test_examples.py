"""The examples run as they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from hicache.cache.recorder import EventRecorder
from hicache.events import EventStream
from hicache.events.publisher import EventPublisher, PublisherOptions
from hicache.keys import RadixKey
from hicache.radix import RadixTree
from hicache.radix.policies import LRUPolicy

TIMEOUT_S = 120


def test_embedding_hits_the_device_and_after_a_restart_storage(repository: Path, tmp_path: Path) -> None:
    outputs = [
        subprocess.run(
            [sys.executable, str(repository / "examples" / "embed.py"), str(tmp_path)],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    hits = [
        [tuple(map(int, re.findall(r"(\d+)(?: tokens)? from", line))) for line in out.splitlines()] for out in outputs
    ]
    assert hits[0] == [(0, 0, 0), (0, 0, 0), (496, 0, 0), (496, 0, 0)]
    assert hits[1] == [(0, 0, 496), (0, 0, 496), (496, 0, 0), (496, 0, 0)]


def test_following_events_shows_what_an_engine_holds(repository: Path) -> None:
    stream = EventStream(1 << 20)
    tree = RadixTree(16, LRUPolicy(), observer=EventRecorder(stream))
    tree.insert(RadixKey.of(range(64), cache_salt="alice"), np.arange(4, dtype=np.int32))
    options = PublisherOptions("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    with EventPublisher(stream, options) as publisher:
        assert publisher.replay_endpoint is not None
        shown = subprocess.run(
            [sys.executable, str(repository / "examples" / "follow_events.py"), publisher.endpoint,
             publisher.replay_endpoint, "--seconds", "2", "--page-size", "16", "--tenant", "alice", "--prompt",
             *map(str, range(40))],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        ).stdout  # fmt: skip
    last = "4 pages on the device, 0 on the host, 0 of them in storage; 32 tokens of the prompt on the device"
    assert shown.splitlines()[-1] == last
