"""The Prometheus exporter: the metrics (`families`), and the HTTP server for scrapers (`server`)."""

from .server import serve_configured

__all__ = ["serve_configured"]
