"""Break-even: how speeds are estimated, how hits are decided by them, and what a cache fetches or computes then."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.memory import MemoryDriver
from hicache.backends.store import UNGUARDED, Store
from hicache.cache.break_even import (
    CALIBRATIONS_MAX,
    OBSERVATIONS_MIN,
    PREFILL_TOKENS_MIN,
    PROBE_EVERY,
    UNKNOWN,
    WINDOW,
    Ahead,
    BreakEven,
    Decision,
    RateEstimator,
    Rates,
    Route,
)
from hicache.config import BreakEvenConfig
from hicache.errors import InvariantError
from hicache_lab.faults import FaultOptions, FaultyDriver
from tests.cache.world import GEOMETRY, World, codec, memory_backend, prompt
from tests.seeds import rng, seeds

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
TOKEN_BYTES = 128 * KIB  # of Llama-3.1-8B in bf16
PREFILL_TOKENS_PER_S = 20_000  # so the break-even bandwidth is 2.6 GB/s
FAST, SLOW = 5 * GIB, GIB

speeds = st.integers(1, 1 << 50)
rates = st.builds(Rates, speeds, speeds, speeds, speeds, speeds)
some_rates = st.tuples(*[st.sampled_from((0, 1, 1000, 1 << 30, 1 << 50))] * 5).map(lambda speed: Rates(*speed))
hits = st.integers(1, 1 << 20)
routes = st.sampled_from(Route)


def measured(
    host: int = 50 * GIB,
    storage: int = FAST,
    prefill: int = PREFILL_TOKENS_PER_S,
    config: BreakEvenConfig | None = None,
    probe_every: int = PROBE_EVERY,
    given: Rates = UNKNOWN,
) -> BreakEven:
    """Return a `BreakEven` that has measured the given speeds with operations of several sizes."""
    break_even = BreakEven(config, probe_every=probe_every, given=given)
    for size in (1, 2, 4, 8, 16):
        break_even.observe_transfer(Route.LOAD, size * MIB, size * MIB / host)
        break_even.observe_transfer(Route.PREFETCH, size * MIB, size * MIB / storage)
        break_even.observe_prefill(size * 100, size * 100 / prefill)
    break_even.use_rates(break_even.rates())
    return break_even


def decide(break_even: BreakEven, route: Route, tokens: int = 1024) -> Decision:
    break_even.check()
    decision = break_even.decide(route, tokens, tokens * TOKEN_BYTES)
    break_even.check()
    return decision


# Decisions


def test_a_tier_above_the_break_even_bandwidth_pays_and_one_below_does_not() -> None:
    assert decide(measured(storage=FAST), Route.PREFETCH) is Decision.PAYS
    assert decide(measured(storage=SLOW), Route.PREFETCH) is Decision.TOO_SLOW
    assert decide(measured(host=FAST), Route.LOAD) is Decision.PAYS
    assert decide(measured(host=SLOW), Route.LOAD) is Decision.TOO_SLOW


def test_a_hit_pays_from_the_wait_on_that_it_lacks() -> None:
    break_even = measured(storage=SLOW)
    hit = (Route.PREFETCH, 1024, 1024 * TOKEN_BYTES)
    lacking_s = break_even.lacking_s(*hit)
    fetch_s, compute_s = 1024 * TOKEN_BYTES * (1 / SLOW + 1 / (50 * GIB)), 1024 / PREFILL_TOKENS_PER_S
    assert lacking_s == pytest.approx(fetch_s - compute_s, rel=0.01)
    assert break_even.lacking_s(*hit, Ahead(wait_s=0.01)) == pytest.approx(lacking_s - 0.01)
    assert break_even.would(*hit, Ahead(wait_s=0.99 * lacking_s)) is Decision.TOO_SLOW
    assert break_even.would(*hit, Ahead(wait_s=1.01 * lacking_s)) is Decision.PAYS
    assert measured(storage=FAST).lacking_s(*hit) < 0


def test_the_cost_of_a_prefetch_includes_the_load_that_follows() -> None:
    assert decide(measured(host=4 * GIB, storage=4 * GIB), Route.LOAD) is Decision.PAYS
    assert decide(measured(host=4 * GIB, storage=4 * GIB), Route.PREFETCH) is Decision.TOO_SLOW


@pytest.mark.parametrize("unknown", Rates._fields)
def test_a_hit_is_fetched_while_a_speed_it_depends_on_is_unknown(unknown: str) -> None:
    break_even = measured(host=1, storage=1)
    break_even.use_rates(break_even.rates()._replace(**{unknown: 0}))
    assert decide(break_even, Route.PREFETCH) is Decision.UNMEASURED
    expected = Decision.TOO_SLOW if unknown.startswith("storage") else Decision.UNMEASURED
    assert decide(break_even, Route.LOAD) is expected


def test_a_round_trip_pays_for_a_long_hit_but_not_for_a_short_one() -> None:
    break_even = BreakEven()
    for size in (1, 4, 16, 64, 256):
        break_even.observe_transfer(Route.LOAD, size * MIB, size * MIB / (50 * GIB))
        break_even.observe_transfer(Route.PREFETCH, size * MIB, 0.03 + size * MIB / (10 * GIB))
        break_even.observe_prefill(1000, 1000 / PREFILL_TOKENS_PER_S)
    break_even.use_rates(break_even.rates())
    assert decide(break_even, Route.PREFETCH, 256) is Decision.TOO_SLOW
    assert decide(break_even, Route.PREFETCH, 8192) is Decision.PAYS


def test_mode_always_ignores_measurements() -> None:
    break_even = measured(host=1, storage=1, config=BreakEvenConfig(mode="always"))
    for route in Route:
        assert {decide(break_even, route) for _ in range(3 * PROBE_EVERY)} == {Decision.OVERRIDDEN}


def test_given_speeds_replace_measured_ones_from_the_first_decision_on() -> None:
    slow = Rates(prefill_tokens_per_s=20_000, host_bytes_per_s=50 * GIB, storage_bytes_per_s=SLOW)
    assert decide(BreakEven(given=slow), Route.LOAD) is Decision.PAYS
    assert decide(BreakEven(given=slow), Route.PREFETCH) is Decision.TOO_SLOW
    assert decide(measured(storage=FAST, given=slow), Route.PREFETCH) is Decision.TOO_SLOW
    fast = Rates(storage_bytes_per_s=FAST)
    assert decide(measured(storage=SLOW, given=fast), Route.PREFETCH) is Decision.PAYS


def test_a_route_whose_speeds_are_all_given_is_not_probed() -> None:
    break_even = BreakEven(given=Rates(prefill_tokens_per_s=20_000, host_bytes_per_s=1, storage_bytes_per_s=1))
    for route in Route:
        assert {decide(break_even, route) for _ in range(3 * PROBE_EVERY)} == {Decision.TOO_SLOW}


@given(rates, speeds, st.sampled_from(Rates._fields), hits, st.integers(1, 1 << 30), routes)
def test_a_hit_that_pays_also_pays_with_a_faster_tier_or_a_slower_prefill(
    speed: Rates, other: int, changed: str, tokens: int, bytes_: int, route: Route
) -> None:
    slow, fast = sorted((getattr(speed, changed), other), reverse=changed == "prefill_tokens_per_s")
    break_even = BreakEven()
    break_even.use_rates(speed._replace(**{changed: slow}))
    before = break_even.decide(route, tokens, bytes_)
    break_even.use_rates(speed._replace(**{changed: fast}))
    after = break_even.decide(route, tokens, bytes_)
    assert before is not Decision.PAYS or after is Decision.PAYS


@given(
    st.lists(st.tuples(some_rates, routes, hits, st.integers(1, 1 << 30)), min_size=1, max_size=100),
    st.integers(1, 9),
)
def test_a_route_is_probed_after_some_refusals(steps: list[tuple[Rates, Route, int, int]], probe_every: int) -> None:
    break_even = BreakEven(probe_every=probe_every)
    refused = dict.fromkeys(Route, 0)
    for speed, route, tokens, bytes_ in steps:
        break_even.use_rates(speed)
        decision = break_even.decide(route, tokens, bytes_)
        break_even.check()
        refused[route] = 0 if decision.go else refused[route] + 1
        assert refused[route] < probe_every


@given(st.lists(st.tuples(rates, rates, routes, hits), min_size=1, max_size=60), st.data())
def test_ranks_that_agree_on_rates_decide_identically_although_their_measurements_differ(
    steps: list[tuple[Rates, Rates, Route, int]], data: st.DataObject
) -> None:
    ranks = [BreakEven(), BreakEven()]
    for *speed, route, tokens in steps:
        for rank, own in zip(ranks, speed, strict=True):
            rank.observe_transfer(Route.PREFETCH, own.storage_bytes_per_s, 1.0)
            rank.observe_transfer(Route.LOAD, own.host_bytes_per_s, 1.0)
            rank.observe_prefill(own.prefill_tokens_per_s, 1.0)
        if data.draw(st.booleans()):
            agreed = Rates(*map(min, *(rank.rates() for rank in ranks)))
            for rank in ranks:
                rank.use_rates(agreed)
        first, second = (rank.decide(route, tokens, tokens * TOKEN_BYTES) for rank in ranks)
        assert first is second


def test_ranks_that_do_not_agree_on_rates_decide_differently() -> None:
    # The control of the test above.
    assert decide(measured(storage=FAST), Route.PREFETCH) is not decide(measured(storage=SLOW), Route.PREFETCH)


def test_decisions_use_only_agreed_rates() -> None:
    break_even = measured(storage=FAST)
    for _ in range(WINDOW):
        break_even.observe_transfer(Route.PREFETCH, MIB, 60.0)
    assert decide(break_even, Route.PREFETCH) is Decision.PAYS
    break_even.use_rates(break_even.rates())
    assert decide(break_even, Route.PREFETCH) is Decision.TOO_SLOW


def test_decisions_are_counted_by_route_and_reason() -> None:
    break_even = measured(storage=SLOW)
    for _ in range(PROBE_EVERY + 1):
        decide(break_even, Route.PREFETCH)
    decide(break_even, Route.LOAD)
    counts = break_even.statistics().decisions
    assert set(counts) == {(route.value, decision.value) for route, decision in itertools.product(Route, Decision)}
    assert {key: count for key, count in counts.items() if count} == {
        ("prefetch", "too_slow"): PROBE_EVERY, ("prefetch", "probe"): 1, ("load", "pays"): 1,
    }


def test_if_all_requests_are_hits_a_few_are_computed_to_measure_prefill() -> None:
    break_even = measured(prefill=10**12)
    break_even.use_rates(break_even.rates()._replace(prefill_tokens_per_s=0))
    decisions = [decide(break_even, route) for _ in range(10 * PROBE_EVERY) for route in (Route.LOAD, Route.PREFETCH)]
    computed = [number for number, decision in enumerate(decisions) if decision is Decision.CALIBRATION]
    assert computed == [PROBE_EVERY * (n + 1) - 1 for n in range(CALIBRATIONS_MAX)]
    assert set(decisions) == {Decision.CALIBRATION, Decision.UNMEASURED}
    assert CALIBRATIONS_MAX >= OBSERVATIONS_MIN


# Estimates of speed


@given(
    st.integers(0, 10**9), st.integers(1, 10**9),
    st.lists(st.integers(1, 10**9), min_size=OBSERVATIONS_MIN, max_size=20),
)
def test_the_line_through_undisturbed_operations_is_not_slower_than_the_slowest(
    fixed_ns: int, bytes_per_s: int, sizes: list[int]
) -> None:
    estimator = RateEstimator()
    for size in sizes:
        estimator.observe(size, fixed_ns / 1e9 + size / bytes_per_s)
    line = estimator.line
    assert line is not None and line.fixed_s >= 0 and line.per_unit_s > 0
    seen = [fixed_ns / 1e9 / size + 1 / bytes_per_s for size in sizes[-WINDOW:]]
    assert line.per_unit_s <= max(seen) * (1 + 1e-9)


@pytest.mark.parametrize("fixed_s", [0.0, 0.03])
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8, 16, 32, 64), (1, 1, 1, 64, 64, 64, 64)])
def test_operations_of_several_sizes_separate_the_fixed_time_from_the_speed(
    fixed_s: float, sizes: tuple[int, ...]
) -> None:
    estimator = RateEstimator()
    for size in sizes:
        estimator.observe(size * MIB, fixed_s + size * MIB / GIB)
    line = estimator.line
    assert line is not None
    assert line.fixed_s == pytest.approx(fixed_s, abs=1e-9)
    assert line.per_unit_s == pytest.approx(1 / GIB)


def test_for_operations_of_one_size_the_fixed_time_is_zero() -> None:
    estimator = RateEstimator()
    for extra in range(WINDOW):
        estimator.observe(MIB + extra, 0.5)
    line = estimator.line
    assert line is not None and line.fixed_s == pytest.approx(0, abs=1e-3)
    assert line.per_unit_s == pytest.approx(0.5 / MIB, rel=1e-3)


@pytest.mark.parametrize("per_unit_s", [0.0, 1e-9, 1e-6])
def test_the_estimated_speed_of_a_much_larger_hit_is_bounded(per_unit_s: float) -> None:
    """As if the whole time were fixed. The largest operation is the fastest, with 8 units per second."""
    estimator = RateEstimator()
    for size in (1, 2, 4, 8):
        estimator.observe(size, 1.0 + per_unit_s * size)
    line = estimator.line
    assert line is not None and 10**6 / (line.fixed_s + 10**6 * line.per_unit_s) < 32 * 8


@pytest.mark.parametrize("seed", seeds(5))
def test_three_stalls_of_thirty_seconds_among_seven_operations_do_not_change_a_decision(seed: int) -> None:
    random = rng(seed)
    sizes = [random.choice((8, 16, 32, 64, 128)) * MIB for _ in range(WINDOW)]
    stalls = random.sample(range(WINDOW), 3)
    for decision, stalled in ((Decision.PAYS, stalls), (Decision.TOO_SLOW, range(WINDOW))):
        break_even = measured()
        for number, size in enumerate(sizes):
            break_even.observe_transfer(Route.PREFETCH, size, 30.0 if number in stalled else size / FAST)
        break_even.use_rates(break_even.rates())
        assert decide(break_even, Route.PREFETCH) is decision


def test_the_first_operation_alone_does_not_count_as_a_measurement() -> None:
    break_even = BreakEven(given=Rates(prefill_tokens_per_s=20_000, host_bytes_per_s=50 * GIB))
    break_even.observe_transfer(Route.PREFETCH, MIB, 5.0)  # the warm-up
    for _ in range(OBSERVATIONS_MIN - 1):
        break_even.use_rates(break_even.rates())
        assert decide(break_even, Route.PREFETCH) is Decision.UNMEASURED
        break_even.observe_transfer(Route.PREFETCH, MIB, MIB / FAST)
    break_even.use_rates(break_even.rates())
    assert decide(break_even, Route.PREFETCH) is Decision.PAYS


def test_prefills_of_a_few_tokens_are_not_measured() -> None:
    break_even = measured()
    before = break_even.rates()
    for _ in range(2 * WINDOW):
        break_even.observe_prefill(1, 0.01)
    assert break_even.rates() == before
    for _ in range(2 * WINDOW):
        break_even.observe_prefill(PREFILL_TOKENS_MIN, 0.01)
    assert break_even.rates() != before


def test_the_fixed_time_of_a_forward_does_not_lower_the_prefill_speed() -> None:
    break_even = BreakEven()
    for tokens in (128, 256, 512, 1024):
        break_even.observe_prefill(tokens, 0.02 + tokens / PREFILL_TOKENS_PER_S)
    assert break_even.rates().prefill_tokens_per_s == PREFILL_TOKENS_PER_S


@pytest.mark.parametrize(("bytes_", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, float("inf"))])
def test_operations_without_size_or_time_are_ignored(bytes_: int, seconds: float) -> None:
    break_even = measured()
    before = break_even.rates()
    for _ in range(WINDOW):
        break_even.observe_transfer(Route.LOAD, bytes_, seconds)
    break_even.check()
    assert break_even.rates() == before


@given(st.integers(1, 1 << 62), st.floats(1e-9, 1e9))
def test_a_known_rate_is_not_zero_and_fits_into_64_bits(units: int, seconds: float) -> None:
    break_even = BreakEven()
    for _ in range(OBSERVATIONS_MIN):
        break_even.observe_transfer(Route.LOAD, units, seconds)
        break_even.observe_transfer(Route.PREFETCH, units, seconds)
        break_even.observe_prefill(max(units, PREFILL_TOKENS_MIN), seconds)
    assert all(type(rate) is int and 0 < rate < 1 << 63 for rate in break_even.rates())


def test_the_check_finds_a_run_of_refusals_without_a_probe() -> None:
    break_even = measured(storage=SLOW)
    break_even._refused[Route.PREFETCH] = PROBE_EVERY
    with pytest.raises(InvariantError, match="refused"):
        break_even.check()


# Slow, then fast again

USUAL_PROBES = WINDOW // 2 + 1


def requests_until_used_again(
    break_even: BreakEven, slow: int, fast: int, size: Callable[[], int]
) -> Iterable[Decision]:
    """Yield the decisions of requests to a store that was slow for a long time and is fast from now on."""
    for _ in range(3 * WINDOW):
        bytes_ = size()
        break_even.observe_transfer(Route.PREFETCH, bytes_, bytes_ / slow)
    while True:
        break_even.use_rates(break_even.rates())
        bytes_ = size()
        decision = break_even.decide(Route.PREFETCH, bytes_ // TOKEN_BYTES, bytes_)
        yield decision
        if decision.go:
            break_even.observe_transfer(Route.PREFETCH, bytes_, bytes_ / fast)


@pytest.mark.parametrize("seed", seeds(5))
def test_a_store_that_becomes_fast_is_used_again_after_at_most_seven_probes(seed: int) -> None:
    random = rng(seed)
    decisions: list[Decision] = []
    break_even = measured()
    slow, fast = random.choice((MIB, 64 * MIB, SLOW)), random.choice((FAST, 20 * GIB))
    requests = requests_until_used_again(break_even, slow, fast, lambda: random.choice((64, 128, 512)) * MIB)
    for decision in requests:
        decisions.append(decision)
        if decision is Decision.PAYS:
            break
        assert len(decisions) <= WINDOW * PROBE_EVERY
    assert decisions.count(Decision.PROBE) <= WINDOW


def test_without_probes_a_store_that_becomes_fast_is_not_used_again() -> None:
    break_even = measured(probe_every=1 << 30)
    requests = requests_until_used_again(break_even, SLOW, FAST, lambda: 64 * MIB)
    assert set(itertools.islice(requests, 100 * PROBE_EVERY)) == {Decision.TOO_SLOW}


# A whole cache: the test reports the times of prefills; the times of copies and reads are real

KEY = prompt(*range(1, 9))
INSTANT_S, AGES_S = 1e-12, 1e6


def report_prefill_time(world: World, seconds: float) -> None:
    """Report prefills that took `seconds` each, as an engine does, and step, after which they count."""
    for _ in range(WINDOW):
        world.cache.record_prefill(PREFILL_TOKENS_MIN, seconds)
    world.step()


def measured_world(*, always: bool = False) -> World:
    """Return a cache that has stored KEY and has measured both tiers with it."""
    config = BreakEvenConfig(mode="always" if always else "measure")
    world = World(backend=memory_backend(), break_even=BreakEven(config))
    world.serve("store", KEY)
    for number in range(OBSERVATIONS_MIN):
        world.forget()
        assert world.serve(f"measure-{number}", KEY).storage_hit_tokens == 8 * GEOMETRY.page_size
    world.leave_l1()
    assert all(world.cache.break_even.rates()[1:]), "both tiers are measured"
    return world


def test_a_hit_in_storage_is_read_only_if_it_pays() -> None:
    world = measured_world()
    report_prefill_time(world, INSTANT_S)
    world.forget()
    reads = world.controller.statistics().prefetched_pages
    assert world.serve("a", KEY).cached_tokens == 0
    assert world.controller.statistics().prefetched_pages == reads
    assert world.cache.statistics().skipped["prefetch_does_not_pay"] == 1
    report_prefill_time(world, AGES_S)
    world.forget()
    assert world.serve("b", KEY).storage_hit_tokens == 8 * GEOMETRY.page_size
    assert world.cache.statistics().break_even.decisions["prefetch", "pays"] == 1


def test_a_hit_on_l2_is_loaded_only_if_it_pays() -> None:
    world = measured_world()
    report_prefill_time(world, INSTANT_S)
    assert world.serve("a", KEY).cached_tokens == 0
    assert world.cache.statistics().skipped["load_does_not_pay"] == 1
    world.leave_l1()
    report_prefill_time(world, AGES_S)
    assert world.serve("b", KEY).host_hit_tokens == 8 * GEOMETRY.page_size
    assert world.cache.statistics().break_even.decisions["load", "pays"] == 1


def test_in_mode_always_hits_that_do_not_pay_are_fetched() -> None:
    # The control of the two tests above.
    world = measured_world(always=True)
    report_prefill_time(world, INSTANT_S)
    assert world.serve("a", KEY).host_hit_tokens == 8 * GEOMETRY.page_size
    world.forget()
    assert world.serve("b", KEY).storage_hit_tokens == 8 * GEOMETRY.page_size
    skipped = world.cache.statistics().skipped
    assert skipped["load_does_not_pay"] == skipped["prefetch_does_not_pay"] == 0


def test_if_an_engine_does_not_report_prefills_every_hit_is_fetched() -> None:
    world = measured_world()
    assert world.cache.break_even.rates().prefill_tokens_per_s == 0
    assert world.serve("a", KEY).host_hit_tokens == 8 * GEOMETRY.page_size
    decisions = world.cache.statistics().break_even.decisions
    expected = {("load", "unmeasured"), ("prefetch", "unmeasured"), ("store", "unmeasured")}
    assert {key for key, count in decisions.items() if count} == expected


# Stores


def test_a_run_is_stored_if_reading_it_could_pay_and_otherwise_once_in_sixteen_runs() -> None:
    assert decide(measured(storage=FAST), Route.STORE) is Decision.PAYS
    assert decide(measured(host=4 * GIB, storage=4 * GIB), Route.STORE) is Decision.TOO_SLOW
    slow = measured(storage=SLOW)
    decisions = [decide(slow, Route.STORE) for _ in range(2 * PROBE_EVERY)]
    assert decisions == 2 * [*[Decision.TOO_SLOW] * (PROBE_EVERY - 1), Decision.PROBE]


def test_the_decision_to_store_ignores_the_fixed_times_because_the_prefix_may_be_long() -> None:
    break_even = measured()
    break_even.use_rates(break_even.rates()._replace(storage_operations_per_s=10, host_operations_per_s=10))
    assert decide(break_even, Route.PREFETCH, 64) is Decision.TOO_SLOW
    assert decide(break_even, Route.STORE, 64) is Decision.PAYS


@given(rates, hits, st.integers(1, 1 << 30))
def test_a_run_whose_prefetch_pays_is_also_stored(speeds: Rates, tokens: int, bytes_: int) -> None:
    break_even = BreakEven()
    break_even.use_rates(speeds)
    pays = break_even.would(Route.PREFETCH, tokens, bytes_) is Decision.PAYS
    assert not pays or break_even.would(Route.STORE, tokens, bytes_) is Decision.PAYS


@pytest.mark.parametrize("unknown", [name for name in Rates._fields if not name.endswith("operations_per_s")])
def test_while_a_speed_is_unknown_all_runs_are_stored(unknown: str) -> None:
    break_even = measured(host=1, storage=1)
    break_even.use_rates(break_even.rates()._replace(**{unknown: 0}))
    assert {decide(break_even, Route.STORE) for _ in range(3 * PROBE_EVERY)} == {Decision.UNMEASURED}


def test_with_writes_always_an_engine_stores_runs_for_others_that_do_not_pay_here() -> None:
    break_even = measured(storage=SLOW, config=BreakEvenConfig(writes="always"))
    assert decide(break_even, Route.STORE) is Decision.OVERRIDDEN
    assert decide(break_even, Route.PREFETCH) is Decision.TOO_SLOW


SLOW_CALLS = FaultOptions(latency="100ms")


class MeasuredStore:
    """A cache with a prefill of one token per millisecond, which has measured a store that is faster."""

    def __init__(self, *, probe_every: int) -> None:
        given = Rates(prefill_tokens_per_s=1000, host_bytes_per_s=1 << 50)
        self.driver = MemoryDriver()
        self.faults = FaultyDriver(self.driver)
        backend = Store(self.faults, codec(), UNGUARDED)
        self.world = World(backend=backend, break_even=BreakEven(given=given, probe_every=probe_every))
        self.prompts = itertools.count(1)
        self.world.serve("store", KEY)
        for _ in range(WINDOW):
            assert self.is_read()

    def is_read(self) -> bool:
        self.world.forget()
        return self.world.serve(f"r{next(self.prompts)}", KEY).storage_hit_tokens > 0

    def stores(self, count: int) -> int:
        """Serve `count` new prompts of two pages, handed over one by one; return how many of them were stored."""
        before = self.driver.measure().pages
        for _ in range(count):
            number = next(self.prompts)
            request = self.world.begin(f"r{number}", key := prompt(1000 + number, 7, tail=0))
            self.world.cache.cache_unfinished_req(request, key.head(4))
            self.world.cache.cache_finished_req(request, key)
            self.world.settle()
        return (self.driver.measure().pages - before) // 2

    @property
    def refused(self) -> int:
        return self.world.cache.statistics().skipped["store_does_not_pay"]


@pytest.mark.long
@pytest.mark.parametrize("probe_every", [4, 1 << 30])
def test_a_store_that_becomes_slow_gets_only_probe_writes_until_it_is_fast(probe_every: int) -> None:
    """The control, without probes, does not notice that the store is fast again."""
    probes = probe_every == 4
    s = MeasuredStore(probe_every=probe_every)
    assert s.stores(8) == 8 and s.refused == 0
    s.faults.options = SLOW_CALLS
    for _ in range(USUAL_PROBES):
        assert s.is_read()
    refused = s.refused
    assert s.stores(8) == (2 if probes else 0)
    assert s.refused > refused
    s.faults.options = FaultOptions()
    for _ in range(WINDOW * 4):
        s.is_read()
    assert s.stores(8) == (8 if probes else 0)
