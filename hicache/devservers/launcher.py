"""Starting child processes that end with this process, however it ends.

The kernel sends a child its parent-death signal when the *thread* that made it ends. So all children are made by one
thread that lives as long as the process: then it does not matter who calls `launch`.

Locking design: the launcher's thread owns nothing; callers wait for their own future.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def _forget() -> None:
    """A process that forks gets a fresh thread."""
    global _THREAD  # noqa: PLW0603
    _THREAD = ThreadPoolExecutor(1, "hicache-launcher")


_THREAD = ThreadPoolExecutor(1, "hicache-launcher")
# Its thread starts here, not with the first server: a signal that interrupts the pool while it starts its thread would
# leave one that the exit of the process waits for and nobody ends.
_THREAD.submit(int).result()
os.register_at_fork(after_in_child=_forget)


def launch(
    command: Sequence[str], *, environ: Mapping[str, str], directory: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Start `command` (its first word an absolute path) in a session of its own, writing to the end of `log`.

    It is killed when this process ends, also by SIGKILL. Blocks until it is started; any thread. Raises OSError.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return _THREAD.submit(
            subprocess.Popen[bytes],
            [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,  # Ctrl-C on a terminal reaches this process alone, and a group can be killed whole
        ).result()
    finally:
        os.close(descriptor)
