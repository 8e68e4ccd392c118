"""Starts child processes that end with this process, even if it is killed.

The kernel sends a child its parent-death signal when the *thread* that started it ends. So one thread, which lives as
long as the process, starts all children, and any thread can call `launch`.

Locking design: the launcher's thread owns no state; callers wait for their own future.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Runs in the child before exec: 1 is PR_SET_PDEATHSIG, 9 is SIGKILL; the setting survives exec. If the parent died
# before, there will be no signal, so the child checks.
_BECOME = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


def _forget() -> None:
    """Start a new thread in a forked process."""
    global _THREAD  # noqa: PLW0603
    _THREAD = ThreadPoolExecutor(1, "hicache-launcher")


_THREAD = ThreadPoolExecutor(1, "hicache-launcher")
# The thread starts at import, not with the first server: if a signal interrupted the pool while it starts the thread,
# the exit of the process would wait for a thread that never ends.
_THREAD.submit(int).result()
os.register_at_fork(after_in_child=_forget)


def launch(
    command: Sequence[str], *, environ: Mapping[str, str], directory: Path, log: Path, fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start `command` (its first word is an absolute path) in its own session, with output appended to `log`. It
    inherits the descriptors in `fds`.

    It is killed when this process ends, also by SIGKILL. Blocks until it has started. Any thread. Raises OSError.
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
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C on a terminal reaches only this process; the whole group can be killed
        ).result()
    finally:
        os.close(descriptor)


def suspend(pid: int) -> None:
    """Suspend a child process (SIGSTOP), and return when all its threads have stopped, or it has ended.

    The signal alone stops one thread, which may not run for a while on a busy machine; until then the others go on.
    """
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
