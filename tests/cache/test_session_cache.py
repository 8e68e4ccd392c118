"""Sessions: what a turn finds of the turn before, and who gets the room when there is none."""

from __future__ import annotations

from dataclasses import replace

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


# What a turn finds


def bigram_talks() -> Talks:
    return Talks(position_bytes=BIGRAM_BYTES)


@pytest.mark.parametrize("held", range(1, 3 * PAGE + 1))
def test_a_turn_goes_on_at_the_very_token_where_the_last_one_ended(held: int) -> None:
    talks = opened("s")
    first = talks.turn("s", tokens(held))
    assert first.kv.cached_tokens == 0
    second = talks.turn("s", tokens(held + 3), answer=[70, 71])
    assert second.kv.device_hit_tokens == second.kv.cached_tokens == held
    third = talks.turn("s", [*second.tokens, 80])
    assert third.kv.cached_tokens == held + 5
    assert talks.cache.session_statistics().continued_turns == 2


@pytest.mark.parametrize("held", range(1, 3 * PAGE + 1))
def test_with_bigrams_a_turn_goes_on_at_the_last_token_which_had_no_successor(held: int) -> None:
    talks = opened("s", talks=bigram_talks())
    assert talks.turn("s", tokens(held)).kv.cached_tokens == 0
    second = talks.turn("s", tokens(held + 3), answer=[70, 71])
    assert second.kv.device_hit_tokens == second.kv.cached_tokens == held - 1
    assert talks.turn("s", [*second.tokens, 80]).kv.cached_tokens == held + 4
    assert talks.turn("s", [*second.tokens, 80]).kv.cached_tokens == held + 5  # the same again, for its last token
    assert talks.cache.session_statistics().released == {}


def test_with_bigrams_a_turn_that_goes_on_with_another_token_diverges_one_token_earlier() -> None:
    """The KV of the token before depends on it."""
    talks = opened("s", talks=bigram_talks())
    talks.turn("s", tokens(10))
    assert talks.turn("s", [*tokens(9), 99, 98]).kv.cached_tokens == 8
    assert talks.cache.session_statistics().released == {"diverged": 1}
    talks.turn("s", [*tokens(9), 99, 98, 97])
    talk = talks.begin([*tokens(9), 99, 98, 97, 96], "s")
    assert talk.kv.cached_tokens == 11
    talks.abort(talk)
    assert talks.turn("s", [*tokens(9), 99, 98, 97, 95]).kv.cached_tokens == 11


def test_a_key_of_the_other_kind_is_refused_and_the_books_still_balance() -> None:
    talks = opened("s", talks=bigram_talks())
    talks.turn("s", tokens(10))
    talks.cache.join_session("a", "s")
    with pytest.raises(InvalidInput, match="bytes a position"):
        talks.cache.begin_request("a", RadixKey.of(tokens(12)))
    talks.cache.abort_prefetch("a")
    talks.cache.check()


def test_without_a_session_the_partial_page_is_computed_again() -> None:
    """Negative control: the same turns as ordinary requests find whole pages only."""
    talks = opened("s")
    for count, cached in ((6, 0), (9, 4)):
        talk = talks.begin(tokens(count))
        assert talk.kv.cached_tokens == cached
        talks.finish(talk)


def test_the_comparison_finds_a_token_of_the_partial_page_that_changed() -> None:
    """Negative control: with one byte of the session's own page changed, a token counts as wrong."""
    talks = opened("s")
    talk = talks.begin(tokens(PAGE + 2), "s")
    partial_page = int(talk.kv.pages[1])
    talks.finish(talk)
    talks.world.device.blocks.layers[0][0][partial_page][0] ^= 1
    talks.turn("s", tokens(PAGE + 5))
    # Once when the turn begins, once when it ends.
    assert talks.wrong_tokens == 2
    talks.wrong_tokens = 0


def test_whole_pages_of_a_turn_are_shared_with_others_at_once() -> None:
    talks = opened("s")
    talks.turn("s", tokens(10))
    other = talks.begin(tokens(12))
    assert other.kv.cached_tokens == 8
    talks.finish(other)


def test_a_turn_that_another_request_has_run_ahead_of_takes_its_pages() -> None:
    """The other request has computed the rest of the partial page and more; then the tree knows better."""
    talks = opened("s")
    talks.turn("s", tokens(6))
    other = talks.begin(tokens(14))
    talks.finish(other)
    assert talks.turn("s", tokens(15)).kv.cached_tokens == 12


@pytest.mark.parametrize(
    ("turn", "cached"),
    [
        ([*tokens(9), 99, 98], 8),  # other tokens within the partial page
        ([*tokens(5), 99, 98, 97], 4),  # other tokens within a whole page
        ([99, *tokens(9)], 0),
        (tokens(10), 8),  # the same prompt once more
        (tokens(9), 8),
        (tokens(3), 0),
    ],
)
def test_a_turn_that_diverges_finds_the_common_whole_pages_of_the_tree(turn: list[int], cached: int) -> None:
    talks = opened("s")
    talks.turn("s", tokens(10))
    talk = talks.turn("s", turn)
    assert talk.kv.cached_tokens == cached
    assert talks.cache.session_statistics().released == {"diverged": 1}
    assert talks.turn("s", [*turn, 50]).kv.cached_tokens == len(turn)


def test_a_turn_of_another_tenant_finds_nothing() -> None:
    talks = opened("s")
    talks.turn("s", tokens(10))
    talks.cache.join_session("other", "s")
    request = talks.cache.begin_request("other", RadixKey.of(tokens(12), cache_salt="b"))
    assert request is not None and request.cached_tokens == 0
    talks.cache.cache_finished_req(request, None)


def test_a_session_survives_the_eviction_of_everything_else() -> None:
    talks = opened("s")
    talks.turn("s", tokens(10))
    talks.settle()
    assert talks.cache.evict(100).freed_pages == 0
    assert talks.turn("s", tokens(12)).kv.device_hit_tokens == 10


def test_hits_of_the_partial_page_are_in_the_statistics_of_the_cache() -> None:
    talks = opened("s")
    talks.turn("s", tokens(10))
    talks.turn("s", tokens(12))
    assert talks.cache.statistics().hit_tokens["device"] == 10
    state = talks.cache.session_statistics()
    assert (state.turns, state.continued_turns, state.tail_tokens) == (2, 1, 2)
    assert (state.open, state.holding, state.running, state.held_pages, state.own_pages) == (1, 1, 0, 3, 0)


class FailingLoads(CpuCopyEngine):
    """Starts no copy to the device."""

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        raise TransferError("no load today")


def test_after_a_failed_device_copy_no_session_is_served_any_more() -> None:
    """What the device holds is unknown then, the partial page of a session included."""
    talks = opened("s", talks=Talks(backend=memory_backend(), copies=FailingLoads))
    talks.turn("s", tokens(10))
    other = talks.begin(tokens(12, first=50))
    talks.finish(other)
    talks.settle()
    talks.cache.evict(100)
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
    """A turn of session s, held up to token 10, that is aborted at some point."""
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


@pytest.mark.parametrize("point", ["waiting", "computed", "before the page is full", "decoding"])
def test_an_aborted_turn_leaves_the_session_as_it_was(point: str) -> None:
    talks = opened("s")
    talks.turn("s", tokens(10))
    before, free = talks.cache.session_statistics().held_pages, talks.free_pages
    abort_at(talks, point)
    assert (talks.cache.session_statistics().held_pages, talks.free_pages) == (before, free)
    assert talks.turn("s", [*tokens(10), 90, 91, 92]).kv.cached_tokens == 10


def test_an_aborted_turn_that_has_shared_the_partial_page_costs_the_tokens_of_that_page() -> None:
    talks = opened("s")
    talks.turn("s", tokens(10))
    abort_at(talks, "shared")
    assert talks.turn("s", [*tokens(10), 90, 91, 92]).kv.cached_tokens == 8


class TakesThePageBackAnyway(SessionCache):
    """Gives the partial page back to the session even if the tree has it."""

    def _roll_back(self, session: module._Session, request: RequestKV) -> None:
        held = session.held
        if held is not None and session.lent is not None:
            whole = held.shared_pages
            held.pages, held.key = request.pages[: whole + 1].copy(), session.lent
        HiRadixCache.cache_finished_req(self, request, None)


def test_taking_a_shared_page_back_would_be_found() -> None:
    """Negative control: the page would have two owners, and the next turn would write into what others read."""
    talks = opened("s", talks=Talks(kind=TakesThePageBackAnyway))
    talks.leave()
    talks.turn("s", tokens(10))
    with pytest.raises(InvariantError):
        abort_at(talks, "shared")


def test_an_aborted_first_turn_and_an_aborted_divergent_one_leave_an_empty_session() -> None:
    talks = opened("s")
    for prompt in (tokens(10), tokens(10, first=50)):
        talk = talks.begin(prompt, "s")
        talks.abort(talk)
        assert talks.cache.session_statistics().holding == 0
        talks.turn("s", tokens(10))


def test_a_preempted_turn_goes_on_where_it_was_when_it_joins_again() -> None:
    talks = opened("s")
    talk = talks.begin(tokens(10), "s", rid="turn")
    assert talks.decode(talk, [60])
    talks.finish(talk)
    again = talks.begin([*talk.tokens, 61], "s", rid="turn")
    assert again.kv.cached_tokens == 11
    talks.finish(again)


def test_a_turn_that_ends_with_an_impossible_key_goes_on() -> None:
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


# Which turns there are


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


def test_unknown_closed_and_expired_sessions_take_no_turn() -> None:
    talks = opened("s", "t")
    assert talks.cache.close_session("s") and not talks.cache.close_session("s")
    talks.clock.now_s = 60.0
    for session_id in ("s", "t", "never"):
        with pytest.raises(UnknownSession) as caught:
            talks.cache.join_session("a", session_id)
        assert isinstance(caught.value, SessionError)


def test_what_cannot_be_opened_is_refused() -> None:
    talks = opened("s", talks=Talks(sessions_max=2))
    with pytest.raises(InvalidInput, match="already open"):
        talks.cache.open_session("s")
    with pytest.raises(InvalidInput, match="above 0"):
        talks.cache.open_session("t", ttl_s=0)
    talks.cache.open_session("t")
    with pytest.raises(CapacityError, match="2 are open"):
        talks.cache.open_session("u")
    talks.clock.now_s = 60.0
    talks.cache.open_session("u")  # the time of the others is over
    assert talks.cache.session_statistics().open == 1


# Closing and expiry


def test_closing_leaves_all_whole_pages_to_the_tree() -> None:
    talks = opened("s")
    talks.turn("s", tokens(10))
    talks.settle()
    assert talks.cache.close_session("s")
    talks.cache.check()
    assert talks.cache.tree.device_protected_pages == 0 and talks.free_pages == talks.world.device.pages - 2
    other = talks.begin(tokens(12))
    assert other.kv.cached_tokens == 8
    talks.finish(other)


def test_a_session_expires_when_it_had_no_turn_for_its_time() -> None:
    talks = opened("s")
    talks.cache.open_session("long", ttl_s=1000.0)
    talks.turn("s", tokens(6))
    talks.turn("long", tokens(6, first=50))
    for now_s, left in ((59.9, 2), (60.0, 1), (999.0, 1), (1000.0, 0)):
        talks.clock.now_s = now_s
        talks.cache.poll()
        talks.cache.check()
        assert talks.cache.session_statistics().open == left
    assert talks.cache.session_statistics().released == {"expired": 2}


def test_a_turn_that_waits_or_runs_keeps_its_session_and_its_end_starts_the_time_again() -> None:
    talks = opened("s")
    talks.cache.join_session("a", "s")
    talks.clock.now_s = 100.0
    talks.cache.poll()
    request = talks.cache.begin_request("a", RadixKey.of(tokens(6)))
    assert request is not None
    talks.clock.now_s = 200.0
    talks.cache.poll()
    talks.cache.cache_finished_req(request, None)
    talks.clock.now_s = 259.0
    talks.cache.poll()
    assert talks.cache.session_statistics().open == 1
    talks.clock.now_s = 260.0
    talks.cache.poll()
    assert talks.cache.session_statistics().open == 0


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("aborted", [False, True])
def test_dropping_all_leaves_nothing_to_any_session(shared: bool, aborted: bool) -> None:
    """Nor does what a turn computes that runs meanwhile: it may be of the old weights."""
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


# Emptying and new weights


def emptied(talks: Talks, how: str) -> None:
    if how == "weights":
        talks.cache.update_weights(talks.cache.weights_epoch + 1)
    else:
        talks.cache.clear()
    talks.cache.check()


WAYS = ["clear", "weights"]


@pytest.mark.parametrize("how", WAYS)
def test_after_emptying_an_idle_session_is_open_and_has_nothing(how: str) -> None:
    talks = opened("s")
    talks.turn("s", tokens(10))
    talks.settle()
    emptied(talks, how)
    assert talks.free_pages == talks.world.device.pages
    talk = talks.turn("s", tokens(12))
    assert talk.kv.cached_tokens == 0
    assert talks.cache.session_statistics().released == {"dropped": 1}
    assert talks.turn("s", tokens(13)).kv.cached_tokens == 12


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_what_a_turn_computed_before_does_not_come_back_to_its_session(how: str, aborted: bool, shared: bool) -> None:
    talks = opened("s")
    talks.turn("s", tokens(10))
    talk = talks.begin(tokens(15), "s")
    if shared:
        talks.share(talk)
    emptied(talks, how)
    assert talks.decode(talk, [60, 61])
    (talks.abort if aborted else talks.finish)(talk)
    assert talks.turn("s", [*tokens(15), 60, 61, 62]).kv.cached_tokens == 0
    assert talks.turn("s", [*tokens(15), 60, 61, 62, 63]).kv.cached_tokens == 18


def test_weights_that_are_refused_cost_no_session_its_kv() -> None:
    talks = opened("s")
    talks.turn("s", tokens(10))
    with pytest.raises(InvalidInput, match="not above"):
        talks.cache.update_weights(0)
    assert talks.turn("s", tokens(12)).kv.cached_tokens == 10


class KeepsWhatIsOld(SessionCache):
    """Goes on from what a session holds whatever has become of its tree."""

    def drop_all(self) -> None:
        pass

    def begin_request(self, rid: str, key: RadixKey, *, priority: int = 0) -> RequestKV | None:
        session = self._turns.get(rid)
        if session is not None and session.held is not None:
            session.held = replace(session.held, tree=self.tree)
        return super().begin_request(rid, key, priority=priority)


def test_going_on_from_old_weights_would_be_found() -> None:
    """Negative control."""
    talks = opened("s", talks=Talks(kind=KeepsWhatIsOld))
    talks.leave()
    talks.turn("s", tokens(10))
    emptied(talks, "weights")
    talks.cache.join_session("a", "s")
    request = talks.cache.begin_request("a", RadixKey.of(tokens(12)))
    assert request is not None and request.cached_tokens == 2  # of the partial page, which is of the old weights


# Memory pressure


def test_idle_sessions_give_their_kv_up_least_recently_used_first() -> None:
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
    assert talks.turn("b", tokens(12, first=101)).kv.cached_tokens in (0, 8)  # what the tree still has


def test_a_request_that_needs_the_room_of_many_sessions_tries_once_before_and_once_after() -> None:
    talks = opened(*"abcdefgh", talks=Talks(device_pages=24))
    for number, session_id in enumerate("abcdefgh"):
        talks.turn(session_id, tokens(10, first=100 * number + 1))  # 3 pages each
    talks.settle()
    refused = talks.cache.statistics().skipped["no_device_room"]
    other = talks.begin(tokens(18 * PAGE, first=900))
    state = talks.cache.session_statistics()
    assert talks.cache.statistics().skipped["no_device_room"] == refused + 1
    assert (state.released, state.holding) == ({"pressure": 6}, 2)
    talks.finish(other)


def test_a_request_that_needs_more_room_as_it_grows_gets_it_from_idle_sessions() -> None:
    talks = opened("a", talks=Talks(device_pages=6))
    talks.turn("a", tokens(10))
    talks.settle()
    talk = talks.begin(tokens(12, first=50))
    assert talks.decode(talk, tokens(12, first=80))
    assert talks.cache.session_statistics().released == {"pressure": 1}
    talks.finish(talk)


def write_back_talks(kind: type[SessionCache] = SessionCache) -> Talks:
    """A session has half of L1, another request had the other half, and a third finds no room yet."""
    config = every_hit(write_policy="write_back")
    talks = opened("s", talks=Talks(device_pages=6, config=config, kind=kind))
    talks.turn("s", tokens(10))
    other = talks.begin(tokens(12, first=50))
    talks.finish(other)
    assert talks.try_begin(tokens(12, first=90), rid="a") is None
    return talks


def test_room_that_is_on_its_way_to_l2_costs_no_session_its_kv() -> None:
    """With write_back: what was evicted is still being copied, so a request finds no room now, but soon will."""
    talks = write_back_talks()
    assert talks.cache.writeback_pages == 3 and talks.cache.session_statistics().released == {}
    talks.settle()
    talk = talks.begin(tokens(12, first=90), rid="a")
    assert talks.cache.session_statistics().released == {}
    talks.finish(talk)


class OverlooksWhatIsSaved(SessionCache):
    """Does not know that eviction may take time."""

    @property
    def writeback_pages(self) -> int:
        return 0


def test_a_session_would_give_way_for_room_that_is_on_its_way() -> None:
    """Negative control."""
    talks = write_back_talks(OverlooksWhatIsSaved)
    assert talks.cache.session_statistics().released == {"pressure": 1}


class KeepsAll(SessionCache):
    """Lets no session give way."""

    def _give_way(self, least_pages: int, enough_pages: int, own: module._Session | None) -> bool:
        return False


def test_sessions_that_give_nothing_up_would_keep_requests_out() -> None:
    """Negative control of the two above."""
    talks = opened("a", talks=Talks(device_pages=6, kind=KeepsAll))
    talks.turn("a", tokens(10))
    talks.settle()
    assert talks.try_begin(tokens(16, first=50)) is None
    talk = talks.begin(tokens(12, first=50))
    assert not talks.decode(talk, [80])
    talks.abort(talk)


def test_a_session_with_a_running_turn_gives_nothing_up() -> None:
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


def test_sessions_keep_their_kv_if_giving_it_up_would_not_make_enough_room() -> None:
    talks = opened("a", talks=Talks(device_pages=8))
    talks.turn("a", tokens(10))
    running = talks.begin(tokens(16, first=50))
    talks.settle()
    assert talks.try_begin(tokens(20, first=90)) is None
    assert talks.cache.session_statistics().holding == 1
    talks.finish(running)


def test_a_turn_that_needs_all_of_l1_gets_it_from_its_own_session_last() -> None:
    """Its page beside the session's partial one would not fit; it computes the tokens of that page again."""
    talks = opened("a", "b", talks=Talks(device_pages=6))
    talks.turn("a", tokens(10))
    talks.turn("b", tokens(5, first=50))
    talks.settle()
    assert talks.turn("a", tokens(6 * PAGE)).kv.cached_tokens == 8
    assert talks.cache.session_statistics().released == {"pressure": 2}


def test_the_priority_of_a_turn_holds_for_its_request() -> None:
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


# The books


def test_the_books_account_for_every_page() -> None:
    """Negative control of `check`: a page that no request or session has is found, by this class alone."""
    talks = opened("s")
    talks.leave()
    talks.turn("s", tokens(6))
    assert talks.cache.page_source.alloc(1) is not None
    HiRadixCache.check(talks.cache)
    with pytest.raises(InvariantError, match="requests and sessions"):
        talks.cache.check()


@pytest.mark.parametrize("damage", ["pages", "tokens", "tree", "turn"])
def test_the_check_finds_a_session_that_is_damaged(damage: str) -> None:
    """Negative control of `check`."""
    talks = opened("s")
    talks.leave()
    talks.turn("s", tokens(6))
    session = talks.cache._sessions["s"]
    assert session.held is not None
    if damage == "pages":
        session.held.pages = session.held.pages[:1]
    elif damage == "tokens":
        session.held.key = RadixKey.of(tokens(5, first=7))
    elif damage == "tree":
        session.held.key = RadixKey.of(tokens(6, first=7))
    else:
        session.turn = "nobody"
    with pytest.raises(InvariantError, match="session"):
        talks.cache.check()
