"""The file store: pages as files on a local file system, shared by all processes of a machine."""

from .driver import FileDriver

__all__ = ["FileDriver"]
