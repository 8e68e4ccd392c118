"""KV events."""

from .types import Medium

__all__ = ["Medium"]
