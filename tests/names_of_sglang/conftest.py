"""The caches that a test opens are closed after it, as in tests/cache."""

from tests.cache.conftest import close_worlds

__all__ = ["close_worlds"]
