"""The commands on the pages run as written: those of one page in order, in a folder like a fresh clone.

`NOT_RUN` names the others, each with the reason. Every `hicache` command is parsed, whether it runs or not, and also
within the text. Table headings in the output shown on a page must be those of the real output.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hicache.cli.main import main
from hicache_lab.conformance import make_keys
from hicache_lab.devservers.launcher import launch
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from tests.admin.ctl import Ctl
from tests.daemon.daemons import Client
from tests.daemon.traffic import BusyDaemon
from tests.waiting import wait_for

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 500
DAEMON_ADDRESS = "127.0.0.1:9321"
NOT_RUN = {
    r"make ": "test_house.py compares targets with the Makefile; CI runs `make test` and `make test-engines`",
    r"(\S*/)?pip install|\S*python3? -m (pip|venv) ": "installs packages",
    r"vllm serve|python -m sglang|curl -s localhost:8000": "needs an engine: tests/engines",
    r"useradd|systemctl|install -|\S*hicache ctl --socket /run/": "changes the system, as root",
    r"kubectl ": "needs a cluster; tests/deploy checks the manifests",
    r"ssh |prometheus |promtool |python3 -m http.server": "needs another host or program, or serves until stopped",
    r"\S*hicache demo": "lab/tests/cli/test_demo.py and test_demo_storage.py",
    r"\S*hicache doctor": "needs a machine of the configuration's size: tests/cli/test_doctor.py",
    r"\S*hicache dev-up|\S*python -m hicache_lab.devservers": "lab/tests/cli/test_dev_up.py",
    r"\S*hicache replay( conversation_trace.jsonl|$)": "takes minutes, or needs the public trace: lab/tests/replay",
    r"\S*hicache plan conversation_trace.jsonl": "needs the public trace: lab/tests/cli/test_plan_command.py",
    r"\S*python examples/": "tests/test_examples.py",
    r"\S*python -m (tests\.|pytest .*tests/(backends|faults)( |$))": "takes minutes",
}


def examples(text: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a page, each with its output: lines after `$ ` in console blocks."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^ *```console\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if found and not _is_whole(found[-1][0]):
                found[-1] = (f"{found[-1][0]}\n{line}", [])
            elif line.lstrip().startswith("$ "):
                found.append((line.lstrip()[2:], []))
            elif found:
                found[-1][1].append(line)
    return found


def _is_whole(command: str) -> bool:
    try:
        shlex.split(command)
    except ValueError:
        return False
    return not command.endswith("\\")


def reason(command: str) -> str | None:
    """Return the pattern of `NOT_RUN` that a command matches."""
    return next((pattern for pattern in NOT_RUN if re.match(pattern, command)), None)


TEXTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), ROOT / "lab/README.md", *(ROOT / "docs").rglob("*.md")])
}
PAGES = {page: found for page, text in TEXTS.items() if (found := examples(text))}
RUN = {page: run for page, found in PAGES.items() if (run := [one for one in found if reason(one[0]) is None])}


class Folder:
    """A folder like a fresh clone with its `.venv`; it is the home directory too."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._stack = stack
        for entry in ROOT.iterdir():
            if entry.name in ("deploy", "docs"):  # some commands write into them
                shutil.copytree(entry, path / entry.name)
            elif not entry.name.startswith(".") and entry.name not in ("build", "dist", "demo-data"):
                (path / entry.name).symlink_to(entry)
        (path / ".venv").symlink_to(sys.prefix)
        runtime = path / "run"
        runtime.mkdir(mode=0o700)
        self.socket = runtime / "hicache" / "daemon.sock"
        self.address = f"{LOOPBACK}:{free_ports(1)[0]}"
        self.environ = {
            **os.environ,
            "PATH": f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "120",
            "HOME": str(path),
            "XDG_RUNTIME_DIR": str(runtime),
            "HICACHE_DAEMON__LISTEN": self.address,
            "HICACHE_DAEMON__SOCKET": str(self.socket),
        }

    def run(self, command: str) -> str:
        """Run a command, which must succeed, and return its output. `hicache serve` runs until the end of the test."""
        if "hicache serve" in command:
            self._serve(command)
            return ""
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.path, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    def _serve(self, command: str) -> None:
        log = self.path / "daemon.log"
        words = ["/bin/bash", "-c", f"exec {command}"]
        daemon = launch(words, environ=self.environ, directory=self.path, log=log)
        self._stack.callback(daemon.wait)
        self._stack.callback(daemon.terminate)

        def is_ready() -> bool:
            assert daemon.poll() is None, log.read_text()
            client = Client(self.socket)
            try:
                return client.call("GET", "/readyz")[0] == 200
            except OSError:
                return False
            finally:
                client.close()

        wait_for(is_ready)


@pytest.fixture
def folder(scratch: Path) -> Iterator[Folder]:
    """A folder for one page; its daemon ends with the test."""
    with ExitStack() as stack:
        yield Folder(scratch, stack)


@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run_in_order(page: str, folder: Folder) -> None:
    with ExitStack() as stack:
        adapt = stack.enter_context(adapted(page, folder))
        for command, shown in RUN[page]:
            output = folder.run(adapt(command).replace(DAEMON_ADDRESS, folder.address))
            assert headings(shown) <= headings(output.splitlines()), f"{command}: {output}"


class Adapter:
    """Puts values of this run in place of those on a page: a socket, and digests of pages, namespaces and pins."""

    def __init__(self, daemon: BusyDaemon | None = None) -> None:
        self._daemon = daemon

    def __call__(self, command: str) -> str:
        """Return the command to run."""
        if self._daemon is None:
            return command
        ctl = Ctl(("--socket", str(self._daemon.socket)))
        key = make_keys(1, "chain1/0")[0].hex()
        namespace = self._daemon.status()["namespaces"][0]["namespace"][:8]
        values = {
            r"hicache ctl": f"hicache ctl --socket {self._daemon.socket}",
            r"\b[0-9a-f]{64}\b": key,
            r"(?<=lookup )[0-9a-f]+": key[:8],
            r"(?<=--namespace )\w+": namespace,
            r"(?<=quota )\w+": namespace,
            r"(?<=unpin )\w+": next((one["id"] for one in ctl.quick("--json", "pin").json), ""),
        }
        for pattern, value in values.items():
            command = re.sub(pattern, value, command)
        return command


@contextmanager
def adapted(page: str, folder: Folder) -> Iterator[Adapter]:
    """Prepare what the commands of a page work on."""
    if page == "docs/operations.md":
        place = folder.path / "busy"
        place.mkdir()
        with BusyDaemon(place, ("Llama-3.1-8B",), "file") as daemon:
            daemon.serve(rounds=2)
            yield Adapter(daemon)
        return
    if any("demo-data/pages" in command for command, _ in RUN[page]):
        folder.run(".venv/bin/hicache replay --requests 5 --store demo-data/pages")
    yield Adapter()


def headings(lines: list[str]) -> set[tuple[str, ...]]:
    """Return the headings of the tables in an output: lines of at least two words in capitals."""
    found = {tuple(line.split()) for line in lines}
    return {words for words in found if len(words) > 1 and all(word.isupper() for word in words)}


@pytest.mark.parametrize("page", PAGES)
def test_options_and_arguments_exist(page: str) -> None:
    for command, _ in PAGES[page]:
        match = re.match(r"(?:\S*/)?hicache (.*)", command.replace("\\\n", " "), flags=re.DOTALL)
        if match is not None:
            parse([word for word in shlex.split(match[1].partition(" > ")[0]) if word])


@pytest.mark.parametrize("page", TEXTS)
def test_commands_within_the_text_exist(page: str) -> None:
    for mention in re.findall(r"`hicache ([a-z][^`]*)`", TEXTS[page]):
        assert is_known(mention.split()), f"hicache {mention}"


def is_known(words: list[str]) -> bool:
    """Return True if `hicache` has the command, and its options. The last option may lack its value."""
    option = words[-1] if words[-1].startswith("--") else ""
    shown = CliRunner().invoke(main, [*(words[:-1] if option else words), "--help"])
    return shown.exit_code == 0 and option in shown.output


def parse(words: list[str]) -> None:
    """Parse the command line of `hicache`. Raises click.UsageError."""
    command: click.Command = main
    context = main.make_context("hicache", list(words), resilient_parsing=False)
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command = found
        with context.scope(cleanup=False):
            context = command.make_context(name, rest, parent=context)


def test_reasons_and_headings_are_not_stale() -> None:
    used = {reason(command) for found in PAGES.values() for command, _ in found}
    assert used >= set(NOT_RUN)
    assert any(headings(shown) for _, shown in RUN["docs/operations.md"])


def test_commands_of_a_page_that_do_not_work_are_noticed(folder: Folder) -> None:
    """The control: a failing command, an unknown option, another heading."""
    (one, two) = examples("```console\n$ hicache ls \\\n  x\nA B\n$ true\n```\n")
    assert one == ("hicache ls \\\n  x", ["A B"]) and two == ("true", [])
    with pytest.raises(AssertionError, match="No such file or directory"):
        folder.run(".venv/bin/hicache verify missing")
    with pytest.raises(click.UsageError, match="--no-such"):
        parse(["ls", "--no-such", "x"])
    assert not headings(["STORE  PAGE"]) <= headings(["STORE  PAGES"])
    assert is_known(["ctl", "logs", "LEVEL"]) and is_known(["purge", "--epoch"])
    assert not (is_known(["ctl", "log-level"]) or is_known(["purge", "--age"]) or is_known(["ls", "--age", "5"]))
