"""Follows a publisher over ZeroMQ and keeps a `PrefixIndex` equal to its tree.

It requests a missing sequence number at the replay socket. If the publisher no longer has it, the index forgets
everything, and the publisher sends a snapshot. The index restarts at the `AllBlocksCleared` with which the snapshot
begins. Needs pyzmq and msgspec (extra `events`). Has no thread: `poll` does the work.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import zmq

from ..clock import SYSTEM_CLOCK, Clock
from ..config.addresses import split_endpoint
from ..errors import ConfigError, InvalidInput
from .index import PrefixIndex
from .publisher import END_OF_REPLAY, SEQUENCE_BYTES
from .types import Event
from .wire import decode_batch

# A batch has about 256 KiB and at most one tree node more; a peer that sends larger messages is disconnected.
MESSAGE_BYTES_MAX = 64 << 20
# Batches that are received and not yet polled. Further batches are dropped, and requested again.
QUEUED_BATCHES_MAX = 1000


@dataclass(frozen=True, slots=True)
class ClientCurve:
    """The keys of a subscriber, and the public key of its publisher, each 40 characters of Z85."""

    public: str
    secret: str = field(repr=False)
    server: str


@dataclass(frozen=True, slots=True)
class FollowerStatistics:
    """`replays` counts requests for missing batches, `losses` how often these were gone and the index started over,
    `refused` messages that could not be read.
    """

    batches: int
    replays: int
    losses: int
    refused: int


class EventFollower(AbstractContextManager["EventFollower"]):
    """Connects to the two endpoints of a publisher. Used by one thread; a context manager that closes. Raises
    ConfigError for an endpoint that is not valid.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str, *, topic: str = "kv-events", curve: ClientCurve | None = None,
        replay_timeout_s: float = 5.0, replay_interval_s: float = 5.0, clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self.index = PrefixIndex()
        self.index.lose()  # the publisher's tree is unknown until a `Cleared`
        self._topic = topic.encode()
        self._replay_timeout_s = replay_timeout_s
        self._replay_interval_s = replay_interval_s
        self._expected = 0
        self._ask_again_s = -math.inf
        self._newest = -1  # the largest number that was published, not replayed
        self._batches = self._replays = self._losses = self._refused = 0
        self._context = zmq.Context()
        with ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            self._sub = self._connect(zmq.SUB, endpoint, curve, QUEUED_BATCHES_MAX)
            self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
            # Large enough for a whole replay buffer: the publisher drops the batches that do not fit.
            self._dealer = self._connect(zmq.DEALER, replay_endpoint, curve, 0)
            undo.pop_all()

    def poll(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` for a batch, then apply all received batches; return their number.

        May also wait for a replay, up to its time limit. Requests a replay at the start, for missing numbers, and once
        per interval, because the loss of the newest batch does not show as a missing number.
        """
        before = self._batches
        if self._clock() >= self._ask_again_s:
            self._expected = self._expected if self.index.in_sync else 0
            self._catch_up(self._expected)
            self._ask_again_s = self._clock() + self._replay_interval_s
        if self._sub.poll(int(1000 * timeout_s)):
            while self._sub.poll(0):
                self._receive(self._sub.recv_multipart())
        return self._batches - before

    def statistics(self) -> FollowerStatistics:
        return FollowerStatistics(self._batches, self._replays, self._losses, self._refused)

    def close(self) -> None:
        """Disconnect. Idempotent. Does not block."""
        self._context.destroy(linger=0)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _connect(self, kind: int, endpoint: str, curve: ClientCurve | None, hwm: int) -> zmq.Socket[bytes]:
        try:
            split_endpoint(endpoint, listens=False)
        except ValueError as error:
            raise ConfigError(f"events: cannot connect to {endpoint[:80]!r}: {error}") from error
        connected = self._context.socket(kind)
        connected.set_hwm(hwm)
        connected.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        connected.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            if curve is not None:
                connected.setsockopt(zmq.CURVE_PUBLICKEY, curve.public.encode())
                connected.setsockopt(zmq.CURVE_SECRETKEY, curve.secret.encode())
                connected.setsockopt(zmq.CURVE_SERVERKEY, curve.server.encode())
            connected.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"events: cannot connect to {endpoint[:80]!r}: {error.strerror}") from error
        return connected

    def _receive(self, frames: list[bytes]) -> None:
        """Apply one message of the publisher."""
        if len(frames) != 3 or frames[0] != self._topic or len(frames[1]) != SEQUENCE_BYTES:
            self._refused += 1
            return
        sequence = int.from_bytes(frames[1], "big")
        events = self._decode(frames[2])
        if events is None:
            return
        if sequence <= self._newest:
            # A publisher's numbers only rise. This is another publisher, started after the clock was set back.
            self._expected = 0
            self.index.lose()
        self._newest = sequence
        if sequence > self._expected:
            self._catch_up(sequence)
        if sequence >= self._expected:  # a smaller number was already in the replay
            self._apply(sequence, events)

    def _catch_up(self, until: int) -> None:
        """Request the batches from the expected one on. If some below `until` stay missing, the index starts over."""
        self._replays += 1
        while self._dealer.poll(0):  # the rest of a replay that timed out
            self._dealer.recv_multipart()
        try:
            self._dealer.send_multipart((b"", self._expected.to_bytes(SEQUENCE_BYTES, "big")), zmq.NOBLOCK)
        except zmq.Again:
            pass  # not connected, for example because our key is not listed
        else:
            self._receive_replay()
        self._skip_to(until)

    def _receive_replay(self) -> None:
        deadline_s = self._clock() + self._replay_timeout_s
        while self._dealer.poll(max(0, int(1000 * (deadline_s - self._clock())))):
            frames = self._dealer.recv_multipart()
            if len(frames) != 4 or len(frames[2]) != SEQUENCE_BYTES:
                self._refused += 1
                continue
            if frames[2] == END_OF_REPLAY:
                return
            sequence = int.from_bytes(frames[2], "big")
            events = self._decode(frames[3])
            if events is not None and sequence >= self._expected:
                self._skip_to(sequence)
                self._apply(sequence, events)

    def _skip_to(self, sequence: int) -> None:
        """Abandon the batches before `sequence`."""
        if sequence > self._expected:
            self._losses += self.index.in_sync
            self._expected = sequence
            self.index.lose()

    def _apply(self, sequence: int, events: tuple[Event, ...]) -> None:
        self.index.apply(events)
        self._expected = sequence + 1
        self._batches += 1

    def _decode(self, payload: bytes) -> tuple[Event, ...] | None:
        """Return the events, or None for a payload that is not a batch: it is counted, and its number stays missing."""
        try:
            return decode_batch(payload)
        except InvalidInput:
            self._refused += 1
            return None
