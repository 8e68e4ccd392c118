"""HiCache's KV events: the decoders of vLLM and SGLang read them over real sockets, and their encoders write the same
fields. No engine is started.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from hicache.config import EventsConfig
from hicache.config.addresses import ranked_endpoint
from hicache.events import BlockLabels, Cleared, Event, EventStream, Medium, Origin, PageBlocks, Removed, Stored
from hicache.events.blocks import BlockLedger
from hicache.events.publisher import EventPublisher
from hicache.events.types import MEDIUM_NAMES
from hicache.events.wire import WireForm, encode_batch
from hicache.keys import RadixKey, page_keys, token_bytes
from tests.waiting import wait_for

with warnings.catch_warnings():  # from the engines and their imports
    warnings.simplefilter("ignore")
    from sglang.srt.disaggregation import kv_events as sglang
    from sglang.srt.mem_cache.utils import hash_str_to_int64
    from vllm.distributed import kv_events as vllm
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

ENGINES = [vllm, sglang]
TIMEOUT_MS = 30_000
LOOPBACK = "tcp://127.0.0.1:*"
IDS = list(range(1, 9))
TOKENS = token_bytes(IDS)
KEYS = tuple(page_keys(TOKENS, 4))
PAIRS = RadixKey.of([*IDS, 9], bigram=True).tokens
SEED = bytes(range(32))
ORIGIN = Origin(7, "lora", "salt", "session")
HASHES = [hash_str_to_int64(key.hex()) for key in KEYS]
EVENTS: list[Event] = [
    Stored(Medium.DEVICE, KEYS, None, b"", TOKENS, 4),
    Stored(Medium.HOST, KEYS[1:], KEYS[0], b"", TOKENS[16:], 4),
    Stored(Medium.STORAGE, KEYS, None, SEED, TOKENS, 4, ORIGIN),
    Stored(Medium.DEVICE, tuple(page_keys(PAIRS, 8)), None, b"", PAIRS, 4),
    Stored(Medium.HOST, KEYS, None, b"", b"", 4),
    Removed(Medium.STORAGE, KEYS),
]


@contextmanager
def published(events: Sequence[Event], **options: Any) -> Iterator[EventPublisher]:
    stream = EventStream(1 << 20)
    config = EventsConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, data_parallel_rank=2, tenants=True, **options)
    with EventPublisher(stream, config) as publisher:
        for event in events:
            stream.put(event)
        wait_for(lambda: publisher.statistics().events == len(events) + 1)
        yield publisher


def replayed(endpoint: str | None) -> list[bytes]:
    """Return the batches of a replay from the first one on."""
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(str(endpoint))
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        payloads: list[bytes] = []
        while dealer.poll(TIMEOUT_MS):
            empty, topic, sequence, payload = dealer.recv_multipart()
            if (empty, topic, sequence, payload) == (b"", b"", vllm.ZmqEventPublisher.END_SEQ, b""):
                return payloads
            assert (empty, topic) == (b"", b"kv-events")
            payloads.append(payload)
        raise AssertionError("the replay has not ended")
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("engine", ENGINES, ids=["vllm", "sglang"])
def test_hicache_answers_a_replay_like_an_engine(engine: Any, tmp_path: Path) -> None:
    """The same client reads both."""
    ends = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    theirs = engine.ZmqEventPublisher(0, endpoint=ends[0], replay_endpoint=ends[1], topic="kv-events")
    try:
        theirs.publish(engine.KVEventBatch(ts=1.0, events=[engine.AllBlocksCleared()]))
        wait_for(lambda: len(theirs._buffer) == 1)
        (payload,) = replayed(ends[1])
    finally:
        theirs.shutdown()
    with published([]) as publisher:
        (ours,) = replayed(publisher.replay_endpoint)
    assert msgspec.msgpack.decode(payload)[1] == msgspec.msgpack.decode(ours)[1] == [{"type": "AllBlocksCleared"}]


def decoded(engine: Any, payloads: list[bytes]) -> list[Any]:
    decoder = msgspec.msgpack.Decoder(engine.KVEventBatch)
    batches = [decoder.decode(payload) for payload in payloads]
    assert {getattr(batch, "data_parallel_rank", getattr(batch, "attn_dp_rank", None)) for batch in batches} == {2}
    return [event for batch in batches for event in batch.events]


@pytest.mark.parametrize("engine", ENGINES, ids=["vllm", "sglang"])
def test_the_decoder_of_an_engine_reads_a_replay(engine: Any) -> None:
    with published(EVENTS) as publisher:
        cleared, device, host, named, pairs, given, removed = decoded(engine, replayed(publisher.replay_endpoint))
    assert isinstance(cleared, engine.AllBlocksCleared)
    assert (device.block_hashes, device.parent_block_hash, device.token_ids) == (HASHES, None, IDS)
    assert (device.block_size, device.medium, device.lora_id) == (4, "GPU", None)
    assert (host.block_hashes, host.parent_block_hash, host.medium) == (HASHES[1:], HASHES[0], "CPU")
    assert (named.lora_id, named.lora_name, named.session_id) == (7, "lora", "session")
    assert (pairs.token_ids, given.token_ids) == (IDS, [])
    assert (removed.block_hashes, removed.medium) == (HASHES, "STORAGE")


def test_each_engine_reads_the_salt_from_its_own_field() -> None:
    payload = encode_batch(EVENTS, 1.0, WireForm(tenants=True, data_parallel_rank=2))
    assert decoded(sglang, [payload])[2].cache_salt == "salt"
    assert decoded(vllm, [payload])[2].extra_keys == [("lora", "salt"), ("lora",)]


@pytest.mark.parametrize("engine", ENGINES, ids=["vllm", "sglang"])
def test_a_decoder_rejects_events_that_engines_do_not_write(engine: Any) -> None:
    """Negative control for the tests of the decoders."""
    event = {"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": [1], "block_size": 1,
             "lora_id": None, "medium": "GPU", "lora_name": None}
    for changes in ({"token_ids": [[1, 2]]}, {"block_hashes": ["x"]}, {"block_size": "4"}):
        with pytest.raises(msgspec.ValidationError):
            decoded(engine, [msgspec.msgpack.encode((1.0, [event | changes], 2))])


def test_the_subscriber_of_sglang_follows_a_publisher(repository: Path) -> None:
    folder = repository / "tests/engines"
    stream = EventStream(1 << 20)
    with EventPublisher(stream, EventsConfig(endpoint=LOOPBACK, data_parallel_rank=1)) as publisher, subprocess.Popen(
        [sys.executable, folder / "sglang_subscriber.py", publisher.endpoint], text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "sglang_cpu"), *sys.path])},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(process.stdout.readline)
            wait_for(first.done, lambda: stream.put(EVENTS[0]), timeout_s=120.0)
            stream.put(Removed(Medium.HOST, KEYS))
            last = next((line for line in process.stdout if line.startswith("revoke")), "")
        process.stdin.close()
    hashes = " ".join(map(str, HASHES))
    assert (first.result(), last) == (f"report HBM {hashes}\n", f"revoke DRAM {hashes}\n")


def own(events: list[Event], form: WireForm) -> list[dict[str, Any]]:
    """Return the events that HiCache writes, without the field `hicache`."""
    _, found, _ = msgspec.msgpack.decode(encode_batch(events, 1.0, form))
    for event in found:
        event.pop("hicache", None)
    return list(found)


def written(batch: Any) -> bytes:
    return msgspec.msgpack.encode(batch)


def test_vllm_writes_the_same_bytes_except_for_the_field_hicache() -> None:
    ours = own([EVENTS[0], EVENTS[2], EVENTS[5], Cleared()], WireForm(tenants=True))
    ours[1].pop("cache_salt")  # SGLang's
    hashes: dict[str, Any] = {"block_hashes": HASHES, "block_size": 4, "token_ids": IDS, "parent_block_hash": None}
    theirs = vllm.KVEventBatch(
        ts=1.0, data_parallel_rank=0,
        events=[
            vllm.BlockStored(**hashes, lora_id=None, medium="GPU", lora_name=None),
            vllm.BlockStored(
                **hashes, lora_id=7, medium="STORAGE", lora_name="lora", session_id="session",
                extra_keys=[("lora", "salt"), ("lora",)],
            ),
            vllm.BlockRemoved(block_hashes=HASHES, medium="STORAGE"),
            vllm.AllBlocksCleared(),
        ],
    )
    assert written(theirs) == written((1.0, ours, 0))


def test_sglang_writes_the_same_fields_in_another_order_without_an_unknown_name() -> None:
    first, named, removed, cleared = own([EVENTS[0], EVENTS[2], EVENTS[5], Cleared()], WireForm(tenants=True))
    assert first.pop("lora_name") is None
    assert named.pop("extra_keys") == [["lora", "salt"], ["lora"]]  # vLLM's
    named["lora_name"] = named.pop("lora_name")
    hashes: dict[str, Any] = {"block_hashes": HASHES, "block_size": 4, "token_ids": IDS, "parent_block_hash": None}
    theirs = sglang.KVEventBatch(
        ts=1.0, attn_dp_rank=0,
        events=[
            sglang.BlockStored(**hashes, lora_id=None, medium="GPU"),
            sglang.BlockStored(
                **hashes, lora_id=7, medium="STORAGE", cache_salt="salt", session_id="session", lora_name="lora"
            ),
            sglang.BlockRemoved(block_hashes=HASHES, medium="STORAGE"),
            sglang.AllBlocksCleared(),
        ],
    )
    assert written(theirs) == written((1.0, [first, named, removed, cleared], 0))


def test_media_have_the_names_of_sglang() -> None:
    names = MEDIUM_NAMES["sglang"]
    assert names[Medium.DEVICE] == sglang.StorageMedium.GPU and names[Medium.HOST] == sglang.StorageMedium.CPU
    assert names[Medium.STORAGE] == sglang.StorageMedium.EXTERNAL


@pytest.mark.parametrize("engine", ENGINES, ids=["vllm", "sglang"])
def test_the_decoder_of_an_engine_reads_the_blocks_of_a_page(engine: Any) -> None:
    labels = BlockLabels(7, "lora", "full_attention", 128)
    page = PageBlocks(b"".join(KEYS), None, TOKENS, (("lora", "salt"), None), labels)
    stored = Stored(Medium.HOST, KEYS[1:], None, b"", b"", 8, blocks=(page,))
    events = BlockLedger().translate([stored, Removed(Medium.HOST, KEYS[1:])])
    found, removed = decoded(engine, [encode_batch(events, 1.0, WireForm(data_parallel_rank=2))])
    assert found.block_hashes == removed.block_hashes == [maybe_convert_block_hash(BlockHash(key)) for key in KEYS]
    assert (found.token_ids, found.block_size, found.medium, found.lora_name) == (IDS, 4, "CPU", "lora")
    if engine is vllm:
        assert (found.extra_keys, found.group_idx, removed.group_idx) == ([("lora", "salt"), None], 0, 0)
        assert (found.kv_cache_spec_kind, found.kv_cache_spec_sliding_window) == ("full_attention", 128)


@pytest.mark.parametrize("engine", ENGINES, ids=["vllm", "sglang"])
def test_a_rank_has_the_same_endpoint_as_under_its_engine(engine: Any) -> None:
    for endpoint in ("tcp://127.0.0.1:5557", "tcp://[::1]:5557"):
        for number in (0, 3):
            assert ranked_endpoint(endpoint, number) == engine.ZmqEventPublisher.offset_endpoint_port(endpoint, number)
