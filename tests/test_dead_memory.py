"""Memory whose processes have died is removed by the next process that starts; memory in use or wanted never is."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hicache.shared_memory import CONTROL_BYTES, Layout, Role, SharedMemory, path_of, remove_dead
from tests.backends.remote.daemon import Daemon
from tests.cache.test_shared_host import ENGINE, on, sections
from tests.leftovers import guarded
from tests.waiting import WAIT_S, wait_for

ROOT = Path(__file__).resolve().parents[1]
FRAME = 8192
LAYOUT = Layout(0, 4, FRAME, b"s" * 32)
# Opens memory, prints a line, and waits to be killed.
HOLDER = """
import json, sys, time
from hicache.shared_memory import Layout, Role, SharedMemory
name, processes, keep, role = json.loads(sys.argv[1])
layout = Layout(processes, 4, 8192, b"s" * 32, keep=keep)
memory = SharedMemory.open(name, layout, deadline=time.monotonic() + 60, role=Role[role])
print("open", flush=True)
sys.stdin.read()
"""
# Opens and leaves memories of its own in turn, and fails if one disappears or changes while it is open.
STARTER = """
import os, sys, time
from hicache.shared_memory import Layout, Role, SharedMemory
prefix, rounds = sys.argv[1], int(sys.argv[2])
for number in range(rounds):
    name = f"{prefix}-{number % 3}"
    layout, deadline = Layout(0, 4, 8192, b"s" * 32), time.monotonic() + 60
    memory = SharedMemory.open(name, layout, deadline=deadline, role=Role.ALONE)
    memory.frames[:8] = number.to_bytes(8, "little")
    for _ in range(20):
        state = os.lstat(memory.path)
        assert (state.st_dev, state.st_ino) == memory.identity, "the name is another file's"
        assert int.from_bytes(memory.frames[:8], "little") == number
        time.sleep(0)
    memory.close()
print("done", flush=True)
"""
# Starts an engine, closes it in the child of a fork, prints the child's status, and closes it at the end of its input.
FORKING = """
import json, os, sys
from hicache.admin import serve_configured
from hicache.cache import create_cache
from hicache.config import HiCacheConfig
from tests.cache.test_factory import NAMESPACE
config = HiCacheConfig.model_validate(json.loads(sys.argv[1]))
cache = create_cache(config, NAMESPACE)
admin = serve_configured(config, cache, NAMESPACE)
child = os.fork()
if not child:
    admin.close()
    os._exit(0 if cache.close() else 1)
print(os.waitpid(child, 0)[1], flush=True)
sys.stdin.read()
admin.close()
cache.close()
print("closed", flush=True)
"""
_numbers = itertools.count()


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other test uses; its file is removed in the end."""
    chosen = f"test-dead-{os.getpid()}-{next(_numbers)}"
    yield chosen
    for path in path_of(chosen).parent.glob(f"{path_of(chosen).name}*"):
        path.unlink()


@contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python code, and kill it at the end."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def held(name: str, processes: int = 0, *, keep: bool = False, role: Role = Role.OWNER) -> Iterator[None]:
    """Run a process that has the memory `name` open, and kill it at the end."""
    with running(HOLDER, json.dumps([name, processes, keep, role.name])) as holder:
        assert line_of(holder) == "open" and path_of(name).exists()
        yield


def open_it(name: str, layout: Layout = LAYOUT) -> SharedMemory:
    return SharedMemory.open(name, layout, deadline=time.monotonic() + WAIT_S)


def start_beside(name: str) -> None:
    """Start an engine with memory of another name."""
    memory = open_it(f"{name}-other")
    memory.unlink()
    memory.close()


@pytest.mark.parametrize("kind", ["persistent", "for three processes", "created by a daemon", "creation cut short"])
def test_the_next_engine_that_starts_removes_the_memory_of_a_killed_one(name: str, kind: str) -> None:
    """The controls: nothing is removed while the process lives, and a leftover of its own name is taken over."""
    processes, role = 3 if "three" in kind else 0, Role.DAEMON if "daemon" in kind else Role.OWNER
    with held(name, processes, role=role):
        start_beside(name)
        assert path_of(name).exists()
        if "short" in kind:
            os.truncate(path_of(name), 4096)
    start_beside(name)
    assert not path_of(name).exists()


def test_an_engine_of_the_same_name_takes_the_memory_over(name: str) -> None:
    with ExitStack() as guard:
        with held(name):
            guard.enter_context(guarded(name))
            before = path_of(name).stat().st_ino
        assert open_it(name).identity[1] == before


def test_memory_that_is_kept_stays_until_an_engine_does_not_want_it(name: str) -> None:
    with held(name, keep=True):
        pass
    assert name not in remove_dead() and path_of(name).exists()
    with held(name):  # opens it without `keep`
        pass
    start_beside(name)
    assert not path_of(name).exists()


def test_memory_stays_as_long_as_any_process_has_it_open(name: str) -> None:
    """Two members, a daemon that is attached, and a view: the last one counts."""
    with held(name):
        pass
    first, second = open_it(name), open_it(name)
    daemon = SharedMemory.attach(name, deadline=time.monotonic() + WAIT_S)
    view = daemon.frames
    for memory in (first, second):
        assert name not in remove_dead()
        memory.close()
    assert name not in remove_dead()
    with pytest.raises(BufferError):
        daemon.close()
    del daemon
    assert name not in remove_dead() and path_of(name).exists()
    del view
    wait_for(lambda: not path_of(name).exists(), remove_dead)


def _foreign(path: Path) -> None:
    path.write_bytes(b"notes" * 9999)


def _empty(_: Path) -> None:
    """The file of a process that has created it and has not locked it yet."""


def _newer(path: Path) -> None:
    path.write_bytes(Layout(0, 4, FRAME, b"s" * 32, version=2).pack() + bytes(CONTROL_BYTES))


def _open_to_all(path: Path) -> None:
    path.write_bytes(LAYOUT.pack() + bytes(CONTROL_BYTES))
    path.chmod(0o644)


def _of_another_user(path: Path) -> None:
    path.write_bytes(LAYOUT.pack() + bytes(CONTROL_BYTES))
    os.chown(path, 12345, -1)


def _link(path: Path) -> None:
    aside = path.with_name(f"{path.name}-aside")
    aside.touch(0o600)
    aside.write_bytes(LAYOUT.pack())
    os.chmod(aside, 0o644)
    path.unlink()
    path.symlink_to(aside)


def _named_otherwise(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}_x"))
    path.with_name(f"{path.name}_x").write_bytes(LAYOUT.pack())
    path.symlink_to(f"{path.name}_x")


@pytest.mark.parametrize("make", [_foreign, _empty, _newer, _open_to_all, _of_another_user, _link, _named_otherwise])
def test_a_file_that_is_not_certainly_dead_memory_of_this_user_stays(name: str, make: Callable[[Path], None]) -> None:
    if make is _of_another_user and os.geteuid():
        pytest.skip("only root can give a file away")
    path = path_of(name)
    path.touch(0o600)
    make(path)
    before = {one.name: one.lstat().st_ino for one in path.parent.glob(f"{path.name}*")}
    removed = remove_dead()
    assert not any(name in one for one in removed)
    assert {one.name: one.lstat().st_ino for one in path.parent.glob(f"{path.name}*")} == before


def _flocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_a_file_that_another_process_is_opening_stays(name: str) -> None:
    """The control: it is removed once the lock has ended."""
    with held(name):
        descriptor = os.open(path_of(name), os.O_RDWR)
        wait_for(lambda: _flocked(descriptor))  # a test beside this one may look for dead memory
    assert name not in remove_dead() and path_of(name).exists()
    os.close(descriptor)
    wait_for(lambda: not path_of(name).exists(), remove_dead)


@pytest.mark.long
def test_many_starters_at_once_never_remove_memory_in_use(name: str) -> None:
    """Each leaves dead memory behind all the time, which the others remove while they create theirs."""
    ended = threading.Event()

    def sweep() -> None:
        while not ended.is_set():
            remove_dead()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    with ExitStack() as stack:
        stack.callback(sweeper.join)
        stack.callback(ended.set)
        starters = [stack.enter_context(running(STARTER, f"{name}-{number % 2}", "60")) for number in range(4)]
        assert [line_of(starter) for starter in starters] == ["done"] * 4
    wait_for(lambda: not list(path_of(name).parent.glob(f"{path_of(name).name}-*")), remove_dead)


# With real engines and daemons


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, {"pool": "1MiB", "staging": "8MiB"}) as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("case", ["the daemon was restarted in between", "both died", "no daemon at all"])
def test_the_l2_of_a_killed_engine_is_removed_by_whoever_starts(name: str, daemon: Daemon, case: str) -> None:
    settings = sections(name, **({} if "no daemon" in case else on(daemon)))
    with running(ENGINE, json.dumps(settings)) as engine:
        assert line_of(engine) == "stored"
        if "no daemon" not in case:
            daemon.kill()
        if "between" in case:
            daemon.start()
            assert path_of(name).exists(), "the control: its engine lives"
    if "both" in case:
        daemon.start()
    elif "no daemon" in case:
        start_beside(name)
    wait_for(lambda: not path_of(name).exists())


@pytest.mark.long
def test_the_child_of_a_fork_that_closes_the_cache_leaves_its_parents_names(name: str, scratch: Path) -> None:
    """The control: the parent's `close` removes them."""
    socket = scratch / "admin" / "engine.sock"
    with running(FORKING, json.dumps(sections(name, admin={"socket": str(socket)}))) as parent:
        assert line_of(parent) == "0"
        assert path_of(name).exists() and socket.exists()
        assert parent.stdin is not None
        parent.stdin.close()
        assert line_of(parent) == "closed"
        assert not path_of(name).exists() and not socket.exists()
