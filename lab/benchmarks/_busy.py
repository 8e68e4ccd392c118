"""A loop that computes in pure Python, as a scheduler does: in a thread of this process, or in another process.

    python -m lab.benchmarks._busy    the other process; it ends with its parent
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from types import TracebackType

_REQUESTS = 64


def step() -> int:
    """Choose a batch among some requests, about a tenth of a millisecond of Python that never gives up the lock."""
    requests = [{"id": number, "tokens": number * 37 % 101, "started": number % 3 == 0} for number in range(_REQUESTS)]
    waiting = sorted((request for request in requests if not request["started"]), key=lambda one: one["tokens"])
    room, chosen = 1000, []
    for request in waiting:
        if request["tokens"] <= room:
            room -= request["tokens"]
            chosen.append(request["id"])
    return len(chosen)


class BusyThread(AbstractContextManager["BusyThread"]):
    """A thread of this process that computes inside `with`, and waits outside."""

    def __init__(self, core: int) -> None:
        self._computes = threading.Event()
        self._closed = False
        self._core = core
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        os.sched_setaffinity(0, {self._core})  # of this thread
        while not self._closed:
            self._computes.wait()
            step()

    def __enter__(self) -> BusyThread:
        self._computes.set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._computes.clear()

    def close(self) -> None:
        self._closed = True
        self._computes.set()
        self._thread.join()


class BusyProcess(AbstractContextManager["BusyProcess"]):
    """Another process that computes inside `with`, and is stopped outside."""

    def __init__(self, core: int) -> None:
        command = [sys.executable, "-m", "lab.benchmarks._busy"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None and self._process.stdout.readline() == b"ready\n"
        self.pid = self._process.pid
        os.sched_setaffinity(self.pid, {core})
        self._process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> BusyProcess:
        self._process.send_signal(signal.SIGCONT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    parent = os.getppid()
    print("ready", flush=True)
    while os.getppid() == parent:
        step()


if __name__ == "__main__":
    main()
