"""Accounts of prompts: one short story for each reason and detail, and the memory of pages that left."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest

from hicache.backends.base import Direction, SetOutcome
from hicache.backends.calls import Call
from hicache.cache import ChunkCache, HiRadixCache, SessionCache, create_cache
from hicache.cache.break_even import BreakEven, Rates
from hicache.cache.explain import RECENT_MAX, PromptTokens
from hicache.config import HiCacheConfig, TransferConfig
from hicache.config.integrity import IntegrityConfig
from hicache.config.schema import ExplainConfig
from hicache.errors import InvariantError
from hicache.frame import PageBuffer
from hicache.geometry import KVGeometry
from hicache.ghosts import KINDS, Departure, GhostIndex, Kind, Reason, key_ids, page_ids
from hicache.keys import Namespace, RadixKey
from hicache.tiers import create_device_pool
from tests.cache.host_world import HostWorld
from tests.cache.talks import Talks
from tests.cache.world import (
    GEOMETRY,
    GatedBackend,
    LastingBackend,
    StepClock,
    World,
    codec,
    every_hit,
    filled,
    memory_backend,
    prefetch,
    prompt,
)
from tests.tuned import tuned

KEY = prompt(1, 2)  # two pages and one more token
TAIL: Kind = (Reason.TAIL, "")


def account_of(world: World, rid: str, key: RadixKey = KEY) -> PromptTokens:
    """Return the account of a request that begins without a prefetch of its own, and is aborted."""
    account = world.attempt(rid, key).account
    assert account is not None and account is world.cache.explainer.recent[rid]
    assert account.tokens == account.cached + sum(account.computed.values())
    return account


def fetched_account_of(world: World, rid: str, key: RadixKey = KEY) -> PromptTokens:
    """As `account_of`, after a lookup in storage."""
    world.prefetch(rid, key)
    return account_of(world, rid, key)


def why(account: PromptTokens) -> dict[Kind, int]:
    """Return the reasons apart from the one token at the end."""
    assert account.computed.pop(TAIL) == 1
    return account.computed


def leave(world: World, key: RadixKey = KEY) -> None:
    """Serve a prompt, and evict it from L1 and L2."""
    world.serve("leaves", key)
    world.forget()


def remove(backend: LastingBackend, key: RadixKey = KEY) -> None:
    """Remove the pages of a prompt from a store, as another engine or an operator may do."""
    backend.delete(key.page_keys(GEOMETRY.page_size, key.seed, 0, key.pages(GEOMETRY.page_size)), deadline=1e9)


# New, and where prompts differ


def test_a_prompt_that_was_never_seen_is_new_from_its_first_token() -> None:
    account = account_of(World(), "r")
    assert (account.cached, account.diverged_at, account.age_s) == (0, 0, None)
    assert why(account) == {(Reason.NEW, ""): 8}


@pytest.mark.parametrize(("changed", "diverged_at"), [(0, 0), (2, 2), (6, 6), (7, 7), (8, 8)])
def test_the_first_token_that_differs_is_found_inside_a_page(changed: int, diverged_at: int) -> None:
    """A date in a system prompt is the classic. The last case differs in a page that follows all known ones."""
    world = World()
    tokens = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 9]
    world.serve("known", RadixKey.of(tokens))
    tokens[changed] = 77
    account = account_of(world, "r", RadixKey.of(tokens))
    assert account.diverged_at == diverged_at and account.device == changed // 4 * 4
    assert why(account) == {(Reason.NEW, ""): 12 - account.device}


def test_a_whole_prompt_that_is_known_does_not_diverge() -> None:
    world = World()
    world.serve("known", KEY)
    account = account_of(world, "r")
    assert account.diverged_at is None and (account.device, why(account)) == (8, {})


def test_prompts_of_two_salts_are_not_compared_with_each_other() -> None:
    world = World()
    world.serve("a", prompt(1, 2, salt="a"))
    world.forget()
    account = account_of(world, "b", prompt(1, 2, salt="b"))
    assert account.diverged_at == 0 and why(account) == {(Reason.NEW, ""): 8}
    assert why(account_of(world, "a again", prompt(1, 2, salt="a"))) == {(Reason.EVICTED, "host"): 8}


# Evicted


def test_pages_that_were_only_on_l1_are_evicted_from_the_device() -> None:
    clock = StepClock()
    world = World(config=every_hit(write_policy="write_through_selective"), clock=clock)
    leave(world)
    clock.advance(30)
    account = account_of(world, "r")
    assert account.age_s == pytest.approx(30, abs=1) and account.diverged_at is None
    assert why(account) == {(Reason.EVICTED, "device"): 8}


def test_pages_that_l2_had_last_are_evicted_from_the_host() -> None:
    world = World()
    leave(world)
    assert why(account_of(world, "r")) == {(Reason.EVICTED, "host"): 8}


def test_pages_that_storage_has_lost_are_evicted_from_storage() -> None:
    backend = memory_backend()
    world = World(backend=backend)
    leave(world)
    remove(backend)
    assert why(fetched_account_of(world, "r")) == {(Reason.EVICTED, "storage"): 8}


def test_the_known_part_of_a_prompt_comes_before_the_new_part() -> None:
    world = World()
    leave(world)
    account = account_of(world, "r", prompt(1, 2, 3))
    assert account.diverged_at == 8 and account.age_s is not None
    assert list(why(account).items()) == [((Reason.EVICTED, "host"), 8), ((Reason.NEW, ""), 4)]


def test_an_emptied_cache_has_cleared_its_pages() -> None:
    world = World()
    world.serve("leaves", KEY)
    world.cache.clear()
    assert why(account_of(world, "r")) == {(Reason.EVICTED, "cleared"): 8}


def test_pages_of_earlier_weights_are_known_as_such_however_they_left() -> None:
    for leaves in (False, True):
        world = World(backend=memory_backend(), open_storage=lambda epoch: memory_backend(epoch=epoch))
        world.serve("leaves", KEY)
        if leaves:
            world.forget()
        world.cache.update_weights(1)
        world.until(lambda world=world: world.controller.gate.may(Direction.READ))  # type: ignore[misc]
        assert why(fetched_account_of(world, "r")) == {(Reason.OTHER_WEIGHTS, ""): 8}


def test_pages_that_storage_removes_by_their_age_are_expired() -> None:
    """The store is one in memory; the cache reads the age from its configuration."""
    clock, backend = StepClock(), memory_backend()
    config = HiCacheConfig.model_validate({
        "storage": {"type": "file", "options": {"path": "/unused", "max_age": 60}},
        "break_even": {"mode": "always"}, "prefetch": {"threshold_tokens": 4, "timeout_base": 20},
    })
    world = World(config=config, backend=backend, clock=clock)
    leave(world)
    remove(backend)
    assert why(fetched_account_of(world, "early")) == {(Reason.EVICTED, "storage"): 8}
    clock.advance(61)
    assert why(fetched_account_of(world, "late")) == {(Reason.EXPIRED, ""): 8}


def test_a_restarted_process_does_not_know_the_pages_of_the_one_before() -> None:
    backend = filled(memory_backend(), KEY)
    world = World(backend=backend)
    account = fetched_account_of(world, "r", prompt(1, 2, 3))
    assert account.storage == 8 and account.diverged_at == 8 and why(account) == {(Reason.NEW, ""): 4}


# Not stored


def not_stored(world: World, key: RadixKey = KEY) -> dict[str, int]:
    """Let a prompt leave, and return the details of its pages that are not stored."""
    leave(world, key)
    account = fetched_account_of(world, "r", key)
    details = {detail: tokens for (reason, detail), tokens in why(account).items() if reason is Reason.NOT_STORED}
    assert sum(details.values()) + 1 + account.cached == account.tokens
    return details


def test_pages_that_the_write_policy_does_not_want_yet_are_not_stored() -> None:
    world = World(config=every_hit(write_policy="write_through_selective"), backend=memory_backend())
    assert not_stored(world) == {"policy": 8}


def test_pages_that_would_not_pay_are_not_stored() -> None:
    slow = Rates(10**9, host_bytes_per_s=1 << 50, storage_bytes_per_s=1, storage_operations_per_s=1)
    rule = BreakEven(given=slow, probe_every=1 << 30)
    world = World(config=HiCacheConfig(prefetch=prefetch()), backend=memory_backend(), break_even=rule)
    assert not_stored(world) == {"not_worth": 8}


def test_pages_that_find_a_full_queue_are_not_stored() -> None:
    backend = GatedBackend()
    world = World(backend=backend, transfer=tuned(TransferConfig, store_host_share=0.1))
    backend.writes.clear()
    world.cache.cache_finished_req(world.begin("first", prompt(7, 8, 9)), prompt(7, 8, 9))
    world.until(backend.entered.is_set)
    world.cache.cache_finished_req(world.begin("leaves", KEY), KEY)
    for _ in range(3):
        world.step()
    backend.writes.set()
    world.settle()
    world.forget()
    assert why(fetched_account_of(world, "r")) == {(Reason.NOT_STORED, "queue"): 8}


def test_pages_for_which_l2_has_no_room_are_not_stored() -> None:
    """While the first page is being stored, it holds the only page of L2; the second one leaves L1 meanwhile."""
    backend = GatedBackend()
    world = World(backend=backend, host_pages=1)
    backend.writes.clear()
    world.cache.cache_finished_req(world.begin("leaves", KEY), KEY)
    world.until(backend.entered.is_set)
    world.cache.evict(16)
    backend.writes.set()
    world.settle()
    account = account_of(world, "r")
    assert account.cached == 4 and why(account) == {(Reason.NOT_STORED, "no_room"): 4}


def test_pages_that_a_full_store_rejects_are_not_stored() -> None:
    """The first page fits."""
    world = World(backend=memory_backend(capacity_bytes=codec().frame_bytes))
    assert not_stored(world) == {"full": 4}


def test_pages_below_a_run_that_a_paused_store_does_not_take_are_not_stored_either() -> None:
    clock = StepClock()
    world = World(backend=memory_backend(), clock=clock)
    world.controller.gate.failed(Direction.WRITE)
    for key in (KEY, prompt(1, 2, 3)):  # the second turn adds a run below the first
        world.cache.cache_finished_req(world.begin("leaves", key), key)
        world.controller.launch_backups()
        while not world.cache.poll():
            pass
    assert world.cache.statistics().skipped["store_paused"] >= 2
    world.forget()
    clock.advance(10)
    account = fetched_account_of(world, "r", prompt(1, 2, 3))
    assert why(account) == {(Reason.NOT_STORED, "paused"): 12}


class FailingBackend(LastingBackend):
    """A store that does not take pages."""

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        return [SetOutcome.ERROR] * len(keys)


def test_pages_that_a_store_fails_to_take_are_not_stored() -> None:
    assert not_stored(World(backend=FailingBackend(codec()))) == {"failed": 8}


# Late, not worth, no room


def test_a_request_whose_lookup_was_never_started_is_late_in_the_queue() -> None:
    world = World(backend=filled(memory_backend(), KEY))
    account = account_of(world, "r")
    assert account.diverged_at is None and why(account) == {(Reason.LATE, "queue"): 8}


def test_a_request_that_begins_during_its_lookup_is_late() -> None:
    world = World(backend=filled(memory_backend(), KEY), config=every_hit(prefetch=prefetch(policy="best_effort")))
    assert world.cache.prefetch_from_storage("r", KEY)
    assert why(account_of(world, "r")) == {(Reason.LATE, "lookup"): 8}


def test_a_request_that_begins_during_its_read_is_late() -> None:
    backend = filled(GatedBackend(), KEY)
    world = World(backend=backend, config=every_hit(prefetch=prefetch(policy="best_effort")))
    backend.reads.clear()
    assert world.cache.prefetch_from_storage("r", KEY)
    world.until(backend.entered.is_set)
    assert why(account_of(world, "r")) == {(Reason.LATE, "read"): 8}
    backend.reads.set()


VERIFIES = IntegrityConfig(verify="load")


def test_pages_of_l2_that_are_not_verified_are_late() -> None:
    world = World(config=every_hit(integrity=VERIFIES), backend=memory_backend(), host_codec=codec)
    world.serve("on L2", KEY)
    world.leave_l1()
    assert why(account_of(world, "r")) == {(Reason.LATE, "verification"): 8}


def test_pages_of_l2_that_are_too_few_are_not_worth_a_load() -> None:
    world = World(config=every_hit(load_back_threshold_tokens=100))
    world.serve("on L2", KEY)
    world.leave_l1()
    assert why(account_of(world, "r")) == {(Reason.NOT_WORTH, ""): 8}


def test_found_pages_that_are_too_few_are_not_worth_a_read() -> None:
    world = World(backend=filled(memory_backend(), KEY), config=every_hit(prefetch=prefetch(threshold_tokens=12)))
    account = fetched_account_of(world, "r", prompt(1, 2, 3))
    assert account.diverged_at == 8
    assert list(why(account).items()) == [((Reason.NOT_WORTH, ""), 8), ((Reason.NEW, ""), 4)]


def test_pages_that_do_not_fit_into_a_load_have_no_room() -> None:
    world = World(transfer=tuned(TransferConfig, load_pages_max=1))
    world.serve("on L2", KEY)
    world.leave_l1()
    account = account_of(world, "r")  # a run has at most as many pages as a load
    assert account.host == 4 and why(account) == {(Reason.NO_ROOM, ""): 4}


# Unavailable, damaged, unshared


def test_a_request_that_begins_while_storage_is_paused_finds_it_unavailable() -> None:
    for asks in (False, True):
        clock = StepClock()
        world = World(backend=filled(memory_backend(), KEY), clock=clock)
        world.controller.gate.failed(Direction.READ)
        world.step()
        if asks:
            world.cache.prefetch_from_storage("r", KEY)
        assert why(account_of(world, "r")) == {(Reason.UNAVAILABLE, ""): 8}


def test_pages_of_a_store_that_was_detached_are_unavailable_and_unknown_pages_are_new() -> None:
    world = World(backend=memory_backend())
    leave(world)
    world.cache.storage.detach()
    account = account_of(world, "r", prompt(1, 2, 3))
    assert list(why(account).items()) == [((Reason.UNAVAILABLE, ""), 8), ((Reason.NEW, ""), 4)]


def test_a_damaged_page_of_storage_is_computed_because_of_its_damage() -> None:
    backend = filled(memory_backend(), KEY)
    for page in KEY.page_keys(GEOMETRY.page_size, b"", 0, 2):
        frame = bytearray(backend.driver.peek(codec().namespace, page) or b"")
        frame[-1] ^= 1
        frame[300] ^= 1
        backend.driver.poke(codec().namespace, page, bytes(frame))
    account = fetched_account_of(World(backend=backend), "r")
    assert why(account) == {(Reason.DAMAGED, ""): 8}


def test_a_damaged_page_of_l2_is_computed_because_of_its_damage_and_not_after_the_next_copy() -> None:
    world = World(config=every_hit(integrity=VERIFIES), backend=memory_backend(), host_codec=codec)
    world.serve("on L2", KEY)
    world.leave_l1()
    world.cache.storage.detach()  # so that it is not read from there
    (node,) = world.cache.tree.nodes()
    assert node.host is not None
    world.host.frame(int(node.host[0]))[300] ^= 1
    world.cache.prefetch_from_storage("r", KEY)
    world.until(lambda: world.cache.check_prefetch_progress("r"))
    request = world.begin("r", KEY)
    assert request.account is not None and why(request.account) == {(Reason.DAMAGED, ""): 8}
    world.cache.cache_finished_req(request, KEY)
    world.forget()
    assert why(account_of(world, "later")) == {(Reason.EVICTED, "host"): 8}


def test_a_cache_without_reuse_and_a_request_that_wants_none_share_nothing() -> None:
    cache = ChunkCache(create_device_pool(GEOMETRY, 8))
    request = cache.begin_request("r", KEY)
    assert request is not None and request.account is not None
    assert request.account.computed == {(Reason.UNSHARED, ""): 9}
    cache.check()
    world, key = HostWorld(), prompt(1, 2, tail=0)
    world.write("first", key)
    world.cache.lookup("r", key, prompt_tokens=9, unshared=True)
    world.cache.record_progress("r", 0)
    assert why(world.cache.explainer.recent["r"]) == {(Reason.UNSHARED, ""): 8}
    world.cache.abort("r")


def test_a_failed_load_of_an_engine_is_unavailable() -> None:
    world, key = HostWorld(), prompt(1, 2, tail=0)
    world.write("first", key)
    world.cache.lookup("r", key, prompt_tokens=9)
    world.cache.end_load(world.begin_load("r", key, 0, 2), None)
    assert why(world.cache.explainer.recent["r"]) == {(Reason.UNAVAILABLE, ""): 8}
    world.cache.abort("r")


# The end, the parts and the sum


def test_a_prompt_of_one_token_has_only_a_tail() -> None:
    account = account_of(World(), "r", RadixKey.of([5]))
    assert (account.tokens, account.computed, account.diverged_at) == (1, {TAIL: 1}, None)


def test_the_last_token_of_whole_pages_leaves_a_page_to_the_tail() -> None:
    world, key = World(), prompt(1, 2, tail=0)
    world.serve("known", key)
    account = account_of(world, "r", key)
    assert account.device == 4 and account.computed == {TAIL: 4}


def test_pages_of_one_token_and_bigrams_are_counted_alike() -> None:
    for bigram in (False, True):
        geometry = KVGeometry(layers=2, heads=1, head_dim=4, page_size=1, dtype="float32")
        config = HiCacheConfig.model_validate(
            {"page_size": 1, "device": {"tokens": 64}, "host": {"tokens": 64}, "bigram_keys": bigram}
        )
        with create_cache(config, Namespace("test", geometry)) as cache:
            assert isinstance(cache, HiRadixCache)
            for number, tokens in enumerate(([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6])):
                request = cache.begin_request(f"r{number}", key := RadixKey.of(tokens, bigram=bigram))
                assert request is not None
                cache.cache_finished_req(request, key)
            account = cache.explainer.recent["r1"]
            # With bigrams, the KV of a token depends on the next one too.
            assert (account.device, account.diverged_at) == ((2, 2) if bigram else (3, 3))
            assert account.computed == {(Reason.NEW, ""): 3 if bigram else 2, TAIL: 1}
            assert account.tokens == 6


def test_the_tokens_that_a_request_adds_are_its_written_tokens() -> None:
    world = World()
    first = world.serve("first", KEY)
    second = world.serve("second", prompt(1, 2, 3, tail=2))
    assert first.account is not None and second.account is not None
    assert (first.account.written, second.account.written) == (8, 4)
    assert world.cache.statistics().written_tokens == 12


def test_the_partial_page_of_a_session_counts_as_on_l1_and_moves_the_point_where_the_prompt_differs() -> None:
    talks = Talks(kind=SessionCache)
    talks.cache.open_session("s")
    talks.turn("s", [1, 2, 3, 4, 5, 6])
    talk = talks.begin([1, 2, 3, 4, 5, 6, 7, 8, 9], "s")
    account = talk.kv.account
    assert account is not None and (account.device, account.diverged_at) == (6, 6)
    assert {kind: tokens for kind, tokens in account.computed.items() if tokens} == {(Reason.NEW, ""): 2, TAIL: 1}
    talks.finish(talk)


def test_the_check_of_a_cache_finds_a_token_without_a_source() -> None:
    """The control for the sum in all random tests."""
    world = World()
    account_of(world, "r")
    world.cache.check()
    world.cache._counters.computed_tokens[Reason.NEW, ""] -= 1
    with pytest.raises(InvariantError, match="tokens"):
        world.cache.check()
    world.cache._counters.computed_tokens[Reason.NEW, ""] += 1


def test_every_kind_of_reason_has_a_story_here() -> None:
    """The stories name their kinds in the source of this module."""
    with open(__file__, encoding="utf-8") as file:
        source = file.read()
    for reason, detail in KINDS:
        assert f"Reason.{reason.name}" in source or reason is Reason.TAIL
        assert not detail or f'"{detail}"' in source


# Memory of accounts and pages


def test_the_newest_accounts_are_kept_in_order() -> None:
    world = World()
    for number in range(RECENT_MAX + 5):
        account_of(world, f"r{number}", RadixKey.of([number]))
    recent = world.cache.explainer.recent
    assert len(recent) == RECENT_MAX and next(iter(recent)) == "r5" and list(recent)[-1] == f"r{RECENT_MAX + 4}"


def test_the_history_has_the_counts_once_a_minute_for_an_hour() -> None:
    clock = StepClock()
    world = World(clock=clock)
    for number in range(150):
        account_of(world, f"r{number}", KEY)
        clock.advance(30)
    history = world.cache.explainer.history
    assert len(history) == 61 and history[-1][1][Reason.NEW, ""] - history[0][1][Reason.NEW, ""] == 120 * 8
    assert 3600 <= history[-1][0] - history[0][0] < 3700


def test_without_a_memory_of_pages_all_are_new() -> None:
    world = World(config=every_hit(explain=ExplainConfig(pages=0)))
    leave(world)
    world.serve("leaves", prompt(5, 6))
    world.cache.clear()
    for key in (KEY, prompt(5, 6)):
        assert why(account_of(world, "r", key)) == {(Reason.NEW, ""): 8}


def test_a_small_memory_forgets_the_oldest_pages_first() -> None:
    world = World(config=every_hit(explain=ExplainConfig(pages=32)), device_pages=8, host_pages=8)
    for number in range(40):
        world.serve(f"r{number}", prompt(number, number + 1))
        world.settle()
    world.forget()
    assert why(account_of(world, "old", prompt(0, 1))) == {(Reason.NEW, ""): 8}
    assert why(account_of(world, "young", prompt(39, 40))) == {(Reason.EVICTED, "host"): 8}


def departure(time_s: float) -> Departure:
    return Departure(Reason.EVICTED, "host", time_s)


def test_the_memory_of_pages_stays_at_its_bound_after_ten_times_as_many() -> None:
    pages, run = 16_000, 10
    index = GhostIndex(pages)
    bytes_at_bound = 0
    tracemalloc.start()
    try:
        for number in range(10 * pages // run):
            index.note(range(number * run, (number + 1) * run), departure(number))
            if number == 2 * pages // run:
                bytes_at_bound, _ = tracemalloc.get_traced_memory()
        bytes_at_end, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pages - pages // 8 <= len(index) <= pages + 8 * run
    assert bytes_at_end < 1.3 * bytes_at_bound and bytes_at_end < 160 * pages
    assert index.find(0) is None and index.find(10 * pages - 1) is not None


def test_a_page_that_left_twice_is_found_by_its_last_departure() -> None:
    index = GhostIndex(160)
    index.note([1, 2], departure(1.0))
    index.note(range(100, 120), departure(2.0))  # begins another generation
    index.note([2], departure(3.0))
    assert index.find(1) == departure(1.0) and index.find(2) == departure(3.0)
    assert index.find(3) is None


def test_pages_leave_the_memory_with_their_generation() -> None:
    index = GhostIndex(160)
    for number in range(40):
        index.note(range(number * 10, number * 10 + 10), departure(number))
    assert len(index) == 160 and len(index._generations) == 8
    assert [index.find(number * 10) is not None for number in (23, 24, 39)] == [False, True, True]


def test_the_identity_of_a_page_contains_all_pages_before_it() -> None:
    run = bytes(range(32))
    whole = page_ids(5, run, 8)
    assert len(set(whole)) == 4
    assert page_ids(whole[1], run[16:], 8) == whole[2:]
    assert set(whole).isdisjoint(page_ids(6, run, 8))
    keys = [bytes([number]) * 32 for number in range(3)]
    assert key_ids(b"".join(keys)) == [int.from_bytes(key[:8], "little") for key in keys]
