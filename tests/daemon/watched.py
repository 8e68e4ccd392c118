"""`python -m tests.daemon.watched ARGUMENTS`: runs `hicache ARGUMENTS` and reports accesses to files on the event loop.

Standard error gets one line, which begins with `MARK`, for each kind of access by a chain of functions. Two sources
report: Python's audit events of files, which include imports, and a profile of calls into C, for functions without an
event (`os.stat`) and for those that open files inside C (certificates). Sockets, and output to the log, do not count.
"""

from __future__ import annotations

import asyncio
import os
import sys
from types import FrameType
from typing import Any

MARK = "on the event loop:"
_EVENTS = {
    "fcntl.flock", "open", "sqlite3.connect",
    *(f"os.{name}" for name in ("chmod", "chown", "link", "listdir", "mkdir", "remove", "rename", "rmdir", "scandir",
                                "symlink", "truncate", "utime")),
}
_CALLS = {
    "access", "fsync", "fdatasync", "load_cert_chain", "load_verify_locations", "lstat", "open", "open_code",
    "readlink", "set_default_verify_paths", "stat", "statvfs",
}
# FastAPI reads the source of a route's handler at the first request to it, for its messages.
_FASTAPI = "_extract_endpoint_context"
_PACKAGE = "/hicache/"
_CALLERS_MAX = 4


def watch() -> None:
    """Report what this thread does from now on while it runs an event loop."""
    seen: set[str] = set()

    def report(what: str) -> None:
        if asyncio._get_running_loop() is None:
            return
        callers = list[str]()
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_name == _FASTAPI:
                return
            if _PACKAGE in code.co_filename or not callers:
                callers.append(f"{code.co_filename.rpartition(_PACKAGE)[2]}:{code.co_name}")
            frame = frame.f_back
        line = f"{MARK} {what} by {' < '.join(callers[:_CALLERS_MAX])}\n"
        if line not in seen:
            seen.add(line)
            os.write(2, line.encode())

    def audit(event: str, _: tuple[Any, ...]) -> None:
        if event in _EVENTS:
            report(event)

    def profile(_: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in _CALLS:
            report(function.__name__)

    sys.addaudithook(audit)
    sys.setprofile(profile)


if __name__ == "__main__":
    from hicache.cli.main import main

    watch()
    main()
