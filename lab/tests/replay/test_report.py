"""The HTML report: well-formed, self-contained, with every figure, and safe against text in a trace."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hicache_lab.plots import Curve, linear_axis, lines, log_axis
from hicache_lab.replay.report import REASONS, flattened_drops, html_report, share_curves
from hicache_lab.replay.result import ReplayResult
from lab.tests.replay.test_result import example, latency, sample

VOID = {"meta", "br"}
FIGURES = [
    "Prompt tokens by source, over time",
    "Occupancy of the tiers, over time",
    "Bytes moved between tiers",
    "Pages evicted, by the tier they left",
    "Scheduler time per request, by percentile",
    "Processor time of the scheduler's thread, by call",
]


class Page(HTMLParser):
    """A parser that checks the nesting of tags and records the contents of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.captions: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "
        if self.open and self.open[-1] == "figcaption":
            self.captions.append(data)


def figures(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in text.split("<svg")[1:]]


def test_the_page_is_well_formed_and_has_every_figure() -> None:
    text = html_report(example())
    page = Page(text)
    assert page.captions == FIGURES
    assert len(figures(text)) == len(FIGURES)
    assert all(figure.get("aria-label") for figure in figures(text))


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = Page(html_report(example()))
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.links == []
    assert "http" not in html_report(example())


def test_the_page_names_the_numbers_of_the_report_and_compares_the_hits_with_ideal_caches() -> None:
    text = Page(html_report(example())).text
    for shown in (
        "60.0 %", "some <trace>.jsonl", "1,000", "3.9 KiB", "wrong bytes of 976.6 KiB", "no backup to L2",
        "ideal LRU of 87,681 pages (hits: 93.8 % of it)", "optimum of 87,681 pages (hits: 80.0 % of it)",
        "What was computed, and why", "evicted host", "24.6 %",
    ):
        assert shown in text, shown
    assert "ideal LRU of" not in html_report(example(ideal=None))


def test_wrong_bytes_and_an_interruption_are_prominent() -> None:
    good, bad = html_report(example()), html_report(example(wrong_bytes=1, complete=False))
    assert 'class="tile good"' in good and "interrupted" not in good
    assert 'class="tile bad"' in bad and "interrupted" in bad


def empty() -> ReplayResult:
    none = latency()
    result = example(samples=(), skipped={}, refused={}, damaged={}, storage_errors={}, elapsed_s=0.0, complete=False)
    assert result.scheduler is not None
    times = replace(
        result.scheduler, step_cpu=none, step_elapsed=none, request_cpu=none, request_elapsed=none, calls={}, steps=0
    )
    tokens = replace(result.tokens, prompt=0, hits={}, computed=0, seen=0, recomputed=0)
    return replace(result, scheduler=times, tokens=tokens)


def test_a_replay_of_nothing_still_makes_a_page() -> None:
    page = Page(html_report(empty()))
    assert "Nothing." in page.text


def test_a_replay_without_storage_has_two_tiers_to_fill() -> None:
    setup = replace(example().setup, storage=None, storage_capacity_bytes=None)
    text = html_report(example(setup=setup))
    occupancy = figures(text)[1]
    assert len(occupancy.findall("polyline")) == 2
    assert len(figures(html_report(example()))[1].findall("polyline")) == 3


def test_shares_of_each_interval_add_up_to_a_hundred() -> None:
    moments, curves = share_curves(example().samples)
    assert moments == [2.0, 4.0]
    assert [curve.name for curve in curves] == ["L1 device", "L2 host", "L3 storage", "computed"]
    assert [list(curve.values) for curve in curves] == [[40, 20], [0, 40], [0, 20], [60, 20]]


def test_moments_without_prompts_belong_to_the_previous_interval() -> None:
    moments, _ = share_curves([sample(0), sample(1, 100, device=50), sample(2, 100, device=50)])
    assert moments == [1.0]
    assert share_curves([]) == ([], share_curves([])[1])


def test_drops_are_listed_by_frequency_and_unknown_ones_by_name() -> None:
    drops = flattened_drops(example())
    assert drops[0] == ("skipped no_device_room", 11)
    assert ("skipped a_reason_of_tomorrow", 1) in drops
    assert "skipped a_reason_of_tomorrow" not in REASONS
    assert "skipped a_reason_of_tomorrow" in Page(html_report(example())).text


@pytest.mark.parametrize("high", [0, 0.003, 1, 7, 99, 1234, 5e6])
def test_a_linear_axis_has_a_few_ticks_within_it(high: float) -> None:
    axis = linear_axis(high, "x", str)
    values = [value for value, _ in axis.ticks]
    assert 3 <= len(values) <= 7
    assert values[0] == 0 and values[-1] <= axis.high * 1.001


@pytest.mark.parametrize(("low", "high"), [(0.02, 35), (1, 1), (0, 10), (0.5, 0.6)])
def test_a_logarithmic_axis_contains_its_values_between_powers_of_ten(low: float, high: float) -> None:
    axis = log_axis(low, high, "y", str)
    assert axis.low <= max(low, 1e-3) and axis.high >= high
    assert axis.position(axis.low, 100, -80) == pytest.approx(100)
    assert axis.position(axis.high, 100, -80) == pytest.approx(20)


def test_values_beyond_an_axis_are_drawn_at_its_end() -> None:
    x, y = linear_axis(10, "x", str), linear_axis(10, "y", str)
    svg = lines(x, y, [0, 20], [Curve("a <b>", [5, 50], 0)], title='say "so"')
    points = ElementTree.fromstring(svg).findall("polyline")[0].get("points", "").split()
    inside = ElementTree.fromstring(lines(x, y, [0, 10], [Curve("a", [5, 10], 0)], title="")).find("polyline")
    assert inside is not None and points == inside.get("points", "").split()
    assert "a &lt;b&gt;" in svg
