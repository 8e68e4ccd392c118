"""The command `hicache`: help, errors and exit codes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import hicache
from hicache.cli.interrupts import interrupted_by_signals
from hicache.cli.main import COMMANDS, LAB_COMMANDS, LazyGroup, main
from hicache.errors import BackendUnavailable, CapacityError, InvariantError


def run(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the real command in its own process."""
    return subprocess.run(
        [sys.executable, "-m", "hicache", *args], capture_output=True, text=True, timeout=300, check=False, cwd=cwd,
        stdin=subprocess.DEVNULL,
    )


def test_version_is_that_of_the_package() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"hicache, version {hicache.__version__}\n")


HEAVY = {"torch", "fastapi", "uvicorn", "boto3", "redis", "zmq", "mooncake", "hicache_lab"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "heavy"),
    [*((option, HEAVY | {"numpy", "pydantic", "cryptography"}) for option in ("--version", "--help")),
     *((line, HEAVY) for line in ("config check", "purge . --yes", "doctor -c none.yaml"))],
)
def test_a_command_imports_nothing_heavy(line: str, heavy: set[str], tmp_path: Path) -> None:
    """A command for operators imports no engine, no server and no laboratory; version and help not even numpy."""
    code = (
        "import sys\nfrom hicache.cli.main import main\n"
        f"try:\n    main({line.split()}, standalone_mode=False)\nexcept Exception:\n    pass\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True, cwd=tmp_path
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert all(f"  {name} " in result.stdout for name in [*COMMANDS, *LAB_COMMANDS])


@pytest.mark.parametrize("group", ["config", "trace"])
def test_no_help_line_of_a_group_is_cut(group: str) -> None:
    shown = CliRunner().invoke(main, [group, "--help"], terminal_width=80).stdout
    assert "Commands:" in shown and "..." not in shown.partition("Commands:")[2]


@pytest.mark.parametrize("name", sorted([*COMMANDS, *LAB_COMMANDS]))
def test_every_command_is_where_the_tables_say(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None and command.name == name
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def test_a_mistyped_command_gets_the_nearest_one_as_suggestion() -> None:
    result = run("demoo")
    assert result.returncode == 2 and "No such command 'demoo'; did you mean 'demo'?" in result.stderr
    assert run("zzzzzz").stderr.endswith("No such command 'zzzzzz'.\n")


def run_code(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command after `code`, which changes what is installed."""
    command = [sys.executable, "-c", f"{code}\nfrom hicache.cli.main import main\nmain()", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
def test_a_command_without_its_packages_names_the_extra() -> None:
    result = run_code("import sys; sys.modules['uvicorn'] = None", "serve", "-c", "none.yaml")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("hicache: ") and "pip install -e '.[daemon]'" in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(LAB_COMMANDS))
def test_a_command_of_the_laboratory_says_what_to_install(name: str) -> None:
    hidden = "import importlib.metadata as m; m.entry_points = lambda **_: ()"
    result = run_code(hidden, name)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"hicache: {name} is in the package hicache-lab; install it, in a clone by pip ")
    assert f"  {name} " not in run_code(hidden, "--help").stdout


@pytest.mark.long
def test_another_package_adds_a_command_and_cannot_replace_one(tmp_path: Path) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    entries = "greet = other:greet\nls = other:greet\nbad = other:click\n"
    (info / "entry_points.txt").write_text("[hicache.commands]\n" + entries)
    (tmp_path / "other.py").write_text("import click\n@click.command()\ndef greet(): click.echo('hello')\n")
    found = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    assert run_code(found, "greet").stdout == "hello\n"
    assert "Added by the package other." in run_code(found, "--help").stdout
    assert run_code(found, "ls", "--help").stdout.startswith("Usage: -c ls ")
    assert "the entry point other:click is not a click command" in run_code(found, "bad").stderr


@pytest.mark.long
@pytest.mark.parametrize("args", [("--version",), ("config", "schema")])
def test_a_full_disk_behind_the_output_is_one_line_and_exit_code_2(args: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        assert_one_line(args, full.fileno(), "No space left on device")


def test_a_closed_pipe_ends_a_command_silently() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        command = [sys.executable, "-m", "hicache", "config", "schema"]
        result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    finally:
        os.close(write_end)
    assert (result.returncode, result.stderr) == (141, "")


def assert_one_line(args: tuple[str, ...], stdout: int, reason: str) -> None:
    """Check that the command reports in one line why it cannot write to `stdout`."""
    command = [sys.executable, "-m", "hicache", *args]
    result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (2, f"hicache: cannot write to standard output: {reason}\n")


def test_a_closed_output_is_one_line_and_exit_code_2() -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "hicache", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (
        2, "hicache: standard output is closed; redirect it to a file or a terminal\n",
    )


def test_ctrl_c_is_exit_code_130_without_a_traceback() -> None:
    result = run_failing(KeyboardInterrupt())
    assert (result.exit_code, result.output) == (130, "\n")


def test_an_error_by_which_a_library_replaces_an_interrupt_is_the_interrupt() -> None:
    """PyTorch's C code does so. The second half is the control."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(KeyboardInterrupt) as found, interrupted_by_signals():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None
    assert isinstance(found.value.__cause__, ValueError)
    with pytest.raises(ZeroDivisionError), interrupted_by_signals():
        _ = 1 / 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def run_failing(error: BaseException) -> Result:
    """Run a command that raises `error`."""

    @click.command()
    def fails() -> None:
        raise error

    class Failing(LazyGroup):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
            return fails

    return CliRunner().invoke(Failing("hicache"), ["fails"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Not yours", "/x\x1b[31m\udcff"), "'/x\\x1b[31m\\udcff': Not yours"),
        (OSError(errno.EXDEV, "Invalid link", "/a", None, "/b"), "'/a': '/b': Invalid link"),
        (OSError("no number"), "no number"),
        (MemoryError(), "not enough memory"),
        (CapacityError("too large"), "too large"),
        (BackendUnavailable("the disk is gone; plug it in"), "the disk is gone; plug it in\n"),
    ],
)
def test_an_error_that_a_user_can_fix_is_one_line_and_exit_code_2(error: Exception, said: str) -> None:
    result = run_failing(error)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"hicache: {said}")


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), RecursionError("deep"), UnicodeDecodeError("utf-8", b"x", 0, 1, "no"), OverflowError("large"),
     InvariantError("a page twice"), ExceptionGroup("two", [ValueError("a\nb")])],
    ids=repr,
)
def test_a_bug_is_one_line_and_exit_code_3_and_its_traceback_is_saved(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run_failing(error)
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    (kept,) = tmp_path.iterdir()
    assert "this is a bug in HiCache" in result.stderr and str(kept) in result.stderr
    assert "Traceback" in kept.read_text() and "raise error" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0


def test_the_traceback_of_a_bug_is_printed_if_no_file_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")
    result = run_failing(ZeroDivisionError("x"))
    assert result.exit_code == 3 and "Traceback" in result.stderr and "the traceback above" in result.stderr


def test_help_lists_the_exit_codes() -> None:
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).stdout.partition("Exit codes:")[2]
    assert [line.split()[0] for line in shown.splitlines() if line[4:5].isdigit()] == ["0", "1", "2", "3", "130", "141"]


def test_ctrl_c_while_the_command_is_imported_is_no_traceback() -> None:
    """The import of click is held here, in which the signal arrives."""
    code = (
        "import os, signal, sys\n"
        "class Held:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Held())\n"
        "from hicache.__main__ import run; run()"
    )
    ended = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
