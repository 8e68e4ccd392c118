"""Break-even while requests wait: reading costs nothing meanwhile, and the reads ahead take their time."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from hicache.cache.break_even import PROBE_EVERY, WINDOW, Ahead, BreakEven, Decision, Rates, Route

PAGE_BYTES, PAGE_TOKENS = 1_000_000, 64
# A page is computed in 64 ms, and read in 100 ms; the load takes no time.
SLOW = Rates(1000, 1 << 60, 1_000_000, 10_000_000, 1_000_000)
# A page is read in 10 ms.
FAST = SLOW._replace(storage_bytes_per_s=100_000_000)

waits = st.floats(0, 1000)
aheads = st.builds(Ahead, waits, st.integers(0, 10_000), st.floats(0, 100))
speeds = st.integers(1, 1 << 40)
rates = st.builds(Rates, speeds, speeds, speeds, speeds, speeds)
hits = st.integers(1, 1 << 14)


def break_even_of(speed: Rates) -> BreakEven:
    """Return a `BreakEven` that decides by the given speeds."""
    break_even = BreakEven(None, PAGE_BYTES)
    break_even.use_rates(speed)
    return break_even


def would(speed: Rates, pages: int, ahead: Ahead, part_pages: float = float("inf")) -> Decision:
    return break_even_of(speed).would(Route.PREFETCH, pages * PAGE_TOKENS, pages, ahead, part_pages)


def seconds(speed: Rates, pages: int) -> tuple[float, float]:
    """Return the fixed time of a fetch, and the time of its pages."""
    fixed_s = 1 / speed.host_operations_per_s + 1 / speed.storage_operations_per_s
    return fixed_s, pages * PAGE_BYTES * (1 / speed.host_bytes_per_s + 1 / speed.storage_bytes_per_s)


def test_a_slow_fetch_pays_if_its_request_waits_for_the_difference_anyway() -> None:
    # 100 pages: 10 s of reading for 6.4 s of computing.
    assert would(SLOW, 100, Ahead(3.5)) is Decision.TOO_SLOW
    assert would(SLOW, 100, Ahead(3.7)) is Decision.PAYS


def test_a_fast_fetch_does_not_pay_behind_many_other_reads() -> None:
    # 1 s of reading for 6.4 s of computing, behind 5 or 6 s of other reads.
    assert would(FAST, 100, Ahead(0.0, 500)) is Decision.PAYS
    assert would(FAST, 100, Ahead(0.0, 600)) is Decision.TOO_SLOW
    assert would(FAST, 100, Ahead(1.0, 600)) is Decision.PAYS


def test_a_slow_fetch_pays_if_many_requests_would_wait_for_its_computing() -> None:
    # Arrivals add a/2 x 6.4^2 s = a x 20.5 s.
    assert would(SLOW, 100, Ahead(arrivals_per_s=0.17)) is Decision.TOO_SLOW
    assert would(SLOW, 100, Ahead(arrivals_per_s=0.18)) is Decision.PAYS


@given(rates, hits, aheads)
def test_a_hit_pays_exactly_if_it_is_there_in_time(speed: Rates, pages: int, ahead: Ahead) -> None:
    compute_s = pages * PAGE_TOKENS / speed.prefill_tokens_per_s
    fetch_s = sum(seconds(speed, pages)) + ahead.pages * PAGE_BYTES / speed.storage_bytes_per_s
    spared_s = ahead.wait_s + compute_s + ahead.arrivals_per_s / 2 * compute_s**2
    assume(abs(fetch_s - spared_s) > 1e-6 * (fetch_s + spared_s))
    decision = break_even_of(speed).would(Route.PREFETCH, pages * PAGE_TOKENS, pages, ahead)
    assert decision is (Decision.PAYS if fetch_s < spared_s else Decision.TOO_SLOW)


@given(rates, hits, st.sampled_from((Route.LOAD, Route.PREFETCH)))
def test_without_a_wait_reads_and_arrivals_the_times_of_fetching_and_computing_decide(
    speed: Rates, pages: int, route: Route
) -> None:
    fetch_s = 1 / speed.host_operations_per_s + pages * PAGE_BYTES / speed.host_bytes_per_s
    if route is Route.PREFETCH:
        fetch_s = sum(seconds(speed, pages))
    compute_s = pages * PAGE_TOKENS / speed.prefill_tokens_per_s
    assume(abs(fetch_s - compute_s) > 1e-6 * (fetch_s + compute_s))
    decision = break_even_of(speed).would(route, pages * PAGE_TOKENS, pages)
    assert decision is (Decision.PAYS if fetch_s < compute_s else Decision.TOO_SLOW)


@given(rates, hits, aheads, waits, st.integers(1, 64))
def test_a_hit_that_pays_or_pays_partly_is_not_refused_after_a_longer_wait(
    speed: Rates, pages: int, ahead: Ahead, more_s: float, part_pages: int
) -> None:
    break_even, tokens = break_even_of(speed), pages * PAGE_TOKENS
    before = break_even.would(Route.PREFETCH, tokens, pages, ahead, part_pages)
    later = ahead._replace(wait_s=ahead.wait_s + more_s)
    after = break_even.would(Route.PREFETCH, tokens, pages, later, part_pages)
    assert before is not Decision.PAYS or after is Decision.PAYS
    assert not before.go or after.go


@given(rates, hits, aheads, st.integers(1, 1000))
def test_a_hit_that_pays_also_pays_with_a_faster_store(
    speed: Rates, pages: int, ahead: Ahead, factor: int
) -> None:
    fast = speed._replace(
        storage_bytes_per_s=factor * speed.storage_bytes_per_s,
        storage_operations_per_s=factor * speed.storage_operations_per_s,
    )
    tokens = pages * PAGE_TOKENS
    before, after = (
        break_even_of(each).would(Route.PREFETCH, tokens, pages, ahead) for each in (speed, fast)
    )
    assert before is not Decision.PAYS or after is Decision.PAYS


# Parts


def test_of_a_hit_that_is_too_slow_the_pages_that_arrive_during_the_wait_pay() -> None:
    # Each page costs 36 ms more than computing it.
    assert break_even_of(SLOW).paying_pages(6400, 100, Ahead(1.0)) == 27
    assert would(SLOW, 100, Ahead(1.0), 27) is Decision.PARTLY
    assert would(SLOW, 100, Ahead(1.0), 28) is Decision.TOO_SLOW
    assert would(SLOW, 100, Ahead(1.0)) is Decision.TOO_SLOW, "the caller does not take a part"
    assert would(SLOW, 100, Ahead(1.0, 10), 1) is Decision.TOO_SLOW, "other reads take the whole wait"
    assert would(SLOW, 100, Ahead(), 1) is Decision.TOO_SLOW


@given(rates, hits, aheads, st.integers(1, 64))
def test_the_paying_part_is_there_when_its_request_could_start_and_a_page_more_would_be_late(
    speed: Rates, pages: int, ahead: Ahead, part_pages: int
) -> None:
    break_even, tokens = break_even_of(speed), pages * PAGE_TOKENS
    decision = break_even.would(Route.PREFETCH, tokens, pages, ahead, part_pages)
    part = break_even.paying_pages(tokens, pages, ahead)
    assert 0 <= part <= pages
    assert (decision is Decision.PARTLY) == (decision is not Decision.PAYS and part >= part_pages)
    if decision is not Decision.PARTLY:
        return
    read_s = ahead.pages * PAGE_BYTES / speed.storage_bytes_per_s

    def late_s(part: int) -> float:
        """Return how much later the request starts than without the fetch."""
        fixed_s, pages_s = seconds(speed, part)
        return read_s + fixed_s + pages_s - ahead.wait_s - part * PAGE_TOKENS / speed.prefill_tokens_per_s

    exact_s = 1e-9 * (ahead.wait_s + read_s + sum(seconds(speed, pages)))
    assert late_s(part) <= exact_s
    assert late_s(part + 1) >= -exact_s


def test_a_part_that_pays_ends_a_run_of_refusals() -> None:
    break_even = break_even_of(SLOW)
    for _ in range(3):
        for _ in range(PROBE_EVERY - 1):
            assert not break_even.decide(Route.PREFETCH, 6400, 100).go
        assert break_even.decide(Route.PREFETCH, 6400, 100, Ahead(1.0), 1) is Decision.PARTLY
        break_even.check()


# Stores


def test_a_slow_store_is_written_to_while_requests_wait() -> None:
    break_even = break_even_of(SLOW)
    assert break_even.usual_ahead == Ahead()
    for wait_s in (0.0, 5.0, 5.0, 5.0):
        break_even.decide(Route.PREFETCH, 6400, 100, Ahead(wait_s, 1000))
    assert break_even.usual_ahead == (ahead := Ahead(5.0)), "the reads ahead are those of another time"
    assert break_even.would(Route.STORE, 6400, 100) is Decision.TOO_SLOW
    assert break_even.would(Route.STORE, 6400, 100, ahead) is Decision.PAYS
    assert break_even.would(Route.STORE, 64_000, 1000, ahead) is Decision.TOO_SLOW, "36 s late after a wait of 5 s"
    for _ in range(WINDOW // 2 + 1):
        break_even.decide(Route.PREFETCH, 6400, 100)
    assert break_even.usual_ahead == Ahead()


def test_a_slow_store_is_written_to_if_fetching_relieves_the_requests_that_arrive() -> None:
    break_even = break_even_of(SLOW)
    for _ in range(WINDOW):
        break_even.decide(Route.PREFETCH, 6400, 100, Ahead(arrivals_per_s=4.0))
    assert break_even.would(Route.STORE, 6400, 100) is Decision.TOO_SLOW
    assert break_even.would(Route.STORE, 6400, 100, break_even.usual_ahead) is Decision.PAYS


@given(rates, hits, aheads)
def test_a_run_whose_prefetch_pays_is_stored_if_what_was_ahead_of_it_is_usual(
    speed: Rates, pages: int, ahead: Ahead
) -> None:
    break_even, tokens = break_even_of(speed), pages * PAGE_TOKENS
    if break_even.decide(Route.PREFETCH, tokens, pages, ahead) is Decision.PAYS:
        assert break_even.would(Route.STORE, tokens, pages, break_even.usual_ahead) is Decision.PAYS
