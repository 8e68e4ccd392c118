"""`hicache demo` in its own process, as a user runs it: output, exit code and metrics."""

from __future__ import annotations

import json
import re
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from hicache.cli.main import main
from hicache.config import load_config
from hicache_lab.cli.demo import DEMO_CONFIG
from hicache_lab.cli.demo_report import differences, gain_line, gains, time_table
from hicache_lab.cli.demo_run import Answer, Pair, Runner
from hicache_lab.cli.demo_workload import DemoRequest
from hicache_lab.engine import BUNDLED_MODEL, Engine, Sampling, create_engine, load_checkpoint
from tests.cli.processes import DEMO_TIMEOUT_S, demo_timeout, finish, hicache, start

pytestmark = pytest.mark.long

DEMO = ("demo", "--max-new-tokens", "2")


def hits(output: str, tier: str) -> int:
    found = re.search(rf"{tier}[^0-9]*([0-9,]+)", output)
    assert found is not None, output
    return int(found[1].replace(",", ""))


@pytest.mark.servers
@demo_timeout
def test_a_demo_on_two_levels_hits_every_tier_with_equal_tokens_and_one_on_zeroed_pages_reports_them(
    repository: Path, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first demo starts and ends a real server; lab/tests/engine/test_shared_storage.py has engines on the others.
    The second demo starts with hits. It is the control of the comparison: its KV passes every check, and is wrong.
    """
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.chdir(tmp_path)
    process = start(repository, *DEMO, "--verify", "--metrics-port", "0", "--storage", "file+s3")
    assert process.stdout is not None
    address = process.stdout.readline().split()[1]
    with urllib.request.urlopen(address, timeout=60) as response:
        names = {family.name for family in text_string_to_metric_families(response.read().decode())}
    assert {"hicache_hit_tokens", "hicache_queued_operations"} <= names
    code, output = finish(process, DEMO_TIMEOUT_S)
    assert code == 0, output
    assert output.rstrip().endswith("identical with and without the cache, and after the restart")
    assert "Warning" not in output and "no prefix came from storage" not in output
    assert list(scratch.iterdir()) == []
    gained = output.splitlines()[-2]
    assert re.match(r"gained: [1-9][0-9,]* of [0-9,]+ prompt tokens .* were not computed: [1-9][0-9,]* from L1", gained)
    for source in (r"none \(a miss\)", "L1 device", "L2 host", "L3 storage", "L3, restarted"):
        assert re.search(rf"\n{source} +[0-9.]+ x +[0-9]+ ms +[0-9]+ ms +[0-9]+ +[1-9][0-9]*", output), output
    for tier in ("L1 device", "L2 host", "L3 storage"):
        assert hits(output, tier) > 0, output
    first = hits(output, "L3 storage")
    pages = tmp_path / "demo-data/pages"  # the upper level
    zeroing = ("--set", "storage.type=tests.cli.zeroing:ZeroingDriver", "--set", f"storage.options.path={pages}")
    code, output = hicache(repository, *DEMO, *zeroing, "--json", timeout_s=DEMO_TIMEOUT_S)
    assert code == 1, output
    figures = json.loads(output[output.index("\n{") : output.rindex("\n}") + 2])
    assert figures["tokens_not_computed"]["storage"] > 0 and figures["differences"] != []
    assert "TOKENS DIFFER" in output.splitlines()[-1]
    assert hits(output, "L3 storage") > first, "the second demo has no more hits in storage than the first"


def test_differences_name_the_first_token_and_the_bytes() -> None:
    one = Answer("a", "a", [1, 2], [5, 6], {"device": 0, "host": 0, "storage": 0}, 0.1, "digest", 0.1)
    assert differences([one], [one]) == []
    assert differences([one], [replace(one, tokens=[5, 7])]) == ["a: output token 1 is 7, not 6"]
    assert "KV bytes differ" in differences([one], [replace(one, kv_digest="other")])[0]


def test_a_demo_without_storage_is_rejected(tmp_path: Path) -> None:
    config = tmp_path / "no-storage.yaml"
    config.write_text("device: {tokens: 4096}\n", encoding="utf-8")
    result = CliRunner().invoke(main, [*DEMO, "-c", str(config)])
    assert result.exit_code == 2 and "storage" in result.output


def test_the_tables_fit_into_60_columns_and_no_figure_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    one = Answer("a", "a", [1] * 99_999, [5], {"device": 99_999, "host": 0, "storage": 0}, 12.345, None, 123.456)
    lines = time_table([one] * 999, []).splitlines()
    assert max(map(len, lines)) <= 60
    assert all(figure in "\n".join(lines) for figure in (" 99999", " 123456 ms", " 12345 ms", " 10.0 x"))
    gained = gain_line(gains([one], []))
    assert gained == (
        "gained: 99,999 of 99,999 prompt tokens (100.0 %) were not computed: "
        "99,999 from L1 device, 0 from L2 host, 0 from L3 storage"
    )


def test_the_speed_is_the_median_of_the_pairs_whatever_the_load_on_each_pair() -> None:
    quiet = Answer("a", "a", [1], [5], {"device": 1, "host": 0, "storage": 0}, 0.01, None, 0.2)
    busy = replace(quiet, time_to_first_token_s=0.05, computed_s=1.0)
    idle = replace(quiet, time_to_first_token_s=0.001, computed_s=0.02)
    found = gains([quiet, busy, idle], [])["time_to_first_token"]
    assert found["L1 device"]["speed_up"] == pytest.approx(20) and found["L2 host"] is None


class Recorder(Runner):
    """A runner that also notes its name at each call."""

    def __init__(self, name: str, calls: list[str], engine: Engine, *, reuse: bool) -> None:
        sampling = Sampling(temperature=0.0)
        super().__init__(engine, reuse=reuse, verify=False, max_new_tokens=1, sampling=sampling)
        self.name, self.calls = name, calls

    def serve(self, wave: list[DemoRequest]) -> list[Answer]:
        self.calls.append(self.name)
        return super().serve(wave)


def test_the_engines_take_turns_at_being_first_and_a_pair_has_the_time_of_its_own_computation() -> None:
    checkpoint, calls = load_checkpoint(BUNDLED_MODEL), list[str]()
    config = load_config(DEMO_CONFIG, environ={}, overrides={}).model_copy(update={"storage": None})
    with create_engine(config, checkpoint) as one, create_engine(config, checkpoint) as other:
        pair = Pair(Recorder("computed", calls, one, reuse=False), Recorder("cached", calls, other, reuse=True))
        answers = [found for _ in range(3) for found in pair.serve([DemoRequest("a", list(range(2, 66)))])]
    assert calls == ["computed", "cached", "cached", "computed", "computed", "cached"]
    assert [cached.computed_s for _, cached in answers] == [computed.computed_s for computed, _ in answers]
    assert [computed.tier for computed, _ in answers] == ["computed"] * 3
    assert [cached.tier for _, cached in answers] == ["computed", "device", "device"]
