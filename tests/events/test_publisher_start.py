"""What a publisher keeps and what it leaves behind: nothing that nobody can ask for, and nothing if it cannot start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hicache.config import EventsConfig
from hicache.events import Cleared, EventStream
from hicache.events.publisher import EventPublisher
from tests.events.test_publisher import LOOPBACK, published, removed
from tests.waiting import wait_for

# More than a process can address, so that no thread can start.
ENDLESS_STACK_BYTES = 1 << 47


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Let no thread of Python start."""
    before = threading.stack_size(ENDLESS_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize("replay_endpoint", [LOOPBACK, None])
def test_batches_are_kept_only_if_somebody_can_ask_for_them(replay_endpoint: str | None) -> None:
    stream = EventStream(1 << 20)
    with published(stream, replay_endpoint=replay_endpoint) as publisher:
        stream.put(removed(1))
        wait_for(lambda: publisher.statistics().events == 2)  # it begins with a Cleared
    assert (len(publisher._kept) > 0, publisher._kept_bytes > 0) == 2 * (replay_endpoint is not None,)


def test_a_publisher_whose_thread_cannot_start_leaves_neither_sockets_nor_a_reader() -> None:
    stream = EventStream(1 << 20)
    with published(stream) as publisher:
        options = EventsConfig(endpoint=publisher.endpoint)
    with no_more_threads(), pytest.raises(RuntimeError, match="thread"):
        EventPublisher(stream, options)
    assert stream.statistics().readers == 0
    with EventPublisher(stream, options) as publisher:
        stream.put(Cleared())
        wait_for(lambda: publisher.statistics().events == 2)
