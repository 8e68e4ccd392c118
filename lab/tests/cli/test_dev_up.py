"""`hicache dev-up` as a user runs it: its printed configuration works, and it leaves nothing at its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from hicache.cli.main import main
from hicache.errors import ConfigError
from hicache_lab.cli.dev_up import section
from hicache_lab.devservers import KINDS, MooncakeClientDaemon, RedisSentinel, make_service
from hicache_lab.devservers.ports import free_ports, is_free
from tests.waiting import wait_for

TIMEOUT_S = 300


@contextmanager
def running(repository: Path, directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command, with `directory` for temporary files of servers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hicache", "dev-up", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(repository), "TMPDIR": str(directory)},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def output_of_start(process: subprocess.Popen[str]) -> str:
    """Return the output of the command up to the line that the server serves."""
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or "serves" not in lines[-1]:
        line = process.stderr.readline()
        assert line, "".join(lines)
        lines.append(line)
    return "".join(lines)


def ended(process: subprocess.Popen[str], by: signal.Signals) -> tuple[int, str]:
    """End the command by a signal. Return its exit code and its standard output."""
    process.send_signal(by)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output


def test_a_server_runs_until_it_is_interrupted_and_leaves_nothing(repository: Path, scratch: Path) -> None:
    """The tests below end it by the other signals."""
    port = free_ports(1)[0]
    with running(repository, scratch, "valkey", "--port", str(port)) as process:
        output_of_start(process)
        assert len(list(scratch.iterdir())) == 1 and not is_free(port)
        code, output = ended(process, signal.SIGHUP)
    assert code == 0
    assert yaml.safe_load(output) == {"storage": {"type": "redis", "options": {"url": f"redis://127.0.0.1:{port}"}}}
    assert list(scratch.iterdir()) == [] and is_free(port)


@pytest.mark.parametrize("kind", ["redis", "mooncake"])
def test_each_kind_runs(repository: Path, scratch: Path, kind: str) -> None:
    with running(repository, scratch, kind) as process:
        output_of_start(process)
        code, output = ended(process, signal.SIGTERM)
    assert code == 0 and list(scratch.iterdir()) == []
    assert yaml.safe_load(output)["storage"]["type"] == kind


def test_credentials_are_printed_apart_from_the_section(repository: Path, scratch: Path) -> None:
    with running(repository, scratch, "s3") as process:
        exports = dict(re.findall(r"^export (\w+)=(\S+)$", output_of_start(process), flags=re.MULTILINE))
        code, output = ended(process, signal.SIGINT)
    options: dict[str, Any] = yaml.safe_load(output)["storage"]["options"]
    assert code == 0 and list(scratch.iterdir()) == []
    assert {options["access_key_env"], options["secret_key_env"]} == set(exports)
    assert not any(value in output for value in exports.values())


def test_data_stays_in_the_given_directory(repository: Path, tmp_path: Path, scratch: Path) -> None:
    data = tmp_path / "data"
    for expected in (None, b"1"):
        port = free_ports(1)[0]
        with running(repository, scratch, "valkey", "--data", str(data), "--port", str(port)) as process:
            output_of_start(process)
            with make_client(port) as client:
                assert client.get("key") == expected
                client.set("key", "1")
            assert ended(process, signal.SIGINT)[0] == 0
    assert list(scratch.iterdir()) == [] and list(data.iterdir())


def make_client(port: int) -> Any:
    import redis  # noqa: PLC0415  optional

    return redis.Redis(port=port)


def test_a_server_that_dies_ends_the_command_with_an_error(repository: Path, scratch: Path) -> None:
    with running(repository, scratch, "valkey") as process:
        output_of_start(process)
        pids = [child for task in Path(f"/proc/{process.pid}/task").iterdir() for child in task_children(task)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2 and "valkey: the server has ended" in errors
    assert list(scratch.iterdir()) == []


def task_children(task: Path) -> list[int]:
    return [int(child) for child in (task / "children").read_text().split()]


def test_an_interrupt_during_the_start_leaves_nothing(repository: Path, scratch: Path) -> None:
    with running(repository, scratch, "s3") as process:
        wait_for(lambda: any(scratch.glob("hicache-dev-*/logs")))
        code, output = ended(process, signal.SIGTERM)
    assert (code, output) == (130, "")
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nonsense"], "'redis', 'valkey', 's3', 'mooncake'"), (["mooncake", "--data", "x"], "keeps pages only in memory"),
     (["valkey", "--port", "0"], "1<=x<=65535")],
)
def test_invalid_arguments_are_rejected(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["dev-up", *arguments])
    assert result.exit_code == 2 and words in result.output


def test_every_kind_has_a_service_and_other_kinds_are_rejected() -> None:
    for kind in KINDS:
        assert not make_service(kind).running
    with pytest.raises(ConfigError, match="use one of redis, valkey, s3, mooncake"):
        make_service("nonsense")


def test_the_section_of_any_service_is_yaml_of_its_storage(
    redis_sentinel: RedisSentinel, mooncake_daemon: MooncakeClientDaemon
) -> None:
    for service in (redis_sentinel, mooncake_daemon):
        kind, options = service.storage()
        assert yaml.safe_load(section(service)) == {"storage": {"type": kind, "options": options}}
