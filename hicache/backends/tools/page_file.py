"""Verifies one page file of a file store, outside its store."""

from __future__ import annotations

import os
import stat
from os import PathLike

from ...errors import BackendUnavailable
from ..file.pages import NOT_REGULAR, read_start
from ..file.system import System
from .verify import NO_KEYS, PageKeys, PageReport, read_page

_FILE_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def inspect_page(path: str | PathLike[str], *, keys: PageKeys = NO_KEYS) -> PageReport:
    """Read and verify one page file, including that its name and its namespace directory match its header.

    Blocks for one read. Never follows a link. Raises BackendUnavailable if the file cannot be read.
    """
    where, system = os.path.abspath(os.fspath(path)), System()
    folder, name = os.path.split(where)
    try:
        found = system.lstat(where)
        if not stat.S_ISREG(found.st_mode):
            kind = _FILE_KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")
            return PageReport(found.st_size, damage=NOT_REGULAR, note=f"it is {kind}")
        names = (os.path.basename(os.path.dirname(folder)), name)
        page = read_page(found.st_size, lambda bytes_max: read_start(system, None, where, bytes_max), names, keys)
        assert page is not None
    except OSError as error:
        raise BackendUnavailable(f"page {where}: {error.strerror}; check the path and its permissions") from error
    return page[1]
