"""The exporter: a scrape over HTTP shows what the snapshot says, under names that keep the rules."""

from __future__ import annotations

import dataclasses
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from hicache import __version__, ghosts
from hicache.backends.base import BackendStatistics, Direction, GetOutcome, SetOutcome, Usage
from hicache.backends.compose import Levels, Part
from hicache.backends.errors import ErrorKind
from hicache.backends.guard import IDLE, Override, Refusal
from hicache.backends.memory import MemoryDriver
from hicache.backends.storage import StoreStatistics, store_statistics
from hicache.backends.store import Store
from hicache.cache.break_even import BreakEven, Decision, Rates, Route
from hicache.cache.report import LIMITS
from hicache.cache.statistics import CacheStatistics, SessionStatistics
from hicache.config import HiCacheConfig
from hicache.errors import ConfigError, InvalidInput
from hicache.events import PublisherStatistics
from hicache.frame import Damage, FrameCodec
from hicache.histogram import BOUNDS_S, SIZE_BOUNDS_BYTES, Histogram, HistogramStatistics
from hicache.metrics import serve_configured
from hicache.metrics.families import CACHE_METRICS, cache_collector
from hicache.metrics.server import MetricsServer
from hicache.metrics.spec import BUILD_INFO, LABELS, MetricSpec, SnapshotCollector
from hicache.metrics.stores import STORE_METRICS, store_table
from hicache_lab.conformance import NAMESPACE, empty_frames, full_frames, make_keys, memory_store, soon
from hicache_lab.metrics_page import page
from tests.cache.world import GEOMETRY, World, codec, prompt
from tests.ranks import Exchange
from tests.waiting import wait_for


def guarded() -> Store:
    return Store(MemoryDriver(), codec(), name="near")


Scraped = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def values_of(found: Scraped, prefix: str, **common: str) -> Callable[..., float]:
    """Return a function that returns the sample of a name, without its prefix, and labels besides the common ones."""
    return lambda name, **labels: found[f"{prefix}{name}", tuple(sorted({**common, **labels}.items()))]


def file_backend(usage: Usage | None) -> StoreStatistics:
    statistics = BackendStatistics(
        gets={GetOutcome.HIT: 3, GetOutcome.CORRUPT: 1},
        sets={SetOutcome.STORED: 5},
        corrupt={"tag": 1},
        errors={"ENOSPC": 2},
        evicted_pages=4,
        read_bytes=12288,
        written_bytes=20480,
        expired_pages=6,
    )
    return StoreStatistics("file", statistics, usage, None, IDLE)


USAGE = Usage(pages=7, bytes=28672, capacity_bytes=1000)


def found_in(collector: Collector) -> Scraped:
    """What a scraper reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def of_stores(*stores: StoreStatistics) -> Collector:
    """The collector of some stores."""
    return SnapshotCollector(lambda: stores, store_table(lambda found: found))


def shown(world: World) -> Scraped:
    return found_in(cache_collector(world.cache.statistics))


def served(statistics: Callable[[], CacheStatistics | None], **section: Any) -> MetricsServer:
    server = serve_configured(HiCacheConfig.model_validate({"metrics": {"port": 0} | section}), statistics)
    assert server is not None
    return server


def scrape(port: int, host: str = "127.0.0.1") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as response:
        return str(response.read().decode())


def test_a_scrape_shows_the_statistics_of_each_backend() -> None:
    value = values_of(found_in(of_stores(file_backend(USAGE))), "hicache_backend_", backend="file")
    assert value("get_pages_total", outcome="hit") == 3
    assert value("get_pages_total", outcome="corrupt") == 1
    assert value("set_pages_total", outcome="stored") == 5
    assert value("corrupt_pages_total", reason="tag") == 1
    assert value("errors_total", reason="ENOSPC") == 2
    assert value("evicted_pages_total") == 4
    assert value("expired_pages_total") == 6
    assert value("transferred_bytes_total", direction="read") == 12288
    assert value("transferred_bytes_total", direction="write") == 20480
    assert (value("stored_pages"), value("stored_bytes"), value("capacity_bytes")) == (7, 28672, 1000)


def test_unknown_values_are_absent() -> None:
    usage = {"hicache_backend_stored_pages", "hicache_backend_stored_bytes", "hicache_backend_capacity_bytes"}
    assert not usage & {name for name, _ in found_in(of_stores(file_backend(None)))}
    unlimited = found_in(of_stores(file_backend(Usage(pages=7, bytes=28672, capacity_bytes=None))))
    assert usage - {name for name, _ in unlimited} == {"hicache_backend_capacity_bytes"}


def test_a_scrape_shows_the_guard_of_each_backend() -> None:
    codec = FrameCodec(NAMESPACE, 5000)
    keys = make_keys(2)
    with closing(Store(MemoryDriver(), codec, name="near")) as guard:
        guard.batch_set(keys, full_frames(codec, keys), parent=None, deadline=soon())
        guard.batch_get(keys, empty_frames(codec, 2), deadline=soon())
        wait_for(lambda: guard.usage_sample() is not None)
        guard.override(Direction.READ, Override.OFF)
        guard.batch_get(keys, empty_frames(codec, 2), deadline=soon())
        found = found_in(of_stores(*store_statistics(guard)))
    value = values_of(found, "hicache_backend_", backend="near")
    assert (value("breaker_state", direction="read"), value("breaker_state", direction="write")) == (2, 0)
    assert (value("override", direction="read"), value("override", direction="write")) == (1, 0)
    assert value("refused_calls_total", direction="read", reason="open") == 1
    assert value("breaker_opens_total", direction="read") == value("retried_calls_total", direction="read") == 0
    assert value("probes_total", direction="write", outcome="good") == 0
    assert value("in_flight_bytes") == value("in_flight_calls") == value("overdue_calls") == 0
    assert value("errors_total", reason="guard_open") == 2
    assert value("stored_pages") == 2
    calls = {verb: value("call_seconds_count", verb=verb) for verb in ("exists", "get", "set", "delete")}
    assert calls == {"exists": 0, "get": 1, "set": 1, "delete": 0}
    assert value("call_seconds_bucket", verb="get", le="+Inf") == 1


def test_a_scrape_shows_the_copies_of_compositions_by_target() -> None:
    near, top, low = (Part(name, memory_store(codec())) for name in ("near", "top", "low"))
    far = Part("far", Levels(codec(), [top, low]))
    with closing(World(backend=Levels(codec(), [near, far]))) as world:
        world.serve("one", prompt(1, 2))
        world.until(lambda: world.cache.statistics().controller.copies["far/low"].copied == 2)
        found = shown(world)

    def copies(backend: str) -> dict[str, float]:
        return {
            dict(labels)["outcome"]: value
            for (name, labels), value in found.items()
            if name == "hicache_backend_copies_total" and dict(labels)["backend"] == backend
        }

    assert copies("far/low") == {"copied": 2, "present": 0, "failed": 0, "dropped": 0}
    assert copies("far")["copied"] == 2
    assert set(copies("near").values()) == set(copies("far/top").values()) == {0}
    assert found["hicache_backend_waiting_copies", (("backend", "far/low"),)] == 0


def test_a_histogram_is_exported_with_its_bounds_cumulated() -> None:
    latency = HistogramStatistics(BOUNDS_S, (3, 0, 2, *(0 for _ in BOUNDS_S[3:]), 1), 31.5)
    spec: MetricSpec[Any] = MetricSpec("wait_seconds", "Help.", (), lambda snapshot: snapshot, "", True)
    *buckets, count, total = spec.collect([((), latency)]).samples
    assert [sample.labels["le"] for sample in buckets] == [*(f"{bound:.6g}" for bound in BOUNDS_S), "+Inf"]
    assert [sample.value for sample in buckets] == [3, 3, *(5 for _ in BOUNDS_S[2:]), 6]
    assert (count.value, total.value) == (6, 31.5)


def test_the_queues_and_workers_of_the_metrics_are_those_of_the_controller() -> None:
    with closing(World(backend=guarded())) as world:
        found, workers = shown(world), {pool.name for pool in world.controller._storage.pools.values()}
    shown_queues = {dict(labels)["queue"] for name, labels in found if name == "hicache_refused_operations_total"}
    assert {f"queue {queue}" for queue in shown_queues} == {limit for limit in LIMITS if limit.startswith("queue ")}
    assert {dict(labels)["worker"] for name, labels in found if name == "hicache_worker_errors_total"} == workers


def test_bounds_in_bytes_keep_all_their_digits() -> None:
    sizes = Histogram(SIZE_BOUNDS_BYTES)
    sizes.add(4 << 30)
    spec: MetricSpec[Any] = MetricSpec("copy_bytes", "Help.", (), lambda snapshot: snapshot, "", True)
    samples = {sample.labels.get("le"): sample.value for sample in spec.collect([((), sizes.statistics())]).samples}
    assert (samples["1073741824"], samples["4294967296"]) == (0, 1)


def test_series_start_at_zero_before_their_first_event() -> None:
    """`increase()` takes the first sample as what was there before: an event that begins a series is not seen."""
    with closing(World(backend=guarded())) as world:
        before = shown(world)
        state = world.cache.statistics()
    (store,) = state.controller.backends
    assert store.guard is not None
    kinds = [*ErrorKind, "guard_open", "raised_KeyError", "SQLITE_FULL", "EIO", "ENOTTY", "of_a_plugin"]
    errors = dict.fromkeys(kinds, 1)
    corrupt = dict.fromkeys([*Damage, "type", "checksum", "daemon", "injected", "of_a_plugin"], 1)
    guard = dataclasses.replace(
        store.guard,
        refused={(Direction.READ, refusal): 1 for refusal in Refusal},
        failures={(Direction.WRITE, reason): 1 for reason in ("error", "raised", "overdue")},
    )
    statistics = dataclasses.replace(store.statistics, errors=errors, corrupt=corrupt)
    controller = dataclasses.replace(
        state.controller,
        refused=dict.fromkeys(("write", "load", "prefetch", "backup"), 1),
        worker_errors={"io:KeyError": 2, "backup:ThreadDied": 1},
        backends=(dataclasses.replace(store, statistics=statistics, guard=guard),),
    )
    hints = {("kv.pin", "clipped"): 1, ("unknown", "rejected"): 1}
    after = found_in(cache_collector(lambda: dataclasses.replace(state, controller=controller, hints=hints)))
    counts = {key: value for key, value in after.items() if key[0].endswith(("_total", "_count"))}
    assert set(counts) <= set(before)
    assert sum(value for (name, _), value in counts.items() if name == "hicache_backend_errors_total") == len(errors)
    assert counts["hicache_worker_errors_total", (("worker", "io"),)] == 2


@pytest.mark.usefixtures("long_back_off")
def test_a_scrape_shows_steps_waits_copies_and_lookups() -> None:
    with closing(World(backend=guarded())) as world:
        world.serve("one", prompt(1, 2, 3))
        world.until(lambda: world.controller.idle)
        world.cache.clear()
        world.serve("two", prompt(1, 2, 3))
        found = shown(world)
        world.controller.gate.failed(Direction.READ)
        world.step()
        world.cache.prefetch_from_storage("three", prompt(4, 5))
        assert shown(world)["hicache_waiting_prefetches", ()] == 1
        world.cache.abort_prefetch("three")
    value = values_of(found, "hicache_")
    assert value("scheduler_step_seconds_count") > 0
    assert value("copy_seconds_count", direction="device_to_host") >= 1
    pages = value("moved_pages_total", direction="device_to_host")
    assert value("copy_bytes_sum", direction="device_to_host") == pages * GEOMETRY.payload_bytes
    assert value("backend_call_bytes_count", backend="near", verb="set") == value(
        "backend_call_seconds_count", backend="near", verb="set"
    )
    assert value("prefetch_wait_seconds_count") == 2
    assert value("waiting_prefetches") == 0
    assert value("lookups_total", outcome="miss") == value("lookups_total", outcome="whole") == 1


def test_the_prompt_tokens_of_all_sources_and_reasons_add_up() -> None:
    name = "hicache_prompt_tokens_total"
    with closing(World()) as world:
        before = shown(world)
        world.serve("one", prompt(1, 2, 3))
        world.cache.clear()
        world.serve("two", prompt(1, 2, 4))
        world.serve("three", prompt(1, 2, 4))
        found = shown(world)
    series = {labels: value for (found_name, labels), value in found.items() if found_name == name}
    value = values_of(found, "hicache_", reason="", detail="")
    assert {source: value("prompt_tokens_total", source=source) for source in ("device", "host", "storage")} == {
        "device": 12, "host": 0, "storage": 0}
    value = values_of(found, "hicache_", source="computed")
    assert value("prompt_tokens_total", reason="new", detail="") == 16
    assert value("prompt_tokens_total", reason="evicted", detail="cleared") == 8
    assert value("prompt_tokens_total", reason="tail", detail="") == 3
    assert sum(series.values()) == 39 and found["hicache_written_tokens_total", ()] == 24
    assert len(series) == 3 + len(ghosts.KINDS)
    assert not any(before[name, labels] for labels in series), "every series exists from the start"


def test_a_scrape_shows_sessions_only_if_there_are_any() -> None:
    sessions = SessionStatistics(
        open=3, holding=2, running=1, held_pages=5, own_pages=2, turns=7, continued_turns=6, tail_tokens=9,
        released={"pressure": 4},
    )
    with closing(World()) as world:
        plain = shown(world)
        state = world.cache.statistics()
    assert not [name for name, _ in plain if name.startswith("hicache_session")]
    found = found_in(cache_collector(lambda: dataclasses.replace(state, sessions=sessions)))
    assert [found["hicache_sessions", (("state", name),)] for name in ("open", "holding", "running")] == [3, 2, 1]
    assert found["hicache_session_held_bytes", ()] == 5 * state.device.page_bytes
    assert found["hicache_session_released_total", (("reason", "pressure"),)] == 4
    assert found["hicache_session_released_total", (("reason", "expired"),)] == 0


def test_the_build_is_shown_without_a_cache_too() -> None:
    found = found_in(cache_collector(lambda: None))
    (labels,) = [dict(labels) for name, labels in found if name == "hicache_build_info"]
    assert (labels["version"], labels["torch"]) == (__version__, torch.__version__)


def test_health_takes_no_snapshot_and_is_not_metrics() -> None:
    def statistics() -> None:
        raise AssertionError("a probe of health asks for no snapshot")

    with served(statistics) as server:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz", timeout=60) as response:
            assert response.read() == b"ok\n"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=60)


def test_every_scrape_takes_one_new_snapshot_and_registering_takes_none() -> None:
    with closing(World()) as world:
        taken: list[CacheStatistics] = []

        def statistics() -> CacheStatistics:
            taken.append(dataclasses.replace(world.cache.statistics(), requests=len(taken)))
            return taken[-1]

        with served(statistics) as server:
            assert not taken
            for number in range(3):
                assert f"hicache_requests_total {number}.0\n" in scrape(server.port)
    assert len(taken) == 3


def test_a_snapshot_that_fails_is_a_failed_scrape_and_the_next_one_works(capfd: pytest.CaptureFixture[str]) -> None:
    broken = [True]

    def statistics() -> None:
        if broken.pop() if broken else False:
            raise InvalidInput("not now")

    with served(statistics) as server:
        with pytest.raises(OSError):  # HTTP 500 or a closed connection
            scrape(server.port)
        assert "# HELP hicache_requests_total" in scrape(server.port)
    assert "not now" in capfd.readouterr().err


def test_closing_frees_the_port_and_may_be_repeated() -> None:
    server = served(lambda: None)
    with pytest.raises(ConfigError, match="cannot listen"):
        served(lambda: None, port=server.port)
    server.close()
    server.close()
    with pytest.raises(OSError):
        scrape(server.port)
    served(lambda: None, port=server.port).close()


def test_without_a_port_nothing_is_served_and_an_address_of_ipv6_is() -> None:
    assert serve_configured(HiCacheConfig(), lambda: None) is None
    with served(lambda: None, host="::1") as server:
        assert "hicache_requests_total" in scrape(server.port, "[::1]")


def test_the_help_of_decisions_names_all_reasons() -> None:
    texts = {spec.name: spec.help for spec in CACHE_METRICS}
    refused = ", ".join(decision.value for decision in Decision if not decision.go)
    assert f"(or not: {refused})" in texts["break_even_decisions_total"]


def test_a_scrape_shows_what_the_publisher_of_events_counts() -> None:
    counters = PublisherStatistics(
        alive=True, batches=9, events=90, slow=2, gaps=3, replays=5, refused=6, errors={"ZMQError": 8}
    )
    with closing(World()) as world:
        found = found_in(cache_collector(lambda: dataclasses.replace(world.cache.statistics(), publisher=counters)))
    assert found["hicache_event_publisher_alive", ()] == 1
    assert found["hicache_event_slow_batches_total", ()] == 2
    assert found["hicache_event_gaps_total", ()] == 3
    assert found["hicache_event_refused_total", ()] == 6
    assert found["hicache_event_publisher_errors_total", ()] == 8


def test_a_scrape_shows_decisions_by_route_and_reason_and_only_speeds_that_are_known() -> None:
    break_even = BreakEven()
    with closing(World(break_even=break_even)) as world:
        break_even.use_rates(Rates(prefill_tokens_per_s=20_000, host_bytes_per_s=5, host_operations_per_s=7))
        break_even.decide(Route.LOAD, 64, 1 << 20)
        found = shown(world)
    total = "hicache_break_even_decisions_total"
    decisions = {labels: value for (name, labels), value in found.items() if name == total}
    assert len(decisions) == len(Route) * len(Decision)
    assert decisions.pop((("reason", "too_slow"), ("route", "load"))) == 1
    assert set(decisions.values()) == {0}
    speeds = {key: value for key, value in found.items() if re.match("hicache_break_even_.*per_second", key[0])}
    assert speeds == {
        ("hicache_break_even_prefill_tokens_per_second", ()): 20_000,
        ("hicache_break_even_bandwidth_bytes_per_second", (("tier", "host"),)): 5,
        ("hicache_break_even_operations_per_second", (("tier", "host"),)): 7,
    }


def test_every_metric_keeps_the_naming_rules() -> None:
    specs: list[MetricSpec[Any]] = [BUILD_INFO, *CACHE_METRICS, *STORE_METRICS]
    for spec in specs:
        assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", spec.name) and spec.help.endswith(".")
        assert spec.act.endswith("."), spec.name
        assert set(spec.labels) <= LABELS
    assert len({spec.name for spec in specs}) == len(specs)


def test_the_page_of_metrics_is_that_of_the_code(repository: Path) -> None:
    assert (repository / "docs/metrics.md").read_text() == page(), "run: python -m hicache_lab.metrics_page"


def test_a_scrape_of_one_of_two_ranks_shows_how_many_there_are_and_how_it_waits() -> None:
    one, other = Exchange(2).ranks()
    with closing(World(ranks=one)) as first, closing(World(ranks=other)) as second:
        for _ in range(3):
            for world in (first, second):
                world.cache.poll()
        found = shown(first)
    assert (found["hicache_ranks", ()], found["hicache_rank_lost", ()]) == (2, 0)
    assert found["hicache_rank_wait_seconds_count", ()] == 2  # the first step has nothing to wait for
