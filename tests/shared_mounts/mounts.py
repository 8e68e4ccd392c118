"""Two mounts of one directory, as two machines have them: for tests and benchmarks of shared directories.

    plain              the directory itself, twice: the control
    bindfs             two FUSE mounts whose locks of files are local to each mount, as with NFS `nolock`
    bindfs-locks       the same, with locks that both mounts share
    gluster            two clients of one GlusterFS server, with the caches of a usual client
    gluster-uncached   the same without caches

All except `plain` need root and FUSE. The processes end with this one, also if it is killed; a mount of a killed
process is removed by the next `shared_mounts`. All files of GlusterFS are in the directory of the mounts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hicache_lab.devservers.launcher import launch, suspend
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from tests.waiting import is_running, wait_for

KINDS = ("plain", "bindfs", "bindfs-locks", "gluster", "gluster-uncached")
_PREFIX = "hicache-mounts-"
# For a command that does not wait for a server.
_COMMAND_S = 10.0
# A hung process keeps a mount busy until its threads have ended.
_END_S = 5.0

_SERVER = """
volume posix
  type storage/posix
  option directory {directory}
end-volume
volume locks
  type features/locks
  subvolumes posix
end-volume
volume upcall
  type features/upcall
  option cache-invalidation off
  subvolumes locks
end-volume
volume brick
  type performance/io-threads
  subvolumes upcall
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address {address}
  option transport.socket.listen-port {port}
  option auth.addr.brick.allow {address}
  subvolumes brick
end-volume
"""
_CLIENT = """
volume remote
  type protocol/client
  option transport-type tcp
  option remote-host {address}
  option remote-port {port}
  option remote-subvolume brick
end-volume
"""
# In the order of GlusterFS's own volumes.
_CACHES = ("write-behind", "read-ahead", "io-cache", "quick-read", "md-cache")
_UNCACHED = ("--direct-io-mode=enable", "--attribute-timeout=0", "--entry-timeout=0")


@dataclass(slots=True)
class SharedMounts:
    """Two paths to the same `directory`, and the processes by which they answer."""

    kind: str
    directory: Path
    paths: tuple[Path, Path]
    pids: list[int] = field(default_factory=list)

    def stop(self) -> None:
        """Suspend the processes: calls on the mounts hang."""
        for pid in self.pids:
            suspend(pid)

    def resume(self) -> None:
        """Continue the suspended processes."""
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)

    @property
    def hang(self) -> bool:
        """True if the processes are suspended."""
        return all(_state(pid) == "T" for pid in self.pids)


def unavailable(kind: str) -> str | None:
    """Return why this machine cannot make mounts of a kind; None if it can."""
    if kind == "plain":
        return None
    if os.geteuid() != 0:
        return f"mounts of {kind} need root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return f"mounts of {kind} need /dev/fuse"
    programs = ("bindfs",) if kind.startswith("bindfs") else ("glusterfs", "glusterfsd")
    missing = [program for program in programs if shutil.which(program) is None]
    return f"{', '.join(missing)} is not installed (apt-get install bindfs glusterfs-server)" if missing else None


@contextlib.contextmanager
def shared_mounts(kind: str, parent: Path | None = None) -> Iterator[SharedMounts]:
    """Make two mounts of an empty directory, below `parent` or a temporary directory; remove all at the end.

    REQUIRES: `unavailable(kind)` is None. Raises AssertionError with the logs if a mount does not appear.
    """
    _remove_dead(parent or Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
    directory, logs = folder / "directory", folder / "logs"
    for made in (directory, logs):
        made.mkdir()
    paths = (directory, directory) if kind == "plain" else (folder / "one", folder / "two")
    mounts = SharedMounts(kind, directory, paths)
    try:
        with contextlib.ExitStack() as processes:
            if kind.startswith("gluster"):
                _mount_gluster(mounts, logs, processes)
            elif kind != "plain":
                _mount_bindfs(mounts, logs, processes)
            yield mounts
    finally:
        assert not _mounted_below(folder), "a directory is still mounted"
        shutil.rmtree(folder)


def _mount_bindfs(mounts: SharedMounts, logs: Path, processes: contextlib.ExitStack) -> None:
    # With several threads a mount makes calls at the same time, as file systems of clusters do.
    options = ["-f", "--multithreaded", *(["--enable-lock-forwarding"] if mounts.kind == "bindfs-locks" else [])]
    for path in mounts.paths:
        command = ["bindfs", *options, str(mounts.directory), str(path)]
        mounts.pids.append(processes.enter_context(_mount(command, path, logs)))


def _mount_gluster(mounts: SharedMounts, logs: Path, processes: contextlib.ExitStack) -> None:
    (port,) = free_ports(1)
    names = {"directory": mounts.directory, "address": LOOPBACK, "port": port}
    (logs / "server.vol").write_text(_SERVER.format(**names))
    caches, above, client = _CACHES if mounts.kind == "gluster" else (), "remote", _CLIENT.format(**names)
    for cache in caches:
        client += f"volume {cache}\n  type performance/{cache}\n  subvolumes {above}\nend-volume\n"
        above = cache
    (logs / "client.vol").write_text(client)

    def command(program: str, volumes: str, name: str) -> list[str]:
        return [program, "--no-daemon", f"--volfile={logs / volumes}", f"--log-file={logs / name}.log",
                f"--pid-file={logs / name}.pid"]

    server = processes.enter_context(_process(command("glusterfsd", "server.vol", "server"), logs))
    wait_for(lambda: _listens(port) or _state(server) in ("", "Z"))
    for path in mounts.paths:
        client_command = [*command("glusterfs", "client.vol", path.name), *(() if caches else _UNCACHED), str(path)]
        processes.enter_context(_mount(client_command, path, logs))
    # The mounts hang without their server.
    mounts.pids.append(server)


@contextlib.contextmanager
def _mount(command: Sequence[str], path: Path, logs: Path) -> Iterator[int]:
    """Mount `path` with a process; yield its number. Unmount at the end, then end the process."""
    path.mkdir()
    with _process(command, logs) as pid:
        try:
            wait_for(lambda: str(path) in _mounted_below(path.parent) or _state(pid) in ("", "Z"))
            assert str(path) in _mounted_below(path.parent), _read(logs)
            path.stat()
            yield pid
        finally:
            os.kill(pid, signal.SIGCONT)
            _unmount(path)


@contextlib.contextmanager
def _process(command: Sequence[str], logs: Path) -> Iterator[int]:
    """Start a program; yield the number of the process. End it, and all that it has started, at the end."""
    program = shutil.which(command[0])
    assert program is not None, f"{command[0]} is not installed"
    process = launch([program, *command[1:]], environ=dict(os.environ), directory=logs, log=logs / "output")
    try:
        yield process.pid
    finally:
        os.kill(process.pid, signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_COMMAND_S)


def _unmount(path: Path) -> None:
    """Unmount a path. If it is still in use, its files stay open until their users end."""
    for option in ([], ["--lazy"]):
        if str(path) in _mounted_below(path.parent):
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["umount", *option, str(path)], check=False, capture_output=True, timeout=_COMMAND_S)


def _remove_dead(parent: Path) -> None:
    """Remove the mounts and directories of killed processes."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if not is_running(int(folder.name.removeprefix(_PREFIX).partition("-")[0])):
            for path in _mounted_below(folder):
                subprocess.run(["umount", "--lazy", path], check=False, capture_output=True, timeout=_COMMAND_S)
            if not _mounted_below(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _mounted_below(folder: Path) -> list[str]:
    """Return the mounts below a directory. Does not touch them: a dead mount hangs or fails."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [path for path in (line.split()[4] for line in lines) if path.startswith(f"{folder}/")]


def _state(pid: int) -> str:
    """Return the letter of a process's state (proc(5)); empty text if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((LOOPBACK, port)) == 0


def _read(logs: Path) -> str:
    texts = [path.read_text(errors="replace")[-2000:] for path in sorted(logs.iterdir()) if path.suffix in ("", ".log")]
    return "\n".join(texts)
