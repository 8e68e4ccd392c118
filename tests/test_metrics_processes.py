"""Several engines of one node: an exporter each, promtool's word on what they export, and a Prometheus that adds up."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.prometheus import Prometheus, checked
from tests.waiting import wait_for

pytestmark = pytest.mark.long


@contextmanager
def engine(requests: int, port: int = 0) -> Iterator[str]:
    """An engine that has served so many requests; where its exporter listens, empty if it did not start."""
    environ = {**os.environ, "HICACHE_METRICS__PORT": str(port)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.exporting", str(requests)], env=environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None and process.stderr is not None
            told = process.stdout.readline().strip()
            yield f"127.0.0.1:{told}" if told else process.stderr.read()
        finally:
            process.kill()


def test_two_engines_export_what_each_counts_and_prometheus_adds_them_up(tmp_path: Path) -> None:
    with ExitStack() as stack:
        targets = [stack.enter_context(engine(requests)) for requests in (3, 4)]
        for target, requests in zip(targets, (3, 4), strict=True):
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            assert f"hicache_requests_total {requests}.0\n" in text
            assert checked(text) == ""
        jobs = [(f"engine-{number}", target) for number, target in enumerate(targets)]
        prometheus = stack.enter_context(Prometheus(tmp_path, jobs))
        wait_for(lambda: prometheus.values("sum(hicache_requests_total)") == [7.0], timeout_s=30, pause_s=0.2)
        assert len(prometheus.values("hicache_build_info")) == 2


def test_promtool_objects_to_a_metric_that_breaks_the_rules() -> None:
    """The control."""
    assert "non-counter" in checked("# HELP hicache_x_total Help.\n# TYPE hicache_x_total gauge\nhicache_x_total 1\n")


def test_a_second_engine_on_a_taken_port_says_which(tmp_path: Path) -> None:
    with engine(0) as first:
        port = int(first.rpartition(":")[2])
        with engine(0, port) as second:
            assert f"metrics: cannot listen on 127.0.0.1 port {port}" in second
