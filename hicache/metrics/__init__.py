"""The Prometheus exporter: what is exported (`families`), and the HTTP server that a scraper asks (`server`)."""

from .server import serve_configured

__all__ = ["serve_configured"]
