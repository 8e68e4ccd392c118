"""The worker processes of a test engine, as its scheduler sees them: commands out, reports in, and their end."""

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
_TIMEOUT_S = 30.0


class WorkerLost(Exception):
    """A worker has died. The engine cannot go on with the others."""


class Workers:
    """One process per task. Used by the scheduler alone; only `receive` waits."""

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
        """The first report of each worker, by rank. Raises WorkerLost."""
        ready = []
        for pipe in self._pipes:
            try:
                assert pipe.poll(_TIMEOUT_S), "a worker does not start"
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
        """What has been reported, with the rank; waits for `timeout_s` if that is nothing. Raises WorkerLost."""
        reports = []
        for pipe in connection.wait(self._pipes, timeout_s):
            assert isinstance(pipe, Connection)
            try:
                reports.append((self._pipes.index(pipe), pipe.recv()))
            except (EOFError, OSError) as error:
                raise WorkerLost from error
        return reports

    def kill(self) -> None:
        """End all processes at once: when this returns, none of them writes to the shared frames."""
        for process in self.processes:
            process.kill()
        self._join()

    def close(self) -> None:
        """Have the processes end by themselves. Raises AssertionError if one does not, or failed."""
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
