"""Each panel and each rule gives results on a real Prometheus that scrapes a real engine and a real daemon."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.cache import TreeCache, create_cache
from hicache.config import HiCacheConfig, TransferConfig
from hicache.geometry import KVGeometry
from hicache.keys import Namespace, RadixKey
from hicache.metrics import serve_configured
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from hicache_lab.faults import spoiled
from tests.daemon.traffic import BusyDaemon
from tests.prometheus import Prometheus
from tests.tuned import tuned

pytestmark = [pytest.mark.servers, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[2]
RULES = [ROOT / "deploy/prometheus" / name for name in ("recording.rules.yml", "alerts.rules.yml")]
GEOMETRY = KVGeometry(layers=2, heads=1, head_dim=4, page_size=4, dtype="float32")
# The interval of rates. Targets are scraped every second, so a rate is known after a few scrapes.
RATE = "10s"
RUN_S = 40.0


def engine_config(folder: Path) -> HiCacheConfig:
    """Return the configuration of an engine with events and two stores, one of which fails and damages pages."""
    near, far = (
        {"type": "file", "options": {"path": str(folder / name), "capacity": "1MiB"}} for name in ("nvme", "shared")
    )
    far = spoiled(far, error_share=0.2, damage_share=0.1, seed=1)
    levels = [{"name": "nvme", **near}, {"name": "shared", **far}]
    return HiCacheConfig.model_validate({
        "page_size": GEOMETRY.page_size, "device": {"tokens": 256}, "host": {"tokens": 512},
        "prefetch": {"threshold_tokens": 8}, "load_back_threshold_tokens": 4, "sessions": {"enabled": True},
        # Room for the copies of one request, so that those of a second one are rejected while they run.
        "transfer": tuned(TransferConfig, write_pages_max=13),
        "storage": {"type": "levels", "options": {"levels": levels}},
        "events": {"endpoint": f"tcp://{LOOPBACK}:{free_ports(1)[0]}"}, "metrics": {"port": 0},
    })


def serve(cache: TreeCache, rid: str, tokens: list[int]) -> None:
    """Serve one request as an engine, without computing."""
    key = RadixKey.of(tokens)
    cache.prefetch_from_storage(rid, key)
    while not cache.check_prefetch_progress(rid):
        cache.poll()
        time.sleep(0.0005)
    request = cache.begin_request(rid, key)
    if request is not None:
        cache.start_loading()
        cache.cache_finished_req(request, key)
    cache.poll()


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the name and the expression of each panel and each rule."""
    for path in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):  # a row has none
                expression = re.sub(r"\$__(rate_interval|range)\b", RATE, target["expr"]).replace("$instance", ".*")
                yield f"{path.stem}: {panel['title']} ({target['legendFormat']})", expression
    for rule in rules():
        for number, part in enumerate(conditions(rule["expr"])):
            yield f"{rule.get('alert') or rule['record']} {number}", re.sub(r" offset \w+", "", part)


def rules() -> Iterator[Any]:
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def conditions(expression: str) -> list[str]:
    """Return the joined conditions of an expression, each without its comparison."""
    parts = re.split(r"\s+(?:unless|or|and)\s+", expression)
    return [re.split(r"\s(?:==|<|>)\s(?!0\))", part)[0] for part in parts]


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="hicache-test-"))
    yield made
    shutil.rmtree(made)


def test_every_panel_and_every_rule_gives_results(folder: Path) -> None:
    config = engine_config(folder)
    with ExitStack() as stack:
        daemon = stack.enter_context(BusyDaemon(folder))
        cache = stack.enter_context(create_cache(config, Namespace(model="stamp", geometry=GEOMETRY)))
        metrics = serve_configured(config, cache.statistics)
        assert metrics is not None
        stack.enter_context(metrics)
        targets = [("hicache", f"{LOOPBACK}:{metrics.port}"), ("hicache-daemon", daemon.target)]
        prometheus = stack.enter_context(Prometheus(folder, targets, RULES))
        remaining = dict(expressions())
        numbers = itertools.count()
        deadline_s = time.monotonic() + RUN_S
        while remaining and time.monotonic() < deadline_s:
            daemon.serve(rounds=1, pages=4)
            ends_s = time.monotonic() + 1
            while time.monotonic() < ends_s:
                number = next(numbers)
                # New prompts evict older ones; each third request repeats one that is on the host or in storage.
                first = number if number % 3 else max(0, number - 40)
                serve(cache, str(number), [first * 7 % 1009 + place for place in range(48)])
            remaining = {name: query for name, query in remaining.items() if not prometheus.values(query)}
        assert not remaining
        assert not [(rule["name"], rule["lastError"]) for rule in prometheus.rules() if rule["health"] == "err"]
        # The control: an expression about a metric that does not exist is empty.
        assert not prometheus.values("rate(hicache_no_such_metric_total[1m])")
