"""The screen of `hicache plan`: each figure, within 80 columns and 50 lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache_lab.cli.plan_view import LINES_MAX, plan_lines
from hicache_lab.plan.advice import UNKNOWNS
from hicache_lab.plan.result import Plan, Service, StorageBreakEven
from hicache_lab.plan.tables import format_duration
from lab.tests.plan.examples import example, fleet, gib

SCREEN = """\
some <trace>.jsonl: 1,234 requests in 1.0 h, 1,000,000 prompt tokens
a-model: 1.0 MiB per token, pages of 64 tokens

TIER             SIZE   FOUND    HITS  NEXT GIB FINDS  SAVES A DAY  95 % WITH
L1 device     8.0 GiB  10.0 %   9.0 %          +1,000      30.00 s  300.0 GiB
L2 host      64.0 GiB   5.0 %   4.5 %          +2,000      1.0 min  310.0 GiB
L3 storage  256.0 GiB  20.0 %  18.0 %          +3,000      1.5 min  320.0 GiB

WITH             HITS  FIRST TOKEN, MEAN     P50      P99  COMPUTING
no cache        0.0 %             2.00 s  200 ms  20.00 s      2.0 h
L1              9.0 %             1.00 s  100 ms  10.00 s      1.0 h
L1 and L2      18.0 %             500 ms   50 ms   5.00 s   30.0 min
L1, L2 and L3  27.0 %             250 ms   25 ms   2.50 s   15.0 min

WRITE POLICY               HITS    WRITTEN    PER DAY     WORN IN
write_through            33.5 %  100.0 GiB    2.3 TiB  10.5 years
write_through_selective  21.5 %   40.0 GiB  960.0 GiB   36.5 days
write_back               31.5 %   90.0 GiB    2.1 TiB  12.0 years

idle break-even of L3: 1.5 GB/s; it reads 3 GB/s, pays from 128 tokens on
- Do <this>.
- Then do that.
Not known: The rest.
"""


def screen(plan: Plan, width: int = 80) -> str:
    return "".join(f"{line}\n" for line in plan_lines(plan, width))


def without_rate() -> Plan:
    """Return a plan without times, as without a rate of prefill."""
    services = {
        name: Service(hit_tokens=one.hit_tokens, ttft_mean_s=None, ttft_p50_s=None, ttft_p99_s=None, prefill_s=None,
                      load=None)
        for name, one in example().services.items()
    }
    more = {tier: replace(one, prefill_s_per_day=None) for tier, one in example().more_gib.items()}
    return example(services=services, more_gib=more, break_even=None)


def test_the_screen_has_each_figure_of_the_plan() -> None:
    assert screen(example()) == SCREEN


def test_columns_without_figures_are_left_out_and_a_line_names_the_option_for_them() -> None:
    text = screen(without_rate())
    assert "TIER             SIZE   FOUND    HITS  NEXT GIB FINDS  95 % WITH\n" in text
    assert "WITH             HITS\nno cache        0.0 %\n" in text
    assert "Left out: times and break-even need --prefill-rate.\n" in text
    assert "FIRST TOKEN" not in text and "break-even of L3" not in text and "Left out" not in SCREEN


def test_wear_without_an_endurance_and_rates_without_a_duration_are_left_out() -> None:
    policies = {name: replace(one, years=None) for name, one in example().policies.items() if one is not None}
    setup = replace(example().setup, endurance_bytes=None)
    text = screen(example(policies=policies, setup=setup))
    assert "PER DAY\n" in text and "Left out: years until L3 is worn need --endurance.\n" in text
    policies = {name: replace(one, written_bytes_per_day=None) for name, one in policies.items()}
    text = screen(example(policies=policies, setup=replace(setup, duration_s=None)))
    assert "HITS    WRITTEN\n" in text and "1,234 requests at one time" in text
    assert "figures per day need a trace with different timestamps" in text


def test_a_system_without_a_store_has_neither_policies_nor_a_break_even() -> None:
    setup = replace(example().setup, sizes={**example().setup.sizes, "storage": gib(0)}, endurance_bytes=None)
    text = screen(example(setup=setup, policies=dict.fromkeys(example().policies), break_even=None))
    assert "L3 storage      none" in text
    assert "WRITE POLICY" not in text and "break-even" not in text and "--endurance" not in text


def test_a_store_without_a_limit_is_unlimited() -> None:
    setup = replace(example().setup, sizes={**example().setup.sizes, "storage": None})
    assert "L3 storage  unlimited" in screen(example(setup=setup))


@pytest.mark.parametrize(
    ("point", "said"),
    [(StorageBreakEven(read_bytes_per_s=None, is_above=False, prefix_tokens=None),
      "break-even of L3: none, copies from host memory are slower than computing"),
     (StorageBreakEven(read_bytes_per_s=4e9, is_above=False, prefix_tokens=None),
      "idle break-even of L3: 4 GB/s; it reads 3 GB/s, never pays")],
)
def test_a_store_that_never_pays_is_named(point: StorageBreakEven, said: str) -> None:
    assert said in screen(example(break_even=point))


def test_several_nodes_add_a_row_for_each_routing() -> None:
    text = screen(example(fleet=fleet(), setup=replace(example().setup, nodes=4)))
    assert "pages of 64 tokens, 4 nodes, routing prefix\n" in text
    assert (
        "ROUTING    FOUND  ON THE NODE  BUSIEST NODE  FIRST TOKEN  L3 TO MATCH BEST\n"
        "random    27.5 %        7.5 %        26.0 %       500 ms         333.0 GiB\n"
        "prefix *  35.0 %       15.0 %        31.0 %       250 ms         256.0 GiB\n"
    ) in text


def test_a_long_plan_fits_on_one_screen() -> None:
    sentence = "A sentence of a recommendation that takes two lines of the screen, as most of these sentences do."
    plan = example(fleet=fleet(), recommendation=(sentence,) * 12, unknowns=UNKNOWNS)
    text = screen(plan)
    assert text.count("\n") <= LINES_MAX and max(map(len, text.splitlines())) <= 80
    assert text.replace("\n", " ").count(sentence) == 12


def test_a_number_and_its_unit_are_on_one_line() -> None:
    sentence = "The next GiB saves most on L2 host, 47,552 tokens of the trace, or as computing 62 s per day."
    for width in range(70, 100):
        text = screen(example(recommendation=(sentence,)), width)
        assert "47,552 tokens" in text and "62 s" in text and "\N{NO-BREAK SPACE}" not in text, width


def test_no_figure_is_cut_on_a_narrow_terminal() -> None:
    lines = screen(example(fleet=fleet()), 60).splitlines()
    assert max(map(len, lines)) <= 60
    for shown in ("310.0 GiB", "36.5 days", "333.0 GiB", "30.0 min"):
        assert any(shown in line for line in lines), shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, ""), (0.0, "0 s"), (0.000_25, "0.25 ms"), (0.25, "250 ms"), (59.0, "59.00 s"), (60.0, "1.0 min"),
     (5400.0, "1.5 h"), (86_400.0 * 2, "2.0 days"), (-90.0, "-1.5 min"),
     (86_400.0 * 365 * 1500, "1,500.0 years")],
)
def test_times_have_the_largest_unit_in_which_they_are_one(seconds: float | None, shown: str) -> None:
    assert format_duration(seconds) == shown
