"""Publishes an event stream over ZeroMQ, in the format of docs/formats/kv_events.md.

A PUB socket sends batches with consecutive sequence numbers; a ROUTER socket resends the newest of them to a
subscriber that missed some. If a subscriber missed more than the replay buffer holds, the publisher requests a snapshot
of the tree and publishes it to all: `AllBlocksCleared`, then all stored pages. With CURVE keys, pyzmq's authenticator
admits the listed subscribers only. Needs pyzmq and msgspec (extra `events`).

Locking design: one thread owns the sockets, the replay buffer and the sequence; it is the only user of the stream's
reader. The constructor makes and binds the sockets before the thread starts. `close` sets the event `_closing`. The
thread writes the counters and `statistics` reads them; each is a single reference. The authenticator has its own
thread and sockets; `_ListedKeys` runs there, and only that thread writes its counter. The scheduler never calls this
module: it puts events into the stream, and the thread polls the stream.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ..clock import SYSTEM_CLOCK, Clock
from ..config import EventsConfig
from ..config.addresses import ranked_endpoint
from ..errors import ConfigError
from .blocks import BlockEvent, BlockLedger
from .security import CurveKeys, require_private
from .stream import EventStream
from .types import Cleared, Event, PublisherStatistics
from .wire import WireForm, encode_batch

logger = logging.getLogger(__name__)

SEQUENCE_BYTES = 8
# After the last batch of a replay: minus one as a signed number.
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES
# The longest time that an event waits before it is sent. Shorter means more wake-ups of an idle publisher.
POLL_INTERVAL_S = 0.01
# A batch is sent once it has this size, so a message is at most one tree node larger; and the most events that one poll
# takes from the stream.
BATCH_BYTES_MAX = 1 << 18
DRAIN_EVENTS_MAX = 1024
# Batches stored for replay, of any size. A client that reads one replay while another arrives loses none of them.
REPLAY_BATCHES_MAX = 10_000
REPLAYS_QUEUED_MAX = 2
# The share of the closing time in which events are still sent; the rest is for the sockets.
SENDING_SHARE = 0.8
# Requests that are served before events are sent again.
REQUESTS_PER_STEP_MAX = 16
# A request has a few dozen bytes, and the longest message of a CURVE handshake about 400; larger messages are invalid.
REQUEST_BYTES_MAX = 1024
# How long the thread sleeps after an unexpected error, so that a persistent error does not use a whole core.
ERROR_BACKOFF_S = 0.5
_ZAP_DOMAIN = "hicache"


class _ListedKeys:
    """The public keys that may connect, in the interface of pyzmq's authenticator. Counts the keys that it rejects."""

    def __init__(self, keys: frozenset[str]) -> None:
        self._keys = keys
        self.refused = 0

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if the key, in Z85, is listed. Public keys are not secret, so timing does not matter."""
        is_listed = key.decode() in self._keys
        self.refused += not is_listed
        return is_listed


class EventPublisher(AbstractContextManager["EventPublisher"]):
    """See the module's docstring. Starts a thread; a context manager that closes.

    `given_keys`: the engine supplies the page keys, and events name its blocks (`blocks`). Raises ConfigError without
    an endpoint, and for an endpoint that cannot be bound or that other users or hosts can reach without keys.
    """

    def __init__(
        self, stream: EventStream, config: EventsConfig, curve: CurveKeys | None = None, *, given_keys: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if config.endpoint is None:
            raise ConfigError("events.endpoint: is not set; set an address, such as tcp://127.0.0.1:5557")
        require_private(config, curve)
        self._config = config
        self._clock = clock
        self._topic = config.topic.encode()
        self._form = WireForm(config.token_ids, config.tenants, config.data_parallel_rank, config.media)
        self._ledger = BlockLedger() if given_keys else None
        self._kept: deque[bytes] = deque()  # the payloads of the newest batches, the last with number `_sequence` - 1
        self._kept_bytes = 0
        # Microseconds since 1970, so that the numbers of a later publisher at this address are larger. A subscriber
        # then sees a gap instead of a continuation.
        self._origin = self._sequence = int(1e6 * clock.wall_s())
        self._snapshot_asked = False  # a subscriber missed more batches than are stored
        self._snapshot_due_s = -math.inf
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._closing = threading.Event()
        self._close_deadline_s = -math.inf
        self._listed = _ListedKeys(curve.clients if curve else frozenset())
        with ExitStack() as undo:
            self._context = zmq.Context()
            undo.callback(self._context.destroy, linger=0)
            # ZeroMQ calls it for each connection (ZAP, RFC 27), so it must exist before the first one.
            self._authenticator = ThreadAuthenticator(self._context)
            if curve is not None:
                self._authenticator.configure_curve_callback(_ZAP_DOMAIN, self._listed)
                undo.callback(self._authenticator.stop)
                self._authenticator.start()
            rank, replay = config.data_parallel_rank, config.replay_endpoint
            self._pub = self._bind(zmq.PUB, ranked_endpoint(config.endpoint, rank), curve)
            self._router = self._bind(zmq.ROUTER, ranked_endpoint(replay, rank), curve) if replay else None
            # The addresses for subscribers, with the bound port.
            self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
            self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT) if self._router else None
            self._reader = stream.subscribe()
            undo.callback(self._reader.close)
            self._thread = threading.Thread(target=self._run, name="hicache-events", daemon=True)
            self._thread.start()
            undo.pop_all()  # the thread owns everything from here on

    def statistics(self) -> PublisherStatistics:
        """Return the counters. Any thread; they may be of slightly different moments."""
        counts = self._counts
        return PublisherStatistics(
            alive=self._thread.is_alive(), batches=self._sequence - self._origin, events=counts["events"],
            slow=counts["slow"], gaps=self._reader.gaps, replays=counts["replays"],
            refused=counts["malformed"] + self._listed.refused, errors=dict(self._errors),
        )

    def close(self, timeout_s: float = 5.0) -> bool:
        """Send the remaining events, then stop. Idempotent. Blocks for up to `timeout_s`.

        Return False if the thread did not end in time; it continues as a daemon thread.
        """
        if not self._closing.is_set():
            self._close_deadline_s = self._clock() + SENDING_SHARE * timeout_s
            self._closing.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _bind(self, kind: int, endpoint: str, curve: CurveKeys | None) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        replay_max = REPLAYS_QUEUED_MAX * (REPLAY_BATCHES_MAX + 1)
        bound.set_hwm(self._config.queued_batches_max if kind == zmq.PUB else replay_max)
        bound.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        bound.setsockopt(zmq.IPV6, int("[" in endpoint))
        if kind == zmq.PUB:
            bound.setsockopt(zmq.XPUB_NODROP, 1)
        if curve is not None and not endpoint.startswith("ipc://"):
            bound.setsockopt(zmq.CURVE_SERVER, 1)
            bound.setsockopt(zmq.CURVE_SECRETKEY, curve.secret.encode())
            bound.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN.encode())
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"events: cannot listen on {endpoint[:80]!r}: {error.strerror}") from error
        return bound

    # The thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._guarded(self._step)
            self._guarded(self._drain)
        finally:
            self._reader.close()
            self._authenticator.stop()
            linger_s = max(0.0, self._close_deadline_s - self._clock())
            self._context.destroy(linger=int(1000 * linger_s))

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step. After an error, count it, log the first of its kind, and request a snapshot."""
        try:
            step()
        except Exception as error:
            kind = type(error).__name__
            self._errors[kind] += 1
            if self._errors[kind] == 1:
                logger.exception("event publisher: unexpected %s; further ones are only counted", kind)
            # The events being sent are lost, so the subscribers' indexes may be wrong.
            self._reader.request_snapshot()
            self._clock.wait_set(self._closing, ERROR_BACKOFF_S)

    def _step(self) -> None:
        """Serve requests for as long as an event may wait, then publish all events."""
        self._answer(POLL_INTERVAL_S)
        self._request_snapshot()
        while self._publish_some() and not self._closing.is_set():
            self._answer(0)

    def _drain(self) -> None:
        while self._clock() < self._close_deadline_s and self._publish_some():
            pass

    def _answer(self, timeout_s: float) -> None:
        """Answer requests for replays; wait up to `timeout_s` for the first."""
        if self._router is None:
            self._clock.wait_set(self._closing, timeout_s)
            return
        for _ in range(REQUESTS_PER_STEP_MAX):
            if not self._router.poll(int(1000 * timeout_s)):
                return
            self._replay(self._router)
            timeout_s = 0

    def _publish_some(self) -> bool:
        """Publish the events of one poll of the stream. Return False if there were none."""
        if self._sequence == self._origin:
            # Subscribers may still have the tree of a previous publisher at this address.
            self._send([Cleared()])
        events = self._reader.drain(DRAIN_EVENTS_MAX)
        for part in _parts(events if self._ledger is None else self._ledger.translate(events)):
            self._send(part)
        return bool(events)

    def _send(self, events: Sequence[Event | BlockEvent]) -> None:
        payload = encode_batch(events, self._clock.wall_s(), self._form)
        frames = (self._topic, _number(self._sequence), payload)
        if self._router is not None:
            self._kept.append(payload)
            self._kept_bytes += len(payload)
        while self._kept_bytes > self._config.replay_buffer or len(self._kept) > REPLAY_BATCHES_MAX:
            self._kept_bytes -= len(self._kept.popleft())
        self._sequence += 1
        self._counts["events"] += len(events)
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            # A subscriber's queue is full. Only a socket that must not drop raises this.
            self._counts["slow"] += 1
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, zmq.NOBLOCK, copy=False)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Answer one request: the stored batches from the number in it on, then the end marker."""
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
            self._counts["malformed"] += 1
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        first = self._sequence - len(self._kept)
        self._counts["replays"] += 1
        self._snapshot_asked |= start < first and first > self._origin
        for number in range(max(start, first), self._sequence):
            # Drops batches if the queue of a client that does not read is full; the client sees missing numbers.
            answer = (client, b"", self._topic, _number(number), self._kept[number - first])
            router.send_multipart(answer, zmq.NOBLOCK, copy=False)
        router.send_multipart((client, b"", b"", END_OF_REPLAY, b""), zmq.NOBLOCK)

    def _request_snapshot(self) -> None:
        """Request the whole tree, at most once per `snapshot_interval`, because the scheduler has to walk it."""
        now_s = self._clock()
        if self._snapshot_asked and now_s >= self._snapshot_due_s:
            self._snapshot_asked = False
            self._snapshot_due_s = now_s + self._config.snapshot_interval
            self._reader.request_snapshot()


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def _parts(events: Iterable[Event | BlockEvent]) -> Iterator[list[Event | BlockEvent]]:
    """Yield `events` in lists of about `BATCH_BYTES_MAX`."""
    part: list[Event | BlockEvent] = []
    size_bytes = 0
    for event in events:
        part.append(event)
        size_bytes += event.size_bytes
        if size_bytes >= BATCH_BYTES_MAX:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part
