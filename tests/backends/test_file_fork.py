"""A process that forks: its child holds no lock of the store, does not use it, and does not change it when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.backends.file.inspection import FileInspection
from hicache.backends.stored import StoredPages
from hicache_lab.conformance import HIT, STORED, full_frames, load, make_keys, soon, store_chain

from ._files import CODEC, PAGE, Faulty, check, file_options, open_file, temporary_files

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).resolve().parents[2]

_KILLED = """
import multiprocessing, os, signal, sys
from hicache_lab.conformance import NAMESPACE, make_keys, soon
from tests.backends._files import PAGE, file_driver, open_file
root, how, alive = sys.argv[1], sys.argv[2], int(sys.argv[3])

def help():
    print("helping", flush=True)
    os.read(alive, 1)

store = file_driver(open_file(root))._store
with store.transaction(soon()) as index:
    index.reserve(NAMESPACE, make_keys(8, "dead"), [None] * 8, f"{store.owner}.1", PAGE, 1)
with store.transaction(soon()) as index:
    if how == "os.fork":
        if os.fork() == 0:
            help()
            os._exit(0)
    else:
        multiprocessing.get_context("fork").Process(target=help).start()
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_the_locks_of_a_killed_engine_end_with_it_even_if_its_child_lives(root: Path, how: str) -> None:
    store = open_file(root, capacity=8 * PAGE)
    alive, ended = os.pipe()
    command = [sys.executable, "-c", _KILLED, str(root), how, str(alive)]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[alive], text=True
    ) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        assert engine.stdout.readline() == "helping\n"
        engine.stdin.write("now\n")
        engine.stdin.flush()
        assert engine.wait() == -signal.SIGKILL
        keys = make_keys(8, "new")
        # The engine had reserved the whole capacity, so its owner file must be unlocked too.
        assert (store_chain(store, keys), dict(store.backend.statistics().errors)) == ([STORED] * 8, {})
        assert all(name.endswith(".alive") for name in temporary_files(root))
        os.close(ended)
    os.close(alive)
    check(store, root)
    store.backend.close()


_USED_BY_CHILD = """
import os, sys
from hicache_lab.conformance import NAMESPACE, empty_frames, full_frames, make_keys, soon, store_chain
from tests.backends._files import CODEC, check, file_driver, open_file
from pathlib import Path
root = Path(sys.argv[1])
store, keys = open_file(root), make_keys(100)
backend = store.backend
store_chain(store, keys)
with file_driver(store)._store.transaction(soon()) as index:
    index._run("PRAGMA cache_size = 1")
    index.touch(NAMESPACE, dict.fromkeys(keys, 1 << 60))
    pid = os.fork()
    if pid == 0:
        fresh = [os.open("/dev/null", os.O_RDONLY) for _ in range(4)]
        print(set(backend.batch_get(keys, empty_frames(CODEC, 100), deadline=soon())), end=" ")
        print(set(backend.batch_set(keys, full_frames(CODEC, keys), parent=None, deadline=soon())), end=" ")
        print(backend.batch_exists(keys, deadline=soon()), backend.delete(keys, deadline=soon()), end=" ")
        print(any(backend.batch_has(keys, deadline=soon())), backend.clear(deadline=soon()), end=" ")
        print(backend.usage().pages, *backend.statistics().errors.items())
        backend.close()
        for fd in fresh:
            os.close(fd)
        try:
            index.totals()
        except Exception as error:
            print(type(error).__name__)
        sys.stdout.flush()
        # Through the end of the interpreter, which finalizes what it still knows.
        sys.exit(0)
    os.waitpid(pid, 0)
check(store, root)
rows = index.all_stored()
print(len(rows), all(row.last_use == 1 << 60 for row in rows), set(store_chain(store, make_keys(5, "new"))))
backend.close()
"""


def test_a_child_is_rejected_and_its_end_does_not_affect_its_parents_transaction(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _USED_BY_CHILD, str(tmp_path / "s")]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300)
    child, stub, parent = result.stdout.splitlines()
    assert child == (
        "{<GetOutcome.ERROR: 'error'>} {<SetOutcome.ERROR: 'error'>} 0 0 False 0 0 (<ErrorKind.FORKED: 'forked'>, 204)"
    )
    assert stub == "ProgrammingError"
    assert parent == "100 True {<SetOutcome.STORED: 'stored'>}"
    assert result.returncode == 0
    store = open_file(tmp_path / "s")
    assert load(store, make_keys(100)) == [HIT] * 100
    check(store, tmp_path / "s")
    store.backend.close()


def test_a_child_forked_while_a_tool_reads_holds_no_lock(tmp_path: Path) -> None:
    root, children = tmp_path / "s", list[int]()
    store = open_file(root)
    store_chain(store, make_keys(2))

    def before(name: str, number: int, args: tuple[object, ...]) -> None:
        if name == "listdir" and not children:
            children.append(os.fork())
            if not children[0]:
                os.read(alive, 1)
                os._exit(0)

    alive, held = os.pipe()
    raw = StoredPages(FileInspection(None, file_options(root), system=Faulty(before)), "file")
    assert len(list(raw.pages())) == 2
    raw.close()
    try:
        frames = full_frames(CODEC, keys := make_keys(2, "new"))
        assert store.backend.batch_set(keys, frames, parent=None, deadline=soon()) == [STORED] * 2
    finally:
        os.close(held)
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
        os.close(alive)
    store.backend.close()
