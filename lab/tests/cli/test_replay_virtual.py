"""`hicache replay --virtual` and `hicache replay diff` as a user runs them."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
from pathlib import Path

import pytest

from hicache_lab.traces.trace import write_trace
from lab.tests.cli.test_replay_command import SMALL, invoke
from lab.tests.replay.test_report import Page
from lab.tests.replay.world import rounds
from tests.cli.processes import finish, start

pytestmark = pytest.mark.long

VIRTUAL = (*SMALL[:-2], "--virtual")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, rounds(8, 3))
    return path


def replayed(trace: Path, file: Path, *options: str) -> Path:
    code, output = invoke("replay", str(trace), *VIRTUAL, *options, "--json", str(file))
    assert code == 0, output
    return file


def test_a_virtual_replay_says_so_on_screen_and_page_and_compares_no_bytes(tmp_path: Path, trace: Path) -> None:
    page = tmp_path / "report.html"
    code, output = invoke("replay", str(trace), *VIRTUAL, "--report", str(page))
    assert code == 0, output
    assert "s of virtual time" in output and "time to first token, in ms" in output
    assert "wrong bytes" not in output and "cost of the cache" not in output
    text = page.read_text()
    assert "of virtual time" in text and "copies between L1 and L2" in text
    assert not any("Scheduler time" in caption for caption in Page(text).captions)


def test_requests_0_are_all_of_the_trace(tmp_path: Path, trace: Path) -> None:
    few, every = replayed(trace, tmp_path / "5", "--requests", "5"), replayed(trace, tmp_path / "0", "--requests", "0")
    assert json.loads(few.read_text())["requests"]["ended"] == 5
    assert json.loads(every.read_text())["requests"]["ended"] == 24


def test_the_samples_are_rows_of_a_csv_file(tmp_path: Path, trace: Path) -> None:
    code, output = invoke("replay", str(trace), *VIRTUAL, "--csv", str(tmp_path / "samples.csv"))
    assert code == 0 and "samples.csv" in output, output
    rows = list(csv.DictReader(io.StringIO((tmp_path / "samples.csv").read_text())))
    assert int(rows[-1]["requests"]) == 24 and float(rows[-1]["elapsed_s"]) >= float(rows[0]["elapsed_s"])
    assert int(rows[-1]["prompt_tokens"]) == 24 * 1024 and int(rows[-1]["hit_tokens.storage"]) > 0
    assert int(rows[-1]["computed_tokens.tail"]) > 0 and rows[-1]["computed_tokens.damaged"] == "0"


def test_two_reports_are_compared_by_setup_and_figures(tmp_path: Path, trace: Path) -> None:
    small = replayed(trace, tmp_path / "small.json")
    large = replayed(trace, tmp_path / "large.json", "--host-tokens", "32768", "--storage", "read=1MB/s")
    code, output = invoke("replay", "diff", str(small), str(large))
    assert code == 0, output
    cells = [re.split("  +", line.strip()) for line in output.splitlines()]
    rows = {name: rest for name, *rest in cells}
    assert rows["host_pages"] == ["64", "512"]
    assert rows["virtual.storage.read_bytes_per_s"] == ["3000000000.0", "1000000.0"]
    assert rows["requests"] == ["24", "24", "="]
    assert rows["computed: tail"] == ["1,536", "1,536", "="]
    assert rows["tokens from L2 host"][0] == "0" and rows["tokens from L2 host"][2] == "new"
    assert "page_size" not in output, "equal in both"
    code, output = invoke("replay", "diff", str(small), str(small))
    assert code == 0 and "%" not in output and "host_pages" not in output


def test_a_file_that_is_not_a_report_cannot_be_compared(tmp_path: Path, trace: Path) -> None:
    report = replayed(trace, tmp_path / "report.json")
    (tmp_path / "other.json").write_text('{"requests": 3}')
    for other, says in (("other.json", "is not a report"), ("missing.json", "cannot be read")):
        code, output = invoke("replay", "diff", str(report), str(tmp_path / other))
        assert code == 2 and other in output and says in output


def test_the_speed_of_a_store_is_taken_from_a_report_of_the_doctor(tmp_path: Path, trace: Path) -> None:
    config = tmp_path / "store.yaml"
    config.write_text(f"storage: {{type: file, options: {{path: {tmp_path / 'pages'}, free_space_floor: 0}}}}\n")
    code, output = invoke("doctor", "-c", str(config), "--model", "tiny", "--json")
    assert code == 0, output
    (tmp_path / "speeds.json").write_text(output[output.index("{") :])
    report = replayed(trace, tmp_path / "r", "--like", str(tmp_path / "speeds.json"), "--storage", "write=5GB/s")
    speeds = json.loads(report.read_text())["setup"]["virtual"]["storage"]
    assert speeds["write_bytes_per_s"] == 5e9, "what is named has precedence"
    assert speeds["read_bytes_per_s"] not in (0, 3e9) and speeds["parallel"] == 16


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--storage", "read=1GB/s"), "need --virtual"),
        (("--host-bandwidth", "1GB/s"), "need --virtual"),
        (("--virtual", "--store", "pages"), "remove --store"),
        (("--virtual", "--device", "cuda"), "remove --store and --device"),
        (("--virtual", "--storage", "read=1GB"), "write it like 3GB/s"),
        (("--virtual", "--like", "missing"), "missing: cannot be read"),
        (("--virtual", "--set", "integrity.verify=load"), "verify bytes; remove them"),
    ],
)
def test_options_of_the_other_kind_of_time_are_errors(trace: Path, options: tuple[str, ...], says: str) -> None:
    code, output = invoke("replay", str(trace), *options)
    assert code == 2, output
    assert says in " ".join(output.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_virtual_replay_with_a_report_of_whole_steps(
    repository: Path, tmp_path: Path, trace: Path, number: signal.Signals
) -> None:
    json_file = tmp_path / "report.json"
    write_trace(trace, rounds(8, 20_000))
    process = start(repository, "replay", str(trace), *VIRTUAL, "--processes", "2", "--json", str(json_file))
    assert process.stdout is not None
    assert "replaying trace.jsonl" in process.stdout.readline()
    process.send_signal(number)
    code, output = finish(process)
    assert code == 128 + number, output
    assert "interrupted" in output
    assert json.loads(json_file.read_text())["complete"] is False
