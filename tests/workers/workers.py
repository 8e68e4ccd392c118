"""The scheduler's handle of the worker processes: it sends commands, receives reports and ends the processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection

from tests.workers import worker
from tests.workers.worker import Command, Ready, Report, Task

# A fork of a process that has imported torch starts in milliseconds; the import takes seconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([worker.__name__])
_TIMEOUT_S = 60.0


class WorkerLost(Exception):
    """A worker has died. The engine cannot continue with the others."""


class Workers:
    """One process per task, for the scheduler. Of the calls in a step, only `receive` waits."""

    def __init__(self, tasks: list[Task], start: Callable[[Task, Connection], None] = worker.main) -> None:
        self._pipes: list[Connection] = []
        self.processes = []
        for task in tasks:
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=start, args=(task, there), daemon=True)
            process.start()
            there.close()  # so that the end of the process ends the pipe
            self._pipes.append(here)
            self.processes.append(process)

    def __len__(self) -> int:
        return len(self._pipes)

    def wait_ready(self) -> list[Ready]:
        """Wait for the first report of each worker and return them by rank. Raises WorkerLost."""
        ready = []
        for pipe in self._pipes:
            try:
                assert pipe.poll(_TIMEOUT_S), "a worker has not started in time"
                ready.append(pipe.recv())
            except (EOFError, OSError) as error:
                raise WorkerLost from error
        return ready

    def send(self, command: Command, *ranks: int) -> None:
        """Send to some ranks, by default to all. Raises WorkerLost."""
        try:
            for rank in ranks or range(len(self)):
                self._pipes[rank].send(command)
        except OSError as error:
            raise WorkerLost from error

    def receive(self, timeout_s: float) -> list[tuple[int, Report]]:
        """Return the reports with their ranks; wait up to `timeout_s` for the first. Raises WorkerLost."""
        reports = []
        for pipe in connection.wait(self._pipes, timeout_s):
            assert isinstance(pipe, Connection)
            try:
                reports.append((self._pipes.index(pipe), pipe.recv()))
            except (EOFError, OSError) as error:
                raise WorkerLost from error
        return reports

    def kill(self) -> None:
        """Kill all processes. When this returns, none of them writes to the shared frames."""
        for process in self.processes:
            process.kill()
        self._join()

    def close(self) -> None:
        """Close the pipes and wait until the processes end. Raises AssertionError if one hangs or failed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(_TIMEOUT_S)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        assert codes == [0] * len(codes), codes

    def _join(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(_TIMEOUT_S)
            assert process.exitcode is not None
