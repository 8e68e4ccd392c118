"""The report of a replay as an HTML page: one file with inline figures, without scripts or external resources."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from ...cache.statistics import SKIP_REASONS
from ...units import format_share, format_size
from .plots import Axis, Curve, bars, legend, linear_axis, lines, log_axis, stacked
from .result import TIER_NAMES, ReplayResult, Sample
from .timing import Latency

WAY_NAMES: Mapping[str, str] = {
    "device_to_host": "L1 to L2", "host_to_device": "L2 to L1",
    "host_to_storage": "L2 to L3", "storage_to_host": "L3 to L2",
}  # fmt: skip
# Descriptions of counters; a counter without one is shown by its name.
REASONS: Mapping[str, str] = {
    **{f"skipped {reason}": text for reason, text in SKIP_REASONS.items()},
    "refused write": "no backup to L2: queue full",
    "refused load": "no load from L2: queue full",
    "refused prefetch": "no prefetch: too many waiting",
    "refused backup": "nothing stored: queue full",
}
# The number of intervals of a curve of shares; each has the same number of prompt tokens.
INTERVALS = 60
PERCENTS = (0.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 100.0)
# The goal for the scheduler's work for one request, drawn into its figure.
REQUEST_GOAL_MS = 1.0

_STYLE = """
:root { --ground: #fcfcfb; --card: #fff; --ink: #1d2129; --soft: #5d6673; --rule: #dfe3e8; --good: #12703c;
  --bad: #b3261e; --c0: #2f6fde; --c1: #0f9b8e; --c2: #d98a00; --c3: #b9c0ca; --c4: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --card: #1b1f26; --ink: #e6e9ee; --soft: #9aa4b2;
  --rule: #30363f; --good: #5fd08f; --bad: #ff8a80; --c0: #6ea0ff; --c1: #3cc7b8; --c2: #f0b03f; --c3: #4b5461;
  --c4: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 960px; padding: 32px 20px 64px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 4px; }
p { margin: 4px 0 12px; max-width: 75ch; } .soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(136px, 1fr)); gap: 12px; margin: 20px 0 8px; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; } .good b { color: var(--good); } .bad b { color: var(--bad); }
figure { margin: 12px 0 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 14px; }
figcaption { font-weight: 600; margin-bottom: 6px; } svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .value { fill: var(--ink); }
.grid { stroke: var(--rule); } .tick { stroke: var(--soft); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.line.c3 { stroke: var(--c3); } .line.c4 { stroke: var(--c4); }
.area.c0 { fill: var(--c0); } .area.c1 { fill: var(--c1); } .area.c2 { fill: var(--c2); } .area.c3 { fill: var(--c3); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 0; font-size: 13px; }
.key { display: inline-flex; align-items: center; gap: 6px; }
.swatch { width: 14px; height: 10px; border-radius: 2px; }
.swatch.c0 { background: var(--c0); } .swatch.c1 { background: var(--c1); } .swatch.c2 { background: var(--c2); }
.swatch.c3 { background: var(--c3); } .swatch.c4 { background: var(--c4); }
.swatch.dashed { height: 3px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: 12px 0 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; font-size: 13px; }
"""


def html_report(result: ReplayResult) -> str:
    """Return the whole page."""
    title = f"Replay of {result.setup.trace}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_subtitle(result))}</p>',
        _tiles(result),
        "<h2>Sources of prompt tokens</h2>",
        "<p>Prompt tokens over time: found on a tier, or computed. The table also has the tokens seen before in the "
        "trace, which an unlimited cache would have, and the hits of ideal caches as large as all tiers together: the "
        "optimum, which knows the future, and an LRU.</p>",
        _sources(result),
        "<h2>Occupancy of the tiers</h2>",
        _occupancy(result),
        "<h2>Bytes moved, pages evicted</h2>",
        _moves(result),
        "<h2>Cost of the cache on the scheduler's thread</h2>",
        "<p>Time inside the cache's calls, for each request and for each step with work. Processor time is that of the "
        "thread; elapsed time also includes waiting for the interpreter's lock and for a core. Both exclude the time "
        "in which this replay writes and compares pages.</p>",
        _times(result),
        "<h2>Refused, skipped and failed</h2>",
        "<p>Work that the cache rejected or skipped. It makes a request slower, never wrong.</p>",
        _drops(result),
        "<h2>Setup</h2>",
        _setup(result),
    ]
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
            f"<body>\n{chr(10).join(parts)}\n</body></html>\n")  # fmt: skip


def flattened_drops(result: ReplayResult) -> list[tuple[str, int]]:
    """Return the counts of refused, skipped, damaged and failed work, by kind and reason, the most frequent first."""
    groups = {"skipped": result.skipped, "refused": result.refused, "damaged": result.damaged,
              "failed": result.storage_errors}  # fmt: skip
    drops = [
        (f"{kind} {reason}", count) for kind, counts in groups.items() for reason, count in counts.items() if count
    ]
    return sorted(drops, key=lambda drop: (-drop[1], drop[0]))


def ideal_rows(result: ReplayResult) -> Iterator[tuple[str, int]]:
    """Yield the tokens that other caches would have found, the best cache first, and our hits as a share of each."""
    tokens, ideal = result.tokens, result.ideal
    found = [("seen before in the trace", tokens.seen)]
    if ideal is not None:
        room = "without limit" if ideal.pages is None else f"of {ideal.pages:,} pages"
        found += [(f"optimum {room}", ideal.optimum_tokens), (f"ideal LRU {room}", ideal.lru_tokens)]
    for name, count in found:
        yield f"{name} (hits: {format_share(sum(tokens.hits.values()), count)} of it)", count


def share_curves(samples: Sequence[Sample]) -> tuple[list[float], list[Curve]]:
    """Return the shares of the tiers and of computing, in percent, over elapsed seconds."""
    moments, tiers = [], list(TIER_NAMES)
    shares: list[list[float]] = [[] for _ in range(len(tiers) + 1)]
    for before, after in _intervals(samples):
        tokens = after.prompt_tokens - before.prompt_tokens
        hits = [after.hit_tokens.get(tier, 0) - before.hit_tokens.get(tier, 0) for tier in tiers]
        for share, count in zip(shares, (*hits, tokens - sum(hits)), strict=True):
            share.append(100 * count / tokens)
        moments.append(after.elapsed_s)
    names = (*TIER_NAMES.values(), "computed")
    return moments, [Curve(name, share, colour) for colour, (name, share) in enumerate(zip(names, shares, strict=True))]


def _intervals(samples: Sequence[Sample]) -> Iterator[tuple[Sample, Sample]]:
    if not samples:
        return
    before, least = samples[0], max(1.0, samples[-1].prompt_tokens / INTERVALS)
    for sample in samples[1:]:
        last = sample is samples[-1] and sample.prompt_tokens > before.prompt_tokens
        if sample.prompt_tokens - before.prompt_tokens >= least or last:
            yield before, sample
            before = sample


def _subtitle(result: ReplayResult) -> str:
    setup = result.setup
    processes = f"{setup.processes} processes" if setup.processes > 1 else "one process"
    pace = "as fast as served" if setup.speed_up is None else f"{setup.speed_up:g} times faster than recorded"
    state = "" if result.complete else "; interrupted before its end"
    return f"model {setup.model}, {processes}, requests arrive {pace}; {result.elapsed_s:.1f} s{state}"


def _tiles(result: ReplayResult) -> str:
    tokens = result.tokens
    hits = sum(tokens.hits.values())
    good = "bad" if result.wrong_bytes else "good"
    tiles = [
        ("", f"{result.requests.ended:,}", "request" if result.requests.ended == 1 else "requests"),
        ("", f"{tokens.prompt / 1e6:,.2f} M", "prompt tokens"),
        ("", format_share(hits, tokens.prompt), "found on a tier"),
        (good, f"{result.wrong_bytes:,}", f"wrong bytes of {format_size(result.checked_bytes)} compared"),
        ("", f"{result.scheduler.request_cpu.p50_us / 1000:.2f} ms", "scheduler work per request, p50"),
        ("", f"{result.scheduler.request_cpu.p99_us / 1000:.2f} ms", "scheduler work per request, p99"),
    ]
    return '<div class="tiles">' + "".join(
        f'<div class="tile {kind}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for kind, value, label in tiles
    ) + "</div>"  # fmt: skip


def _sources(result: ReplayResult) -> str:
    tokens = result.tokens
    moments, curves = share_curves(result.samples)
    figure = ""
    if moments:
        x = linear_axis(result.elapsed_s, "seconds since the start", _plain)
        y = Axis(0, 100, [(percent, f"{percent} %") for percent in range(0, 101, 25)], "share of prompt tokens")
        plot = stacked(x, y, moments, curves, title="Share of prompt tokens by source, over time")
        figure = _captioned("Prompt tokens by source, over time", plot + legend(curves))
    rows = [(TIER_NAMES[tier], tokens.hits.get(tier, 0)) for tier in TIER_NAMES]
    rows += [("computed", tokens.computed), *ideal_rows(result)]
    rows += [("computed again after a preemption", tokens.recomputed)]
    return figure + _table(
        ("source", "tokens", "share"),
        [(name, f"{count:,}", format_share(count, tokens.prompt)) for name, count in rows],
    )


def _occupancy(result: ReplayResult) -> str:
    setup, samples = result.setup, result.samples
    if not samples:
        return "<p>No sample was taken.</p>"
    pages = {"device": (setup.device_pages, [s.device_pages for s in samples]),
             "host": (setup.host_pages, [s.host_pages for s in samples])}  # fmt: skip
    curves = [
        Curve(TIER_NAMES[tier], [100 * used / (capacity * setup.processes) for used in values], colour)
        for colour, (tier, (capacity, values)) in enumerate(pages.items())
    ]
    if setup.storage_capacity_bytes:
        values = [100 * sample.storage_bytes / setup.storage_capacity_bytes for sample in samples]
        curves.append(Curve(TIER_NAMES["storage"], values, 2))
    x = linear_axis(result.elapsed_s, "seconds since the start", _plain)
    y = Axis(0, 100, [(percent, f"{percent} %") for percent in range(0, 101, 25)], "of capacity in use")
    plot = lines(x, y, [sample.elapsed_s for sample in samples], curves, title="Occupancy of the tiers, over time")
    return _captioned("Occupancy of the tiers, over time", plot + legend(curves))


def _moves(result: ReplayResult) -> str:
    moved = [(WAY_NAMES.get(way, way), float(count), format_size(count)) for way, count in result.moved_bytes.items()]
    evicted = [(TIER_NAMES[tier], float(result.evicted_pages.get(tier, 0)),
                f"{result.evicted_pages.get(tier, 0):,}") for tier in TIER_NAMES]  # fmt: skip
    return _captioned(
        "Bytes moved between tiers", bars(moved, colour=1, title="Bytes moved between tiers")
    ) + _captioned("Pages evicted, by the tier they left", bars(evicted, colour=2, title="Pages evicted by tier"))


def _times(result: ReplayResult) -> str:
    times = result.scheduler
    rows = [
        (name.replace("cpu", "processor time"), f"{found.count:,}", *(f"{value / 1000:.3f}" for value in
         (found.p50_us, found.p90_us, found.p99_us, found.p999_us, found.max_us)))
        for name, found in times.distributions().items()
    ]  # fmt: skip
    table = _table(("time in ms", "count", "p50", "p90", "p99", "p99.9", "max"), rows)
    calls = sorted(times.calls.items(), key=lambda call: -call[1].cpu_s)
    where = bars(
        [(name, call.cpu_s, f"{call.cpu_s:.3f} s in {call.calls:,}") for name, call in calls],
        colour=0, title="Processor time of the scheduler's thread, by call",
    )  # fmt: skip
    return _percentile_figure(times.request_cpu, times.request_elapsed) + table + _captioned(
        "Processor time of the scheduler's thread, by call", where
    )  # fmt: skip


def _percentile_figure(cpu: Latency, elapsed: Latency) -> str:
    if not cpu.count:
        return ""
    # Percentiles on an axis that has as much room for the last 1 % as for the first 90.
    positions = [-_distance(percent) for percent in PERCENTS]
    curves = [
        Curve("processor time", [cpu.at(percent) / 1000 for percent in PERCENTS], 0),
        Curve("elapsed", [elapsed.at(percent) / 1000 for percent in PERCENTS], 1),
        Curve(f"{REQUEST_GOAL_MS:g} ms, the goal at p99", [REQUEST_GOAL_MS] * len(PERCENTS), 4, dashed=True),
    ]
    shown = {0.0: "0", 50.0: "50", 90.0: "90", 99.0: "99", 99.9: "99.9", 100.0: "max"}
    x = Axis(positions[0], positions[-1], [(-_distance(p), text) for p, text in shown.items()],
             "percentile of requests")  # fmt: skip
    least = min(curves[0].values[0], REQUEST_GOAL_MS / 10)
    y = log_axis(least, max(elapsed.max_us / 1000, REQUEST_GOAL_MS * 10), "ms per request", lambda ms: f"{ms:g}")
    plot = lines(x, y, positions, curves, title="Scheduler time per request, by percentile")
    return _captioned("Scheduler time per request, by percentile", plot + legend(curves))


def _distance(percent: float) -> float:
    """Return the distance from the maximum, in powers of ten, so that 90, 99 and 99.9 are evenly spaced. The maximum
    comes next."""
    return -4.0 if percent == 100.0 else math.log10(1 - percent / 100)


def _drops(result: ReplayResult) -> str:
    drops = flattened_drops(result)
    if not drops:
        return "<p>Nothing.</p>"
    return _table(("what", "times", "counter"), [(REASONS.get(name, name), f"{n:,}", name) for name, n in drops])


def _setup(result: ReplayResult) -> str:
    setup, requests = result.setup, result.requests
    storage = setup.storage or "none"
    if setup.storage_capacity_bytes:
        storage += f", {format_size(setup.storage_capacity_bytes)}"
    rate = f"{setup.prefill_tokens_per_s:,.0f}" if setup.prefill_tokens_per_s else "no limit"
    rows = [
        ("KV per token", format_size(setup.kv_bytes_per_token)),
        ("tokens per page", f"{setup.page_size}"),
        ("L1", f"{setup.device_pages:,} pages, {format_size(setup.device_pages * setup.device_page_bytes)}"),
        ("L2", f"{setup.host_pages:,} pages, {format_size(setup.host_pages * setup.host_page_bytes)}"),
        ("L3", storage),
        ("running and waiting at most", f"{setup.running_max} and {setup.waiting_max}"),
        ("prompt tokens computed per second", rate),
        ("requests too long for L1, left out", f"{requests.too_long:,}"),
        ("requests unfinished", f"{requests.unfinished:,}"),
        ("preemptions", f"{requests.preempted:,}"),
    ]
    if setup.speed_up is not None:
        rows.append(("latest arrival behind its time", f"{requests.late_s:.1f} s"))
    return _table(("", ""), rows)


def _captioned(caption: str, content: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{content}</figure>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    header = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines_ = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{lines_}</tbody></table></div>'


def _plain(value: float) -> str:
    return f"{value:g}"
