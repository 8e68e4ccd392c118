"""The exporter: a scrape over HTTP shows what the snapshot says, under names that keep the rules."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hicache.backends.base import BackendStatistics, GetOutcome, SetOutcome, Usage
from hicache.backends.compose import LevelsBackend, Part
from hicache.backends.guard import (
    BOUNDS_S,
    Direction,
    GuardedBackend,
    LatencyStatistics,
    LeafStatistics,
    Override,
    leaf_statistics,
)
from hicache.backends.memory import MemoryBackend
from hicache.backends.testing import NAMESPACE, empty_frames, full_frames, make_keys, soon
from hicache.cache import Decision, Figures, Payoff, Route
from hicache.config import EventsConfig
from hicache.errors import ConfigError, InvalidInput
from hicache.events import EventStream, PublisherStatistics
from hicache.events.publisher import EventPublisher
from hicache.frame import FrameCodec
from hicache.metrics import (
    HistogramSpec,
    MetricKind,
    MetricSpec,
    SnapshotCollector,
    backend_metrics,
    cache_metrics,
    serve_metrics,
)
from tests.cache.world import World, codec, prompt
from tests.waiting import wait_for

Scraped = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A small tree as an engine would show."""

    backends: tuple[LeafStatistics, ...] = ()
    hits: int = 0


HITS: MetricSpec[Snapshot] = MetricSpec(
    "hicache_hit_tokens_total", MetricKind.COUNTER, "Tokens found.", ("tier",), lambda s: [(("device",), s.hits)]
)


def file_backend(usage: Usage | None) -> LeafStatistics:
    statistics = BackendStatistics(
        gets={GetOutcome.HIT: 3, GetOutcome.CORRUPT: 1},
        sets={SetOutcome.STORED: 5},
        corrupt={"tag": 1},
        errors={"ENOSPC": 2},
        evicted_pages=4,
        read_bytes=12288,
        written_bytes=20480,
    )
    return LeafStatistics("file", statistics, usage, None)


USAGE = Usage(pages=7, bytes=28672, capacity_bytes=1000)


def scrape(port: int, host: str = "127.0.0.1") -> Scraped:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def collector(snapshot: Snapshot, extra: Iterable[MetricSpec[Snapshot]] = ()) -> SnapshotCollector[Snapshot]:
    return SnapshotCollector(lambda: snapshot, [*backend_metrics(lambda s: s.backends), *extra])


def test_a_scrape_shows_the_statistics_of_each_backend() -> None:
    with serve_metrics(collector(Snapshot((file_backend(USAGE),)))) as server:
        found = scrape(server.port)

    def value(name: str, **labels: str) -> float:
        return found[f"hicache_backend_{name}", tuple(sorted({"backend": "file", **labels}.items()))]

    assert value("get_pages_total", outcome="hit") == 3
    assert value("get_pages_total", outcome="corrupt") == 1
    assert value("set_pages_total", outcome="stored") == 5
    assert value("corrupt_pages_total", reason="tag") == 1
    assert value("errors_total", reason="ENOSPC") == 2
    assert value("evicted_pages_total") == 4
    assert value("transferred_bytes_total", direction="read") == 12288
    assert value("transferred_bytes_total", direction="write") == 20480
    assert (value("stored_pages"), value("stored_bytes"), value("capacity_bytes")) == (7, 28672, 1000)


def test_outcomes_that_have_not_happened_are_zero_and_not_absent() -> None:
    with serve_metrics(collector(Snapshot((file_backend(USAGE),)))) as server:
        found = scrape(server.port)
    outcomes = {dict(labels)["outcome"] for name, labels in found if name == "hicache_backend_get_pages_total"}
    assert outcomes == {outcome.value for outcome in GetOutcome}
    assert found["hicache_backend_get_pages_total", (("backend", "file"), ("outcome", "miss"))] == 0


def test_a_capacity_that_the_server_sets_is_absent() -> None:
    unlimited = Usage(pages=7, bytes=28672, capacity_bytes=None)
    with serve_metrics(collector(Snapshot((file_backend(unlimited),)))) as server:
        assert not [name for name, _ in scrape(server.port) if name == "hicache_backend_capacity_bytes"]


def test_usage_that_is_not_known_yet_is_absent() -> None:
    with serve_metrics(collector(Snapshot((file_backend(None),)))) as server:
        found = {name for name, _ in scrape(server.port)}
    assert "hicache_backend_get_pages_total" in found
    assert not found & {"hicache_backend_stored_pages", "hicache_backend_stored_bytes"}


def test_a_scrape_shows_the_guard_of_each_backend() -> None:
    codec = FrameCodec(NAMESPACE, 5000)
    keys = make_keys(2)
    with closing(GuardedBackend(MemoryBackend(codec), name="near")) as guard:
        guard.batch_set(keys, full_frames(codec, keys), parent=None, deadline=soon())
        guard.batch_get(keys, empty_frames(codec, 2), deadline=soon())
        wait_for(lambda: guard.usage_sample() is not None)
        guard.override(Direction.READ, Override.OFF)
        guard.batch_get(keys, empty_frames(codec, 2), deadline=soon())
        with serve_metrics(SnapshotCollector(lambda: guard, backend_metrics(leaf_statistics))) as server:
            found = scrape(server.port)

    def value(name: str, **labels: str) -> float:
        return found[f"hicache_backend_{name}", tuple(sorted({"backend": "near", **labels}.items()))]

    assert (value("breaker_state", direction="read"), value("breaker_state", direction="write")) == (2, 0)
    assert (value("override", direction="read"), value("override", direction="write")) == (1, 0)
    assert value("refused_calls_total", direction="read", reason="open") == 1
    assert value("breaker_opens_total", direction="read") == value("retried_calls_total", direction="read") == 0
    assert value("probes_total", direction="write", outcome="good") == 0
    assert value("in_flight_bytes") == value("in_flight_calls") == value("overdue_calls") == 0
    assert value("errors_total", reason="guard_open") == 1
    assert value("stored_pages") == 2
    calls = {verb: value("call_seconds_count", verb=verb) for verb in ("exists", "get", "set", "delete")}
    assert calls == {"exists": 0, "get": 1, "set": 1, "delete": 0}
    assert value("call_seconds_bucket", verb="get", le="+Inf") == 1


def test_a_scrape_shows_the_copies_of_compositions_by_the_part_they_go_to() -> None:
    near, top, low = (Part(name, MemoryBackend(codec())) for name in ("near", "top", "low"))
    far = Part("far", LevelsBackend(codec(), [top, low]))
    with closing(World(backend=LevelsBackend(codec(), [near, far]))) as world:
        world.serve("one", prompt(1, 2))
        world.until(lambda: world.cache.statistics().controller.copies["far/low"].copied == 2)
        with serve_metrics(SnapshotCollector(world.cache.statistics, cache_metrics())) as server:
            found = scrape(server.port)

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
    counts = (3, 0, 2, *(0 for _ in BOUNDS_S[3:]), 1)
    latency = LatencyStatistics(counts, 31.5)
    spec: HistogramSpec[None] = HistogramSpec("hicache_wait_seconds", "Help.", (), lambda s: [((), latency)])
    with serve_metrics(SnapshotCollector(lambda: None, [spec])) as server:
        found = scrape(server.port)
    buckets = {labels[0][1]: value for (name, labels), value in found.items() if name.endswith("_bucket")}
    assert len(buckets) == len(BOUNDS_S) + 1
    assert [buckets[bound] for bound in ("0.0001", "0.0002", "0.0004", "0.0008", "+Inf")] == [3, 3, 5, 5, 6]
    assert (found["hicache_wait_seconds_sum", ()], found["hicache_wait_seconds_count", ()]) == (31.5, 6)


def test_every_scrape_takes_one_new_snapshot_and_registering_takes_none() -> None:
    taken: list[Snapshot] = []

    def snapshot() -> Snapshot:
        taken.append(Snapshot(hits=len(taken)))
        return taken[-1]

    with serve_metrics(SnapshotCollector(snapshot, [HITS])) as server:
        assert not taken
        values = [scrape(server.port)["hicache_hit_tokens_total", (("tier", "device"),)] for _ in range(3)]
    assert values == [0, 1, 2] and len(taken) == 3


def test_a_snapshot_that_fails_is_a_failed_scrape_and_the_next_one_works(capfd: pytest.CaptureFixture[str]) -> None:
    broken = [True]

    def snapshot() -> Snapshot:
        if broken.pop() if broken else False:
            raise InvalidInput("not now")
        return Snapshot(hits=1)

    with serve_metrics(SnapshotCollector(snapshot, [HITS])) as server:
        with pytest.raises(OSError):  # HTTP 500 or a closed connection
            scrape(server.port)
        assert scrape(server.port)["hicache_hit_tokens_total", (("tier", "device"),)] == 1
    assert "not now" in capfd.readouterr().err


def test_closing_frees_the_port_and_may_be_repeated() -> None:
    server = serve_metrics(collector(Snapshot()))
    server.close()
    server.close()
    with pytest.raises(OSError):
        scrape(server.port)
    serve_metrics(collector(Snapshot()), port=server.port).close()


def test_a_client_that_never_asks_does_not_keep_others_waiting() -> None:
    with (
        serve_metrics(collector(Snapshot(), [HITS])) as server,
        socket.create_connection(("127.0.0.1", server.port)),
    ):
        assert scrape(server.port)


def test_the_help_of_decisions_names_all_that_refuse() -> None:
    texts = {spec.name: spec.help for spec in cache_metrics()}
    refused = ", ".join(decision.value for decision in Decision if not decision.go)
    assert f"(or not: {refused})" in texts["hicache_payoff_decisions_total"]


@dataclass(frozen=True, slots=True)
class Counters:
    """A publisher that has only its counters."""

    counters: PublisherStatistics

    def close(self, timeout_s: float) -> None:
        """Nothing runs."""

    def statistics(self) -> PublisherStatistics:
        return self.counters


def test_a_scrape_shows_what_the_publisher_of_events_counts() -> None:
    counters = PublisherStatistics(
        alive=True, batches=9, events=90, slow=2, gaps=3, replays=5, refused=6, errors={"ZMQError": 8}
    )
    with closing(World()) as world:
        world.cache.record_events(EventStream(1 << 20), Counters(counters))
        with serve_metrics(SnapshotCollector(world.cache.statistics, cache_metrics())) as server:
            found = scrape(server.port)
    assert found["hicache_event_publisher_alive", ()] == 1
    assert found["hicache_event_slow_batches_total", ()] == 2
    assert found["hicache_event_gaps_total", ()] == 3
    assert found["hicache_event_refused_total", ()] == 6
    assert found["hicache_event_publisher_errors_total", (("reason", "ZMQError"),)] == 8


def test_a_cache_shows_its_publisher_and_ends_it() -> None:
    stream = EventStream(1 << 20)
    with (
        closing(World()) as world,
        closing(EventPublisher(stream, EventsConfig(endpoint="tcp://127.0.0.1:*"))) as publisher,
    ):
        assert world.cache.statistics().publisher is None
        world.cache.record_events(stream, publisher)
        running = world.cache.statistics().publisher
        world.close()
        ended = world.cache.statistics().publisher
    assert running is not None and running.alive
    assert ended is not None and not ended.alive


def test_a_scrape_shows_decisions_by_route_and_reason_and_only_speeds_that_are_known() -> None:
    payoff = Payoff()
    with closing(World(payoff=payoff)) as world:
        payoff.use_figures(Figures(prefill_tokens_per_s=20_000, host_bytes_per_s=5, host_operations_per_s=7))
        payoff.decide(Route.LOAD, 64, 1 << 20)
        with serve_metrics(SnapshotCollector(world.cache.statistics, cache_metrics())) as server:
            found = scrape(server.port)
    decisions = {labels: value for (name, labels), value in found.items() if name == "hicache_payoff_decisions_total"}
    assert len(decisions) == len(Route) * len(Decision)
    assert decisions.pop((("reason", "too_slow"), ("route", "load"))) == 1
    assert set(decisions.values()) == {0}
    speeds = {key: value for key, value in found.items() if re.match("hicache_payoff_.*per_second", key[0])}
    assert speeds == {
        ("hicache_payoff_prefill_tokens_per_second", ()): 20_000,
        ("hicache_payoff_bandwidth_bytes_per_second", (("tier", "host"),)): 5,
        ("hicache_payoff_operations_per_second", (("tier", "host"),)): 7,
    }


def test_only_loopback_is_listened_on_unless_allowed() -> None:
    with pytest.raises(ConfigError, match="allow_remote"):
        serve_metrics(collector(Snapshot()), "192.0.2.1")


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with serve_metrics(collector(Snapshot())) as server, pytest.raises(ConfigError, match="cannot listen"):
        serve_metrics(collector(Snapshot()), port=server.port)


@pytest.mark.parametrize(
    ("name", "kind", "text", "labels"),
    [
        ("hit_tokens_total", MetricKind.COUNTER, "Help.", ()),
        ("hicache_Hits_total", MetricKind.COUNTER, "Help.", ()),
        ("hicache_hits", MetricKind.COUNTER, "Help.", ()),
        ("hicache_hits_total", MetricKind.GAUGE, "Help.", ()),
        ("hicache_hits_total", MetricKind.COUNTER, "Help.", ("tenant",)),
        ("hicache_hits_total", MetricKind.COUNTER, "", ()),
    ],
)
def test_a_metric_that_breaks_the_naming_rules_is_refused(
    name: str, kind: MetricKind, text: str, labels: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidInput, match=name):
        MetricSpec[Snapshot](name, kind, text, labels, lambda s: [])
    if kind is MetricKind.GAUGE or name.endswith("_total"):
        with pytest.raises(InvalidInput, match=name):
            HistogramSpec[Snapshot](name, text, labels, lambda s: [])


def test_two_metrics_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match="hicache_hit_tokens_total"):
        SnapshotCollector(Snapshot, [HITS, HITS])
