"""The backend `remote`: pages of a storage daemon, on this host through shared memory."""

from .backend import RemoteBackend
from .memory import create_memory

__all__ = ["RemoteBackend", "create_memory"]
