"""The scrape example with TLS and a token, with a real Prometheus, a real daemon and an engine's exporter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.cache import create_cache
from hicache.config import HiCacheConfig
from hicache.geometry import KVGeometry
from hicache.keys import Namespace
from hicache.metrics import serve_configured
from hicache_lab.devservers.ports import LOOPBACK
from tests.certificates import make_certificates
from tests.daemon.daemons import Daemon
from tests.mounted import MountedSecret
from tests.prometheus import Prometheus
from tests.proxy import Proxy
from tests.waiting import wait_for

pytestmark = pytest.mark.servers
EXAMPLE = Path(__file__).resolve().parents[2] / "deploy/prometheus/prometheus-tls.yml"
PAUSE_S = 0.2
OLD, NEW = "old-token-of-scrapers", "new-token-of-scrapers"


def jobs(secrets: MountedSecret, targets: dict[str, str]) -> list[dict[str, Any]]:
    """Return the jobs of the example for these targets, with its files in `secrets`."""
    text = EXAMPLE.read_text(encoding="utf-8").replace("/etc/prometheus/hicache/", f"{secrets.folder}/")
    found: list[dict[str, Any]] = yaml.safe_load(text)["scrape_configs"]
    for job in found:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    return found


@pytest.fixture
def engine() -> Iterator[int]:
    """The port of an engine's exporter."""
    geometry = KVGeometry(layers=2, heads=1, head_dim=4, page_size=4, dtype="float32")
    config = HiCacheConfig.model_validate({"page_size": 4, "device": {"tokens": 64}, "host": {"tokens": 64},
                                           "metrics": {"port": 0}})
    with create_cache(config, Namespace(model="scraped", geometry=geometry)) as cache:
        metrics = serve_configured(config, cache.statistics)
        assert metrics is not None
        with metrics:
            yield metrics.port


@pytest.mark.long
def test_the_example_scrapes_a_daemon_and_an_engine_and_follows_a_replaced_token(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, engine: int
) -> None:
    """The control: while only the daemon has the new token, Prometheus cannot scrape it."""
    made = make_certificates(tmp_path_factory.mktemp("certificates"))
    files: dict[str, str | bytes] = {
        "ca.crt": made.ca_file.read_bytes(), "tls.crt": made.client_cert_file.read_bytes(),
        "tls.key": made.client_key_file.read_bytes(), "token": OLD, "engine-token": "unused",
    }
    served = MountedSecret(tmp_path / "served", {"token": OLD})
    mounted = MountedSecret(tmp_path / "mounted", files)
    (tmp_path / "daemon").mkdir(mode=0o700)
    daemon = Daemon(tmp_path / "daemon")
    daemon.configure({
        "listen": f"0.0.0.0:{daemon.port}", "token_file": str(served["token"]), "pool": 0,
        "tls": {"certificate": str(made.cert_file), "key": str(made.key_file), "client_ca": str(made.ca_file)},
    })
    with ExitStack() as stack:
        stack.enter_context(daemon)
        proxy = stack.enter_context(Proxy(engine, tls=made.server_context()))
        targets = {"hicache-daemon": f"{LOOPBACK}:{daemon.port}", "hicache": f"{LOOPBACK}:{proxy.port}"}
        prometheus = stack.enter_context(Prometheus(tmp_path, jobs=jobs(mounted, targets)))

        def is_up(job: str, value: int = 1) -> bool:
            return prometheus.values(f'up{{job="{job}"}}') == [value]

        wait_for(lambda: is_up("hicache-daemon") and is_up("hicache"), pause_s=PAUSE_S)
        assert prometheus.values('hicache_daemon_state{state="ready"}') == [1]
        assert prometheus.values("hicache_requests_total") == [0], "the engine's"
        served.replace({"token": NEW})
        wait_for(lambda: is_up("hicache-daemon", 0), pause_s=PAUSE_S)
        mounted.replace({**files, "token": NEW})
        wait_for(lambda: is_up("hicache-daemon"), pause_s=PAUSE_S)
