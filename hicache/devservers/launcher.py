"""Starting child processes that end with this process, however it ends.

The kernel sends a child its parent-death signal when the *thread* that made it ends. So all children are made by one
thread that lives as long as the process: then it does not matter who calls `launch`.

Locking design: the launcher's thread owns nothing but its queue. Callers wait for their own future; a lock guards that
only one thread is ever started.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

# Runs in the child before it becomes the server: 1 is PR_SET_PDEATHSIG, 9 SIGKILL, and both outlive exec. If the parent
# died before that, its death goes unsignalled, so the child looks.
_BECOME = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that wanted this server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""

_Job = tuple["Future[subprocess.Popen[bytes]]", list[str], dict[str, str], Path, int]


class _Launcher:
    """The thread that makes the children. A process that forks gets a fresh one."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._jobs, self._lock, self._thread = queue.SimpleQueue(), threading.Lock(), None

    def submit(self, job: _Job) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hicache-launcher", daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            future, command, environ, directory, log = self._jobs.get()
            try:
                future.set_result(self._make(command, environ, directory, log))
            except OSError as error:
                future.set_exception(error)

    @staticmethod
    def _make(command: list[str], environ: dict[str, str], directory: Path, log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C on a terminal reaches this process alone, and a group can be killed whole
        )


_LAUNCHER = _Launcher()


def launch(
    command: Sequence[str], *, environ: Mapping[str, str], directory: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Start `command` (its first word an absolute path) in a session of its own, writing to the end of `log`.

    It is killed when this process ends, also by SIGKILL. Blocks until it is started; any thread. Raises OSError.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        future: Future[subprocess.Popen[bytes]] = Future()
        _LAUNCHER.submit((future, list(command), dict(environ), directory, descriptor))
        return future.result()
    finally:
        os.close(descriptor)
