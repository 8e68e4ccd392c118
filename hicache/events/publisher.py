"""Publishes an event stream over ZeroMQ, in the form of docs/formats/kv_events.md.

A PUB socket sends batches with consecutive sequence numbers; a ROUTER socket sends the newest of them again to whoever
missed some. A subscriber that missed more than is kept makes the publisher ask for a snapshot of the tree, which is
then published to all as `AllBlocksCleared` and what is stored. Needs pyzmq and msgspec (extra `events`).

Locking design: one thread owns the sockets, the replay buffer and the sequence; it is the only user of the stream's
reader. The constructor makes and binds the sockets before the thread starts. `_closing` is an event that `close` sets;
the counters are written by the thread and read by `statistics`, each is a single reference. The producer is never in
here: it puts events into the stream and the thread comes for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack

import zmq
import zmq.utils.z85

from ..config import EventsConfig
from ..errors import ConfigError
from .security import CurveKeys, require_private
from .stream import EventStream
from .types import Batch, Cleared, Event, Gap, PublisherStatistics
from .wire import BatchEncoder

logger = logging.getLogger(__name__)

SEQUENCE_BYTES = 8
# After the last batch of a replay: minus one as a signed number.
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES
# How long an event waits at most before it is sent. Shorter means more wake-ups of an idle publisher.
POLL_INTERVAL_S = 0.01
# A batch that begins below this weight is complete at it, so that no message becomes larger than about a node of the
# tree and this; and one poll of the stream takes no more events than this.
BATCH_BYTES_MAX = 1 << 18
DRAIN_EVENTS_MAX = 1024
# Batches kept for replay, however small. A client that reads one replay while another comes loses none of them.
REPLAY_BATCHES_MAX = 10_000
REPLAYS_QUEUED_MAX = 2
# The part of the time for closing in which events are still sent; the rest is for the sockets.
SENDING_SHARE = 0.8
# Requests that are served before events come first again.
REQUESTS_PER_STEP_MAX = 16
# A request is a few dozen bytes, and the longest message of a CURVE handshake some 400; more is nonsense.
REQUEST_BYTES_MAX = 1024
# How long the thread rests after an unexpected error, so that a persistent one costs no core.
ERROR_BACKOFF_S = 0.5
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


class EventPublisher:
    """See the module's docstring. Starts a thread; a context manager that closes.

    `rank` is the data-parallel rank that the batches name; `config` has none. Raises ConfigError without an endpoint,
    and for one that is open to strangers or cannot be bound.
    """

    def __init__(
        self, stream: EventStream, config: EventsConfig, curve: CurveKeys | None = None, *, rank: int | None = None
    ) -> None:
        if config.endpoint is None:
            raise ConfigError("events.endpoint: there is none; say where to publish, such as tcp://127.0.0.1:5557")
        for endpoint in filter(None, (config.endpoint, config.replay_endpoint)):
            require_private(endpoint, curve)
        self._config = config
        self._curve = curve
        self._topic = config.topic.encode()
        self._encoder = BatchEncoder(config.dialect, token_ids=config.token_ids, rank=rank)
        self._kept: deque[bytes] = deque()  # the payloads of the batches up to number `_sequence` - 1
        self._kept_bytes = 0
        # Microseconds since 1970, so that the numbers of a later publisher at this address are larger: a subscriber
        # then sees a gap instead of taking its batches for a continuation.
        self._origin = self._sequence = time.time_ns() // 1000
        self._snapshot_asked = False  # by a subscriber that missed more than is kept
        self._snapshot_due_s = 0.0
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._closing = threading.Event()
        self._close_deadline_s = 0.0
        with ExitStack() as undo:
            self._context = zmq.Context()
            undo.callback(self._context.destroy, linger=0)
            self._zap = self._bind_zap() if curve else None
            self._pub = self._bind(zmq.PUB, config.endpoint)
            self._router = self._bind(zmq.ROUTER, config.replay_endpoint) if config.replay_endpoint else None
            # Where subscribers connect to, with the port that was taken.
            self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
            self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT) if self._router else None
            self._reader = stream.subscribe()
            undo.callback(self._reader.close)
            self._thread = threading.Thread(target=self._run, name="hicache-events", daemon=True)
            self._thread.start()
            undo.pop_all()  # all of it is the thread's now

    def statistics(self) -> PublisherStatistics:
        """A snapshot of the counters. Any thread; the numbers may be of neighbouring moments."""
        counts = self._counts
        return PublisherStatistics(
            alive=self._thread.is_alive(), batches=self._sequence - self._origin, events=counts["events"],
            bytes=counts["bytes"], slow=counts["slow"], gaps=counts["gaps"], snapshots=counts["snapshots"],
            replays=counts["replays"], refused=counts["refused"], replay_batches=len(self._kept),
            replay_bytes=self._kept_bytes, errors=dict(self._errors),
        )  # fmt: skip

    def close(self, timeout_s: float = 5.0) -> bool:
        """Send what is in the stream, then stop listening. Blocks for up to `timeout_s`; may be called twice.

        False if the thread did not end in time (it is left behind, a daemon).
        """
        if not self._closing.is_set():
            self._close_deadline_s = time.monotonic() + SENDING_SHARE * timeout_s
            self._closing.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Sockets, on the constructor's thread

    def _bind_zap(self) -> zmq.Socket[bytes]:
        """Where ZeroMQ asks whether a key may connect (ZAP, RFC 27). It must be there before the first connection."""
        zap = self._context.socket(zmq.REP)
        zap.bind(_ZAP_ENDPOINT)
        return zap

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        replay_max = REPLAYS_QUEUED_MAX * (REPLAY_BATCHES_MAX + 1)
        bound.set_hwm(self._config.queued_batches_max if kind == zmq.PUB else replay_max)
        bound.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        bound.setsockopt(zmq.IPV6, int("[" in endpoint))
        if kind == zmq.PUB:
            bound.setsockopt(zmq.XPUB_NODROP, 1)
        if self._curve is not None and not endpoint.startswith("ipc://"):
            bound.setsockopt(zmq.CURVE_SERVER, 1)
            bound.setsockopt(zmq.CURVE_SECRETKEY, self._curve.secret.encode())
            bound.setsockopt(zmq.ZAP_DOMAIN, b"hicache")
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"events: cannot listen on {endpoint[:80]!r}: {error.strerror}") from error
        return bound

    # The thread

    def _run(self) -> None:
        try:
            # Subscribers may remember an earlier publisher at this address, whose tree is gone.
            self._send([Cleared()])
            while not self._closing.is_set():
                self._guarded_step()
            while time.monotonic() < self._close_deadline_s and self._publish_some():
                pass
        except Exception as error:
            self._failed(error)
        finally:
            self._reader.close()
            linger_s = max(0.0, self._close_deadline_s - time.monotonic())
            self._context.destroy(linger=int(1000 * linger_s))

    def _guarded_step(self) -> None:
        try:
            self._step()
        except Exception as error:
            self._failed(error)
            # What was being sent is lost, so what subscribers know may be wrong.
            self._reader.request_snapshot()
            self._closing.wait(ERROR_BACKOFF_S)

    def _failed(self, error: Exception) -> None:
        kind = type(error).__name__
        self._errors[kind] += 1
        if self._errors[kind] == 1:
            logger.exception("event publisher: unexpected %s; counted from now on", kind)

    def _step(self) -> None:
        """Answer who asks, for as long as an event may wait, then publish all there is."""
        self._answer(POLL_INTERVAL_S)
        self._request_snapshot()
        while self._publish_some() and not self._closing.is_set():
            self._answer(0)

    def _answer(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        for asked in filter(None, (self._zap, self._router)):
            poller.register(asked, zmq.POLLIN)
        if not poller.sockets:
            self._closing.wait(timeout_s)
        for _ in range(REQUESTS_PER_STEP_MAX):
            ready = dict(poller.poll(int(1000 * timeout_s))) if poller.sockets else {}
            if self._zap is not None and self._zap in ready:
                self._admit(self._zap)
            if self._router is not None and self._router in ready:
                self._replay(self._router)
            if not ready:
                break
            timeout_s = 0

    def _publish_some(self) -> bool:
        """Publish what one look into the stream brings; False if that was nothing."""
        entry = self._reader.drain(DRAIN_EVENTS_MAX)
        if isinstance(entry, Gap):
            # Until the snapshot comes, knowing nothing is better than knowing what is wrong.
            self._counts["gaps"] += 1
            self._send([Cleared()])
            return True
        if isinstance(entry, Batch):
            for part in _parts(entry.events):
                self._send(part)
            return bool(entry.events)
        self._counts["snapshots"] += 1
        for part in _parts((Cleared(), *entry.events)):
            self._send(part)
        return True

    def _send(self, events: Sequence[Event]) -> None:
        payload = self._encoder.encode(events, time.time())
        frames = (self._topic, _number(self._sequence), payload)
        if self._router is not None:
            self._kept.append(payload)
            self._kept_bytes += len(payload)
        while self._kept_bytes > self._config.replay_buffer or len(self._kept) > REPLAY_BATCHES_MAX:
            self._kept_bytes -= len(self._kept.popleft())
        self._sequence += 1
        self._counts["events"] += len(events)
        self._counts["bytes"] += len(payload)
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            # Somebody's queue is full. Only a socket that may not drop says so; one that may sends to all the others.
            self._counts["slow"] += 1
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, zmq.NOBLOCK, copy=False)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Answer one request: the kept batches from the number in it on, then the end marker."""
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
            self._counts["refused"] += 1
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        first = self._sequence - len(self._kept)
        self._counts["replays"] += 1
        self._snapshot_asked |= start < first and first > self._origin
        for number in range(max(start, first), self._sequence):
            # Drops what does not fit into the queue of a client that asks and does not read; it sees missing numbers.
            router.send_multipart((client, b"", _number(number), self._kept[number - first]), zmq.NOBLOCK, copy=False)
        router.send_multipart((client, b"", END_OF_REPLAY, b""), zmq.NOBLOCK)

    def _request_snapshot(self) -> None:
        """Ask the scheduler for the whole tree, which it walks over, no more often than `snapshot_interval` allows."""
        now_s = time.monotonic()
        if self._snapshot_asked and now_s >= self._snapshot_due_s:
            self._snapshot_asked = False
            self._snapshot_due_s = now_s + self._config.snapshot_interval
            self._reader.request_snapshot()

    def _admit(self, zap: zmq.Socket[bytes]) -> None:
        """Answer ZeroMQ whether a client's key is on the list. Compares 32-byte public keys, which are no secret."""
        frames = zap.recv_multipart()
        allowed = False
        if self._curve is not None and len(frames) >= 7 and frames[5] == b"CURVE":
            allowed = zmq.utils.z85.encode(frames[6]).decode() in self._curve.clients
        if not allowed:
            self._counts["refused"] += 1
        status = (b"200", b"OK") if allowed else (b"400", b"this key is not on the list")
        zap.send_multipart((_ZAP_VERSION, frames[1] if len(frames) > 1 else b"", *status, b"", b""))


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def _parts(events: Iterable[Event]) -> Iterator[list[Event]]:
    """`events` in lists of about `BATCH_BYTES_MAX`; none if there are none."""
    part: list[Event] = []
    size_bytes = 0
    for event in events:
        part.append(event)
        size_bytes += event.size_bytes
        if size_bytes >= BATCH_BYTES_MAX:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part
