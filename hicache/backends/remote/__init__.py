"""The store `remote`: pages of a storage daemon, on this host through shared memory."""

from .driver import RemoteDriver, create_memory

__all__ = ["RemoteDriver", "create_memory"]
