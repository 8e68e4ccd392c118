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
from hicache.lab.cli.demo_report import differences, gain_lines, gains, time_table
from hicache.lab.cli.demo_run import Answer
from tests.cli.processes import DEMO_TIMEOUT_S, demo_timeout, finish, hicache, start

pytestmark = pytest.mark.long

DEMO = ("demo", "--max-new-tokens", "2")


def hits(output: str, tier: str) -> int:
    found = re.search(rf"{tier}[^0-9]*([0-9,]+)", output)
    assert found is not None, output
    return int(found[1].replace(",", ""))


@demo_timeout
def test_the_demo_hits_every_tier_with_equal_tokens_and_a_second_demo_starts_with_hits(
    repository: Path, tmp_path: Path
) -> None:
    store = f"storage.options.path={tmp_path / 'pages'}"
    process = start(repository, *DEMO, "--verify", "--metrics-port", "0", "--set", store)
    assert process.stdout is not None
    address = process.stdout.readline().split()[1]
    with urllib.request.urlopen(address, timeout=30) as response:
        names = {family.name for family in text_string_to_metric_families(response.read().decode())}
    assert {"hicache_hit_tokens", "hicache_queued_operations"} <= names
    code, output = finish(process, DEMO_TIMEOUT_S)
    assert code == 0, output
    assert output.rstrip().endswith("identical with and without the cache, and after the restart")
    assert "Warning" not in output
    tokens, times, _ = output.splitlines()[-3:]
    assert re.match(r"gained: [1-9][0-9,]* of [0-9,]+ prompt tokens .* were not computed: [1-9][0-9,]* from L1", tokens)
    assert re.match(r"gained: time to first token [0-9]+ ms computed, [0-9]+ ms from L1 .* after a restart", times)
    for tier in ("L1 device", "L2 host", "L3 storage"):
        assert hits(output, tier) > 0, output
    first = hits(output, "L3 storage")
    code, output = hicache(repository, *DEMO, "--set", store, "--json", timeout_s=DEMO_TIMEOUT_S)
    assert code == 0, output
    figures = json.loads(output[output.index("\n{") : output.rindex("\n}") + 2])
    assert figures["tokens_not_computed"]["storage"] > 0 and figures["differences"] == []
    assert hits(output, "L3 storage") > first, "the second demo has no more hits in storage than the first"


@demo_timeout
def test_zeroed_kv_changes_the_tokens_and_the_demo_reports_it(repository: Path, tmp_path: Path) -> None:
    """Negative control of the comparison: wrong KV that passes every check changes the tokens."""
    code, output = hicache(
        repository, *DEMO, "--set", "storage.type=tests.cli.zeroing:ZeroingDriver",
        "--set", f"storage.options.path={tmp_path / 'pages'}", timeout_s=DEMO_TIMEOUT_S,
    )  # fmt: skip
    assert code == 1, output
    assert "TOKENS DIFFER" in output.splitlines()[-1]


def test_differences_name_the_first_token_the_prompt_and_the_bytes() -> None:
    one = Answer("a", "a", [1, 2], [5, 6], {"device": 0, "host": 0, "storage": 0}, 0.1, "digest")
    assert differences([one], [one]) == []
    assert differences([one], [replace(one, tokens=[5, 7])]) == ["a: output token 1 is 7, not 6"]
    assert "prompts differ" in differences([one], [replace(one, prompt=[1])])[0]
    assert "KV bytes differ" in differences([one], [replace(one, kv_digest="other")])[0]


def test_a_demo_without_storage_is_rejected(tmp_path: Path) -> None:
    config = tmp_path / "no-storage.yaml"
    config.write_text("device: {tokens: 4096}\n", encoding="utf-8")
    result = CliRunner().invoke(main, [*DEMO, "-c", str(config)])
    assert result.exit_code == 2 and "storage" in result.output


def test_the_tables_fit_into_60_columns_and_no_figure_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    one = Answer("a", "a", [1] * 99_999, [5], {"device": 99_999, "host": 0, "storage": 0}, 12.345, None)
    cold = replace(one, hit_tokens=dict.fromkeys(one.hit_tokens, 0), time_to_first_token_s=123.456)
    lines = time_table([cold] * 999, [one] * 999, []).splitlines()
    assert max(map(len, lines)) <= 60
    assert all(figure in "\n".join(lines) for figure in (" 99999", " 123456.0 ms", " 12345.0 ms"))
    tokens, times = gain_lines(gains([cold], [one], []))
    assert tokens.startswith("gained: 99,999 of 99,999 prompt tokens (100.0 %) were not computed: 99,999 from L1")
    assert times == "gained: time to first token 123456 ms computed, 12345 ms from L1 device (10.0 x)"
