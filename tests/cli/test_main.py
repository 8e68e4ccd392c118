"""The command as a user meets it: quick help, clear errors, exit codes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import hicache
from hicache.cli.main import COMMANDS, LazyGroup, main
from hicache.errors import BackendUnavailable


def run(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hicache", *args], capture_output=True, text=True, timeout=60, check=False, cwd=cwd,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_version_is_that_of_the_package() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"hicache, version {hicache.__version__}\n")


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_version_and_help_import_nothing_heavy(argument: str) -> None:
    code = (
        "import sys\nfrom hicache.cli.main import main\n"
        f"main(['{argument}'], standalone_mode=False)\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'cryptography'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert all(f"  {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_is_where_the_table_says(name: str) -> None:
    module, _, attribute = COMMANDS[name][0].partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command) and command.name == name
    assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def test_an_unknown_command_is_a_usage_error() -> None:
    result = run("vrfy")
    assert result.returncode == 2 and "vrfy" in result.stderr and "Traceback" not in result.stderr


def test_an_error_of_ours_is_one_line_and_exit_code_2() -> None:
    @click.command()
    def fails() -> None:
        raise BackendUnavailable("the disk is gone; plug it in")

    class Failing(LazyGroup):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
            return fails

    result = CliRunner().invoke(Failing("hicache"), ["fails"])
    assert result.exit_code == 2
    assert result.stderr == "hicache: the disk is gone; plug it in\n"
