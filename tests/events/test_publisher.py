"""A publisher and its subscribers over real sockets: Unix sockets and free loopback ports."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config import EventsConfig
from hicache.errors import ConfigError
from hicache.events import Cleared, Event, EventReader, EventStream, Medium, Removed, Stored
from hicache.events.publisher import END_OF_REPLAY, ERROR_BACKOFF_S, EventPublisher
from hicache.events.security import CurveKeys, require_private
from hicache.events.subscriber import ClientCurve, EventFollower
from hicache.events.wire import decode_batch
from hicache.keys import page_keys, token_bytes
from hicache_lab.clocks import ManualClock
from tests.events.world import DescribedIndex, RecordedMachine
from tests.seeds import rng, seeds
from tests.tuned import tuned
from tests.waiting import wait_for

TIMEOUT_S = 30.0
LARGE_BYTES = 1 << 30
LOOPBACK = "tcp://127.0.0.1:*"


def published(stream: EventStream, clock: Clock = SYSTEM_CLOCK, **options: Any) -> EventPublisher:
    section = tuned(EventsConfig, **{"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK} | options)
    return EventPublisher(stream, section, clock=clock)


def follower_of(
    publisher: EventPublisher, curve: ClientCurve | None = None, timeout_s: float = TIMEOUT_S
) -> EventFollower:
    assert publisher.replay_endpoint is not None
    follower = EventFollower(
        publisher.endpoint, publisher.replay_endpoint, curve=curve, replay_timeout_s=timeout_s, replay_interval_s=0.05
    )
    follower.index = DescribedIndex()
    follower.index.lose()
    return follower


def connected(stream: EventStream, publisher: EventPublisher, follower: EventFollower) -> None:
    """Wait until `follower` receives published messages, not only replays, and no message is in flight."""

    page = stored(0)

    def one_more() -> None:
        stream.put(page)
        stream.put(Removed(page.medium, page.keys))
        follower.poll(0.05)

    wait_for(lambda: follower._newest >= 0, one_more)
    wait_for(lambda: publisher.statistics().events == stream.statistics().events + 1)  # it begins with a Cleared
    wait_for(lambda: follower.statistics().batches == publisher.statistics().batches, lambda: follower.poll(0.01))


def removed(number: int) -> Removed:
    return Removed(Medium.HOST, (number.to_bytes(32, "big"),))


def stored(number: int, tokens: int = 16) -> Stored:
    """Return an event for a first page."""
    page = token_bytes([number, *[7] * (tokens - 1)])
    return Stored(Medium.DEVICE, tuple(page_keys(page, tokens)), None, b"", page, tokens)


def holds(follower: EventFollower, machine: RecordedMachine) -> bool:
    return follower.index.in_sync and machine.is_known(follower.index)


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_subscriber_s_index_becomes_equal_to_the_tree(transport: str, seed: int, tmp_path: Path) -> None:
    ends = (LOOPBACK, LOOPBACK) if transport == "tcp" else (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    stream = EventStream(LARGE_BYTES)
    machine = RecordedMachine(4, rng(seed), stream)
    with published(stream, endpoint=ends[0], replay_endpoint=ends[1]) as publisher:
        with follower_of(publisher) as follower:
            for _ in range(5):
                for _ in range(40):
                    machine.step()
                wait_for(lambda: holds(follower, machine), lambda: follower.poll(0.01))
                follower.index.check()
            assert follower.statistics().refused == 0
        assert publisher.statistics().errors == {}


def test_a_late_subscriber_gets_missed_batches_by_a_replay_longer_than_its_queue() -> None:
    stream = EventStream(LARGE_BYTES)
    with published(stream, queued_batches_max=1) as publisher:
        for number in range(20):
            wait_for(lambda batches=number + 1: publisher.statistics().batches == batches)  # type: ignore[misc]
            stream.put(stored(number))
        wait_for(lambda: publisher.statistics().batches == 21)
        with follower_of(publisher) as follower:
            follower.poll(0)
            assert len(follower.index) == 20 and follower.statistics().losses == 0
        assert stream.statistics().snapshots == 0


@pytest.mark.parametrize(("media", "name"), [("vllm", b"CPU"), ("sglang", b"CPU_PINNED")])
def test_media_are_published_under_the_configured_names(media: str, name: bytes) -> None:
    stream = EventStream(LARGE_BYTES)
    with published(stream, media=media) as publisher, follower_of(publisher) as follower:
        stream.put(stored(1)._replace(medium=Medium.HOST))
        wait_for(lambda: follower.index.pages() == {Medium.HOST: 1}, lambda: follower.poll(0.01))
        assert any(b"\xa6medium" + bytes([0xA0 + len(name)]) + name in payload for payload in publisher._kept)


def test_lost_messages_are_fetched_by_replay() -> None:
    stream = EventStream(LARGE_BYTES)
    with published(stream) as publisher, follower_of(publisher) as follower:
        connected(stream, publisher, follower)
        for number in range(4):
            before = publisher.statistics().batches
            stream.put(stored(number))
            wait_for(lambda batches=before: publisher.statistics().batches > batches)  # type: ignore[misc]
            if number < 3:
                assert follower._sub.poll(int(1000 * TIMEOUT_S))
                follower._sub.recv_multipart()  # lost
        wait_for(lambda: len(follower.index) == 4, lambda: follower.poll(0.01))
        follower.index.check()
        assert follower.statistics().losses == 0 and stream.statistics().snapshots == 0


@pytest.mark.parametrize(
    ("capacity_bytes", "options"), [(LARGE_BYTES, {"replay_buffer": 1, "snapshot_interval": 0.01}), (1, {})],
    ids=["a subscriber missed more than is kept", "the stream overflows"],
)
def test_a_follower_starts_over_from_a_snapshot_when(capacity_bytes: int, options: dict[str, Any]) -> None:
    stream = EventStream(capacity_bytes)
    machine = RecordedMachine(4, rng(3), stream)
    with published(stream, **options) as publisher:
        wait_for(lambda: publisher.statistics().batches > 0)
        while stream.statistics().events < 100 or (capacity_bytes == 1 and publisher.statistics().gaps == 0):
            machine.step()
        with follower_of(publisher, timeout_s=0.2) as follower:

            def scheduler_and_follower() -> None:
                machine.recorder.poll(machine.tree)
                follower.poll(0.01)

            wait_for(lambda: holds(follower, machine), scheduler_and_follower)
            assert stream.statistics().snapshots >= 1


def test_snapshots_that_subscribers_cause_are_not_more_frequent_than_configured() -> None:
    stream, clock = EventStream(LARGE_BYTES), ManualClock()
    machine = RecordedMachine(4, rng(1), stream)
    with published(stream, clock, replay_buffer=1, snapshot_interval=3600.0) as publisher:
        wait_for(lambda: publisher.statistics().batches == 1)
        with follower_of(publisher, timeout_s=0.01) as follower:

            def scheduler_and_follower() -> None:
                machine.recorder.poll(machine.tree)
                follower.index.lose()  # so that it asks again
                follower.poll(0.01)

            wait_for(lambda: publisher.statistics().replays > 10, scheduler_and_follower)
            assert stream.statistics().snapshots == 1
            clock.advance(3600.0)
            wait_for(lambda: stream.statistics().snapshots == 2, scheduler_and_follower)


def test_another_publisher_at_the_same_address_replaces_the_index(tmp_path: Path) -> None:
    ends: dict[str, Any] = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    first, second = EventStream(LARGE_BYTES), EventStream(LARGE_BYTES)
    publisher = published(first, **ends)
    with follower_of(publisher) as follower:
        for number in range(5):
            first.put(stored(number))
        wait_for(lambda: len(follower.index) == 5, lambda: follower.poll(0.01))
        assert publisher.close()
        second.put(stored(99))
        with published(second, **ends):
            wait_for(lambda: follower.index.keys(Medium.DEVICE) == set(stored(99).keys), lambda: follower.poll(0.05))


def test_closing_sends_the_remaining_events_and_frees_the_port() -> None:
    stream = EventStream(LARGE_BYTES)
    publisher = published(stream)
    with follower_of(publisher) as follower:
        connected(stream, publisher, follower)
        stream.put(stored(1))
        assert publisher.close(TIMEOUT_S) and publisher.close()
        wait_for(lambda: len(follower.index) == 1, lambda: follower.poll(0.01))
    assert stream.statistics().readers == 0 and not publisher.statistics().alive
    published(stream, endpoint=publisher.endpoint).close()


def test_each_rank_has_its_own_port_and_its_batches_carry_the_rank() -> None:
    with published(EventStream(1)) as free:
        port = int(free.endpoint.rpartition(":")[2])
    with published(EventStream(1), endpoint=f"tcp://127.0.0.1:{port - 3}", data_parallel_rank=3) as publisher:
        assert publisher.endpoint == f"tcp://127.0.0.1:{port}"
        wait_for(lambda: publisher.statistics().batches == 1)
        for dealer in raw_requests(publisher):
            (_, payload), *_ = replayed(dealer, 0)
        assert msgspec.msgpack.decode(payload)[2] == 3


@contextmanager
def stuck(publisher: EventPublisher) -> Iterator[None]:
    """A subscriber that does not read."""
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.set_hwm(1)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(publisher.endpoint)
    yield
    context.destroy(linger=0)


def test_a_subscriber_that_does_not_read_is_counted_and_does_not_slow_others(tmp_path: Path) -> None:
    stream = EventStream(LARGE_BYTES)
    ends: dict[str, Any] = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    publisher = published(stream, queued_batches_max=2, **ends)
    with follower_of(publisher) as follower, stuck(publisher):
        number = 0

        def one_more() -> None:
            nonlocal number
            number += 1
            stream.put(stored(number, 4096))
            follower.poll(0.01)

        wait_for(lambda: publisher.statistics().slow > 0, one_more)
        wait_for(lambda: len(follower.index) == number, lambda: follower.poll(0.01))
        publisher.close(1.0)  # which does not wait for it either
        wait_for(lambda: not publisher.statistics().alive)


def raw_requests(publisher: EventPublisher) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    assert publisher.replay_endpoint is not None
    dealer.connect(publisher.replay_endpoint)
    yield dealer
    context.destroy(linger=0)


def replayed(dealer: zmq.Socket[bytes], start: int) -> list[tuple[int, bytes]]:
    """Return the numbers and payloads of a replay from `start` on."""
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    found: list[tuple[int, bytes]] = []
    while dealer.poll(int(1000 * TIMEOUT_S)):
        empty, topic, number, payload = dealer.recv_multipart()
        if number == END_OF_REPLAY:
            assert (empty, topic, payload) == (b"", b"", b"")
            return found
        assert (empty, topic) == (b"", b"kv-events")
        found.append((int.from_bytes(number, "big"), payload))
    raise AssertionError("no end of the replay")


def test_a_replay_begins_at_the_requested_batch_and_ends_with_a_marker() -> None:
    stream = EventStream(LARGE_BYTES)
    with published(stream) as publisher:
        for number in range(3):
            wait_for(lambda batches=number + 1: publisher.statistics().batches == batches)  # type: ignore[misc]
            stream.put(removed(number))
        wait_for(lambda: publisher.statistics().batches == 4)
        for dealer in raw_requests(publisher):
            everything = replayed(dealer, 0)
            origin = everything[0][0]
            assert [number for number, _ in everything] == list(range(origin, origin + 4))
            assert replayed(dealer, origin + 2) == everything[2:]
            assert replayed(dealer, origin + 4) == []
        events = [event for _, payload in everything for event in decode_batch(payload)]
        assert events == [Cleared(), *map(removed, range(3))]


@pytest.mark.parametrize("request_frames", [[b""], [b"", b"short"], [b"", bytes(8), b"more"], [b"x"]])
def test_a_malformed_replay_request_is_rejected_and_the_next_one_served(request_frames: list[bytes]) -> None:
    with published(EventStream(LARGE_BYTES)) as publisher:
        for dealer in raw_requests(publisher):
            dealer.send_multipart(request_frames)
            dealer.send_multipart([b"", (1 << 60).to_bytes(8, "big")])
            assert dealer.recv_multipart() == [b"", b"", END_OF_REPLAY, b""]
        assert publisher.statistics().refused == 1


def test_a_batch_that_cannot_be_read_is_skipped_and_counted() -> None:
    stream = EventStream(LARGE_BYTES)
    with published(stream) as publisher, follower_of(publisher) as follower:
        stream.put(stored(1)._replace(keys=(b"8 bytes.",)))
        wait_for(lambda: follower.statistics().refused > 0, lambda: follower.poll(0.01))
        assert len(follower.index) == 0


class Broken(EventStream):
    """A stream whose reader fails while `broken` is set."""

    broken = False

    def subscribe(self) -> EventReader:
        reader = super().subscribe()
        drain = reader.drain

        def broken_drain(events_max: int) -> tuple[Event, ...]:
            if self.broken:
                raise RuntimeError("planned")
            return drain(events_max)

        reader.drain = broken_drain  # type: ignore[method-assign]
        return reader


def test_an_unexpected_error_is_counted_and_healed_by_a_snapshot() -> None:
    stream, clock = Broken(LARGE_BYTES), ManualClock()
    machine = RecordedMachine(4, rng(3), stream)
    # The publisher may begin its back-off after the clock was moved, and then only the next move ends it.
    with published(stream, clock) as publisher, follower_of(publisher, timeout_s=0.2) as follower:
        stream.broken = True
        wait_for(lambda: publisher.statistics().errors == {"RuntimeError": 1})
        for _ in range(50):
            machine.step()
        assert publisher.statistics().errors == {"RuntimeError": 1}, "it backs off"
        stream.broken = False

        def scheduler_and_follower() -> None:
            clock.advance(ERROR_BACKOFF_S)
            machine.recorder.poll(machine.tree)
            follower.poll(0.01)

        wait_for(lambda: holds(follower, machine) and stream.statistics().snapshots > 0, scheduler_and_follower)


# Who may listen


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://*:5557", "tcp://192.0.2.1:5557", "tcp://[::]:5557", "tcp://example.org:5557", "tcp://eth0:5557"],
)
def test_an_open_address_needs_keys(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="can be reached by other users or hosts"):
        published(EventStream(1), endpoint=endpoint)
    with pytest.raises(ConfigError, match="can be reached by other users or hosts"):
        published(EventStream(1), replay_endpoint=endpoint)
    require_private(EventsConfig(endpoint=endpoint), CurveKeys("x" * 40, frozenset(["y" * 40])))


@pytest.mark.parametrize(
    ("endpoint", "is_private"),
    [
        *((endpoint, True) for endpoint in ("tcp://127.0.0.1:1", "tcp://[::1]:*", "tcp://localhost:5557")),
        *((endpoint, False) for endpoint in (
            "", "inproc://x", "udp://127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:1;192.0.2.1:2",
            "ipc://@abstract", "ipc://*", "ipc://relative/x", "ipc:///" + "x" * 120, "ipc:///no/such/directory/x",
        )),
    ],
)
def test_without_keys_only_private_endpoints_are_accepted(endpoint: str, is_private: bool) -> None:
    with nullcontext() if is_private else pytest.raises(ConfigError):
        require_private(EventsConfig(endpoint=endpoint), None)


def test_a_socket_in_a_directory_that_others_may_enter_is_rejected(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    section = EventsConfig(endpoint=f"ipc://{tmp_path}/x")
    require_private(section, None)
    tmp_path.chmod(0o711)
    with pytest.raises(ConfigError, match="chmod 700"):
        require_private(section, None)


def test_an_address_in_use_is_a_configuration_error() -> None:
    with published(EventStream(1)) as publisher:
        with pytest.raises(ConfigError, match="cannot listen"):
            published(EventStream(1), endpoint=publisher.endpoint)
        assert sum(thread.name == "hicache-events" for thread in threading.enumerate()) == 1


def curve_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def test_with_keys_only_listed_subscribers_are_admitted() -> None:
    (server_public, server_secret), listed, stranger = curve_pair(), curve_pair(), curve_pair()
    stream = EventStream(LARGE_BYTES)
    stream.put(stored(1))
    keys = CurveKeys(server_secret, frozenset([listed[0]]))
    with EventPublisher(stream, EventsConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK), keys) as publisher:
        with follower_of(publisher, ClientCurve(*stranger, server_public), 0.05) as outside:
            wait_for(lambda: publisher.statistics().refused >= 2, lambda: outside.poll(0.01))
            for _ in range(5):
                outside.poll(0.05)  # returns in time, though the refused connection is gone
            assert not outside.index.in_sync
        with follower_of(publisher, None, 0.05) as without_keys:
            without_keys.poll(0.1)
            assert not without_keys.index.in_sync
        with follower_of(publisher, ClientCurve(*listed, server_public)) as inside:
            wait_for(lambda: len(inside.index) == 1, lambda: inside.poll(0.01))
        assert publisher.statistics().replays == 1  # the other requests were not read


def test_malformed_keys_are_rejected_and_never_shown() -> None:
    public, secret = curve_pair()
    for keys in ((secret[:-1], [public]), (secret, []), (secret, ["short"])):
        with pytest.raises(ConfigError, match="CURVE") as refused:
            CurveKeys(keys[0], frozenset(keys[1]))
        assert secret[:-1] not in str(refused.value)
    assert secret not in repr(CurveKeys(secret, frozenset([public])))


def test_a_publisher_without_token_ids_still_reports_locations() -> None:
    stream = EventStream(LARGE_BYTES)
    stream.put(stored(1))
    with published(stream, token_ids=False) as publisher, follower_of(publisher) as follower:
        wait_for(lambda: len(follower.index) == 1, lambda: follower.poll(0.01))
        (key,) = stored(1).keys
        assert follower.index.prefix_pages([key], Medium.DEVICE) == 1
        assert isinstance(follower.index, DescribedIndex) and follower.index.described == {key: (None, b"", b"")}


# What a publisher keeps, and what it leaves behind if it cannot start


@pytest.mark.parametrize("replay_endpoint", [LOOPBACK, None])
def test_batches_are_kept_only_with_a_replay_socket(replay_endpoint: str | None) -> None:
    stream = EventStream(1 << 20)
    with published(stream, replay_endpoint=replay_endpoint) as publisher:
        stream.put(removed(1))
        wait_for(lambda: publisher.statistics().events == 2)  # it begins with a Cleared
    assert (len(publisher._kept) > 0, publisher._kept_bytes > 0) == 2 * (replay_endpoint is not None,)


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Prevent the start of threads: their stacks are larger than the address space."""
    before = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_publisher_whose_thread_cannot_start_leaves_no_socket_and_no_reader(has_keys: bool) -> None:
    """With keys, the thread of the authenticator starts first."""
    stream = EventStream(1 << 20)
    keys = CurveKeys(curve_pair()[1], frozenset([curve_pair()[0]])) if has_keys else None
    with published(stream) as publisher:
        options = EventsConfig(endpoint=publisher.endpoint)
    with no_more_threads(), pytest.raises(RuntimeError, match="thread"):
        EventPublisher(stream, options, keys)
    gc.collect()  # finalises the authenticator that never started, which must not raise
    assert stream.statistics().readers == 0
    with EventPublisher(stream, options, keys) as publisher:
        stream.put(Cleared())
        wait_for(lambda: publisher.statistics().events == 2)
