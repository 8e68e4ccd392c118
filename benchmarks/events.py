"""KV events: the cost of an event for the scheduler, and the speed of publishing.

    python -m benchmarks.events

"record" is the event of a new node from the tree's call to the stream, as `EventRecorder` makes it, without hashing
page keys. Its reference puts an existing tuple into a `queue.Queue`, the least cost of any publisher with a queue.
"read" is the event on the reader's thread, which hashes. "snapshot" are the steps that describe a tree of 100,000 nodes
to a fast reader: the processor time of the scheduler's thread for the longest and the median step, and the number of
steps.
"publish" is the time from the stream to a subscriber's socket. Its reference packs the same fields with msgspec and
sends them with pyzmq in one loop, without a thread, a limit or a replay buffer. ratio = our time : the reference's.
"""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import zmq

from hicache.cache.recorder import EventRecorder
from hicache.config import EventsConfig
from hicache.events import EventStream, Medium, PrefixIndex, Removed, Stored
from hicache.events.publisher import EventPublisher
from hicache.events.wire import decode_batch, encode_batch
from hicache.keys import RadixKey, page_keys, token_bytes
from hicache.policies import POLICIES
from hicache.radix import Node, RadixTree

from ._table import Row, print_table, reduced

EVENTS = reduced(8_000, 400)
PAGE_SIZE = 64
RUNS = reduced(5)
# The scheduler's part is so short that only many short runs avoid disturbance by other processes.
SHORT_EVENTS = 200
SHORT_RUNS = reduced(300, 2)
CAPACITY_BYTES = 1 << 30
PER_BATCH = 64
SNAPSHOT_NODES = reduced(100_000, 1000)
DEPTH = 100


def events(pages: int) -> list[Stored]:
    """Return runs of `pages` pages, each with different tokens."""
    made = []
    for number in range(EVENTS // pages):
        tokens = token_bytes(np.arange(number, number + pages * PAGE_SIZE) % 100_000)
        made.append(Stored(Medium.DEVICE, tuple(page_keys(tokens, PAGE_SIZE)), None, b"", tokens, PAGE_SIZE))
    return made


def nodes(tree: RadixTree, pages: int) -> list[Node]:
    """Return nodes of `pages` pages, without computed keys."""
    made = []
    for number in range(SHORT_EVENTS):
        tokens = np.arange(pages * PAGE_SIZE) + number * PAGE_SIZE
        made.append(tree.insert(RadixKey.of(tokens), np.arange(pages, dtype=np.int32)).node)
    return made


def short(work: Callable[[], object]) -> float:
    """Return the seconds per event of the best of many short runs."""
    times = []
    for _ in range(SHORT_RUNS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times) / SHORT_EVENTS


def record(pages: int) -> Row:
    """The recorder's part."""
    tree = RadixTree(PAGE_SIZE, POLICIES["lru"])
    made = nodes(tree, pages)
    event = events(pages)[0]

    def ours() -> None:
        recorder = EventRecorder(EventStream(CAPACITY_BYTES))
        for node in made:
            node.chain, node.visited = None, 0  # as in a new node
            recorder.stored(Medium.DEVICE, tree, node)

    def bare() -> None:
        waiting = queue.Queue[Stored]()
        for _ in made:
            waiting.put(event)

    return row(f"record, {pages} pages a node", short(ours), short(bare))


def read(pages: int) -> Row:
    """The reader's part."""
    tree = RadixTree(PAGE_SIZE, POLICIES["lru"])
    recorder = EventRecorder(EventStream(CAPACITY_BYTES))
    times = []
    for _ in range(RUNS):
        for node in nodes(tree, pages):
            node.chain, node.visited = None, 0
            recorder.stored(Medium.DEVICE, tree, node)
        reader = recorder.stream.subscribe()
        reader.drain(recorder.stream.statistics().events - SHORT_EVENTS)
        begin = time.perf_counter()
        reader.drain(SHORT_EVENTS)
        times.append((time.perf_counter() - begin) / SHORT_EVENTS)
    return row(f"read, {pages} pages a node", min(times))


def snapshot(shape: str) -> Row:
    """Steps of the scheduler that describe 100,000 nodes."""
    recorder = EventRecorder(EventStream(CAPACITY_BYTES))
    tree = RadixTree(PAGE_SIZE, POLICIES["lru"], observer=recorder)
    stem = np.arange(PAGE_SIZE)
    for number in range(SNAPSHOT_NODES):
        if shape == "deep" and number % DEPTH == 0:
            stem = np.full(0, 0)
        own = np.full(PAGE_SIZE, number)
        tokens = np.concatenate((stem, own))
        tree.insert(RadixKey.of(tokens), np.arange(len(tokens) // PAGE_SIZE, dtype=np.int32))
        stem = tokens if shape == "deep" else stem
    reader = recorder.stream.subscribe()
    reader.request_snapshot()
    steps = []
    while True:
        begin = time.thread_time()
        recorder.poll(tree)
        steps.append(time.thread_time() - begin)
        while reader.drain(1000):
            pass
        if reader.in_sync:
            break
    longest, median = max(steps) * 1e3, sorted(steps)[len(steps) // 2] * 1e3
    what = f"snapshot of {tree.node_count:,} nodes, {shape}: longest of {len(steps)} steps (median)"
    return Row(what, f"{longest:.2f} ms ({median:.2f})", "1 ms", longest, 1.0)


def put_alone(full: bool) -> Row:
    """The stream alone, with room and full."""
    event = Removed(Medium.DEVICE, (bytes(32),))
    capacity = 100 * event.size_bytes if full else CAPACITY_BYTES

    def ours() -> None:
        stream = EventStream(capacity)
        for _ in range(SHORT_EVENTS):
            stream.put(event)

    return row(f"put into a stream that is {'full' if full else 'not full'}", short(ours))


def receive(endpoint: str, made: list[Stored]) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """Return a connected subscriber with buffers for all events."""
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.set_hwm(2 * len(made) + 10)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(endpoint)
    return context, subscriber


def publish_ours(directory: Path, made: list[Stored]) -> float:
    """Return the seconds from the first put to the last event at the subscriber."""
    stream = EventStream(CAPACITY_BYTES)
    with EventPublisher(
        stream, EventsConfig(endpoint=f"ipc://{directory}/ours", queued_batches_max=65536)
    ) as publisher:
        context, subscriber = receive(publisher.endpoint, made)
        while not subscriber.poll(1):
            stream.put(Removed(Medium.DEVICE, (bytes(32),)))  # until the subscription is known
        while subscriber.poll(100):
            subscriber.recv_multipart()
        begin = time.perf_counter()
        for event in made:
            stream.put(event)
        count = 0
        while count < len(made):
            count += len(msgspec.msgpack.decode(subscriber.recv_multipart()[2], type=Envelope)[1])
        seconds = time.perf_counter() - begin
        context.destroy(linger=0)
    return seconds


Envelope = tuple[float, list[msgspec.Raw], int | None]


def publish_bare(directory: Path, made: list[Stored]) -> float:
    """Publish the same messages without HiCache."""
    context = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.set_hwm(2 * len(made) + 10)
    publisher.bind(f"ipc://{directory}/bare")
    other, subscriber = receive(f"ipc://{directory}/bare", made)
    publisher.recv()  # the subscription
    encoder = msgspec.msgpack.Encoder()
    begin = time.perf_counter()
    for start in range(0, len(made), PER_BATCH):
        batch = [
            ("BlockStored", event.keys, event.parent, np.frombuffer(event.tokens, dtype="<u4").tolist(),
             event.page_size, None, "GPU")
            for event in made[start : start + PER_BATCH]
        ]  # fmt: skip
        publisher.send_multipart((b"", start.to_bytes(8, "big"), encoder.encode((0.0, batch, None))))
    count = 0
    while count < len(made):
        count += len(msgspec.msgpack.decode(subscriber.recv_multipart()[2], type=Envelope)[1])
    seconds = time.perf_counter() - begin
    other.destroy(linger=0)
    context.destroy(linger=0)
    return seconds


def publish(pages: int) -> Row:
    """Return one row."""
    made = events(pages)
    with tempfile.TemporaryDirectory() as name:
        ours = min(publish_ours(Path(name), made) for _ in range(RUNS))
        bare = min(publish_bare(Path(name), made) for _ in range(RUNS))
    return row(f"publish, {pages} pages a node", ours / len(made), bare / len(made))


def follow(pages: int) -> Row:
    """Reading batches and keeping an index, per page; the reference only decodes MessagePack."""
    made = events(pages)
    payloads = [encode_batch(made[start : start + PER_BATCH], 0.0) for start in range(0, len(made), PER_BATCH)]
    ours, reference = [], []
    for _ in range(RUNS):
        index = PrefixIndex()
        begin = time.perf_counter()
        for payload in payloads:
            index.apply(decode_batch(payload))
        middle = time.perf_counter()
        for payload in payloads:
            msgspec.msgpack.decode(payload)
        ours.append((middle - begin) / len(made))
        reference.append((time.perf_counter() - middle) / len(made))
    return row(f"follow, {pages} pages a node", min(ours), min(reference))


def row(what: str, ours_s: float, reference_s: float | None = None) -> Row:
    """Return times per event, and their ratio."""
    if reference_s is None:
        return Row(what, f"{ours_s * 1e6:.2f} us")
    return Row(what, f"{ours_s * 1e6:.2f} us", f"{reference_s * 1e6:.2f} us", ours_s / reference_s)


def main() -> None:
    """Command line."""
    rows = [put_alone(False), put_alone(True)]
    rows += [measured(pages) for measured in (record, read, publish, follow) for pages in (1, 16)]
    rows += [snapshot(shape) for shape in ("flat", "deep")]
    print_table(f"KV events, per event, pages of {PAGE_SIZE} tokens (ratio = our time : the reference's)", rows)


if __name__ == "__main__":
    main()
