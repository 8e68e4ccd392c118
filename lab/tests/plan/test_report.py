"""The page and the curves of a plan: well-formed, self-contained, with every figure."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hicache_lab.plan.report import csv_report, html_report
from hicache_lab.plan.result import Curve, Plan, Point, Size
from hicache_lab.plots import Mark, linear_axis, lines
from lab.tests.plan.examples import example, fleet, gib
from lab.tests.plan.world import conversations, plan_of
from lab.tests.replay.test_report import Page, figures

CAPTIONS = [
    "Prompt tokens by source",
    "L1 device: prompt tokens found, over its size",
    "L2 host: prompt tokens found, over its size",
    "L3 storage: prompt tokens found, over its size",
    "Mean time to first token, by tiers",
    "Bytes written to L3, by write policy",
]


def several_nodes() -> Plan:
    return example(fleet=fleet(), setup=replace(example().setup, nodes=4))


def test_the_page_is_well_formed_and_has_every_figure() -> None:
    text = html_report(example())
    assert Page(text).captions == CAPTIONS
    assert len(figures(text)) == len(CAPTIONS)
    assert all(figure.get("aria-label") for figure in figures(text))


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = Page(html_report(several_nodes()))
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.links == [] and "http" not in html_report(several_nodes())


def test_the_recommendation_comes_first_and_text_of_the_trace_is_escaped() -> None:
    text = Page(html_report(example())).text
    places = [text.index(part) for part in ("some <trace>.jsonl", "Do <this>.", "prompt tokens", "The rest.")]
    assert places == sorted(places)


def test_the_page_names_the_figures_of_the_plan() -> None:
    text = Page(html_report(example())).text
    for shown in (
        "1.00 M", "40.0 %", "27.0 %", "250 ms", "mean time to first token; 2.00 s without a cache", "87.5 %",
        "given 8.0 GiB: 10.0 %", "given 64.0 GiB: 5.0 %", "given 256.0 GiB: 20.0 %",
        "95 % of the most 310.0 GiB: 28.5 %", "bend 8.0 GiB: 8.3 %", "960.0 GiB", "36.5 days",
        "Idle break-even of L3: 1.5 GB/s", "3, 250,000 tokens", "device 20, host 2, storage 0.5",
    ):
        assert shown in text, shown


def test_sources_of_prompt_tokens_add_up_to_all_of_them() -> None:
    # Hits of 90,000, 45,000 and 180,000 of 400,000 tokens that can be reused.
    (sources, *_) = figures(html_report(example()))
    labels = [node.text for node in sources.iter("text")]
    assert labels == ["hits of L1 device", "9.0 %", "hits of L2 host", "4.5 %", "hits of L3 storage", "18.0 %",
                      "reusable, computed", "8.5 %", "not reusable", "60.0 %"]


def test_several_nodes_have_a_figure_of_routings_and_sizes_on_each_node() -> None:
    page = Page(html_report(several_nodes()))
    assert page.captions[-1] == "Prompt tokens found on the node that serves the request, by routing"
    assert "L2 host: prompt tokens found, over its size on each node" in page.captions
    assert "L3 storage: prompt tokens found, over its size" in page.captions
    assert "333.0 GiB" in page.text and "prefix *" in page.text


def test_a_page_without_times_and_storage_has_the_other_figures() -> None:
    services = {
        name: replace(one, ttft_mean_s=None, ttft_p50_s=None, ttft_p99_s=None, prefill_s=None, load=None)
        for name, one in example().services.items()
    }
    setup = replace(example().setup, sizes={**example().setup.sizes, "storage": gib(0)})
    policies = dict.fromkeys(example().policies)
    page = Page(html_report(example(services=services, break_even=None, policies=policies, setup=setup)))
    assert page.captions == CAPTIONS[:4]
    assert "Left out: times and break-even need --prefill-rate." in page.text and "Storage" not in page.text


@pytest.mark.parametrize("storage", [None, 0, 1 << 20])
def test_plans_of_traces_make_pages(storage: int | None) -> None:
    plan = plan_of(conversations(3), 4, 16, storage, nodes=2)
    assert Page(html_report(plan)).captions[1:4] == [f"{title} on each node" for title in CAPTIONS[1:3]] + [CAPTIONS[3]]
    plan = plan_of(conversations(3)[:1], 0, 0, storage)
    assert Page(html_report(plan)).captions[:4] == CAPTIONS[:4]


def test_a_curve_of_one_point_makes_a_page() -> None:
    size = Size(tokens=64, bytes=64)
    one = Curve(points=(Point(size=size, found_tokens=0),), bends=(), enough=None)
    plan = example(curves=dict.fromkeys(example().curves, one))
    assert len(figures(html_report(plan))) == len(CAPTIONS)


def test_each_curve_has_its_points_as_rows() -> None:
    head, *rows = csv_report(example()).splitlines()
    assert head == "tier,size_bytes,size_tokens,found_tokens"
    assert len(rows) == 30
    assert rows[0] == "device,1073741824,1024,0" and rows[9] == "device,549755813888,524288,400000"
    assert rows[-1] == "storage,549755813888,524288,250000"


def test_labels_of_marks_have_rows_of_their_own_within_the_figure() -> None:
    x, y = linear_axis(100, "x", str), linear_axis(10, "y", str)
    marks = [Mark(at, 5, f"mark <{at}>") for at in (0, 49, 51, 99, 100)]
    svg = lines(x, y, [0, 100], [], title="", marks=marks)
    (figure,) = figures(svg)
    left, top, width, height = map(float, figure.get("viewBox", "").split())
    labels = [node for node in figure.iter("text") if (node.text or "").startswith("mark <")]
    rows = [float(node.get("y", "")) for node in labels]
    assert len(set(rows)) == 5 and all(top + 12 <= row <= 0 for row in rows)
    anchors = {node.text: node.get("text-anchor") for node in labels}
    assert anchors["mark <0>"] == "start" and anchors["mark <100>"] == "end"
    # A line never crosses the label of a mark on its side: outer marks are above inner ones.
    places = {node.text: float(node.get("y", "")) for node in labels}
    assert places["mark <0>"] < places["mark <49>"] and places["mark <100>"] < places["mark <99>"] < places["mark <51>"]
    assert left == 0 and width > 0 and height > -top


def test_the_ticks_of_sizes_are_powers_of_four_with_units() -> None:
    labels = [node.text or "" for node in figures(html_report(example()))[1].iter("text")]
    assert [label for label in labels if re.fullmatch(r"\d+ [KMGT]iB", label)] == [
        "1 GiB", "4 GiB", "16 GiB", "64 GiB", "256 GiB"
    ]
