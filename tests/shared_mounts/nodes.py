"""Starts, kills and reads nodes (see `node`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from hicache.backends.file.pages import is_hex
from tests.waiting import is_running, wait_for

from .mounts import SharedMounts
from .node import Job, Report, open_store

_REPOSITORY = Path(__file__).resolve().parents[2]


class NodeFailed(Exception):
    """A node ended without a report, or did not open its store."""


class Child:
    """A node at work, or its lines after its end."""

    def __init__(self, pid: int, job: Job) -> None:
        self.pid = pid
        self.job = job

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What it has said. The last line may be cut off by a kill."""
        whole = Path(self.job.report).read_text(encoding="utf-8").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def find(self, kind: str) -> list[Any]:
        """Return the values of its lines of one kind."""
        return [line[kind] for line in self.lines if kind in line]

    @property
    def is_open(self) -> bool:
        """True when it has opened its store. Raises NodeFailed if it ended before."""
        if not self.find("open") and not is_running(self.pid):
            raise NodeFailed("".join(self.find("refused")) or "a node ended before it opened its store")
        return bool(self.find("open"))

    def troubles(self) -> list[dict[str, Any]]:
        """Return the damaged and failed pages so far."""
        return [line for line in self.lines if "trouble" in line]

    def kill(self) -> None:
        """Kill it (SIGKILL) and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        self._wait()

    def end(self) -> None:
        """Let it end its turn and close its store, and wait for its end."""
        os.kill(self.pid, signal.SIGTERM)
        self._wait()

    def report(self, timeout_s: float = 60.0) -> Report:
        """Wait for its end; return its report. Raises NodeFailed without one."""
        self._wait(timeout_s)
        found = self.find("report")
        if not found:
            raise NodeFailed("".join(self.find("refused")) or "a node ended without a report")
        return Report(**found[0])

    def _wait(self, timeout_s: float = 60.0) -> None:
        wait_for(lambda: not is_running(self.pid), timeout_s=timeout_s)


class Nodes:
    """The process that forks nodes; a context manager. `folder` gets the files of reports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.shared_mounts.node"],
            cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate(timeout=300)

    def start(self, job: Job) -> Child:
        """Start a node. It opens its store in the background."""
        self._count += 1
        assert self._process.stdin is not None and self._process.stdout is not None
        job = replace(job, report=str(self._folder / f"report-{self._count}"))
        Path(job.report).touch()
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        return Child(int(self._process.stdout.readline()), job)

    def run(self, jobs: Sequence[Job], during: Callable[[], object] = lambda: None) -> list[Report]:
        """Run nodes at the same time, and call `during` until they end; return their reports. Raises NodeFailed."""
        children = [self.start(job) for job in jobs]
        wait_for(
            lambda: not any(is_running(child.pid) for child in children), during,
            timeout_s=60.0 + max(job.seconds for job in jobs), pause_s=0.05,
        )
        return [child.report() for child in children]


def jobs_of(mounts: SharedMounts, **values: Any) -> list[Job]:
    """Return the jobs of two nodes, one on each mount, with the same store."""
    return [
        Job(path=str(path / "store"), report="", name=name, seed=seed, **values)
        for seed, (path, name) in enumerate(zip(mounts.paths, "ab", strict=True))
    ]


def check_two_nodes(mounts: SharedMounts, folder: Path, seconds: float) -> None:
    """Let two nodes write, read and evict at the same time; check what they found, and what they left."""
    # Half of the chains fit, and a few batches fill the store, so that eviction also runs on slow mounts.
    capacity_bytes, peaks, stored = 1 << 18, [0], mounts.directory / "store"
    jobs = jobs_of(mounts, seconds=seconds, chains=8, capacity_bytes=capacity_bytes, is_hasty=True)
    with Nodes(folder) as nodes:
        reports = nodes.run(jobs, lambda: peaks.append(stored_bytes(stored)))
    for report in reports:
        assert (report.errors, report.corrupt, report.wrong) == (0, 0, 0), reports
        assert report.stored and report.hits, reports
    assert sum(report.evicted for report in reports) > 0, reports
    # Each node knows its own writes since the last listing, and not those of the other one.
    assert max(peaks) <= len(jobs) * capacity_bytes
    # FUSE keeps a file that is removed while it is open as `.fuse_hidden*` until it has handled the close.
    wait_for(lambda: temporary_files(stored) == [])
    store = open_store(jobs[0])
    wait_for(lambda: stored_bytes(stored) <= capacity_bytes)
    store.close()


def page_files(directory: Path) -> Iterator[Path]:
    """Yield the page files of a shared store. Files may vanish."""
    return (path for path in directory.glob("*/*/*") if is_hex(path.name, 64))


def temporary_files(directory: Path) -> list[Path]:
    """Return the temporary files of a shared store, of pages and of its lease."""
    return [*directory.glob("*/*/.*"), *directory.glob(".*")]


def stored_bytes(directory: Path) -> int:
    """Return the bytes of the pages of a shared store at about this time."""
    total = 0
    for path in page_files(directory):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
