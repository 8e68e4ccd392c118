"""Engines of a replay: one in this process, or several in processes of their own on one store.

A child gets its job as one line of JSON on standard input and answers with lines of JSON on standard output: samples,
then its result or an error. Its input stays open for as long as it is wanted: when it ends, because the parent asks
for the result now or is gone, the child gives up what is under way, answers and ends. So no child outlives its parent,
however that ends. Children have a session of their own, so that Ctrl-C reaches the parent alone.

Locking design: one thread in each process; the parent looks at all children's outputs in turn.
"""

from __future__ import annotations

import os
import select
import selectors
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Self

import torch
from pydantic import TypeAdapter, ValidationError

from ..errors import HiCacheError
from .job import ReplayJob, result_of, start
from .result import ReplayResult, Sample, merged, summed_sample
from .runner import SAMPLE_EVERY_S

# How long children may take for an answer once their input has ended: closing a cache takes five seconds at most.
ANSWER_S_MAX = 20.0
_READ_BYTES = 1 << 16


class Engines(ABC):
    """What replays. `run` once, then `result`, then `close`, which ends everything that is left on any path."""

    @abstractmethod
    def run(self) -> Iterator[Sample]:
        """Replay; the state of all engines from time to time. May be left before its end. Raises HiCacheError."""

    @abstractmethod
    def result(self) -> ReplayResult:
        """What it came to, whether `run` went to its end or was left. Raises HiCacheError."""

    @abstractmethod
    def close(self) -> None:
        """End everything; blocks for some seconds at most. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def start_engines(jobs: Sequence[ReplayJob]) -> Engines:
    """The engines for some jobs: a single one in this process. Raises as `job.start`; children's errors come later."""
    return InProcess(jobs[0]) if len(jobs) == 1 else Children(jobs)


class InProcess(Engines):
    """One engine on the calling thread."""

    def __init__(self, job: ReplayJob) -> None:
        # Copies of pages are too small to gain from more threads, which would take cores from the workers.
        torch.set_num_threads(1)
        self._job = job
        self._replay = start(job)

    def run(self) -> Iterator[Sample]:
        return self._replay.run()

    def result(self) -> ReplayResult:
        self._replay.check()
        return result_of(self._job, self._replay)

    def close(self) -> None:
        self._replay.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One line from a child; exactly one field is given."""

    sample: Sample | None = None
    result: ReplayResult | None = None
    error: str | None = None


_JOB = TypeAdapter(ReplayJob)
_MESSAGE = TypeAdapter(Message)


class _Child:
    """A process and what it has said so far."""

    def __init__(self, number: int, job: ReplayJob) -> None:
        self.number = number
        self.sample: Sample | None = None
        self.result: ReplayResult | None = None
        self._line = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            self._input.write(_JOB.dump_json(job) + b"\n")
            self._input.flush()
        except BrokenPipeError:
            pass  # it has ended already; `read` says so

    @property
    def _input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def output(self) -> IO[bytes]:
        """Where its messages come from."""
        assert self.process.stdout is not None
        return self.process.stdout

    def read(self) -> None:
        """Take in what it has said. Raises HiCacheError if it failed. REQUIRES: its output is readable."""
        data = os.read(self.output.fileno(), _READ_BYTES)
        if not data and self.result is None:
            raise HiCacheError(f"replay: process {self.number} ended early, exit code {self.process.wait()}")
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            try:
                message = _MESSAGE.validate_json(line)
            except ValidationError as error:
                raise HiCacheError(f"replay: process {self.number} said what cannot be understood: {error}") from error
            if message.error is not None:
                raise HiCacheError(f"process {self.number}: {message.error}")
            self.sample = message.sample or self.sample
            self.result = message.result or self.result

    def end_input(self) -> None:
        """Ask for the result now."""
        try:
            self._input.close()
        except BrokenPipeError:
            pass

    def end(self, deadline_s: float) -> None:
        """Wait until the process has ended; kill it at the deadline."""
        try:
            self.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.output.close()


class Children(Engines):
    """One process per job."""

    def __init__(self, jobs: Sequence[ReplayJob]) -> None:
        self._children: list[_Child] = []
        self._outputs = selectors.DefaultSelector()
        try:
            for number, job in enumerate(jobs):
                child = _Child(number, job)
                self._children.append(child)
                self._outputs.register(child.output, selectors.EVENT_READ, child)
        except BaseException:
            self.close()
            raise

    def run(self) -> Iterator[Sample]:
        while any(child.result is None for child in self._children):
            self._read(SAMPLE_EVERY_S)
            samples = [child.sample for child in self._children if child.sample is not None]
            if samples:
                yield summed_sample(samples)

    def result(self) -> ReplayResult:
        deadline_s = time.monotonic() + ANSWER_S_MAX
        for child in self._children:
            child.end_input()
        while any(child.result is None for child in self._children) and time.monotonic() < deadline_s:
            self._read(SAMPLE_EVERY_S)
        results = [child.result for child in self._children if child.result is not None]
        if len(results) < len(self._children):
            raise HiCacheError(f"replay: not all processes answered within {ANSWER_S_MAX:.0f} s")
        return merged(results)

    def close(self) -> None:
        deadline_s = time.monotonic() + ANSWER_S_MAX
        for child in self._children:
            child.end_input()
        for child in self._children:
            child.end(deadline_s)
        self._children.clear()
        self._outputs.close()

    def _read(self, timeout_s: float) -> None:
        for key, _ in self._outputs.select(timeout_s):
            child: _Child = key.data
            child.read()
            if child.result is not None:
                self._outputs.unregister(child.output)


def main() -> None:
    """A child: see the module's docstring."""
    job = _JOB.validate_json(sys.stdin.buffer.readline())
    try:
        with InProcess(job) as engines:
            for sample in engines.run():
                _say(Message(sample=sample))
                if _input_ended():
                    break
            _say(Message(result=engines.result()))
    except BrokenPipeError:
        # The parent is gone. What is still in the buffer must not fail once more at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except HiCacheError as error:
        _say(Message(error=str(error)))


def _say(message: Message) -> None:
    sys.stdout.buffer.write(_MESSAGE.dump_json(message) + b"\n")
    sys.stdout.buffer.flush()


def _input_ended() -> bool:
    # Nothing follows the job, so what can be read is the end.
    return bool(select.select([sys.stdin], [], [], 0)[0])


if __name__ == "__main__":
    main()
