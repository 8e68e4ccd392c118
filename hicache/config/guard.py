"""The section `storage.guard`: what stands between the cache and a storage backend."""

from __future__ import annotations

from .section import Section


class GuardConfig(Section):
    """Bounds and breaker of one storage backend."""

    def guard_options(self) -> dict[str, object]:
        """Keyword options as `GuardOptions` takes them: plain numbers, unit in the name."""
        return {}
