"""A real model over all three tiers: KV bytes and greedy tokens do not depend on the tier of a prefix.

The controls zero KV on each tier, which must change the tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hicache.backends.file import FileDriver
from hicache.backends.memory import MemoryDriver
from hicache.backends.storage import Storage
from hicache.config import FileStorageOptions
from hicache.frame import FRAME_ALIGN, HEADER_BYTES, FrameCodec
from hicache.keys import RadixKey, page_keys, token_bytes
from hicache_lab.conformance import driver_of, memory_store, store_of
from hicache_lab.engine import BUNDLED_MODEL, Checkpoint, Engine, load_checkpoint, load_tokenizer
from lab.tests.engine.world import (
    assert_nothing_leaked,
    drive,
    generate,
    make_engine,
    random_checkpoint,
    random_tokens,
    settle,
    tiers,
)

pytestmark = pytest.mark.long

PAGE_SIZE = 16
TEXTS = BUNDLED_MODEL.parent / "texts"


@pytest.fixture(scope="module")
def bundled() -> Checkpoint:
    return load_checkpoint(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Return the bundled texts as tokens."""
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    return [tokenizer.encode(path.read_text()).ids for path in sorted(TEXTS.glob("*.txt"))]


def open_store(path: Path, codec: FrameCodec) -> Storage:
    return store_of(FileDriver, codec, FileStorageOptions(path=path, capacity=None))


def conversations(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return prompts that share prefixes of several lengths and return after other prompts."""
    rounds = []
    for length in (120, 200, 260):  # each turn of a conversation extends the one before
        rounds += [list(text[:length]) for text in texts[:5]]
    return [*rounds, *(list(text[:150]) + list(other[400:440]) for text, other in itertools.pairwise(texts[:5]))]


def outputs(engine: Engine, prompts: Sequence[Sequence[int]], *, salted: bool) -> list[tuple[int, ...]]:
    """Return greedy tokens of all prompts, four requests at a time. With `salted`, no two requests share pages."""
    found = []
    for first in range(0, len(prompts), 4):
        rids = [
            engine.submit(prompt, 6, cache_salt=f"{first}-{i}" if salted else None, ignore_eos=True)
            for i, prompt in enumerate(prompts[first : first + 4])
        ]
        records = drive(engine)
        found += [records[rid].output_tokens for rid in rids]
    return found


def test_tokens_are_the_same_from_every_tier(tmp_path: Path, bundled: Checkpoint, texts: list[list[int]]) -> None:
    prompts = conversations(texts)
    with make_engine(bundled, page_size=PAGE_SIZE, device_pages=100, host_pages=4) as engine:
        expected = outputs(engine, prompts, salted=True)
        assert sum(engine.statistics().hit_tokens.values()) == 0
    assert len(set(expected)) > len(expected) // 2  # the model does answer to its prompt
    # L1 holds one batch, L2 half of the conversations.
    with make_engine(
        bundled,
        page_size=PAGE_SIZE,
        device_pages=72,
        host_pages=48,
        backend=lambda codec: open_store(tmp_path / "store", codec),
    ) as engine:
        assert outputs(engine, prompts, salted=False) == expected
        settle(engine)
        assert outputs(engine, prompts, salted=False) == expected
        hits = engine.statistics().hit_tokens
        assert min(hits["device"], hits["host"], hits["storage"]) > 0, hits
        assert_nothing_leaked(engine)


def test_a_restarted_engine_finds_its_pages_in_the_file_store(tmp_path: Path) -> None:
    checkpoint, prompt = random_checkpoint(), random_tokens(100, seed=1)

    def file_store(codec: FrameCodec) -> Storage:
        return open_store(tmp_path / "store", codec)

    with make_engine(checkpoint, backend=file_store) as engine:
        expected = generate(engine, prompt)
    with make_engine(checkpoint, backend=file_store) as engine:
        again = generate(engine, prompt)
        assert again.output_tokens == expected.output_tokens
        assert (again.storage_hit_tokens, again.computed_tokens) == (96, 4)
    with make_engine(random_checkpoint(seed=1), backend=file_store) as engine:
        assert generate(engine, prompt).hit_tokens == 0  # other weights, other namespace


class Stack:
    """An engine over a memory store, and one prompt whose KV is on every tier."""

    def __init__(self) -> None:
        self.prompt = random_tokens(100, seed=2)
        self.engine = make_engine(random_checkpoint(), backend=self._open)
        self.record = generate(self.engine, self.prompt)
        settle(self.engine)

    def _open(self, codec: FrameCodec) -> Storage:
        self.storage = memory_store(codec)
        return self.storage

    def kv(self) -> list[torch.Tensor]:
        """Return the KV of the prompt's whole pages in L1."""
        match = self.engine.cache.match_prefix(RadixKey.of(self.prompt))
        assert match.host_hit_pages == 0
        pool = self.engine.cache.device
        pages = torch.from_numpy(match.device_pages.copy())
        return [region[pages] for layer in pool.blocks.layers for region in layer]

    def leave_device(self) -> None:
        tree = tiers(self.engine).tree
        tiers(self.engine).evict(tree.device_evictable_pages)
        assert tree.device_evictable_pages == 0

    def leave_host(self) -> None:
        """Evict all pages from L1 and L2."""
        self.leave_device()
        cache = tiers(self.engine)
        cache.host.free(cache.tree.evict_host(cache.host.pages))
        assert cache.tree.node_count == 0

    def host_pages(self) -> list[int]:
        match = self.engine.cache.match_prefix(RadixKey.of(self.prompt))
        assert match.host_hit_pages == match.pages
        nodes = tiers(self.engine).tree.span(match.node, match.pages)
        return [page for node in nodes if node.host is not None for page in node.host.tolist()]

    def stored_keys(self) -> list[bytes]:
        return page_keys(token_bytes(self.prompt), self.engine.cache.page_size)


def test_kv_bytes_are_equal_after_l2_and_l3() -> None:
    stack = Stack()
    with stack.engine as engine:
        computed = stack.kv()
        stack.leave_device()
        from_host = generate(engine, stack.prompt)
        assert (from_host.host_hit_tokens, from_host.output_tokens) == (96, stack.record.output_tokens)
        assert all(map(torch.equal, stack.kv(), computed))
        settle(engine)
        stack.leave_host()
        from_storage = generate(engine, stack.prompt)
        assert (from_storage.storage_hit_tokens, from_storage.output_tokens) == (96, stack.record.output_tokens)
        assert all(map(torch.equal, stack.kv(), computed))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_zeroed_kv_on_l1_or_l2_changes_the_tokens(tier: str) -> None:
    stack = Stack()
    with stack.engine as engine:
        if tier == "device":
            match = engine.cache.match_prefix(RadixKey.of(stack.prompt))
            for layer in engine.cache.device.blocks.layers:
                for region in layer:
                    region[torch.from_numpy(match.device_pages.copy())] = 0
        else:
            stack.leave_device()
            for page in stack.host_pages():
                payload = tiers(engine).host.payload(page)
                payload[:] = bytes(len(payload))
        again = generate(engine, stack.prompt)
        assert getattr(again, f"{tier}_hit_tokens") == 96 and again.output_tokens != stack.record.output_tokens


@pytest.mark.parametrize("sealed", [False, True])
def test_zeroed_kv_on_l3_is_a_miss_unless_it_is_sealed_again(sealed: bool) -> None:
    stack = Stack()
    with stack.engine as engine:
        parent: bytes | None = None
        driver, space = driver_of(stack.storage, MemoryDriver), stack.storage.codec.namespace
        for key in stack.stored_keys():
            frame = bytearray(driver.peek(space, key) or b"")
            end = HEADER_BYTES + stack.storage.codec.payload_bytes
            assert len(frame) % FRAME_ALIGN == 0 and any(frame[HEADER_BYTES:end])
            frame[HEADER_BYTES:end] = bytes(end - HEADER_BYTES)
            if sealed:
                frame[:HEADER_BYTES] = bytes(HEADER_BYTES)
                stack.storage.codec.seal(key, memoryview(frame), parent=parent)
            driver.poke(space, key, bytes(frame))
            parent = key
        stack.leave_host()
        again = generate(engine, stack.prompt)
        if sealed:
            assert again.storage_hit_tokens == 96 and again.output_tokens != stack.record.output_tokens
        else:
            assert again.hit_tokens == 0 and again.output_tokens == stack.record.output_tokens
            assert sum(stack.storage.statistics().corrupt.values()) > 0
