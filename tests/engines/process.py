"""A process with an engine in it, which a test calls step by step.

    with EngineProcess("tests.engines.vllm_engine", {"model": ...}, folder=tmp_path) as engine:
        answer = engine.call("generate", prompts=[...], tokens=8)

The process is a module whose `main` calls `serve` with its steps. Calls and answers are lines of JSON over a socket, so
an engine may print what it likes: its output goes to a log, and a failure shows the end of that. One start serves many
calls. A step that raises fails its call; an engine that dies or hangs fails its call and all later ones. With the
process all others of its session end, and what they leave in /dev/shm and in their temporary directory is removed.
"""

from __future__ import annotations

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
# Python's own process that removes the semaphores and memory of a family of processes once these have ended.
_TRACKER_TIMEOUT_S = 5.0
_LOG_LINES = 40
_NUMBERS = itertools.count(1)


class EngineFailed(Exception):
    """A call did not end well; the message has the reason and the end of the log."""


def engine_environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of an engine's process: this source tree, one thread for each worker, no network."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # or a start compiles C++ for 15 s
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(extra or {}),
    }


class ProcessTree:
    """A command in a session of its own, with its output in `log`. `kill` ends all that is left of the session."""

    def __init__(self, command: list[str], *, folder: Path, environ: Mapping[str, str], fds: tuple[int, ...] = ()):
        self.log = folder / f"engine-{next(_NUMBERS)}.log"
        self._temporary = tempfile.TemporaryDirectory(prefix="hc-")  # engines leave sockets and files there
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environ, "TMPDIR": self._temporary.name},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=fds,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._shared: set[Path] = set()

    def running(self) -> bool:
        return self._process.poll() is None

    def pids(self) -> list[int]:
        """All processes of the session, the first one included."""
        return [pid for pid in _pids() if _session(pid) == self.pid]

    def end(self, ask: Callable[[], object]) -> None:
        """Have `ask` tell the first process to end, give it time for that, and `kill` the rest."""
        for pid in self.pids():  # an engine may end its workers before they have removed theirs
            self._shared |= _shared_memory(pid)
        ask()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """End each process of the session at once, and remove their shared memory. Harmless when repeated."""
        patience = time.monotonic() + _TRACKER_TIMEOUT_S
        while pids := self.pids():  # a process may start another one before it gets the signal
            for pid in pids:
                self._shared |= _shared_memory(pid)
                if not _is_tracker(pid) or time.monotonic() > patience:
                    _send(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(0.01)
        self._process.wait()
        for path in self._shared:
            path.unlink(missing_ok=True)
        self._temporary.cleanup()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


class EngineProcess(ProcessTree):
    """The module `module` in this interpreter, started with `options`. Returns when the engine is up."""

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
        """Run `step` in the process and return its answer, as JSON gives it. Raises EngineFailed."""
        self.submit(step, **arguments)
        return self.result(step, timeout_s=timeout_s)

    def submit(self, step: str, **arguments: object) -> None:
        """Start `step`; `result` must follow. Between the two a test can hurt what the engine depends on."""
        try:
            self._socket.sendall(json.dumps([step, arguments]).encode() + b"\n")
        except OSError as error:
            raise EngineFailed(f"{step}: the engine has ended\n{self.tail()}") from error

    def result(self, step: str, *, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        return self._answer(step, timeout_s)

    def close(self) -> None:
        """End the engine as its user would, and after a deadline with force."""
        self._lines.close()
        self.end(self._socket.close)  # `serve` returns at the end of its input

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
            self.kill()  # its answer to this call must not become that of the next one
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
    """Be the process of an EngineProcess: `start` gets its options and returns its steps by name, which this runs until
    the test ends. Values of steps are whatever JSON can carry."""
    descriptor, options = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as channel, channel.makefile("rb") as lines:
        channel.set_inheritable(False)  # processes of the engine would keep the test waiting after this one's end

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


def _session(pid: int) -> int | None:
    """The session of a process that still runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _shared_memory(pid: int) -> set[Path]:
    """The files of /dev/shm that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    names = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return {Path(name) for name in names if name.startswith("/dev/shm/") and not name.endswith(" (deleted)")}


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
