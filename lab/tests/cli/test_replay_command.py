"""`hicache replay` and `hicache trace` as a user runs them: processes, output, files, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.cli.main import main
from hicache_lab.cli.replay import REPLAY_CONFIG, replay_config
from hicache_lab.traces.synthetic import synthetic_trace
from hicache_lab.traces.trace import read_trace, write_trace
from lab.tests.replay.test_report import FIGURES, Page
from lab.tests.replay.world import rounds
from tests.cli.processes import TIMEOUT_S, finish, hicache, start

pytestmark = pytest.mark.long

# A few seconds on two cores, with all tiers in use.
SMALL = ("--device-tokens", "2048", "--host-tokens", "4096", "--running-max", "1", "--waiting-max", "1",
         "--prefill-rate", "100000", "--set", "storage.options.free_space_floor=0")


def invoke(*arguments: str) -> tuple[int, str]:
    """Run the command in this process. Return its exit code and its output."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, arguments)
    return result.exit_code, result.output


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, rounds(8, 3))
    return path


def test_a_trace_is_replayed_with_all_tiers_and_both_reports(tmp_path: Path, trace: Path) -> None:
    json_file, html_file = tmp_path / "report.json", tmp_path / "report.html"
    code, output = invoke(
        "replay", str(trace), *SMALL, "--json", str(json_file), "--report", str(html_file)
    )
    assert code == 0, output
    assert "0 wrong bytes" in output.splitlines()[-1]
    result = json.loads(json_file.read_text())
    assert result["requests"]["ended"] == 24
    assert result["wrong_bytes"] == 0
    assert result["tokens"]["hits"]["storage"] > 0
    # 8 prompts of 15 pages that can be hits, twice more; storage alone has room for all.
    assert result["ideal"]["lru_tokens"] == result["ideal"]["optimum_tokens"] == 2 * 8 * 15 * 64
    assert result["ideal"]["share_of_lru"] == sum(result["tokens"]["hits"].values()) / 15_360
    assert "ideal LRU of" in output and "optimum of" in output
    assert Page(html_file.read_text()).captions == FIGURES


def test_the_bare_command_replays_a_synthetic_trace_and_leaves_nothing(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code, output = hicache(repository, "replay", "--requests", "30", "--seed", "3")
    assert code == 0, output
    assert "30 requests" in output and "0 wrong bytes" in output
    assert not list(tmp_path.glob("hicache-replay*"))
    assert not (repository / "replay-data").exists()


@pytest.mark.parametrize(("processes", "rate"), [("1", "100000"), ("2", "100000"), ("2", "1")])
def test_ctrl_c_prints_the_report_so_far_and_ends_everything(
    repository: Path, tmp_path: Path, trace: Path, processes: str, rate: str
) -> None:
    """At one token per second it comes in the middle of a forward of 17 minutes."""
    store, json_file = tmp_path / "pages", tmp_path / "report.json"
    write_trace(trace, rounds(8, 20_000))
    process = start(
        repository, "replay", str(trace), *SMALL, "--processes", processes, "--prefill-rate", rate,
        "--store", str(store), "--json", str(json_file),
    )
    assert process.stdout is not None
    assert "replaying trace.jsonl" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "interrupted" in output and "0 wrong bytes" in output
    result = json.loads(json_file.read_text())
    assert (result["complete"], result["ideal"]) == (False, None)


def test_an_invalid_trace_is_rejected_with_the_line_number(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"prompt": "hello"}\n')
    code, output = invoke("replay", str(path))
    assert code == 2
    assert "line 1: timestamp is missing" in output
    assert "Traceback" not in output


def test_one_file_for_both_reports_is_rejected_before_the_replay(tmp_path: Path) -> None:
    code, output = invoke(
        "replay", "--report", str(tmp_path / "a"), "--json", str(tmp_path / "x" / ".." / "a")
    )
    assert code == 2 and "does not exist" in output and "replaying" not in output
    code, output = invoke("replay", "--report", str(tmp_path / "a"), "--json", f"{tmp_path}/./a")
    assert code == 2 and "same file" in output and "replaying" not in output


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_report_is_written_even_if_the_other_one_cannot_be(
    tmp_path: Path, trace: Path, option: str
) -> None:
    other, file = "--report" if option == "--json" else "--json", tmp_path / "other"
    code, output = invoke("replay", str(trace), *SMALL, option, "/dev/full", other, str(file))
    assert code == 2, output
    assert "hicache: /dev/full: cannot be written: No space left on device" in output
    assert file.stat().st_size > 0
    assert f"report: {file}" in output and "sources of prompt tokens" in output


def test_wrong_bytes_are_exit_code_1_also_without_a_report_or_a_reader(repository: Path, trace: Path) -> None:
    """Negative control: a backend that returns wrong bytes under a valid seal."""
    lying = ("replay", str(trace), *SMALL[:-2], "--set", "storage.type=lab.tests.replay.lying:SwappingBackend")
    code, output = hicache(repository, *lying, "--json", "/dev/full")
    assert code == 1, output
    assert "/dev/full: cannot be written" in output and "WRONG BYTES" in output
    code, errors = without_reader(repository, *lying)
    assert code == 1 and errors.startswith("hicache: WRONG BYTES") and errors.count("\n") == 1


def without_reader(repository: Path, *arguments: str) -> tuple[int, str]:
    """Run a command and close its output after the first line. Return the exit code and standard error."""
    command = [sys.executable, "-m", "hicache", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(repository)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        return process.wait(TIMEOUT_S), process.stderr.read()


def test_a_closed_pipe_ends_a_replay_silently(repository: Path, trace: Path) -> None:
    # Pages are in memory: with a slow disk, the cache logs warnings about dropped stores.
    options = (*SMALL[:-2], "--set", "storage.type=memory")
    assert without_reader(repository, "replay", str(trace), *options) == (141, "")


def test_a_replay_in_which_no_request_ran_fails(trace: Path) -> None:
    code, output = invoke("replay", str(trace), "--device-tokens", "512", "--set", "storage.type=memory")
    assert code == 2, output
    last = output.splitlines()[-1]
    assert last.startswith("hicache: replay: no request ran: all 24 are longer than L1 (512 tokens)")
    assert "0 wrong bytes" not in output


@pytest.mark.parametrize(
    ("arguments", "said"), [(("--device", "banana"), "unknown device 'banana'"),
                            (("--set", "prefix_cache=false"), "a replay needs the prefix cache")],
)
def test_an_unsupported_replay_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], said: str
) -> None:
    code, output = invoke("replay", *arguments)
    assert code == 2 and said in output and output.count("\n") == 1


def test_a_synthetic_trace_is_written_and_described(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    code, output = invoke("trace", "generate", str(path), "--requests", "50", "--seed", "7")
    assert code == 0 and "50 requests" in output
    assert list(read_trace(path)) == list(synthetic_trace(50, 7))
    code, output = invoke("trace", "show", str(path))
    assert code == 0
    assert "50 within" in output and "seen before" in output


def test_a_synthetic_trace_can_have_the_users_of_a_recorded_one(tmp_path: Path) -> None:
    path = tmp_path / "agents.jsonl"
    code, _ = invoke("trace", "generate", str(path), "--requests", "20", "--service", "agents")
    assert code == 0 and list(read_trace(path)) == list(synthetic_trace(20, 0, "agents"))


def test_a_trace_is_not_replaced_without_force(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("precious")
    code, output = invoke("trace", "generate", str(path), "--requests", "1")
    assert code == 2 and "--force" in output and path.read_text() == "precious"
    code, output = invoke("trace", "generate", str(path), "--requests", "1", "--force")
    assert (code, output) == (0, f"1 request written to {path}\n")


def path_of(config: object) -> str:
    return str(json.loads(config.model_dump_json())["storage"]["options"].get("path"))  # type: ignore[attr-defined]


def test_pages_are_stored_in_a_temporary_directory_unless_a_path_is_set(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    assert path_of(replay_config({}, {}, temporary)) == str(temporary / "pages")
    assert path_of(replay_config({}, {}, temporary, store=tmp_path)) == str(tmp_path)
    assert path_of(replay_config({"storage.options.path": "/some/where"}, {}, temporary)) == "/some/where"
    for variable in ("HICACHE_STORAGE__OPTIONS__PATH", "HICACHE_storage__options__path"):
        assert path_of(replay_config({}, {variable: "/else/where"}, temporary)) == "/else/where"
    assert path_of(replay_config({}, {}, temporary, REPLAY_CONFIG)) == "replay-data/pages"


def test_other_entries_of_the_storage_do_not_change_its_path_and_another_backend_has_no_options(tmp_path: Path) -> None:
    environ = {"HICACHE_STORAGE__OPTIONS__CAPACITY": "2GiB", "PATH": "/bin"}
    assert path_of(replay_config({}, environ, tmp_path)) == str(tmp_path / "pages")
    assert replay_config({"storage": "null"}, {}, tmp_path).storage is None
    assert replay_config({}, {"HICACHE_STORAGE": "null"}, tmp_path).storage is None
    memory = replay_config({"storage.type": "memory"}, {}, tmp_path).storage
    assert memory is not None and memory.options == {}


def test_sizes_on_the_command_line_override_the_file(trace: Path) -> None:
    given = ("replay", str(trace), "-c", str(REPLAY_CONFIG), "--set", "storage=null")
    code, output = invoke(*given, "--device-tokens", "640")
    assert code == 2 and "longer than L1 (640 tokens)" in output
    code, output = invoke(*given, "--device-tokens", "1")
    assert code == 2 and "device.tokens" in output


def test_traces_and_reports_can_be_piped(repository: Path, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "hicache"]
    environ = {**os.environ, "PYTHONPATH": str(repository)}
    lines = subprocess.run([*run, "trace", "generate", "-", "--requests", "6"], env=environ, capture_output=True,
                           timeout=TIMEOUT_S, check=True).stdout
    facts = subprocess.run([*run, "trace", "show", "-", "--json"], env=environ, input=lines, capture_output=True,
                           timeout=TIMEOUT_S, check=True).stdout
    assert json.loads(facts)["requests"] == 6
    result = subprocess.run([*run, "replay", "-", "--json", "-", "--prefill-rate", "0"], env=environ, input=lines,
                            capture_output=True, timeout=TIMEOUT_S, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["requests"]["ended"] == 6 and b"0 wrong bytes" in result.stderr
    assert list(tmp_path.iterdir()) == []
