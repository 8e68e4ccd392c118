"""Hints: the outcome of each action, and what the cache does afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.cache import SessionCache
from hicache.errors import InvalidInput
from hicache.hints import WaitRecord
from hicache.keys import PAGE_KEY_BYTES, RadixKey
from hicache.radix import Node
from tests.cache.hinting import action, counted, require_nothing_left, send, tokens
from tests.cache.host_world import HostWorld
from tests.cache.world import StepClock, World, every_hit, memory_backend, prompt

A, B, C = prompt(1, 2, 3), prompt(1, 2, 4), prompt(7, 8)


def small(**arguments: Any) -> World:
    """Return a cache of 16 pages on L1 and 32 on L2 with a clock of its own. One session may keep all pages."""
    arguments.setdefault("config", every_hit(hints={"session_share": 0.5}))
    return World(**{"clock": StepClock(), **arguments})


def advance(world: World, seconds: float) -> None:
    clock = world.controller.clock
    assert isinstance(clock, StepClock)
    clock.advance(seconds)
    world.step()


def served(world: World, rid: str, key: RadixKey, *hints: dict[str, Any]) -> None:
    """Serve a request with an envelope, and wait for its copies."""
    if hints:
        assert {one.status for one in world.cache.hint({"actions": list(hints)}, rid)} == {"deferred"}
    world.serve(rid, key)
    world.settle()
    world.cache.check()


def fill_l2(world: World, first: int = 100) -> None:
    """Serve so many other prompts that L2 evicts all that it may."""
    for number in range(first, first + 3 * world.host.pages):
        served(world, f"other {number}", prompt(number))


def nodes_of(world: World, key: RadixKey) -> list[Node]:
    node, found = world.cache.tree.match(key, marks=False).node, []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return found


def record_of(world: World, source: str = "") -> WaitRecord:
    return world.cache._hints._record(source)


# The request's own hints


def test_hints_of_a_request_wait_for_its_end_and_are_about_its_prefix() -> None:
    world = small()
    envelope = {"actions": [action("kv.pin", ttl_s=30), action("session.turn", session_id="s")]}
    assert [one.status for one in world.cache.hint(envelope, "a")] == ["deferred", "deferred"]
    assert world.cache.hint(envelope, "a") == []  # the same object again, as an engine passes it in each step
    request = world.begin("a", prompt(1, 2, 3, 4))
    assert world.cache.tree.pinned_pages == 0
    world.cache.cache_finished_req(request, prompt(1, 2, 3, tail=0))
    assert world.cache.tree.pinned_pages == 3
    assert counted(world.cache, "kv.pin") == {"deferred": 1, "accepted": 1}
    assert send(world.cache, "session.turn", session_id="s").pages == 3
    assert not world.cache._hints._requests


def test_hints_of_requests_that_do_not_complete_are_dropped() -> None:
    world = small()
    for rid in ("waits", "runs"):
        send(world.cache, "kv.pin", rid, session_id="s")
    world.cache.prefetch_from_storage("waits", A)
    world.cache.abort_prefetch("waits")
    world.cache.cache_finished_req(world.begin("runs", A), None)
    world.serve("waits", A)
    assert world.cache.tree.pinned_pages == 0
    assert send(world.cache, "kv.pin", session_id="s").status == "missing"
    require_nothing_left(world.cache)


def test_hints_of_a_request_that_ends_after_a_clear_are_dropped() -> None:
    world = small()
    send(world.cache, "kv.pin", "a", session_id="s")
    request = world.begin("a", A)
    world.cache.clear()
    world.cache.cache_finished_req(request, A)
    send(world.cache, "kv.pin", "b")
    request = world.begin("b", A)
    world.cache.clear()
    send(world.cache, "kv.pin", "b")
    world.cache.cache_finished_req(request, A)
    assert world.cache.tree.node_count == world.cache.tree.pinned_pages == 0
    require_nothing_left(world.cache)


@pytest.mark.parametrize("envelope", [5, {"actions": 5}, {"actions": [{"action_id": "1"}]}, [1]])
def test_a_wrong_envelope_is_an_outcome_for_a_request_and_an_error_without_one(envelope: object) -> None:
    world = small()
    (found,) = world.cache.hint(envelope, "a")
    assert found.status == "rejected" and found.detail.startswith("hints: ")
    with pytest.raises(InvalidInput, match="hints: "):
        world.cache.hint(envelope)
    world.serve("a", A)
    assert counted(world.cache, "unknown") == {"rejected": 1}


@pytest.mark.parametrize("salt", ["", "s" * 100_000, "\ud800"])
def test_a_salt_that_is_not_valid_does_not_fail_the_request(salt: str) -> None:
    world = small()
    (found,) = world.cache.hint({"actions": [action("kv.pin")]}, "a", cache_salt=salt)
    assert found.status == "rejected" and "cache_salt" in found.detail and (salt == "" or salt not in found.detail)
    assert world.serve("a", A).cached_tokens == 0
    assert send(world.cache, "kv.pin", session_id="s", cache_salt="").status == "rejected"


def test_unknown_actions_versions_and_payloads_are_answered_one_by_one() -> None:
    world = small()
    world.serve("a", A)
    actions = [action("kv.fetch"), action("kv.pin", tokens=tokens(A)), action("kv.retain", value=7),
               {**action("kv.release"), "action_version": "3.0"}]
    found = world.cache.hint({"actions": actions})
    assert [one.status for one in found] == ["rejected", "accepted", "rejected", "rejected"]
    assert world.cache.hint({"actions": [action("kv.share")]}, "b")[0].status == "rejected"
    assert counted(world.cache, "unknown") == {"rejected": 2}


def test_a_request_may_not_prefetch_its_own_pages() -> None:
    assert send(small().cache, "kv.prefetch", "a").status == "rejected"


def test_a_request_may_not_name_the_tokens_of_another_prompt() -> None:
    world = small()
    world.serve("a", A)
    assert send(world.cache, "kv.pin", "b", tokens=tokens(A)).status == "rejected"
    assert send(world.cache, "kv.pin", tokens=tokens(A)).status == "accepted"
    assert world.cache.tree.pinned_pages == 3


# Sessions


def test_sessions_of_two_tenants_with_one_name_are_two() -> None:
    world = small()
    mine, theirs = prompt(1, 2, salt="mine"), prompt(1, 2, 3, salt="theirs")
    served(world, "a", mine, action("session.turn", session_id="s"))
    served(world, "b", theirs, action("session.turn", session_id="s"))
    served(world, "c", prompt(5))
    assert send(world.cache, "kv.pin", session_id="s").status == "missing"
    assert send(world.cache, "kv.pin", session_id="s", cache_salt="mine", ttl_s=9).pages == 2
    assert send(world.cache, "kv.pin", session_id="s", cache_salt="theirs", ttl_s=9).pages == 3
    assert send(world.cache, "kv.release", session_id="s", cache_salt="mine").pages == 2
    assert world.cache.tree.pinned_pages == 3


def test_sessions_of_page_keys_are_told_apart_by_the_salt_of_their_requests() -> None:
    """The keys of an engine such as vLLM cover the salt, so the key of the tree has none."""
    world = HostWorld(position_bytes=PAGE_KEY_BYTES)
    hashes = A.page_keys(4, A.seed, 0, 3)
    key = RadixKey.of_hashes(hashes)
    world.cache.hint({"actions": [action("session.turn", session_id="s")]}, "a", cache_salt="mine")
    world.cache.lookup("a", key)
    world.write("a", key)
    world.cache.abort("a")
    page_keys = [one.hex() for one in hashes]
    assert send(world.cache, "kv.pin", session_id="s", cache_salt="theirs").status == "missing"
    assert send(world.cache, "kv.pin", session_id="s", cache_salt="mine").pages == 3
    for salt in ("mine", "theirs"):
        assert send(world.cache, "session.turn", page_keys=page_keys, session_id="s", cache_salt=salt).pages == 3
    assert send(world.cache, "kv.release", page_keys=page_keys, session_id="s", cache_salt="theirs").status != "missing"
    assert world.cache.tree.pinned_pages == 3
    send(world.cache, "kv.retain", page_keys=page_keys, session_id="s", cache_salt="mine")
    send(world.cache, "kv.release", session_id="s", cache_salt="mine")
    assert world.cache.tree.pinned_pages == world.cache._hints._retained_pages == 0


def test_a_key_of_another_kind_is_rejected() -> None:
    page_keys = [one.hex() for one in A.page_keys(4, A.seed, 0, 3)]
    assert send(small().cache, "kv.pin", page_keys=page_keys).status == "rejected"
    assert send(HostWorld(position_bytes=PAGE_KEY_BYTES).cache, "kv.pin", tokens=[1, 2, 3, 4]).status == "rejected"
    twice = page_keys[:1] * 2
    assert send(HostWorld(position_bytes=PAGE_KEY_BYTES).cache, "kv.pin", page_keys=twice).status == "rejected"


def test_hints_of_the_turns_of_open_sessions_are_carried_out() -> None:
    world = small(kind=SessionCache)
    assert isinstance(world.cache, SessionCache)
    world.cache.open_session("open")
    for turn, key in enumerate((A, prompt(1, 2, 3, 4))):
        rid = f"turn {turn}"
        world.cache.join_session(rid, "open")
        send(world.cache, "kv.pin", rid, session_id="s")
        world.cache.cache_finished_req(world.begin(rid, key), key)
        assert world.cache.tree.pinned_pages == key.pages(4)
    assert counted(world.cache, "kv.pin") == {"deferred": 2, "accepted": 2}
    world.cache.join_session("aborted", "open")
    send(world.cache, "kv.release", "aborted", session_id="s")
    world.cache.cache_finished_req(world.begin("aborted", prompt(1, 2, 3, 4, 5)), None)
    assert world.cache.tree.pinned_pages == 4
    world.cache.close_session("open")


# Pins and retained pages


def test_a_pin_keeps_the_pages_on_l2_until_its_time_is_over() -> None:
    world = small()
    served(world, "a", A, action("kv.pin", session_id="s", ttl_s=30))
    fill_l2(world)
    assert sum(world.cache.peek(A)) == 3
    advance(world, 31)
    fill_l2(world, 300)
    assert sum(world.cache.peek(A)) == 0
    require_nothing_left(world.cache)


def test_retained_pages_outlive_others_on_l2_until_their_time_is_over() -> None:
    world = small()
    served(world, "a", A, action("kv.retain", session_id="s", ttl_s=30))
    served(world, "b", C)
    fill_l2(world)
    assert sum(world.cache.peek(A)) == 3 and sum(world.cache.peek(C)) == 0
    advance(world, 31)
    fill_l2(world, 300)
    assert sum(world.cache.peek(A)) == 0
    require_nothing_left(world.cache)


@pytest.mark.parametrize("kind", ["kv.pin", "kv.retain"])
def test_a_longer_time_than_the_limit_is_clipped_to_it(kind: str) -> None:
    world = small(config=every_hit(hints={"ttl_max": 20}))
    world.serve("a", A)
    found = send(world.cache, kind, tokens=tokens(A), ttl_s=3600)
    assert (found.status, found.ttl_s, found.pages) == ("clipped", 20, 3)
    assert "hints.ttl_max" in found.detail
    advance(world, 21)
    require_nothing_left(world.cache)


@pytest.mark.parametrize("kind", ["kv.pin", "kv.retain"])
def test_a_session_keeps_the_first_pages_of_its_share(kind: str) -> None:
    world = small(config=every_hit(hints={"session_share": 5 / 32}))
    served(world, "a", A, action(kind, session_id="s"))
    served(world, "b", prompt(11, 12, 13), action("session.turn", session_id="s"))
    found = send(world.cache, kind, session_id="s")
    assert (found.status, found.pages) == ("clipped", 2) and "hints.session_share" in found.detail
    served(world, "c", C, action("session.turn", session_id="s"))
    assert send(world.cache, kind, session_id="s").status == "rejected"
    fill_l2(world)
    assert [sum(world.cache.peek(key)) for key in (A, prompt(11, 12, 13), C)] == [3, 2, 0]
    assert send(world.cache, "kv.release", tokens=tokens(A), session_id="s").status == "accepted"
    require_nothing_left(world.cache)


@pytest.mark.parametrize("kind", ["kv.pin", "kv.retain"])
def test_the_pages_of_the_next_turn_count_instead_of_those_of_the_last(kind: str) -> None:
    """Otherwise the prefix of an agent would count once for each turn, and its share would be over after a few."""
    world = small(config=every_hit(hints={"session_share": 0.25}))
    for turn in range(1, 9):
        key = prompt(*range(1, turn + 1))
        served(world, f"turn {turn}", key, action(kind, session_id="s"))
        assert counted(world.cache, kind)["accepted"] == turn
    assert world.cache.tree.pinned_pages + world.cache._hints._retained_pages == 8
    advance(world, 61)
    require_nothing_left(world.cache)


@pytest.mark.parametrize("kind", ["kv.pin", "kv.retain"])
def test_hints_without_a_session_do_not_shorten_those_of_others(kind: str) -> None:
    world = small()
    world.serve("a", A)
    send(world.cache, kind, tokens=tokens(A)[:8], ttl_s=60)
    send(world.cache, kind, tokens=tokens(A), ttl_s=5)
    advance(world, 10)
    assert world.cache.tree.pinned_pages + world.cache._hints._retained_pages == 2
    send(world.cache, kind, tokens=tokens(A), ttl_s=55)
    send(world.cache, "kv.release", tokens=tokens(C))
    advance(world, 52)
    assert world.cache.tree.pinned_pages + world.cache._hints._retained_pages == 3
    advance(world, 10)
    require_nothing_left(world.cache)


@pytest.mark.parametrize("kind", ["kv.pin", "kv.retain"])
def test_a_release_without_a_session_ends_only_what_is_kept_of_its_prefix(kind: str) -> None:
    world = small()
    world.serve("a", A)
    world.serve("c", C)
    for key in (A, C):
        send(world.cache, kind, tokens=tokens(key))
    send(world.cache, "kv.release", tokens=tokens(C))
    assert world.cache.tree.pinned_pages + world.cache._hints._retained_pages == 3
    assert sum(world.cache.tree.pages(one) for one in nodes_of(world, A) if one.pin_ref or one.hint) == 3


def test_a_release_by_name_ends_all_that_the_session_keeps_and_no_more() -> None:
    world = small()
    served(world, "a", A, action("kv.pin", session_id="s"), action("kv.retain", session_id="s"))
    served(world, "c", C, action("kv.pin", session_id="s"))
    served(world, "d", prompt(21), action("kv.pin", session_id="other"))
    assert send(world.cache, "kv.release", session_id="s").pages == 2
    assert world.cache.tree.pinned_pages == 1 and world.cache._hints._retained_pages == 0


def test_pages_that_two_sessions_retain_stay_until_the_later_end() -> None:
    world = small()
    served(world, "a", A, action("kv.retain", session_id="long", ttl_s=100))
    served(world, "b", B, action("kv.retain", session_id="short", ttl_s=10))
    advance(world, 20)
    assert all(node.hint is not None for node in nodes_of(world, A))
    fill_l2(world)
    assert sum(world.cache.peek(A)) == 3
    send(world.cache, "kv.retain", session_id="short")  # its last prompt has two of these pages
    advance(world, 100)
    require_nothing_left(world.cache)


def test_retained_pages_of_which_none_changes_hands_count_and_end() -> None:
    world = small()
    served(world, "a", A, action("kv.retain", session_id="a", value=1, ttl_s=100))
    for _ in range(3):
        found = send(world.cache, "kv.retain", session_id="b", tokens=tokens(A), value=0.5, ttl_s=10)
        assert (found.status, found.pages) == ("accepted", 3)
    assert world.cache._hints._retained_pages == 6
    advance(world, 20)
    assert world.cache._hints._retained_pages == 3


def test_retained_pages_that_are_evicted_do_not_use_up_the_share_of_their_session() -> None:
    world = small(config=every_hit(hints={"session_share": 3 / 32}))
    for turn in range(3):
        served(world, f"a{turn}", A, action("kv.retain", session_id="s", ttl_s=500))
        assert counted(world.cache, "kv.retain") == {"deferred": turn + 1, "accepted": turn + 1}
        world.forget()
    assert world.cache._hints._retained_pages == 3
    advance(world, 501)
    require_nothing_left(world.cache)


def test_l2_full_of_retained_pages_still_takes_others() -> None:
    world = small(config=every_hit(hints={"session_share": 1}, pin_host_share=1))
    for number in range(0, 32, 4):
        served(world, f"a{number}", prompt(*range(number, number + 4)), action("kv.retain", session_id=f"{number}"))
    assert world.cache._hints._retained_pages == 32
    served(world, "b", prompt(50, 51))
    world.cache.evict(16)
    world.settle()
    assert world.serve("c", prompt(50, 51)).cached_tokens == 8
    assert "backup_no_host_room" not in world.skipped


def test_retained_pages_of_l1_are_copied_to_l2_by_the_policy_before_they_leave() -> None:
    world = small(config=every_hit(write_policy="write_back"))
    served(world, "a", A, action("kv.retain", session_id="s"))
    world.leave_l1()
    world.settle()
    assert world.cache.peek(A).host_pages == 3


# Waits


def test_a_wait_ends_with_the_next_request_of_the_session() -> None:
    world = small()
    served(world, "a", A, action("session.wait", session_id="s", expected_s=30, source="x"))
    before = record_of(world, "x").count
    advance(world, 30)
    world.serve("b", B)
    record = record_of(world, "x")
    assert record.count == pytest.approx(before * 0.995 + 1)
    assert record.expected(30)[0] == pytest.approx(30)
    world.serve("c", B)
    assert record_of(world, "x") == record
    assert len(world.cache._hints._timers) == 0


def test_a_session_whose_pages_are_gone_has_returned_too() -> None:
    """Otherwise each evicted session would count as ten times too late, and the record would punish exact times."""
    world = small()
    served(world, "a", A, action("session.wait", session_id="s", expected_s=30))
    world.forget()
    advance(world, 30)
    send(world.cache, "session.turn", "b", session_id="s")
    world.begin("b", prompt(1, 2, 3, 4))
    assert record_of(world).expected(100) == pytest.approx((100, 1))
    assert record_of(world).count > 8.5


def test_another_session_that_uses_the_pages_has_not_returned() -> None:
    world = small()
    served(world, "a", A, action("session.wait", session_id="s", expected_s=30))
    advance(world, 1)
    served(world, "b", B, action("session.turn", session_id="new"))
    assert record_of(world).count == 8
    advance(world, 29)
    served(world, "c", A, action("session.turn", session_id="s"))
    assert record_of(world).expected(100) == pytest.approx((100, 1))


def test_a_session_that_does_not_return_counts_as_ten_times_too_late() -> None:
    world = small()
    served(world, "a", A, action("session.wait", session_id="s", expected_s=30))
    advance(world, 299)
    assert record_of(world).count == 8
    advance(world, 2)
    exact = WaitRecord()
    exact.add(30, 301)
    assert (record_of(world).count, record_of(world).y) == pytest.approx((exact.count, exact.y), rel=1e-3)
    assert len(world.cache._hints._timers) == 0


def test_a_wait_of_no_time_is_not_exact_because_nobody_came() -> None:
    world = small()
    for number in range(20):
        served(world, f"a{number}", A, action("session.wait", session_id=f"{number}", expected_s=0))
        advance(world, 0.01)
    advance(world, 11)
    assert record_of(world).count > 20
    assert record_of(world).expected(0)[0] > 1


def test_waits_without_a_session_are_those_of_their_pages() -> None:
    world = small()
    for number, wait_s in enumerate((10, 20, 30)):
        served(world, f"a{number}", prompt(number, number + 10), action("session.wait", expected_s=wait_s))
    for number in range(3):
        advance(world, 10)
        world.serve(f"b{number}", prompt(number, number + 10, 20))
    assert record_of(world).expected(100) == pytest.approx((100, 1), rel=0.01)
    assert len(world.cache._hints._timers) == 0


def test_a_second_wait_shows_that_the_first_was_wrong() -> None:
    world = small()
    world.serve("a", A)
    for _ in range(2):
        send(world.cache, "session.wait", tokens=tokens(A), expected_s=100)
        send(world.cache, "session.wait", tokens=tokens(A), expected_s=100, session_id="s")
        advance(world, 1)
    assert len(world.cache._hints._timers) == 1  # of the name, which spoke last
    exact = WaitRecord()
    for _ in range(3):
        exact.add(100, 1)
    assert record_of(world).count == exact.count


def test_a_pin_or_a_lookup_of_the_session_does_not_end_what_its_wait_says() -> None:
    world = small()
    hints = [action(kind, session_id="s") for kind in ("kv.pin", "session.turn")]
    served(world, "a", A, action("session.wait", session_id="s", expected_s=30), *hints)
    send(world.cache, "session.turn", session_id="s")
    assert all(node.hint is not None and node.hint.speaks_for(node) for node in nodes_of(world, A))
    world.cache.match_prefix(prompt(1))
    assert [node.hint is not None and node.hint.speaks_for(node) for node in nodes_of(world, A)] == [True, False]


def test_a_wait_is_only_about_pages_that_no_other_session_has_used() -> None:
    world = small()
    served(world, "a", A)
    served(world, "b", B, action("session.wait", session_id="s", expected_s=30))
    assert counted(world.cache, "session.wait") == {"deferred": 1, "accepted": 1}
    assert [node.hint is not None for node in nodes_of(world, B)] == [True, False]


@pytest.mark.parametrize("policy", ["lfu", "fifo", "priority", "slru"])
def test_waits_need_an_order_of_times(policy: str) -> None:
    world = small(config=every_hit(eviction_policy=policy))
    world.serve("a", A)
    found = send(world.cache, "session.wait", tokens=tokens(A), expected_s=5)
    assert found.status == "rejected" and "eviction_policy" in found.detail
    assert send(world.cache, "kv.retain", tokens=tokens(A)).status == "accepted"
    fill_l2(world)
    assert sum(world.cache.peek(A)) == 3


# Demotion and release


def test_demoted_pages_leave_l1_and_then_l2_if_storage_has_them() -> None:
    world = small(backend=memory_backend())
    served(world, "a", A, action("session.turn", session_id="s"))
    assert world.cache.peek(A) == (3, 0)
    assert (send(world.cache, "kv.demote", session_id="s").pages, world.cache.peek(A)) == (3, (0, 3))
    assert send(world.cache, "kv.demote", session_id="s", destination="storage").pages == 3
    assert world.cache.peek(A) == (0, 0)
    assert send(world.cache, "kv.demote", session_id="s").status == "missing"
    assert world.serve("b", A).storage_hit_tokens == 12


def test_pages_that_storage_lacks_stay_on_l2() -> None:
    world = small()
    served(world, "a", A, action("session.turn", session_id="s"))
    found = send(world.cache, "kv.demote", session_id="s", destination="storage")
    assert (found.status, found.pages) == ("clipped", 0)
    assert world.cache.peek(A) == (0, 3)


def test_pages_that_are_only_on_l1_are_demoted_after_their_copy() -> None:
    world = small(config=every_hit(write_policy="write_back"))
    served(world, "a", A, action("session.turn", session_id="s"))
    found = send(world.cache, "kv.demote", session_id="s")
    assert (found.status, found.pages) == ("deferred", 3)
    world.settle()
    assert world.cache.peek(A) == (0, 3)


@pytest.mark.parametrize("kind", ["kv.demote", "kv.release"])
def test_pages_of_others_are_neither_demoted_nor_released(kind: str) -> None:
    world = small()
    served(world, "a", A)
    served(world, "b", B, action("session.turn", session_id="s"))
    found = send(world.cache, kind, session_id="s")
    assert (found.status, found.pages) == ("clipped", 1)
    running = world.begin("c", B)
    assert send(world.cache, "kv.demote", session_id="s").pages == 0
    world.cache.cache_finished_req(running, B)
    assert sum(world.cache.peek(A)) == 3


@pytest.mark.parametrize("destination", ["host", "storage"])
def test_pinned_and_retained_pages_are_not_demoted_below_l2(destination: str) -> None:
    world = small(backend=memory_backend())
    served(world, "a", A, action("kv.pin", session_id="s"))
    served(world, "c", C, action("kv.retain", session_id="s"))
    for key in (A, C):
        send(world.cache, "kv.demote", tokens=tokens(key), destination=destination)
        assert sum(world.cache.peek(key)) == key.pages(4)


def test_released_pages_leave_first() -> None:
    world = small()
    served(world, "a", A, action("kv.release", session_id="s"))
    served(world, "c", C)
    world.serve("d", prompt(*range(30, 43)))  # 13 pages: three of 16 must go, one of C would be older without the hint
    assert world.cache.peek(C).device_pages == 2
    assert world.cache.peek(A).device_pages == 0


@pytest.mark.parametrize("end", ["clear", "update_weights"])
def test_nothing_is_left_of_hints_after_a_clear(end: str) -> None:
    world = small(backend=memory_backend(), open_storage=lambda epoch: memory_backend(epoch=epoch))
    hints = [action("kv.pin"), action("session.wait", expected_s=9), action("session.turn", session_id="s")]
    served(world, "a", A, *hints)
    served(world, "c", C, action("kv.retain"))
    send(world.cache, "kv.prefetch", tokens=tokens(B), needed_in_s=100)
    world.cache.clear() if end == "clear" else world.cache.update_weights(1)
    require_nothing_left(world.cache)
    assert not world.cache._hints.is_busy and not world.cache._hints.is_used
    assert world.cache.tree._hinted is None
    assert send(world.cache, "kv.pin", session_id="s").status == "missing"
    advance(world, 1000)
