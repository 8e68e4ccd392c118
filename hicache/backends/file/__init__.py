"""The file backend: pages as files on a local file system, shared by all processes of a machine."""

from ...frame import FrameCodec
from .backend import FileBackend, FileBackendOptions

__all__ = ["FileBackend", "FileBackendOptions", "open_file_backend"]


def open_file_backend(
    codec: FrameCodec,
    *,
    path: str,
    capacity_bytes: int | None = None,
    free_space_floor_bytes: int = 0,
    io_threads: int | None = None,
    direct_io: bool = False,
    sync: bool = False,
) -> FileBackend:
    """The factory behind the name `file`: see FileBackendOptions for what the options mean and what is raised."""
    threads = {} if io_threads is None else {"io_threads": io_threads}
    options = FileBackendOptions(
        path, capacity_bytes, free_space_floor_bytes, direct_io=direct_io, sync=sync, **threads
    )
    return FileBackend(codec, options)
