"""The file backend: pages as files on a local file system, shared by all processes of a machine."""

from .backend import FileBackend

__all__ = ["FileBackend"]
