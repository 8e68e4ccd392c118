"""Makes docs/metrics.md from the tables of metrics: `python -m hicache.cli.metrics_page > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ..cache.statistics import SKIP_REASONS
from ..daemon.metrics import DAEMON_METRICS, NAMESPACE_METRICS
from ..metrics.families import BUILD_INFO, CACHE_METRICS, STORE_METRICS
from ..metrics.spec import MetricSpec
from ..replay.report import REASONS

_HEAD = """\
# Metrics

This page is made from the code by `python -m hicache.cli.metrics_page`. [monitoring.md](monitoring.md) has dashboards
and alerts over these metrics, [runbooks.md](runbooks.md) what to do about an alert, [logs.md](logs.md) the log.

An engine serves its metrics with `hicache.metrics.serve_configured(config, cache.statistics)` on the port
`metrics.port`; `hicache demo --metrics-port` does. `/healthz` on the same port answers `ok` while the process answers
at all, and takes no snapshot. A daemon serves its own at `/metrics` of its sockets.

Counters end in `_total` and start at 0 with the process. Every series is there from the start, so `increase()` and
`rate()` see the first error too; a metric that a configuration does not use, such as those of sessions, is absent.
Labels have few, known values: no prompt, key, tenant or path is a label. Sizes are bytes, times seconds.

## Several processes

Each process exports what it counts itself, and nothing adds up between them: no metric object of `prometheus_client`
is touched outside a scrape, so `PROMETHEUS_MULTIPROC_DIR` is not needed and has no effect. Worker processes that only
copy, such as those of vLLM, count nothing; the process of the scheduler does.

- **Several engines on a node**: give each one a port, in its file or by `HICACHE_METRICS__PORT=9465`. A second process
  on a taken port is refused at its start, with the port in the message.
- **Ranks**: each rank has tiers of its own, so each exports them. `metrics` may differ between ranks: give rank *r* the
  port 9464 + *r*. Counts of requests and tokens are equal on all ranks, since they decide alike: take those of one
  rank, and add up bytes over all.
- **Targets that come and go**: let Prometheus read them from files, which it does whenever one of them changes:

```yaml
scrape_configs:
  - job_name: hicache
    file_sd_configs:
      - files: [/run/hicache/targets/*.json]
```

  A file is a list such as `[{"targets": ["127.0.0.1:9464"], "labels": {"rank": "0"}}]`. On Kubernetes a PodMonitor does
  the same, see [deploy.md](deploy.md).

Engines that use a daemon have no stores of their own but `remote`: look at the daemon for the stores behind it. Add the
engines' hits up by `sum by (tier) (rate(hicache_hit_tokens_total[5m]))` over all targets.
"""
_SECTIONS: tuple[tuple[str, str, Iterable[MetricSpec[Any]]], ...] = (
    ("Every process", "", (BUILD_INFO,)),
    ("An engine's cache", "Of each cache with an exporter.", CACHE_METRICS),
    ("Stores", "Of each store, with its name as the label `backend`; a part of a composition is a store. On a daemon "
     "also with the label `namespace`, the first 8 digits of the namespace as in log lines.", STORE_METRICS),
    ("A daemon", "", DAEMON_METRICS),
    ("A daemon's namespaces", "With the label `namespace`. They end when the namespace is closed.", NAMESPACE_METRICS),
)  # fmt: skip


def page() -> str:
    """Return the whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for title, text, specs in _SECTIONS:
        yield f"## {title}\n"
        if text:
            yield f"{text}\n"
        yield "| metric | type | labels | meaning | what it tells |"
        yield "|---|---|---|---|---|"
        for spec in specs:
            labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
            yield f"| `hicache_{spec.name}` | {spec.kind} | {labels} | {spec.help} | {spec.act} |"
        yield ""
    yield "## Why something was skipped\n"
    yield "Values of the label `reason` of `hicache_skipped_total`.\n"
    yield "| reason | what happened |"
    yield "|---|---|"
    for reason in SKIP_REASONS:
        yield f"| `{reason}` | {REASONS[f'skipped {reason}']} |"


if __name__ == "__main__":
    sys.stdout.write(page())
