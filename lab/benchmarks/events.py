"""KV events: the cost of an event for the scheduler, the speed of publishing, and the size and speed of an index.

    python -m lab.benchmarks.events [--pages PAGES]

"record" is the event of a new node from the tree's call to the stream, as `EventRecorder` makes it, without hashing
page keys. Its reference puts an existing tuple into a `queue.Queue`, the least cost of any publisher with a queue.
"read" is the event on the reader's thread, which hashes. "snapshot" are the steps that describe a tree of 100,000 nodes
to a fast reader: the processor time of the scheduler's thread for the longest and the median step, and the number of
steps.
"publish" is the time from the stream to a subscriber's socket. Its reference packs the same fields with msgspec and
sends them with pyzmq in one loop, without a thread, a limit or a replay buffer. ratio = our time : the reference's.
"index" is `PrefixIndex` of an engine with a million pages (or PAGES). Its limits are the project's; its peer is the
tree of NVIDIA Dynamo's indexer, which is one for all engines, where that is installed (.venv-engines). The peer's
events are JSON. Lookups are of prompts in random order, whose pages are in no processor cache.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import zmq

from hicache.cache.recorder import EventRecorder
from hicache.config import EventsConfig
from hicache.events import EventStream, Medium, PrefixIndex, Removed, Stored
from hicache.events.publisher import EventPublisher
from hicache.events.wire import decode_batch, encode_batch
from hicache.keys import PAGE_KEY_BYTES, RadixKey, page_keys, split_keys, token_bytes
from hicache.policies import POLICIES
from hicache.radix import Node, RadixTree

from ._table import Row, print_table, reduced
from ._table import row as row_of

try:
    from dynamo.llm import RadixTree as PeerTree
except ImportError:
    PeerTree = None

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
INDEX_PAGES = reduced(1_000_000, 10_000)
NODES = 64
PROMPT_PAGES = 100
SHARED_PAGES = 10  # of each prompt, in all nodes
LOOKUPS = reduced(500, 5)
PAGE_BYTES_MAX = 150
LOOKUP_US_MAX = 30.0


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


class _PatientEvents(EventsConfig):
    queued_batches_max: ClassVar[int] = 65536  # the subscriber gets everything


def publish_ours(directory: Path, made: list[Stored]) -> float:
    """Return the seconds from the first put to the last event at the subscriber."""
    stream = EventStream(CAPACITY_BYTES)
    with EventPublisher(
        stream, _PatientEvents(endpoint=f"ipc://{directory}/ours")
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
        ]
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


class Peer:
    """The tree of Dynamo's indexer. Its hashes are the first 63 bits of the page keys."""

    def __init__(self) -> None:
        self._tree: Any = PeerTree()
        self._events = 0

    def store(self, node: int, keys: Sequence[bytes], parent: bytes | None) -> None:
        self._events += 1
        blocks = [{"block_hash": number, "tokens_hash": number} for number in self.hashes(keys)]
        stored = {"parent_hash": None if parent is None else self.hashes([parent])[0], "blocks": blocks}
        event = {"event_id": self._events, "data": {"stored": stored}, "dp_rank": 0}
        self._tree.apply_event(node, json.dumps(event).encode())

    @staticmethod
    def hashes(keys: Sequence[bytes]) -> list[int]:
        return [int.from_bytes(key[:8], "big") >> 1 for key in keys]

    def scores(self, hashes: Sequence[int]) -> dict[tuple[int, int], int]:
        """Return the leading pages of each node that has any, by its number and rank."""
        found: dict[tuple[int, int], int] = self._tree.find_matches(hashes).scores
        return found


class Ours:
    """An index for each node."""

    def __init__(self, nodes: int = 1) -> None:
        self._nodes = [PrefixIndex(stored_pages_max=1 << 40) for _ in range(nodes)]

    def store(self, node: int, keys: Sequence[bytes], parent: bytes | None, medium: Medium = Medium.DEVICE) -> None:
        self._nodes[node].apply([Stored(medium, tuple(keys), parent, b"", b"", PAGE_SIZE)])

    def scores(self, keys: Sequence[bytes], medium: Medium = Medium.DEVICE) -> list[int]:
        return [node.prefix_pages(keys, medium) for node in self._nodes]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def page_bytes(prompts: Sequence[bytes], store: Callable[[int, Sequence[bytes], None], None]) -> float:
    """Return the bytes per page that an index grows by."""
    before = resident_bytes()
    for prompt in prompts:
        store(0, split_keys(prompt), None)
    return (resident_bytes() - before) / (PROMPT_PAGES * len(prompts))


def lookups(
    prompts: Sequence[bytes], ready: Callable[[list[bytes]], Any], look: Callable[[Any], object]
) -> list[float]:
    """Return the seconds of each lookup of a random prompt; `ready` makes its keys as new objects, untimed."""
    draw, times = random.Random(0), []
    for _ in range(LOOKUPS):
        keys = ready(split_keys(draw.choice(prompts)))
        begin = time.perf_counter()
        look(keys)
        times.append(time.perf_counter() - begin)
    return times


def index(pages: int) -> list[Row]:
    """The rows of one node's index. First, because it measures the memory of this process."""
    prompts = [os.urandom(PROMPT_PAGES * PAGE_KEY_BYTES) for _ in range(pages // PROMPT_PAGES)]
    ours, what = Ours(), f"index of {pages:,} pages"
    taken = page_bytes(prompts, ours.store)
    rows = [Row(f"{what}: a page", f"{taken:.0f} B", f"{PAGE_BYTES_MAX} B", taken / PAGE_BYTES_MAX, 1.0)]
    if PeerTree is not None:
        peer = Peer()
        theirs = page_bytes(prompts, peer.store)
        rows.append(Row(f"{what}: a page, beside Dynamo", f"{taken:.0f} B", f"{theirs:.0f} B", taken / theirs))
    times = lookups(prompts, list, ours.scores)
    look = f"lookup of {PROMPT_PAGES} pages"
    rows.append(row_of(f"{what}: {look}, on the device", [times], limit_us=LOOKUP_US_MAX))
    if PeerTree is not None:
        both = [times, lookups(prompts, peer.hashes, peer.scores)]
        rows.append(row_of(f"{what}: {look}, beside Dynamo", both, None))
    for medium in (Medium.HOST, Medium.STORAGE):
        other = Ours()
        for prompt in prompts:
            other.store(0, split_keys(prompt), None, medium)
        times = lookups(prompts, list, lambda keys, other=other, medium=medium: other.scores(keys, medium))  # type: ignore[misc]
        rows.append(row_of(f"{what}: {look}, only on {medium.value}", [times], limit_us=LOOKUP_US_MAX))
    return rows


def routing(pages: int) -> Row:
    """A lookup at all nodes. Each has the first pages of the prompt, one has all."""
    shared = os.urandom(SHARED_PAGES * PAGE_KEY_BYTES)
    own = PROMPT_PAGES - SHARED_PAGES
    prompts = [shared + os.urandom(own * PAGE_KEY_BYTES) for _ in range(pages // own)]
    sides: list[Ours | Peer] = [Ours(NODES), *([Peer()] if PeerTree is not None else [])]
    for side in sides:
        for node in range(NODES):
            side.store(node, split_keys(shared), None)
        for number, prompt in enumerate(prompts):
            keys = split_keys(prompt)
            side.store(number % NODES, keys[SHARED_PAGES:], keys[SHARED_PAGES - 1])
    times = [lookups(prompts, Peer.hashes if isinstance(side, Peer) else list, side.scores) for side in sides]
    return row_of(f"{pages:,} pages on {NODES} nodes: lookup at all, beside Dynamo", times, None)


def row(what: str, ours_s: float, reference_s: float | None = None) -> Row:
    """Return times per event, and their ratio."""
    if reference_s is None:
        return Row(what, f"{ours_s * 1e6:.2f} us")
    return Row(what, f"{ours_s * 1e6:.2f} us", f"{reference_s * 1e6:.2f} us", ours_s / reference_s)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=INDEX_PAGES, help="pages in the index (default %(default)s)")
    pages = parser.parse_args().pages
    indexes = [*index(pages), routing(pages)]
    rows = [put_alone(False), put_alone(True)]
    rows += [measured(pages) for measured in (record, read, publish, follow) for pages in (1, 16)]
    rows += [snapshot(shape) for shape in ("flat", "deep")]
    print_table(f"KV events, per event, pages of {PAGE_SIZE} tokens (ratio = our time : the reference's)", rows)
    print_table("Index of a router (ratio = ours : the limit or Dynamo's)", indexes)


if __name__ == "__main__":
    main()
