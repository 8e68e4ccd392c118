"""The Prometheus exporter: what is exported (`families`), and the HTTP server that a scraper asks (`server`)."""

from .families import (
    LABELS,
    HistogramSpec,
    MetricKind,
    MetricSpec,
    SnapshotCollector,
    backend_metrics,
    cache_metrics,
)
from .server import MetricsServer, serve_configured, serve_metrics

__all__ = [
    "LABELS",
    "HistogramSpec",
    "MetricKind",
    "MetricSpec",
    "MetricsServer",
    "SnapshotCollector",
    "backend_metrics",
    "cache_metrics",
    "serve_configured",
    "serve_metrics",
]
