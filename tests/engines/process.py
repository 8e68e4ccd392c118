"""A process that runs an engine, and that a test calls step by step.

    with EngineProcess("tests.engines.vllm_engine", {"model": ...}, folder=tmp_path) as engine:
        answer = engine.call("generate", prompts=[...], tokens=8)

The process runs a module that calls `serve` with its steps. Calls and answers are lines of JSON over a socket. The
engine's output goes to a log, and a failure shows the end of the log. One start serves many calls. A step that raises
fails its call; an engine that dies or hangs fails its call and all later ones. When the process ends, all processes of
its session are killed, and their files in /dev/shm and in their temporary directory are removed, also those of an
engine that died before.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent.parent
# A start takes about 10 s on two idle cores.
START_TIMEOUT_S = 150.0
CALL_TIMEOUT_S = 90.0
_END_TIMEOUT_S = 20.0
# For Python's resource tracker, which removes the semaphores and shared memory of ended processes.
_TRACKER_TIMEOUT_S = 5.0
_LOG_LINES = 40
_GROUP, _SESSION = 2, 3  # fields of /proc/PID/stat behind the name
_NUMBERS = itertools.count(1)


class EngineFailed(Exception):
    """A call failed. The message has the reason and the end of the log."""


def engine_environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of an engine's process: this source tree, one thread per worker, no network."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # otherwise a start compiles C++ for 15 s
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(extra or {}),
    }


class ProcessTree:
    """A command in its own session, with its output in `log`, which ends with the test process. `kill` ends all
    processes of the session."""

    def __init__(self, command: list[str], *, folder: Path, environ: Mapping[str, str], fds: tuple[int, ...] = ()):
        # Not above: it starts a thread, and the processes that import this module may need namespaces, which a process
        # with threads cannot get.
        from hicache_lab.devservers.launcher import launch  # noqa: PLC0415

        self.log = folder / f"engine-{next(_NUMBERS)}.log"
        self._temporary = tempfile.TemporaryDirectory(prefix="hc-")  # for the sockets and files of engines
        environ = {**environ, "TMPDIR": self._temporary.name}
        self._process = launch(command, environ=environ, directory=ROOT, log=self.log, fds=fds)
        self.pid = self._process.pid
        self._shared: set[Path] = set()

    def running(self) -> bool:
        return self._process.poll() is None

    def pids(self) -> list[int]:
        """Return all processes of the session, including the first one."""
        return [pid for pid in _pids() if _stat(pid, _SESSION) == self.pid]

    def end(self, request_end: Callable[[], object]) -> None:
        """Call `request_end`, wait for the end of the first process up to a deadline, and kill the other processes."""
        for pid in self.pids():  # an engine may kill its workers before they remove their shared memory
            self._shared |= shared_memory_of(pid)
        request_end()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """Kill all processes of the session, and remove their shared memory. Idempotent."""
        patience = time.monotonic() + _TRACKER_TIMEOUT_S
        while pids := self.pids():  # a process may start another one before the signal arrives
            for pid in pids:
                self._shared |= shared_memory_of(pid)
                if not _is_tracker(pid) or time.monotonic() > patience:
                    _send(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(0.01)
        self._process.wait()
        for path in self._shared:
            path.unlink(missing_ok=True)
        _remove_files_of_dead_schedulers()
        self._temporary.cleanup()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


class EngineProcess(ProcessTree):
    """A process that runs `module` with `options`. The constructor returns when the engine is up."""

    def __init__(
        self, module: str, options: Mapping[str, object], *, folder: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", module, str(theirs.fileno()), json.dumps(options)]
        with theirs:
            super().__init__(command, folder=folder, environ=engine_environ(environ), fds=(theirs.fileno(),))
        self._lines = self._socket.makefile("rb")
        try:
            self._answer(f"{module} did not start", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def call(self, step: str, *, timeout_s: float = CALL_TIMEOUT_S, **arguments: object) -> Any:
        """Run `step` in the process and return its decoded JSON answer. Raises EngineFailed."""
        self.submit(step, **arguments)
        return self.result(step, timeout_s=timeout_s)

    def submit(self, step: str, **arguments: object) -> None:
        """Start `step`. Call `result` next; before that, a test can inject faults."""
        try:
            self._socket.sendall(json.dumps([step, arguments]).encode() + b"\n")
        except OSError as error:
            raise EngineFailed(f"{step}: the engine has ended\n{self.tail()}") from error

    def result(self, step: str, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        return self._answer(step, timeout_s)

    def close(self) -> None:
        """End the engine, and kill it after a deadline."""
        self._lines.close()
        self.end(self._socket.close)  # `serve` returns when its input ends

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._socket.close()
            self.kill()

    def _answer(self, what: str, timeout_s: float) -> Any:
        self._socket.settimeout(timeout_s)
        try:
            line = self._lines.readline()
        except TimeoutError:
            self.kill()  # otherwise its late answer would be taken for the next one
            raise EngineFailed(f"{what}: no answer within {timeout_s:g} s\n{self.tail()}") from None
        except OSError:
            line = b""
        if not line:
            raise EngineFailed(f"{what}: the engine has ended\n{self.tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{what}: {answer['error']}\n{self.tail()}")
        return answer["value"]


def serve(start: Callable[[dict[str, Any]], Mapping[str, Callable[..., object]]]) -> None:
    """Run as the process of an EngineProcess. `start` gets the options and returns the steps by name. Run the called
    steps until the test closes the socket. Steps return values that JSON can represent."""
    descriptor, options = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as channel, channel.makefile("rb") as lines:
        channel.set_inheritable(False)  # otherwise child processes could keep the socket open

        def run(step: Callable[..., object], *positional: object, **arguments: object) -> object:
            value: object = None
            try:
                value = step(*positional, **arguments)
                answer = {"value": None if step is start else value}
            except Exception:
                answer = {"error": traceback.format_exc()}
            channel.sendall(json.dumps(answer).encode() + b"\n")
            return value

        steps: Any = run(start, json.loads(options))
        if steps is not None:
            for line in lines:
                name, arguments = json.loads(line)
                run(steps[name], **arguments)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def pids_of_group(group: int) -> list[int]:
    """Return all processes of a process group."""
    return [pid for pid in _pids() if _stat(pid, _GROUP) == group]


def _stat(pid: int, field: int) -> int | None:
    """Return a field of /proc/PID/stat behind the name, of a running process; None if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[field])


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def shared_memory_of(pid: int) -> set[Path]:
    """Return the files of /dev/shm that a process has mapped, by inode: a semaphore is mapped under another name."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    inodes = {int(line.split()[4]) for line in maps.splitlines() if " /dev/shm/" in line}
    return {Path(entry.path) for entry in os.scandir("/dev/shm") if entry.inode() in inodes}


def _remove_files_of_dead_schedulers() -> None:
    """Remove the files of SGLang's schedulers in /dev/shm that no process has open. A scheduler has its file open from
    the creation on. If its start fails, it leaves the file, and ends before a test could see which files it has."""
    left = set(glob.glob("/dev/shm/sglang_loads_*"))
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*") if left else ():
        with contextlib.suppress(OSError):  # it was closed
            left.discard(os.readlink(descriptor))
    for path in left:
        with contextlib.suppress(FileNotFoundError, PermissionError):  # of another test that ends, of another user
            os.unlink(path)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
