"""Sessions: the hits of a turn on the turn before, and eviction of sessions when L1 is full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hicache.cache import HiRadixCache, RequestKV, SessionCache
from hicache.cache import session_cache as module
from hicache.errors import (
    CapacityError,
    InvalidInput,
    InvariantError,
    SessionBusy,
    SessionError,
    TransferError,
    UnknownSession,
)
from hicache.keys import BIGRAM_BYTES, RadixKey
from hicache.tiers import Fence, Transfer
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import PageIds
from tests.cache.talks import PAGE, Talks
from tests.cache.world import every_hit, memory_backend


def opened(*session_ids: str, talks: Talks | None = None) -> Talks:
    talks = talks or Talks()
    for session_id in session_ids:
        talks.cache.open_session(session_id)
    return talks


def tokens(count: int, first: int = 1) -> list[int]:
    return list(range(first, first + count))


def holding(count: int, **parts: Any) -> Talks:
    """Return talks with a session `s` that has had a turn of `count` tokens."""
    talks = opened("s", talks=Talks(**parts))
    talks.turn("s", tokens(count))
    return talks


# Hits of a turn


def bigram_talks() -> Talks:
    return Talks(position_bytes=BIGRAM_BYTES)


@pytest.mark.parametrize("held", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_a_turn_continues_at_the_token_where_the_last_turn_ended(held: int) -> None:
    talks = opened("s")
    first = talks.turn("s", tokens(held))
    assert first.kv.cached_tokens == 0
    second = talks.turn("s", tokens(held + 3), answer=[70, 71])
    assert second.kv.device_hit_tokens == second.kv.cached_tokens == held
    third = talks.turn("s", [*second.tokens, 80])
    assert third.kv.cached_tokens == held + 5
    assert talks.cache.session_statistics().continued_turns == 2


@pytest.mark.parametrize("held", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_with_bigrams_a_turn_computes_the_last_token_again(held: int) -> None:
    talks = opened("s", talks=bigram_talks())
    assert talks.turn("s", tokens(held)).kv.cached_tokens == 0
    second = talks.turn("s", tokens(held + 3), answer=[70, 71])
    assert second.kv.device_hit_tokens == second.kv.cached_tokens == held - 1
    assert talks.turn("s", [*second.tokens, 80]).kv.cached_tokens == held + 4
    assert talks.turn("s", [*second.tokens, 80]).kv.cached_tokens == held + 5  # again, for its last token
    assert talks.cache.session_statistics().released == {}


def test_with_bigrams_a_turn_diverges_one_token_before_the_first_different_token() -> None:
    """The KV of the token before depends on the different token."""
    talks = opened("s", talks=bigram_talks())
    talks.turn("s", tokens(10))
    assert talks.turn("s", [*tokens(9), 99, 98]).kv.cached_tokens == 8
    assert talks.cache.session_statistics().released == {"diverged": 1}
    talks.turn("s", [*tokens(9), 99, 98, 97])
    talk = talks.begin([*tokens(9), 99, 98, 97, 96], "s")
    assert talk.kv.cached_tokens == 11
    talks.abort(talk)
    assert talks.turn("s", [*tokens(9), 99, 98, 97, 95]).kv.cached_tokens == 11


def test_without_a_session_the_partial_page_is_computed_again() -> None:
    """The control: the same turns as ordinary requests hit only whole pages."""
    talks = opened("s")
    for count, cached in ((6, 0), (9, 4)):
        talk = talks.begin(tokens(count))
        assert talk.kv.cached_tokens == cached
        talks.finish(talk)


def test_the_comparison_finds_a_changed_token_of_the_partial_page() -> None:
    """The control: with one changed byte in the page of the session, a token counts as wrong."""
    talks = opened("s")
    talk = talks.begin(tokens(PAGE + 2), "s")
    partial_page = int(talk.kv.pages[1])
    talks.finish(talk)
    talks.world.device.blocks.layers[0][0][partial_page][0] ^= 1
    talks.turn("s", tokens(PAGE + 5))
    # Counted once when the turn begins and once when it ends.
    assert talks.wrong_tokens == 2
    talks.wrong_tokens = 0


def test_other_requests_hit_the_whole_pages_of_a_turn_at_once() -> None:
    talks = holding(10)
    other = talks.begin(tokens(12))
    assert other.kv.cached_tokens == 8
    talks.finish(other)


def test_a_turn_uses_the_pages_of_another_request_that_has_computed_more() -> None:
    """The other request has completed the partial page and more, so the tree has the longer prefix."""
    talks = holding(6)
    other = talks.begin(tokens(14))
    talks.finish(other)
    assert talks.turn("s", tokens(15)).kv.cached_tokens == 12


@pytest.mark.parametrize(
    ("turn", "cached"),
    [
        ([*tokens(9), 99, 98], 8),  # other tokens within the partial page
        ([*tokens(5), 99, 98, 97], 4),  # other tokens within a whole page
        ([99, *tokens(9)], 0),
        (tokens(10), 8),  # the same prompt again
        (tokens(9), 8),
        (tokens(3), 0),
    ],
)
def test_a_turn_that_diverges_hits_the_common_whole_pages_in_the_tree(turn: list[int], cached: int) -> None:
    talks = holding(10)
    talk = talks.turn("s", turn)
    assert talk.kv.cached_tokens == cached
    assert talks.cache.session_statistics().released == {"diverged": 1}
    assert talks.turn("s", [*turn, 50]).kv.cached_tokens == len(turn)


def test_a_turn_of_another_tenant_has_no_hits() -> None:
    talks = holding(10)
    talks.cache.join_session("other", "s")
    request = talks.cache.begin_request("other", RadixKey.of(tokens(12), cache_salt="b"))
    assert request is not None and request.cached_tokens == 0
    talks.cache.cache_finished_req(request, None)


def test_a_session_keeps_its_pages_when_all_others_are_evicted() -> None:
    talks = holding(10)
    talks.settle()
    assert talks.cache.evict(100).freed_pages == 0
    assert talks.turn("s", tokens(12)).kv.device_hit_tokens == 10


def test_hits_of_the_partial_page_count_in_the_statistics() -> None:
    talks = holding(10)
    talks.turn("s", tokens(12))
    assert talks.cache.statistics().hit_tokens["device"] == 10
    state = talks.cache.session_statistics()
    assert (state.turns, state.continued_turns, state.tail_tokens) == (2, 1, 2)
    assert (state.open, state.holding, state.running, state.held_pages, state.own_pages) == (1, 1, 0, 3, 0)


class FailingLoads(CpuCopyEngine):
    """A copy engine whose loads fail."""

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        raise TransferError("no load today")


def test_after_a_failed_device_copy_turns_are_rejected() -> None:
    """The content of the device is unknown then, also that of the partial page of a session."""
    talks = holding(10, backend=memory_backend(), copies=FailingLoads)
    other = talks.begin(tokens(12, first=50))
    talks.finish(other)
    talks.world.leave_l1()
    request = talks.cache.begin_request("victim", RadixKey.of(tokens(12, first=50)))
    assert request is not None and talks.cache.start_loading() is not None
    talks.cache.cache_finished_req(request, None)
    talks.settle()
    talks.cache.join_session("turn", "s")
    with pytest.raises(TransferError):
        talks.cache.begin_request("turn", RadixKey.of(tokens(12)))
    talks.cache.abort_prefetch("turn")
    talks.cache.check()
    talks.cache.close()


# Ends of turns


def abort_at(talks: Talks, point: str) -> None:
    """Begin a turn of session `s`, which holds ten tokens, and abort it at `point`."""
    if point == "waiting":
        talks.cache.join_session("late", "s")
        talks.cache.abort_prefetch("late")
        return
    talk = talks.begin(tokens(11 if point == "before the page is full" else 15), "s")
    if point in ("shared", "before the page is full"):
        talks.share(talk)
    if point == "decoding":
        talks.decode(talk, [60, 61, 62])
    talks.abort(talk)


@pytest.mark.parametrize("point", ["waiting", "computed", "before the page is full", "decoding", "shared"])
def test_an_aborted_turn_does_not_change_its_session_unless_it_has_shared_the_partial_page(point: str) -> None:
    talks = holding(10)
    before, free = talks.cache.session_statistics().held_pages, talks.free_pages
    abort_at(talks, point)
    if point != "shared":
        assert (talks.cache.session_statistics().held_pages, talks.free_pages) == (before, free)
    assert talks.turn("s", [*tokens(10), 90, 91, 92]).kv.cached_tokens == (8 if point == "shared" else 10)


class TakesBackSharedPages(SessionCache):
    """Returns the partial page to the session even if the tree has it."""

    def _roll_back(self, session: module._Session, request: RequestKV) -> None:
        held = session.held
        if held is not None and session.lent is not None:
            whole = held.shared_pages
            held.pages, held.key = request.pages[: whole + 1].copy(), session.lent
        HiRadixCache.cache_finished_req(self, request, None)


def test_the_check_finds_a_session_that_takes_back_a_shared_page() -> None:
    """The control: the page would have two owners, and the next turn would write to a page that others read."""
    talks = holding(10, kind=TakesBackSharedPages)
    talks.leave()
    with pytest.raises(InvariantError):
        abort_at(talks, "shared")


def test_a_session_is_empty_after_an_aborted_first_or_diverging_turn() -> None:
    talks = opened("s")
    for prompt in (tokens(10), tokens(10, first=50)):
        talk = talks.begin(prompt, "s")
        talks.abort(talk)
        assert talks.cache.session_statistics().holding == 0
        talks.turn("s", tokens(10))


def test_a_preempted_turn_that_joins_again_continues_where_it_was() -> None:
    talks = opened("s")
    talk = talks.begin(tokens(10), "s", rid="turn")
    assert talks.decode(talk, [60])
    talks.finish(talk)
    again = talks.begin([*talk.tokens, 61], "s", rid="turn")
    assert again.kv.cached_tokens == 11
    talks.finish(again)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("begins", [False, True])
def test_after_a_preempted_turn_was_aborted_the_next_turn_continues_the_last_finished_one(
    times: int, begins: bool
) -> None:
    talks = holding(9)
    for number in range(times):
        talk = talks.begin(tokens(10 + number), "s", rid="turn")
        talks.finish(talk)  # a preemption
    if begins:
        talks.abort(talks.begin(tokens(12), "s", rid="turn"))
    else:
        talks.cache.join_session("turn", "s")
        talks.cache.abort_prefetch("turn")
    for _ in range(2):
        talk = talks.begin([*tokens(9), 90, 91], "s")
        assert talk.kv.cached_tokens == 9
        talks.abort(talk)
    assert talks.turn("s", [*tokens(9), 80]).kv.cached_tokens == 9
    assert talks.cache.session_statistics().released == {}


def test_after_a_preempted_turn_that_completed_the_partial_page_the_next_turn_starts_from_the_tree() -> None:
    talks = holding(9)
    talks.finish(talks.begin(tokens(13), "s", rid="turn"))
    assert talks.turn("s", [*tokens(9), 90]).kv.cached_tokens == 8
    assert talks.cache.session_statistics().released == {"diverged": 1}


def test_a_turn_that_is_sent_again_continues_the_turn_before_it() -> None:
    talks = holding(9)
    talks.turn("s", tokens(10))
    assert talks.turn("s", tokens(10)).kv.cached_tokens == 9
    assert talks.turn("s", [*tokens(8), 90]).kv.cached_tokens == 8


def test_a_turn_continues_after_its_end_was_rejected_for_a_wrong_key() -> None:
    talks = opened("s")
    talk = talks.begin(tokens(10), "s")
    for key in (RadixKey.of(tokens(13)), RadixKey.of(tokens(10), cache_salt="b")):
        with pytest.raises(InvalidInput):
            talks.cache.cache_finished_req(talk.kv, key)
        talks.cache.check()
    talks.finish(talk)
    with pytest.raises(InvalidInput, match="ended"):
        talks.cache.cache_finished_req(talk.kv, None)
    with pytest.raises(InvalidInput, match="ended"):
        talks.cache.extend(talk.kv, 40)


# Opening sessions and joining turns


def test_a_session_has_one_turn_at_a_time() -> None:
    talks = opened("s", "t")
    talk = talks.begin(tokens(5), "s", rid="a")
    with pytest.raises(SessionBusy):
        talks.cache.join_session("b", "s")
    with pytest.raises(InvalidInput, match="another session"):
        talks.cache.join_session("a", "t")
    with pytest.raises(InvalidInput, match="already begun"):
        talks.cache.begin_request("a", RadixKey.of(tokens(5)))
    talks.finish(talk)
    talks.turn("s", tokens(6))


def test_unknown_closed_and_expired_sessions_reject_turns() -> None:
    talks = opened("s", "t")
    assert talks.cache.close_session("s") and not talks.cache.close_session("s")
    talks.clock.advance(60.0)
    for session_id in ("s", "t", "never"):
        with pytest.raises(UnknownSession) as caught:
            talks.cache.join_session("a", session_id)
        assert isinstance(caught.value, SessionError)


def test_invalid_sessions_and_sessions_above_the_limit_are_rejected() -> None:
    talks = opened("s", talks=Talks(sessions_max=2))
    with pytest.raises(InvalidInput, match="already open"):
        talks.cache.open_session("s")
    with pytest.raises(InvalidInput, match="above 0"):
        talks.cache.open_session("t", ttl_s=0)
    talks.cache.open_session("t")
    with pytest.raises(CapacityError, match="2 are open"):
        talks.cache.open_session("u")
    talks.clock.advance(60.0)
    talks.cache.open_session("u")  # the others have expired
    assert talks.cache.session_statistics().open == 1


# Closing and expiry


def test_after_closing_a_session_the_tree_keeps_its_whole_pages() -> None:
    talks = holding(10)
    talks.settle()
    assert talks.cache.close_session("s")
    talks.cache.check()
    assert talks.cache.tree.device_protected_pages == 0 and talks.free_pages == talks.world.device.pages - 2
    other = talks.begin(tokens(12))
    assert other.kv.cached_tokens == 8
    talks.finish(other)


def test_a_session_without_a_turn_expires_after_its_ttl() -> None:
    talks = opened("s")
    talks.cache.open_session("long", ttl_s=1000.0)
    talks.turn("s", tokens(6))
    talks.turn("long", tokens(6, first=50))
    for passed_s, still_open in ((59.9, 2), (0.2, 1), (939.8, 1), (0.2, 0)):
        talks.clock.advance(passed_s)
        talks.cache.poll()
        talks.cache.check()
        assert talks.cache.session_statistics().open == still_open
    assert talks.cache.session_statistics().released == {"expired": 2}


def test_a_waiting_or_running_turn_keeps_its_session_open_and_its_end_restarts_the_ttl() -> None:
    talks = opened("s")
    talks.cache.join_session("a", "s")
    talks.clock.advance(100.0)
    talks.cache.poll()
    request = talks.cache.begin_request("a", RadixKey.of(tokens(6)))
    assert request is not None
    talks.clock.advance(100.0)
    talks.cache.poll()
    talks.cache.cache_finished_req(request, None)
    talks.clock.advance(59.0)
    talks.cache.poll()
    assert talks.cache.session_statistics().open == 1
    talks.clock.advance(2.0)
    talks.cache.poll()
    assert talks.cache.session_statistics().open == 0


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("aborted", [False, True])
def test_after_drop_all_sessions_hold_no_pages(shared: bool, aborted: bool) -> None:
    """They do not get the pages of a running turn either, because these may be of the old weights."""
    talks = opened("s", "t")
    talks.turn("s", tokens(10))
    talk = talks.begin(tokens(15), "s")
    talks.turn("t", tokens(10, first=50))
    if shared:
        talks.share(talk)
    talks.cache.drop_all()
    talks.cache.check()
    (talks.abort if aborted else talks.finish)(talk)
    state = talks.cache.session_statistics()
    assert (state.open, state.holding, state.running, state.released) == (2, 0, 0, {"dropped": 2})
    talks.turn("t", tokens(12, first=50))


# Clearing and new weights


def empty(talks: Talks, how: str) -> None:
    """Clear the cache, or change its weights."""
    if how == "weights":
        talks.cache.update_weights(talks.cache.weights_epoch + 1)
    else:
        talks.cache.clear()
    talks.cache.check()


WAYS = ["clear", "weights"]


@pytest.mark.parametrize("how", WAYS)
def test_after_clearing_an_idle_session_is_open_and_empty(how: str) -> None:
    talks = holding(10)
    talks.settle()
    empty(talks, how)
    assert talks.free_pages == talks.world.device.pages
    talk = talks.turn("s", tokens(12))
    assert talk.kv.cached_tokens == 0
    assert talks.cache.session_statistics().released == {"dropped": 1}
    assert talks.turn("s", tokens(13)).kv.cached_tokens == 12


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("aborted", "shared"), [(True, False), (False, True)])
def test_after_clearing_a_session_gets_no_pages_of_its_running_turn(how: str, aborted: bool, shared: bool) -> None:
    talks = holding(10)
    talk = talks.begin(tokens(15), "s")
    if shared:
        talks.share(talk)
    empty(talks, how)
    assert talks.decode(talk, [60, 61])
    (talks.abort if aborted else talks.finish)(talk)
    assert talks.turn("s", [*tokens(15), 60, 61, 62]).kv.cached_tokens == 0
    assert talks.turn("s", [*tokens(15), 60, 61, 62, 63]).kv.cached_tokens == 18


class KeepsOldPages(SessionCache):
    """Continues a session with its old pages after its tree was replaced."""

    def drop_all(self) -> None:
        pass

    def begin_request(self, rid: str, key: RadixKey, *, priority: int = 0) -> RequestKV | None:
        session = self._turns.get(rid)
        if session is not None and session.held is not None:
            session.held = replace(session.held, tree=self.tree)
        return super().begin_request(rid, key, priority=priority)


def test_the_tests_find_a_session_that_continues_with_old_weights() -> None:
    """The control of the test above."""
    talks = holding(10, kind=KeepsOldPages)
    talks.leave()
    empty(talks, "weights")
    talks.cache.join_session("a", "s")
    request = talks.cache.begin_request("a", RadixKey.of(tokens(12)))
    assert request is not None and request.cached_tokens == 2  # from the partial page, which is of the old weights


# Memory pressure


def test_idle_sessions_are_evicted_least_recently_used_first() -> None:
    talks = opened("a", "b", "c", talks=Talks(device_pages=12))
    for number, session_id in enumerate("abc"):
        talks.turn(session_id, tokens(10, first=100 * number + 1))  # 3 pages each
    talks.turn("a", tokens(11))
    talks.settle()
    other = talks.begin(tokens(4 * PAGE, first=900))
    state = talks.cache.session_statistics()
    assert (state.released, state.holding, state.open) == ({"pressure": 1}, 2, 3)
    talks.finish(other)
    assert talks.turn("a", tokens(12)).kv.cached_tokens == 11
    assert talks.turn("b", tokens(12, first=101)).kv.cached_tokens in (0, 8)  # the pages that the tree still has


def test_a_request_that_needs_the_room_of_many_sessions_tries_only_twice() -> None:
    talks = opened(*"abcdefgh", talks=Talks(device_pages=24))
    for number, session_id in enumerate("abcdefgh"):
        talks.turn(session_id, tokens(10, first=100 * number + 1))  # 3 pages each
    talks.settle()
    rejected = talks.cache.statistics().skipped["no_device_room"]
    other = talks.begin(tokens(18 * PAGE, first=900))
    state = talks.cache.session_statistics()
    assert talks.cache.statistics().skipped["no_device_room"] == rejected + 1
    assert (state.released, state.holding) == ({"pressure": 6}, 2)
    talks.finish(other)


def test_a_growing_request_gets_the_room_of_idle_sessions() -> None:
    talks = opened("a", talks=Talks(device_pages=6))
    talks.turn("a", tokens(10))
    talks.settle()
    talk = talks.begin(tokens(12, first=50))
    assert talks.decode(talk, tokens(12, first=80))
    assert talks.cache.session_statistics().released == {"pressure": 1}
    talks.finish(talk)


def write_back_talks(kind: type[SessionCache] = SessionCache) -> Talks:
    """Return talks where a session has one half of L1, and a request waits for the write-back of the other half."""
    config = every_hit(write_policy="write_back")
    talks = opened("s", talks=Talks(device_pages=6, config=config, kind=kind))
    talks.turn("s", tokens(10))
    other = talks.begin(tokens(12, first=50))
    talks.finish(other)
    assert talks.try_begin(tokens(12, first=90), rid="a") is None
    return talks


def test_sessions_keep_their_kv_while_a_write_back_frees_enough_room() -> None:
    """The victims are still being copied, so the request has no room now, but will have it soon."""
    talks = write_back_talks()
    assert talks.cache.writeback_pages == 3 and talks.cache.session_statistics().released == {}
    talks.settle()
    talk = talks.begin(tokens(12, first=90), rid="a")
    assert talks.cache.session_statistics().released == {}
    talks.finish(talk)


class IgnoresWriteBack(SessionCache):
    """Ignores pages that are being written back."""

    @property
    def writeback_pages(self) -> int:
        return 0


def test_a_cache_that_ignores_write_back_evicts_a_session() -> None:
    """The control of the test above."""
    talks = write_back_talks(IgnoresWriteBack)
    assert talks.cache.session_statistics().released == {"pressure": 1}


class KeepsSessions(SessionCache):
    """Does not evict sessions."""

    def _release_idle(self, least_pages: int, enough_pages: int, own: module._Session | None) -> bool:
        return False


def test_without_eviction_of_sessions_requests_find_no_room() -> None:
    """The control of the tests of eviction above."""
    talks = opened("a", talks=Talks(device_pages=6, kind=KeepsSessions))
    talks.turn("a", tokens(10))
    talks.settle()
    assert talks.try_begin(tokens(16, first=50)) is None
    talk = talks.begin(tokens(12, first=50))
    assert not talks.decode(talk, [80])
    talks.abort(talk)


def test_a_session_with_a_running_turn_is_not_evicted() -> None:
    talks = opened("a", talks=Talks(device_pages=6))
    talks.turn("a", tokens(10))
    talk = talks.begin(tokens(11), "a")
    talks.settle()
    other = talks.begin(tokens(3, first=90))
    assert talks.try_begin(tokens(16, first=50)) is None
    assert not talks.decode(talk, tokens(12, first=50))
    assert talks.cache.session_statistics().released == {}
    talks.abort(talk)
    talks.abort(other)


def test_sessions_are_not_evicted_if_that_does_not_make_enough_room() -> None:
    talks = opened("a", talks=Talks(device_pages=8))
    talks.turn("a", tokens(10))
    running = talks.begin(tokens(16, first=50))
    talks.settle()
    assert talks.try_begin(tokens(20, first=90)) is None
    assert talks.cache.session_statistics().holding == 1
    talks.finish(running)


def test_a_turn_that_needs_all_of_l1_evicts_its_own_session_last() -> None:
    """A copy of the partial page would not fit beside it, so the turn computes the tokens of that page again."""
    talks = opened("a", "b", talks=Talks(device_pages=6))
    talks.turn("a", tokens(10))
    talks.turn("b", tokens(5, first=50))
    talks.settle()
    assert talks.turn("a", tokens(6 * PAGE)).kv.cached_tokens == 8
    assert talks.cache.session_statistics().released == {"pressure": 2}


def test_the_request_of_a_turn_has_the_given_priority() -> None:
    talks = opened("s", talks=Talks(backend=memory_backend()))
    for count in (8, 12):
        earlier = talks.begin(tokens(count))
        talks.finish(earlier)
    talks.settle()
    assert talks.cache.evict(100).freed_pages == 3
    talks.cache.join_session("a", "s")
    request = talks.cache.begin_request("a", RadixKey.of(tokens(14)), priority=7)
    assert request is not None and (request.priority, request.host_hit_tokens) == (7, 12)
    talks.cache.start_loading()
    talks.cache.cache_finished_req(request, None)


# Checks


def test_the_check_finds_a_page_without_an_owner() -> None:
    """Only the check of the session cache counts the pages of requests and sessions."""
    talks = holding(6)
    talks.leave()
    assert talks.cache.page_source.alloc(1) is not None
    HiRadixCache.check(talks.cache)
    with pytest.raises(InvariantError, match="requests and sessions"):
        talks.cache.check()


@pytest.mark.parametrize("damage", ["pages", "tokens", "tree", "turn"])
def test_the_check_finds_a_damaged_session(damage: str) -> None:
    talks = holding(6)
    talks.leave()
    session = talks.cache._sessions["s"]
    assert session.held is not None
    if damage == "pages":
        session.held.pages = session.held.pages[:1]
    elif damage == "tokens":
        session.held.key = RadixKey.of(tokens(5, first=7))
    elif damage == "tree":
        session.held.key = RadixKey.of(tokens(6, first=7))
    else:
        session.turn = "unknown"
    with pytest.raises(InvariantError, match="session"):
        talks.cache.check()
