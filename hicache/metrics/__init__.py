"""The Prometheus exporter: what is exported (`families`), and the HTTP server that a scraper asks (`server`)."""

from .families import CACHE_METRICS, LABELS, STORE_METRICS, CacheCollector, MetricSpec, store_families
from .server import MetricsServer, serve_configured

__all__ = [
    "CACHE_METRICS",
    "LABELS",
    "STORE_METRICS",
    "CacheCollector",
    "MetricSpec",
    "MetricsServer",
    "serve_configured",
    "store_families",
]
