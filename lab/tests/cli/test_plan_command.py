"""`hicache plan` as a user runs it: processes, output, files, exit codes."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache.cli import progress
from hicache.cli.main import main
from hicache.cli.model_shapes import ModelShape, model_shape
from hicache.units import GIB, MIB
from hicache_lab.plan import PlanInputs, make_plan
from hicache_lab.plan.report import csv_report, html_report
from hicache_lab.speeds import ComputeSpeed, Speeds, StorageSpeed
from hicache_lab.traces.routing import Routing
from hicache_lab.traces.trace import read_trace, write_trace
from lab.tests.plan.test_report import CAPTIONS
from lab.tests.plan.world import conversations
from lab.tests.replay.test_report import Page
from tests.cli.processes import TIMEOUT_S, finish, start


def invoke(*arguments: str, text: str = "") -> tuple[int, str, str]:
    """Run the command in this process. Return its exit code, its output and standard error."""
    result = CliRunner(env={"COLUMNS": "100"}).invoke(main, ["plan", *arguments], input=text)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, conversations(5))
    return path


def test_options_become_the_inputs_of_the_plan_and_all_reports_are_those_of_this_plan(
    tmp_path: Path, trace: Path
) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("json", "csv", "html")}
    code, output, errors = invoke(
        str(trace), "--requests", "100", "--token-bytes", "1024", "--page-size", "32", "--device-size", "10MiB",
        "--host-size", "20MiB", "--storage-size", "1GiB", "--prefill-rate", "5000", "--attention-rate", "1e6",
        "--host-bandwidth", "10GB/s", "--storage", "read=2GB/s,write=1GB/s,fixed=1ms,parallel=2", "--endurance", "0.5",
        "--nodes", "3", "--routing", "session", "--prices", "device=50,storage=0.1", "--json", str(files["json"]),
        "--csv", str(files["csv"]), "--report", str(files["html"]),
    )
    assert (code, errors) == (0, "")
    plan = make_plan(
        lambda: read_trace(trace, 100),
        PlanInputs(
            trace="trace.jsonl", model=ModelShape("unnamed model", 1024), page_size=32, device_bytes=10 * MIB,
            host_bytes=20 * MIB, storage_bytes=GIB, nodes=3, routing=Routing.SESSION, endurance_bytes=5 * 10**14,
            prices={"device": 50, "host": 1, "storage": 0.1},
            speeds=Speeds(compute=ComputeSpeed(tokens_per_s=5000, pairs_per_s=1e6), host_bytes_per_s=10e9,
                          storage=StorageSpeed(read_bytes_per_s=2e9, write_bytes_per_s=1e9, fixed_s=1e-3, parallel=2)),
        ),
    )
    assert files["json"].read_text() == plan.to_json()
    assert files["csv"].read_text() == csv_report(plan)
    assert files["html"].read_text() == html_report(plan)
    for file in files.values():
        assert f"report: {file}" in output
    assert "unnamed model: 1.0 KiB per token, pages of 32 tokens, 3 nodes, routing session" in output


def test_the_bare_command_plans_the_default_system(tmp_path: Path, trace: Path) -> None:
    file = tmp_path / "plan.json"
    code, output, _ = invoke(str(trace), "--json", str(file))
    setup = json.loads(file.read_text())["setup"]
    assert code == 0 and "Left out: times and break-even need --prefill-rate" in output
    assert {tier: size["bytes"] for tier, size in setup["sizes"].items()} == {
        "device": 40 * GIB, "host": 200 * GIB, "storage": 2048 * GIB
    }
    assert setup["token_bytes"] == model_shape("llama-3.1-8b").token_bytes and setup["page_size"] == 64
    for shown in ("40GiB", "200GiB", "2TiB", "llama-3.1-8b", "device=30,host=1,storage=0.03"):
        assert shown in invoke("--help")[1], shown


@pytest.mark.parametrize(("size", "stored"), [("unlimited", None), ("none", 0), ("0", 0)])
def test_a_store_may_be_unlimited_or_missing(tmp_path: Path, trace: Path, size: str, stored: int | None) -> None:
    file = tmp_path / "plan.json"
    assert invoke(str(trace), "--storage-size", size, "--json", str(file))[0] == 0
    plan = json.loads(file.read_text())
    storage = plan["setup"]["sizes"]["storage"]
    assert storage is None if stored is None else storage["bytes"] == stored
    assert (plan["policies"]["write_through"] is None) == (stored == 0)


def test_a_model_may_be_the_path_of_a_configuration(tmp_path: Path, trace: Path) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    code, output, _ = invoke(str(trace), "--model", str(tmp_path))
    # 2 layers of 4 heads of 16, keys and values, 2 bytes each.
    assert code == 0 and "512 B per token" in output


def test_a_plan_is_piped_in_and_out_and_the_screen_moves_to_standard_error(
    repository: Path, tmp_path: Path, trace: Path
) -> None:
    environ = {**os.environ, "PYTHONPATH": str(repository), "COLUMNS": "80"}
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "hicache", "plan", "-", "--csv", "-"], input=trace.read_bytes(), capture_output=True,
        timeout=TIMEOUT_S, check=False, cwd=tmp_path / "elsewhere", env=environ,
    )
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.decode().splitlines()))
    assert {row["tier"] for row in rows} == {"device", "host", "storage"}
    assert b"standard input: 1" in done.stderr and b"NEXT GIB FINDS" in done.stderr
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_page_goes_to_standard_output(trace: Path) -> None:
    code, output, errors = invoke(str(trace), "--report", "-", "--prefill-rate", "1000")
    assert code == 0 and Page(output).captions == CAPTIONS
    assert "FIRST TOKEN" in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "tiny", "--token-bytes", "8"), "--model and --token-bytes exclude each other; remove one"),
        (("--model", "nosuch"), "is neither a file that can be read nor one of"),
        (("--device-size", "5"), "5 has no unit; write 5GiB"),
        (("--host-size", "64KiB"), "--host-size 64KiB is smaller than one page (8MiB); use a larger size"),
        (("--storage-size", "some"), "'some' is not a valid size; write it like 200GiB"),
        (("--storage", "read=3"), "'3' is not a bandwidth"),
        (("--page-size", "48"), "page_size 48 does not fit to blocks of 512 tokens; use a divisor or a multiple"),
        (("--nodes", "0"), "0 is not in the range 1<=x<=64"),
        (("--routing", "best"), "'rotate', 'random', 'session', 'prefix'"),
        (("--prefill-rate", "nan"), "is not a number"),
        (("--endurance", "0"), "is not in the range"),
        (("--prices", "gpu=3"), "'gpu=3' is not a list of prices; write it like device=30,host=1,storage=0.03"),
        (("--prices", "host=0"), "0.0 is not in the range"),
        (("--json", "x/y"), "the directory x does not exist; create it"),
        (("--json", "-", "--csv", "-"), "two of --json, --csv and --report name the same file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_arguments_are_exit_code_2_with_what_to_do(trace: Path, arguments: tuple[str, ...], said: str) -> None:
    code, output, errors = invoke(str(trace), *arguments)
    assert (code, output) == (2, "") and said in " ".join(errors.split()), errors


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "is empty; use a file with at least one request"), ('{"prompt": "hello"}\n', "line 1: timestamp is missing"),
     ("hello\n", "line 1: expected one JSON object a line")],
)
def test_a_bad_trace_is_exit_code_2_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    code, output, errors = invoke(str(path), "--json", str(tmp_path / "plan.json"))
    assert (code, output) == (2, "") and said in errors and "Traceback" not in errors
    assert not (tmp_path / "plan.json").exists()


def test_a_report_that_cannot_be_written_is_exit_code_2_after_the_others(tmp_path: Path, trace: Path) -> None:
    file = tmp_path / "plan.html"
    code, output, errors = invoke(str(trace), "--json", "/dev/full", "--report", str(file))
    assert code == 2 and "hicache: /dev/full: cannot be written: No space left on device" in errors
    assert file.stat().st_size > 0 and f"report: {file}" in output and "NEXT GIB FINDS" in output


def test_reading_shows_its_progress_for_each_pass(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    count = len(trace.read_text().splitlines())
    code, _, errors = invoke(str(trace), "--nodes", "2")
    assert code == 0
    assert f"plan: 1 of {count} requests (1 %), read" in errors
    assert f"plan, pass 3: {count} of {count} requests (100 %), read\n" in errors
    code, _, errors = invoke(str(trace), "--requests", "10")
    assert code == 0 and errors.splitlines()[-1] == "plan: 10 of 10 requests (100 %), read"


@pytest.mark.long
def test_ctrl_c_ends_the_command_without_a_plan(repository: Path, tmp_path: Path, trace: Path) -> None:
    big, file = tmp_path / "big.jsonl", tmp_path / "plan.json"
    big.write_text(trace.read_text() * 20_000)
    process = start(repository, "plan", str(big), "--json", str(file))
    assert process.stdout is not None
    assert process.stdout.readline().startswith("plan: ")
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "Traceback" not in output and "NEXT GIB" not in output and not file.exists()
