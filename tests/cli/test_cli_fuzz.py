"""Every command with hostile arguments: the exit code is 0, 1 (a finding) or 2, and stderr has no traceback."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hicache.cli.main import main
from tests.seeds import rng, seeds

pytestmark = pytest.mark.long

VALUES = [
    "", " ", "0", "-1", "1", "nan", "inf", "-inf", "9" * 30, "9" * 5000, "1" + "0" * 50, "1.5", "0x10", "\u0664",
    "x" * 300, "x" * 100_000, "a\nb", "\x1b[31mx", "\udcff\udcfe", "\ud800", "é" * 50, "a\0b", "/dev/null", "/dev/zero",
    "/dev/full", "pipe", "pipe.yaml", "link.yaml", "loop", "empty", "empty.yaml", "dir", "dir.yaml", "bad.yaml",
    "mem.yaml", "bytes.yaml", "trace.jsonl", "none.yaml", "none/x", "/proc/self/mem", "/root", ".", "..", "-", "=",
    "a=b", "page_size=", "host.size=1e400GiB", "host.tokens=1125899906842624", "1PiB", "-5GiB", "366d", "cuda:999",
    "ff", "storage.type=memory", "storage.options.path=", "storage=null", "device.tokens=1", "storage.type=nosuch",
]
# Arguments that make long commands short.
EXTRA = {
    ("replay",): ["--requests", "2", "--prefill-rate", "0"], ("trace", "generate"): ["--requests", "2"],
    ("demo",): ["--set", "no.entry=1"], ("serve",): ["--set", "no.entry=1"], ("dev-up",): ["--port", "0"],
}
# Options of a group, so that no command reaches a daemon on this machine.
GROUPS = {"ctl": ["--socket", "none.sock"]}
# Commands that exit with 1 if a file is invalid, or a check fails.
FINDS = {("config", "check"), ("doctor",), ("inspect",)}
COMMANDS_OF_EACH = 12


@pytest.fixture(scope="module", autouse=True)
def strange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create one file of each kind in the working directory."""
    folder = tmp_path_factory.mktemp("strange")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("pipe", "pipe.yaml"):
            os.mkfifo(name, 0o600)
        for name in ("empty", "empty.yaml"):
            Path(name).touch()
        for name in ("dir", "dir.yaml"):
            Path(name).mkdir(mode=0o700)
        Path("link.yaml").symlink_to("pipe")
        Path("loop").symlink_to("loop")
        Path("bad.yaml").write_text("storage: {type: file, options: {path: ''}}")
        Path("mem.yaml").write_text("storage: {type: memory}")
        Path("bytes.yaml").write_bytes(b"\xff\xfe\0")
        Path("trace.jsonl").write_text('{"timestamp": 1e400}\n')
        yield


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in command.list_commands(click.Context(command)):
        found = command.get_command(click.Context(command), name)
        assert found is not None
        yield from leaves(found, (*path, name))


LEAVES = dict(leaves(main))


def drawn(path: tuple[str, ...], numbers: random.Random) -> list[str]:
    """Return a random command line with up to two options and hostile values."""
    options = [one for one in LEAVES[path].params if isinstance(one, click.Option) and not one.hidden]
    arguments = [one for one in LEAVES[path].params if isinstance(one, click.Argument)]
    line = [path[0], *GROUPS.get(path[0], []), *path[1:], *EXTRA.get(path, [])]
    for option in numbers.sample(options, min(len(options), numbers.randrange(3))):
        # The last of equal options counts, so do not repeat those of EXTRA.
        if option.opts[-1] not in ("--help", "--processes", *line):
            line += [option.opts[-1]] if option.is_flag else [option.opts[-1], numbers.choice(VALUES)]
    return [*line, *(numbers.choice(VALUES) for one in arguments if one.required or numbers.random() < 0.3)]


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_hostile_arguments_end_with_a_message_and_a_documented_exit_code(
    path: tuple[str, ...], seed: int
) -> None:
    numbers = rng(seed)
    for _ in range(COMMANDS_OF_EACH):
        line = drawn(path, numbers)
        result = CliRunner().invoke(main, line, input="")
        said = f"{[part[:60] for part in line]}: {result.exit_code}\n{result.output[-2000:]}"
        assert result.exit_code in ((0, 1, 2) if path in FINDS else (0, 2)), said
        assert "Traceback" not in result.output, said
        assert result.exception is None or isinstance(result.exception, SystemExit), said
        assert result.exit_code == 0 or result.output.strip(), said
        assert "\x1b[31mx" not in result.stderr, said


@pytest.mark.parametrize(
    "line",
    ["trace show pipe", "trace generate loop", "trace generate pipe", "trace generate dir", "replay -c pipe.yaml",
     f"replay --requests 1{'0' * 50}", f"trace generate x --requests 1{'0' * 50}", "replay --speed-up nan",
     "replay --prefill-rate inf", "replay --running-max 1048577", f"replay --seed {1 << 63}", "demo --temperature nan",
     "demo -c pipe.yaml --storage file", "demo -c link.yaml", "inspect --mac-key-file pipe empty",
     "plan pipe", "plan - --nodes 65", "plan - --endurance nan", "plan /dev/zero",
     "verify --encryption-key-file /dev/zero dir", "dev-up redis --port 65536", "purge --yes link.yaml"],
)
def test_arguments_that_once_hung_or_raised_give_exit_code_2(line: str) -> None:
    result = CliRunner().invoke(main, line.split(), input="")
    assert result.exit_code == 2 and result.stderr.strip(), result.output


@pytest.mark.parametrize(
    "line", ["replay --store @ --requests 1", "replay --json @", "copy @ dir", "ls @", "trace show @"]
)
def test_an_empty_path_is_a_usage_error(line: str) -> None:
    result = CliRunner().invoke(main, line.replace("@", "").split(" "))
    assert result.exit_code == 2 and "the path is empty; write . for the working directory" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [[b"ls", b"\xff\xfe.yaml"], [b"config", b"check", b"pipe.yaml"], [b"purge", b"--yes", b"pipe.yaml"],
     [b"ls", b"\x1b]0;title\x07.yaml"]],
    ids=lambda arguments: ascii(b" ".join(arguments)),
)
def test_a_real_process_with_hostile_bytes_ends_with_one_message(arguments: list[bytes]) -> None:
    command = [os.fsencode(sys.executable), b"-m", b"hicache", *arguments]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == (1 if arguments[0] == b"config" else 2), done.stderr
    assert b"Traceback" not in done.stderr and b"\x1b" not in done.stderr and done.stderr.strip()


def test_a_process_substitution_is_rejected_with_the_reason() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    line = f"{sys.executable} -m hicache config check <(echo page_size: 16)"
    done = subprocess.run([bash, "-c", line], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "cannot be read: it is a pipe, not a regular file" in done.stderr
