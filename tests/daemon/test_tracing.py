"""Spans of a daemon's calls, in the trace of its clients."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache import tracing
from hicache.backends.opening import StorageOpener
from hicache.backends.remote.client import DaemonClient, open_access
from hicache.backends.storage import Storage
from hicache.config import HiCacheConfig
from hicache.config.remote_storage import RemoteStorageOptions
from hicache_lab.devservers.ports import LOOPBACK
from tests.cache.world import World, codec, prompt
from tests.daemon.daemons import Daemon
from tests.spans import COUNTS, HEADERS, OUTCOMES, STORES, TRACE_ID, Recorder, Spans, recording
from tests.waiting import wait_for

KEY = prompt(1, 2, 3)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recording() as made:
        yield made


def traced(folder: Path, endpoint: str, **entries: object) -> Daemon:
    """Return a daemon that exports its spans to `endpoint`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    daemon = Daemon(folder, entries, tracing={"enabled": True})
    daemon.environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    return daemon


def remote(daemon: Daemon) -> Storage:
    """Open a store at the daemon."""
    options = {"socket": str(daemon.socket)}
    return StorageOpener(HiCacheConfig(storage={"type": "remote", "options": options})).open(codec())


@pytest.mark.parametrize(("pool", "source"), [("4MiB", "pool_hits"), (0, "store_hits")])
def test_the_calls_of_a_request_and_the_work_of_the_daemon_are_one_trace(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, pool: object, source: str
) -> None:
    with traced(tmp_path / "daemon", recorder.url, pool=pool) as daemon:
        world = World(backend=remote(daemon))
        world.serve("first", KEY)
        world.close()
        spans = Spans(monkeypatch)
        world = World(backend=remote(daemon))
        assert world.cache.prefetch_from_storage("a", KEY, trace=HEADERS)
        world.arrive("a")
        assert world.attempt("a", KEY).storage_hit_tokens == 12
        world.close()
        assert daemon.stop() == 0
    spans.check()
    calls = {f"{span.context.span_id:016x}": span.name for span in spans.ended}
    received = [span for span in recorder.spans() if span[1] == TRACE_ID]
    parents = {(name, calls.get(parent)) for name, _, parent, _ in received if name.startswith("daemon.")}
    assert parents == {("daemon.exists", "hicache.store.exists"), ("daemon.read", "hicache.store.get")}
    found = {name: [values for other, _, _, values in received if other == name] for name, *_ in received}
    assert found["daemon.exists"] == [{"status": 200}]
    assert found["pool.exists"] == [{"pages": 3, "hit_pages": 3}]
    for reads in (found["pool.get"], found["store.get"] if source == "store_hits" else found["pool.get"]):
        assert sum(int(read["pages"]) for read in reads) == 3  # a client reads in parts, over its connections
    assert sum(int(read[source]) for read in found["pool.get"]) == 3
    names = {**dict.fromkeys(OUTCOMES, "outcome"), **dict.fromkeys(STORES, "store")}
    for _, _, _, values in recorder.spans():
        assert all(type(value) is int if name in COUNTS else names[value] == name for name, value in values.items())


def test_a_daemon_ends_although_its_collector_hangs(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        port = silent.getsockname()[1]
        daemon = traced(tmp_path / "daemon", f"http://{LOOPBACK}:{port}")
        daemon.environ["OTEL_EXPORTER_OTLP_TIMEOUT"] = "600"
        with daemon:
            daemon.ask("DELETE", f"/v1/namespaces/{'ab' * 32}?engine=ab")
            assert daemon.stop() == 0


@pytest.mark.parametrize("is_on", [False, True])
def test_a_client_sends_its_trace_only_with_spans(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    if is_on:
        Spans(monkeypatch)
    client = DaemonClient(open_access(RemoteStorageOptions(url=recorder.url), {}))
    with tracing.span("store.touch", tracing.context_of(HEADERS)):
        assert client.call("POST", "/v1/namespaces/x/touch", {}, deadline=math.inf) == {}
    client.close()
    (headers,) = recorder.headers
    assert [text.split("-")[1] for name, text in headers.items() if name == "traceparent"] == [TRACE_ID] * is_on


def test_without_tracing_a_daemon_ignores_the_header(tmp_path: Path, recorder: Recorder) -> None:
    (tmp_path / "daemon").mkdir(mode=0o700)
    daemon = Daemon(tmp_path / "daemon")
    daemon.environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": recorder.url}
    with daemon:
        assert daemon.ask("GET", "/livez")[0] == 200
        wait_for(daemon.is_ready)
        assert daemon.stop() == 0
    assert not recorder.bodies
