"""Several engines of one node: an exporter each, promtool's word on what they export, and a Prometheus that adds up."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.prometheus import Prometheus, checked
from tests.waiting import wait_for

pytestmark = pytest.mark.long


def started(requests: int, port: int = 0) -> subprocess.Popen[str]:
    """An engine that will have served so many requests when it tells its port."""
    environ = {**os.environ, "HICACHE_METRICS__PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.exporting", str(requests)], env=environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )


def told(engine: subprocess.Popen[str]) -> str:
    """Where its exporter listens; what it complains of, if it does not start."""
    assert engine.stdout is not None and engine.stderr is not None
    port = engine.stdout.readline().strip()
    return f"127.0.0.1:{port}" if port else engine.stderr.read()


@pytest.fixture(scope="module")
def targets() -> Iterator[list[str]]:
    """The exporters of two engines that have served 3 and 4 requests."""
    with ExitStack() as stack:
        engines = []
        for requests in (3, 4):
            engines.append(stack.enter_context(started(requests)))
            stack.callback(engines[-1].kill)
        yield [told(engine) for engine in engines]


def test_two_engines_export_their_own_counts_and_prometheus_adds_them_up(targets: list[str], tmp_path: Path) -> None:
    for target, requests in zip(targets, (3, 4), strict=True):
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        assert f"hicache_requests_total {requests}.0\n" in text
        assert checked(text) == ""
    jobs = [(f"engine-{number}", target) for number, target in enumerate(targets)]
    with Prometheus(tmp_path, jobs) as prometheus:
        wait_for(lambda: prometheus.values("sum(hicache_requests_total)") == [7.0], timeout_s=30, pause_s=0.2)
        assert len(prometheus.values("hicache_build_info")) == 2


def test_promtool_objects_to_a_metric_that_breaks_the_rules() -> None:
    """The control."""
    assert "non-counter" in checked("# HELP hicache_x_total Help.\n# TYPE hicache_x_total gauge\nhicache_x_total 1\n")


def test_a_second_engine_on_a_port_in_use_names_the_port(targets: list[str]) -> None:
    port = int(targets[0].rpartition(":")[2])
    with started(0, port) as second:
        try:
            assert f"metrics: cannot listen on 127.0.0.1 port {port}" in told(second)
        finally:
            second.kill()
