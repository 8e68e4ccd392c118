"""The metrics of a daemon: values from snapshots, and a scrape of a real daemon that promtool checks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from hicache.backends.base import Direction
from hicache.backends.guard import HealthState
from hicache.backends.guard.health import problem
from hicache.backends.storage import unopened
from hicache.daemon import gate
from hicache.daemon.metrics import DAEMON_METRICS, NAMESPACE_METRICS, daemon_collector
from hicache.daemon.statistics import LIMITS, ClientStatistics, NodeStatistics, SharingStatistics
from hicache.metrics.spec import LABELS, MetricSpec
from hicache.metrics.stores import STORE_METRICS
from tests.daemon.daemons import Client, Daemon, keys_of, write
from tests.daemon.snapshots import MIB, guard, namespace, node, store
from tests.prometheus import checked
from tests.waiting import wait_for

Found = dict[tuple[str, frozenset[tuple[str, str]]], float]
ROOT = Path(__file__).resolve().parents[2]


def parsed(text: str) -> Found:
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def exported(state: NodeStatistics) -> Found:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(daemon_collector(lambda: state))
    return parsed(generate_latest(registry).decode())


def value(found: Found, name: str, **labels: str) -> float:
    return found[f"hicache_{name}", frozenset(labels.items())]


def test_requests_are_counted_by_status_class_and_start_at_zero() -> None:
    found = exported(node(requests={("get", 200): 12, ("get", 503): 1, ("set", 204): 4}))
    assert value(found, "daemon_requests_total", operation="get", status="2xx") == 12
    assert value(found, "daemon_requests_total", operation="get", status="5xx") == 1
    assert value(found, "daemon_requests_total", operation="exists", status="5xx") == 0
    assert value(found, "daemon_request_seconds_count", operation="delete") == 0
    assert value(found, "daemon_request_seconds_count", operation="get") == 12


def test_each_namespace_has_its_own_series() -> None:
    other = namespace(label="qwen", namespace="a1" * 32, sharing=SharingStatistics(7, 2, 1, 3, 0), quota_bytes=9)
    found = exported(node(namespace(), other))
    assert value(found, "daemon_pages_total", namespace="a1a1a1a1", source="pool") == 7
    assert value(found, "daemon_pages_total", namespace="5e5e5e5e", source="pool") == 0
    assert value(found, "daemon_namespace_info", namespace="a1a1a1a1", label="qwen", weights_epoch="3") == 1
    assert value(found, "daemon_namespace_quota_bytes", namespace="a1a1a1a1") == 9
    assert ("hicache_daemon_namespace_quota_bytes", frozenset({("namespace", "5e5e5e5e")})) not in found
    assert value(found, "backend_stored_bytes", namespace="a1a1a1a1", backend="nvme") == 300 * MIB
    alone = exported(node(other))
    assert {name for name, labels in found} == {name for name, labels in alone}


def test_series_of_failures_and_limits_exist_before_the_first_event() -> None:
    before = exported(node(namespace(), refused={}))
    failing = store(guard=guard(failures={(Direction.READ, "error"): 3}))
    after = exported(node(namespace(stores=(failing,)), refused=dict.fromkeys(LIMITS, 1)))
    assert set(after) == set(before)
    labels = {"namespace": "5e5e5e5e", "backend": "nvme", "direction": "read", "reason": "error"}
    assert value(after, "backend_failed_calls_total", **labels) == 3
    assert value(after, "daemon_refused_requests_total", reason="token") == 1


def test_a_store_that_keeps_nothing_is_one_and_others_are_zero() -> None:
    full = store("full", health=problem(HealthState.KEEPS_NOTHING, 5.0, "rejected"))
    unread = store("unread", health=problem(HealthState.FAILING, 5.0, "dns"))
    closed = unopened("closed", 5.0, "no such directory")
    found = exported(node(namespace(stores=(full, unread, closed, store("idle")))))
    shown = {name: value(found, "backend_keeps_nothing", namespace="5e5e5e5e", backend=name)
             for name in ("full", "unread", "closed", "idle")}
    assert shown == {"full": 1, "unread": 0, "closed": 1, "idle": 0}


def limits_in_the_source() -> Iterator[str]:
    for path in (ROOT / "hicache/daemon").glob("*.py"):
        for call in re.finditer(r"(?:\brefuse|_refuse|_raise|_limit_time)\(([^)\n]*\"[a-z_]+\")", path.read_text()):
            yield from re.findall(r'"([a-z_]+)"', call[1])


def test_every_limit_in_the_source_is_in_the_table() -> None:
    found = set(limits_in_the_source())
    assert found >= {"token", "peer", "head_timeout", "body_bytes"}  # the control of the search
    assert found <= set(LIMITS)


def test_every_request_has_an_operation_of_the_table() -> None:
    paths = ("/", "/livez", "/x", "/v1", "/v1/x", "/v1/namespaces", "/v1/admin/x", "/history")
    requests = [("GET", path) for path in paths]
    requests += [("PUT", "/v1/namespaces/aa"), ("POST", "/v1/namespaces/aa/get"), ("POST", "/v1/namespaces/aa/x")]
    requests += [("PUT", "/v1/memory/a"), ("DELETE", "/v1/memory/a")]
    assert {gate.operation_of(*one) for one in requests} <= gate.OPERATIONS


def test_every_metric_follows_the_naming_rules() -> None:
    specs: list[MetricSpec[Any]] = [*DAEMON_METRICS, *NAMESPACE_METRICS]
    for spec in specs:
        assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", spec.name)
        assert spec.help.endswith(".") and spec.act.endswith((".", "`.")), spec.name
        assert set(spec.labels) <= LABELS
    assert len({spec.name for spec in specs}) == len(specs)
    assert not {spec.name for spec in specs} & {spec.name for spec in STORE_METRICS}


def test_a_scrape_of_a_real_daemon_passes_promtool_and_has_the_expected_counts(daemon: Daemon, client: Client) -> None:
    assert write(client, keys_of(3))[1]["outcomes"] == ["stored"] * 3
    # Usage is measured on another thread, and has no series before the first measurement.
    wait_for(lambda: daemon.status()["namespaces"][0]["stores"][0]["usage"] is not None)
    text = client.call("GET", "/metrics")[1].decode()
    assert checked(text) == ""
    found = parsed(text)
    label = {"namespace": "abababab"}
    assert value(found, "daemon_set_pages_total", **label, outcome="stored") == 3
    assert value(found, "daemon_requests_total", operation="write", status="2xx") == 1
    assert value(found, "daemon_state", state="ready") == 1
    assert value(found, "backend_set_pages_total", **label, backend="memory", outcome="stored") == 3
    absent = {"daemon_namespace_quota_bytes", "backend_copies_total", "backend_waiting_copies"}
    absent.add("backend_capacity_bytes")  # a memory store has no capacity
    names = {re.sub("_(bucket|count|sum)$", "", name) for name, _ in found}
    specs: list[MetricSpec[Any]] = [*DAEMON_METRICS, *NAMESPACE_METRICS, *STORE_METRICS]
    for spec in specs:
        assert f"hicache_{spec.name}" in names or spec.name in absent, spec.name


def test_an_ended_engine_is_counted_until_its_memory_is_unmapped() -> None:
    clients = (ClientStatistics("engine0", 64, MIB, 1, True), ClientStatistics("engine1", 64, MIB, 1, False))
    found = exported(node(clients=clients))
    assert (value(found, "daemon_clients"), value(found, "daemon_gone_clients")) == (2, 1)


def test_without_namespaces_there_are_no_series_of_stores() -> None:
    found = exported(replace(node(), clients=()))
    assert value(found, "daemon_clients") == value(found, "daemon_client_memory_bytes") == 0
    assert not [name for name, _ in found if name.startswith("hicache_backend_")]
