"""Engines of a replay: one in this process, or several child processes on one store.

A child has one end of a socket pair. It receives its job there, and sends samples, then its result or an error text.
When the socket becomes readable again, because the parent wants the result now or has ended, the child cancels its
work, answers and ends. So a child never outlives its parent. Children have their own session, so that Ctrl-C only
reaches the parent.

Locking design: one thread in each process; the parent waits for all children at once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait

import torch

from hicache.errors import ConfigError, HiCacheError
from hicache.units import Share

from .job import ReplayJob
from .result import ReplayResult, Sample, merged
from .runner import SAMPLE_EVERY_S, start
from .stand_in import never
from .virtual.engines import VirtualEngines

# The time that children may take for their last answer: closing a cache takes at most five seconds.
ANSWER_S_MAX = 20.0


class InProcess:
    """One engine on the calling thread. `run` once, then `result`, then `close`. Raises as `start`."""

    def __init__(self, job: ReplayJob, is_stopped: Callable[[], bool] = never) -> None:
        # Copies of pages are too small to benefit from more threads, which would take cores from the workers.
        torch.set_num_threads(1)
        self._replay = start(job, is_stopped)

    def run(self) -> Iterator[Sample]:
        """Run the replay and yield samples of the state. The caller may stop before the end. Raises HiCacheError."""
        return self._replay.run()

    def result(self) -> ReplayResult:
        """Return the result, of a complete or a stopped `run`. Raises HiCacheError."""
        return self._replay.result()

    def close(self) -> None:
        """End the replay. Blocks for a few seconds at most. Idempotent."""
        self._replay.close()


class _Child:
    """A child process and its last message."""

    def __init__(self, job: ReplayJob) -> None:
        self.number = job.process
        self.sample: Sample | None = None
        self.result: ReplayResult | None = None
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())], stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )
        self.send(job)

    def send(self, job: ReplayJob | None) -> None:
        """Send the child its job, or with None request the result now."""
        with suppress(ConnectionError):  # it has already ended; `read` reports that
            self.pipe.send(job)

    def read(self) -> None:
        """Read the child's next message. Raises HiCacheError if the child failed. REQUIRES: its pipe is readable."""
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionError) as error:
            code = self.process.wait()
            raise HiCacheError(f"replay: process {self.number} ended early, exit code {code}") from error
        if isinstance(message, Sample):
            self.sample = message
        elif isinstance(message, ReplayResult):
            self.result = message
        else:
            raise HiCacheError(f"process {self.number}: {message}")

    def end(self, deadline_s: float) -> None:
        """Wait until the process has ended; kill it at the deadline."""
        try:
            self.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Children:
    """One process for each number below `job.processes`, with the methods of `InProcess`."""

    def __init__(self, job: ReplayJob, is_stopped: Callable[[], bool] = never) -> None:
        self._is_stopped = is_stopped
        self._children: list[_Child] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for process in range(job.processes):
                self._children.append(_Child(replace(job, process=process)))
            undo.pop_all()

    def run(self) -> Iterator[Sample]:
        while self._read() and not self._is_stopped():
            samples = [child.sample for child in self._children if child.sample is not None]
            if samples:
                yield merged(samples)

    def result(self) -> ReplayResult:
        deadline_s = time.monotonic() + ANSWER_S_MAX
        for child in self._children:
            child.send(None)
        while self._read():
            if time.monotonic() > deadline_s:
                raise HiCacheError(f"replay: not all processes answered within {ANSWER_S_MAX:.0f} s")
        result: ReplayResult = merged([child.result for child in self._children])
        return result

    def close(self) -> None:
        deadline_s = time.monotonic() + ANSWER_S_MAX
        for child in self._children:
            child.pipe.close()
        for child in self._children:
            child.end(deadline_s)
        self._children.clear()

    def _read(self) -> bool:
        """Wait briefly for messages of the children. Return False once all have sent their result."""
        waited_for = {child.pipe: child for child in self._children if child.result is None}
        for pipe in wait(list(waited_for), SAMPLE_EVERY_S) if waited_for else ():
            waited_for[pipe].read()  # type: ignore[index]  # these are connections
        return bool(waited_for)


def start_engines(
    job: ReplayJob, is_stopped: Callable[[], bool] = never
) -> InProcess | Children | VirtualEngines:
    """Return the engines of a job; a single engine runs in this process, and so do all in virtual time. Once
    `is_stopped` is True, their `run` ends within a second. Raises as `start` does; `run` raises the errors of children.
    """
    if job.virtual:
        return VirtualEngines(job, is_stopped)
    if job.processes > 1 and isinstance(job.config.host.size, Share):
        raise ConfigError(
            f"replay: host.size: a share needs one pool per machine; with {job.processes} processes write a size: 1GiB"
        )
    return InProcess(job, is_stopped) if job.processes == 1 else Children(job, is_stopped)


def main() -> None:
    """Run a child; see the module's docstring."""
    with Connection(int(sys.argv[1])) as pipe, suppress(ConnectionError, EOFError):  # the parent has ended
        try:
            with closing(InProcess(pipe.recv(), pipe.poll)) as engines:
                for sample in engines.run():
                    pipe.send(sample)
                pipe.send(engines.result())
        except HiCacheError as error:
            pipe.send(str(error))


if __name__ == "__main__":
    main()
