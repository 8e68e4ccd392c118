"""The backend `remote`: pages by way of a storage daemon, on this host through shared memory."""

from .backend import RemoteBackend

__all__ = ["RemoteBackend"]
