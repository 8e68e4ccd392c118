"""Trailing pools of a cache: a window of two pages and a state beside L1, byte by byte on all tiers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache import HiCacheConfig, KVGeometry, Namespace, RadixKey, create_cache
from hicache.cache import HiRadixCache, RequestKV, TreeCache
from hicache.config import TransferConfig
from hicache.errors import CapacityError, ConfigError, InvalidInput
from hicache.tiers import BlockPool, EngineBlocks, MHATokenToKVPool, TrailingPool
from tests.tuned import tuned
from tests.waiting import wait_for

PAGE = 4
WINDOW = 8  # a query sees 8 keys, so it needs the 7 before it: two pages
MAIN = KVGeometry(layers=2, heads=1, head_dim=8, page_size=PAGE, dtype="float32")
WINDOWS = KVGeometry(layers=3, heads=1, head_dim=4, page_size=PAGE, dtype="float32")


def config(path: Path | None = None, *, device: int = 40, host: int = 80, **entries: Any) -> HiCacheConfig:
    entries = {
        "page_size": PAGE, "device": {"tokens": PAGE * device}, "host": {"tokens": PAGE * host},
        "break_even": {"mode": "always"}, "load_back_threshold_tokens": PAGE, **entries,
    }
    if path is not None:
        entries["storage"] = {"type": "file", "options": {"path": str(path)}}
        entries["prefetch"] = {"policy": "wait_complete", "threshold_tokens": PAGE}
    return HiCacheConfig.model_validate(entries)


def stamp(tokens: list[int], page: int) -> float:
    """Return the number that fills page `page` of a prompt in all pools."""
    prefix = bytes(tokens[: (page + 1) * PAGE])
    return float(int.from_bytes(hashlib.sha256(prefix).digest()[:3], "little"))


class Engine:
    """Computes prompts of small tokens in chunks of three pages, and verifies every byte that attention would read."""

    def __init__(self, configuration: HiCacheConfig, slots: int = 12, tokens: int = WINDOW - 1) -> None:
        self.windows = MHATokenToKVPool(WINDOWS, slots)
        self.states = [torch.zeros(slots + 1, 50) for _ in range(2)]
        self.trailing = [
            TrailingPool("window", self.windows, tokens),
            TrailingPool("state", BlockPool(EngineBlocks([[state] for state in self.states], first=1)), 1),
        ]
        self.cache: TreeCache = create_cache(configuration, Namespace("weights", MAIN), trailing=self.trailing)
        self.requests = 0

    def begin(self, tokens: list[int]) -> RequestKV:
        self.requests += 1
        rid, key, begun = f"r{self.requests}", RadixKey.of(tokens), list[RequestKV]()

        def tries() -> bool:
            self.cache.poll()
            if self.cache.check_prefetch_progress(rid) and (kv := self.cache.begin_request(rid, key)) is not None:
                begun.append(kv)
            return bool(begun)

        self.cache.prefetch_from_storage(rid, key)
        wait_for(tries)
        return begun[0]

    def run(self, tokens: list[int]) -> tuple[int, int, int]:
        """Compute a prompt, share it, and return its hits from L1, L2 and storage, in tokens."""
        kv = self.begin(tokens)
        done = kv.cached_tokens
        while done < len(tokens):
            end = min(done + 3 * PAGE, len(tokens))
            self.cache.start_loading()
            wait_for(partial(self.prepare, kv, done, end))
            self.read(kv, tokens, done // PAGE)
            self.write(kv, tokens, done // PAGE, end // PAGE)
            done = end
            self.cache.cache_unfinished_req(kv, RadixKey.of(tokens[:done]))
            self.check()
            self.cache.poll()
        self.cache.cache_finished_req(kv, RadixKey.of(tokens))
        self.check()
        assert self.cache.drain(30.0)
        self.check()
        return kv.device_hit_tokens, kv.host_hit_tokens, kv.storage_hit_tokens

    def prepare(self, kv: RequestKV, start: int, end: int) -> bool:
        """Take slots, which copies of earlier pages may still hold."""
        self.cache.poll()
        return self.cache.prepare(kv, start, end)

    def read(self, kv: RequestKV, tokens: list[int], first: int) -> None:
        """Compare all layers of the pages before `first` that a forward reads."""
        device = self.cache.device
        assert isinstance(device, MHATokenToKVPool)
        for layer in range(MAIN.layers):
            for page in range(first):
                assert all((part[kv.pages[page]] == stamp(tokens, page)).all() for part in device.get_kv_buffer(layer))
        window, state = self.trailing
        for layer in range(WINDOWS.layers):
            for page in range(max(0, first - window.trailing_pages), first):
                slot = window.slots(kv.pages[page : page + 1])[0]
                assert slot
                assert all((part[slot] == stamp(tokens, page)).all() for part in self.windows.get_kv_buffer(layer))
        for layer, tensor in enumerate(self.states):
            state.pool.wait_layer(layer)
            if first:
                slot = state.slots(kv.pages[first - 1 : first])[0]
                assert slot
                assert (tensor[slot] == stamp(tokens, first - 1)).all()

    def write(self, kv: RequestKV, tokens: list[int], first: int, end: int) -> None:
        device = self.cache.device
        assert isinstance(device, MHATokenToKVPool)
        for page in range(first, end):
            for layer in device.kv_buffer:
                layer[kv.pages[page]] = stamp(tokens, page)
            window, state = (pool.slots(kv.pages[page : page + 1])[0] for pool in self.trailing)
            for layer in self.windows.kv_buffer:
                layer[window] = stamp(tokens, page)
            for layer in self.states:
                layer[state] = stamp(tokens, page)

    def check(self) -> None:
        self.cache.check()

    def take_all_slots(self) -> None:
        """Give all slots to the pages of other prompts."""
        for number in range(3):
            self.run(prompt(16, 200 + number))


@contextmanager
def engine(configuration: HiCacheConfig, slots: int = 12, tokens: int = WINDOW - 1) -> Iterator[Engine]:
    built = Engine(configuration, slots, tokens)
    with built.cache:
        yield built


def prompt(pages: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(250) for _ in range(pages * PAGE + 1)]  # the last token is always computed


def test_a_prompt_is_a_hit_on_l1_on_l2_in_storage_and_after_a_restart(tmp_path: Path) -> None:
    tokens = prompt(10, 1)
    with engine(config(tmp_path)) as one:
        assert one.run(tokens) == (0, 0, 0)
        assert one.run(tokens) == (40, 0, 0)
        one.cache.evict(40)
        assert not any(pool.pool.allocator.used_pages for pool in one.trailing)
        assert one.run(tokens) == (0, 40, 0)
        one.cache.clear()
        assert one.run(tokens) == (0, 0, 40)
        assert one.cache.close()
    with engine(config(tmp_path)) as other:
        assert other.run(tokens) == (0, 0, 40)
        assert other.run(tokens + prompt(4, 2)) == (40, 0, 0)


def test_a_prefix_on_l1_that_has_lost_its_slots_gets_them_back_from_l2() -> None:
    tokens = prompt(10, 1)
    with engine(config(device=90, host=100)) as one:
        one.run(tokens)
        one.take_all_slots()
        pages = one.cache.match_prefix(RadixKey.of(tokens)).device_pages
        assert not any(pool.slots(pages).any() for pool in one.trailing)
        loaded = one.cache.statistics().controller.loaded_pages
        assert one.run(tokens) == (40, 0, 0)
        assert one.run(tokens[: 5 * PAGE] + prompt(3, 3)) == (20, 0, 0)  # leaves the prompt in the middle
        # two pages of the window for each; the state's page is one of them
        assert one.cache.statistics().controller.loaded_pages == loaded + 4


def test_a_pool_that_each_token_needs_has_the_whole_context_as_its_trailing_tokens() -> None:
    """Such as the keys of an indexer, or the KV of a draft model."""
    tokens = prompt(10, 1)
    with engine(config(device=90, host=100), slots=22, tokens=20 * PAGE) as one:
        one.run(tokens)
        assert one.run(tokens) == (40, 0, 0)
        one.take_all_slots()
        loaded = one.cache.statistics().controller.loaded_pages
        assert one.run(tokens) == (40, 0, 0)
        lacking = one.cache.statistics().controller.loaded_pages - loaded
        assert lacking > 2


def test_without_copies_on_l2_a_prefix_ends_where_slots_are_and_computing_it_gives_its_pages_slots() -> None:
    tokens = prompt(10, 1)
    with engine(config(device=90, host=100)) as one:
        one.run(tokens)
        one.take_all_slots()
        assert isinstance(one.cache, HiRadixCache)
        tree = one.cache.tree
        one.cache.host.free(tree.evict_host(tree.host_pages))  # copies of pages on L1 may leave at any time
        assert one.run(tokens[: 6 * PAGE + 1]) == (0, 0, 0)
        assert one.run(tokens[: 6 * PAGE + 1]) == (24, 0, 0)


def test_a_prefix_on_l1_without_slots_and_without_copies_is_read_from_storage(tmp_path: Path) -> None:
    tokens = prompt(10, 1)
    with engine(config(tmp_path, device=90, host=100)) as one:
        one.run(tokens)
        one.take_all_slots()
        assert isinstance(one.cache, HiRadixCache)
        tree = one.cache.tree
        one.cache.host.free(tree.evict_host(tree.host_pages))
        assert len(one.cache.match_prefix(RadixKey.of(tokens)).device_pages) == 10
        assert one.run(tokens[: 6 * PAGE + 1]) == (24, 0, 0)  # its pages on L1, with slots from the frames
        assert one.run(tokens) == (40, 0, 0)


def test_with_verified_loads_slots_are_filled_from_verified_frames_only(tmp_path: Path) -> None:
    tokens = prompt(10, 1)
    with engine(config(tmp_path, device=90, host=100, integrity={"verify": "load"})) as one:
        one.run(tokens)
        one.take_all_slots()
        assert one.run(tokens[: 6 * PAGE + 1]) == (0, 0, 0)  # its frames on L2 are not verified while L1 has it
        one.cache.evict(90)
        reads = one.cache.statistics().controller.prefetched_pages
        assert one.run(tokens) == (0, 40, 0)
        assert one.cache.statistics().controller.prefetched_pages == reads


def test_two_requests_that_compute_the_same_prompt_end_with_the_pages_and_slots_of_the_tree() -> None:
    tokens = prompt(4, 1)
    with engine(config(), slots=20) as one:
        first, second = one.begin(tokens), one.begin(tokens)
        for kv in (first, second):
            assert one.cache.prepare(kv, 0, len(tokens))
            one.write(kv, tokens, 0, 4)
        for kv in (first, second):
            one.cache.cache_unfinished_req(kv, RadixKey.of(tokens))
            one.check()
        assert first.pages[:4].tolist() == second.pages[:4].tolist()
        one.read(second, tokens, 4)
        for kv in (first, second):
            one.cache.cache_finished_req(kv, RadixKey.of(tokens))
            one.check()
        assert one.run(tokens) == (16, 0, 0)


def test_a_request_waits_for_slots_and_takes_none_while_others_hold_them() -> None:
    with engine(config(), slots=6) as one:
        first, second = one.begin(prompt(6, 1)), one.begin(prompt(3, 2))
        assert one.cache.prepare(first, 0, 6 * PAGE)
        assert not one.cache.prepare(second, 0, PAGE)
        assert one.cache.statistics().skipped["no_slots"] == 1
        one.check()
        one.cache.cache_finished_req(first, None)
        assert one.cache.prepare(second, 0, PAGE)
        one.check()
        one.cache.cache_finished_req(second, None)
        one.check()


def test_a_request_that_is_aborted_before_its_load_starts_leaves_nothing_held() -> None:
    tokens = prompt(10, 1)
    with engine(config()) as one:
        one.run(tokens)
        one.cache.evict(40)
        kv = one.begin(tokens)
        assert kv.host_hit_tokens == 40
        one.cache.cache_finished_req(kv, None)
        assert one.run(tokens)[1:] == (0, 0)
        assert [pool.holds for pool in one.trailing] == [0, 0]


def test_tokens_without_pages_are_rejected() -> None:
    with engine(config()) as one:
        kv = one.begin(prompt(2, 1))
        for start, end in ((0, 4 * PAGE), (3, 3), (-1, 2)):
            with pytest.raises(InvalidInput):
                one.cache.prepare(kv, start, end)
        one.cache.cache_finished_req(kv, None)


def test_without_a_prefix_cache_requests_have_slots_too() -> None:
    with engine(config(prefix_cache=False)) as one:
        assert one.run(prompt(8, 1)) == one.run(prompt(8, 1)) == (0, 0, 0)


def test_pages_with_and_without_the_pieces_of_a_pool_have_different_namespaces(tmp_path: Path) -> None:
    tokens = prompt(10, 1)
    with engine(config(tmp_path)) as one:
        one.run(tokens)
    with create_cache(config(tmp_path), Namespace("weights", MAIN)) as plain:
        plain.prefetch_from_storage("r", RadixKey.of(tokens))
        wait_for(lambda: plain.check_prefetch_progress("r"), plain.poll)
        request = plain.begin_request("r", RadixKey.of(tokens))
        assert request is not None
        assert request.cached_tokens == 0
        plain.cache_finished_req(request, None)


@pytest.mark.parametrize(
    ("entries", "slots", "error", "text"),
    [
        ({"sessions": {"enabled": True}}, 12, ConfigError, "sessions.enabled"),
        ({}, 2, CapacityError, "pool window: 2 slots"),
        ({"transfer": tuned(TransferConfig, load_pages_max=1)}, 12, ConfigError, "use larger pages"),
    ],
    ids=["sessions", "too few slots", "a bound on loads"],
)
def test_a_cache_that_cannot_have_a_pool_says_so(
    entries: dict[str, Any], slots: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Engine(config(**entries), slots)
