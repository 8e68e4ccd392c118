"""The report of a replay as an HTML page: one file with inline figures, without scripts or external resources."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from hicache.cache.statistics import SKIP_REASONS
from hicache.units import format_share, format_size

from ..pages import captioned, html_page, html_table, html_tiles
from ..plots import Axis, Curve, bars, legend, linear_axis, lines, log_axis, stacked
from ..tier_names import TIER_NAMES
from .result import ReplayResult, Sample
from .timing import Latency, SchedulerTimes

WAY_NAMES: Mapping[str, str] = {
    "device_to_host": "L1 to L2", "host_to_device": "L2 to L1",
    "host_to_storage": "L2 to L3", "storage_to_host": "L3 to L2",
}
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
        "<h2>What was computed, and why</h2>",
        "<p>Prompt tokens that were computed, by reason and detail, also those of preempted requests. docs/explain.md "
        "says what to do about each.</p>",
        html_table(("reason", "tokens", "share"), reason_rows(result)),
        "<h2>Occupancy of the tiers</h2>",
        _occupancy(result),
        "<h2>Bytes moved, pages evicted</h2>",
        _moves(result),
        "<h2>Time to first token</h2>",
        "<p>From the arrival of a request in the queue to its first token.</p>",
        _first_token(result.first_token),
        *(_hints(result) if result.hints is not None else ()),
        *(_times(result.scheduler) if result.scheduler is not None else ()),
        "<h2>Refused, skipped and failed</h2>",
        "<p>Work that the cache rejected or skipped. It makes a request slower, never wrong.</p>",
        _drops(result),
        "<h2>Setup</h2>",
        _setup(result),
    ]
    return html_page(title, parts)


def flattened_drops(result: ReplayResult) -> list[tuple[str, int]]:
    """Return the counts of refused, skipped, damaged and failed work, by kind and reason, the most frequent first."""
    groups = {"skipped": result.skipped, "refused": result.refused, "damaged": result.damaged,
              "failed": result.storage_errors}
    drops = [
        (f"{kind} {reason}", count) for kind, counts in groups.items() for reason, count in counts.items() if count
    ]
    return sorted(drops, key=lambda drop: (-drop[1], drop[0]))


def hint_rows(result: ReplayResult) -> list[tuple[str, str, str]]:
    """Return the outcomes of hints: action, outcome and count."""
    return [(action, outcome, f"{count:,}") for action, outcomes in (result.hints or {}).items()
            for outcome, count in outcomes.items()]


def reason_rows(result: ReplayResult) -> list[tuple[str, str, str]]:
    """Return the reasons of computed tokens, the most frequent first: reason and detail, tokens, and their share."""
    reasons = result.tokens.reasons
    total = sum(reasons.values())
    return [(name.replace(".", " "), f"{count:,}", format_share(count, total))
            for name, count in sorted(reasons.items(), key=lambda one: -one[1])]


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
    ]
    if result.scheduler is None:
        tiles[-1] = ("", f"{result.elapsed_s:,.0f} s", "of virtual time")
        costs, what = result.first_token, "time to first token"
    else:
        costs, what = result.scheduler.request_cpu, "scheduler work per request"
    tiles += [("", f"{value / 1000:,.2f} ms", f"{what}, p{percent}")
              for percent, value in ((50, costs.p50_us), (99, costs.p99_us))]
    return html_tiles(tiles)


def _sources(result: ReplayResult) -> str:
    tokens = result.tokens
    moments, curves = share_curves(result.samples)
    figure = ""
    if moments:
        x = linear_axis(result.elapsed_s, "seconds since the start", _plain)
        y = Axis(0, 100, [(percent, f"{percent} %") for percent in range(0, 101, 25)], "share of prompt tokens")
        plot = stacked(x, y, moments, curves, title="Share of prompt tokens by source, over time")
        figure = captioned("Prompt tokens by source, over time", plot + legend(curves))
    rows = [(TIER_NAMES[tier], tokens.hits.get(tier, 0)) for tier in TIER_NAMES]
    rows += [("computed", tokens.computed), *ideal_rows(result)]
    rows += [("computed again after a preemption", tokens.recomputed)]
    return figure + html_table(
        ("source", "tokens", "share"),
        [(name, f"{count:,}", format_share(count, tokens.prompt)) for name, count in rows],
    )


def _occupancy(result: ReplayResult) -> str:
    setup, samples = result.setup, result.samples
    if not samples:
        return "<p>No sample was taken.</p>"
    pages = {"device": (setup.device_pages, [s.device_pages for s in samples]),
             "host": (setup.host_pages, [s.host_pages for s in samples])}
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
    return captioned("Occupancy of the tiers, over time", plot + legend(curves))


def _moves(result: ReplayResult) -> str:
    moved = [(WAY_NAMES.get(way, way), float(count), format_size(count)) for way, count in result.moved_bytes.items()]
    evicted = [(TIER_NAMES[tier], float(result.evicted_pages.get(tier, 0)),
                f"{result.evicted_pages.get(tier, 0):,}") for tier in TIER_NAMES]
    return captioned(
        "Bytes moved between tiers", bars(moved, colour=1, title="Bytes moved between tiers")
    ) + captioned("Pages evicted, by the tier they left", bars(evicted, colour=2, title="Pages evicted by tier"))


def _first_token(times: Latency) -> str:
    if not times.count:
        return "<p>No request got one.</p>"
    values = (times.total_us / times.count, times.p50_us, times.p90_us, times.p99_us, times.max_us)
    return html_table(("mean, ms", "p50", "p90", "p99", "max"), [[f"{value / 1000:,.1f}" for value in values]])


def _hints(result: ReplayResult) -> Iterator[str]:
    yield f"<h2>Hints: {escape(result.setup.hints or '')}</h2>"
    yield "<p>What became of each action. One that waits for the end of its request has two outcomes.</p>"
    yield html_table(("action", "outcome", "times"), hint_rows(result))


def _times(times: SchedulerTimes) -> Iterator[str]:
    yield "<h2>Cost of the cache on the scheduler's thread</h2>"
    yield (
        "<p>Time inside the cache's calls, for each request and for each step with work. Processor time is that of the "
        "thread; elapsed time also includes waiting for the interpreter's lock and for a core. Both exclude the time "
        "in which this replay writes and compares pages.</p>"
    )
    rows = [
        (name.replace("cpu", "processor time"), f"{found.count:,}", *(f"{value / 1000:.3f}" for value in
         (found.p50_us, found.p90_us, found.p99_us, found.p999_us, found.max_us)))
        for name, found in times.distributions().items()
    ]
    table = html_table(("time in ms", "count", "p50", "p90", "p99", "p99.9", "max"), rows)
    calls = sorted(times.calls.items(), key=lambda call: -call[1].cpu_s)
    where = bars(
        [(name, call.cpu_s, f"{call.cpu_s:.3f} s in {call.calls:,}") for name, call in calls],
        colour=0, title="Processor time of the scheduler's thread, by call",
    )
    yield _percentile_figure(times.request_cpu, times.request_elapsed) + table + captioned(
        "Processor time of the scheduler's thread, by call", where
    )


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
             "percentile of requests")
    least = min(curves[0].values[0], REQUEST_GOAL_MS / 10)
    y = log_axis(least, max(elapsed.max_us / 1000, REQUEST_GOAL_MS * 10), "ms per request", lambda ms: f"{ms:g}")
    plot = lines(x, y, positions, curves, title="Scheduler time per request, by percentile")
    return captioned("Scheduler time per request, by percentile", plot + legend(curves))


def _distance(percent: float) -> float:
    """Return the distance from the maximum, in powers of ten, so that 90, 99 and 99.9 are evenly spaced. The maximum
    comes next."""
    return -4.0 if percent == 100.0 else math.log10(1 - percent / 100)


def _drops(result: ReplayResult) -> str:
    drops = flattened_drops(result)
    if not drops:
        return "<p>Nothing.</p>"
    return html_table(("what", "times", "counter"), [(REASONS.get(name, name), f"{n:,}", name) for name, n in drops])


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
    if setup.virtual is not None:
        store, host = setup.virtual.storage, setup.virtual.host_bytes_per_s
        rows += [
            ("copies between L1 and L2", f"{format_size(host)}/s in each direction"),
            ("store", f"{format_size(store.read_bytes_per_s)}/s read, {format_size(store.write_bytes_per_s)}/s "
                      f"written, {store.fixed_s * 1e6:,.0f} us per operation, {store.parallel} in parallel"),
        ]
    if setup.speed_up is not None:
        rows.append(("latest arrival behind its time", f"{requests.late_s:.1f} s"))
    return html_table(("", ""), rows)


def _plain(value: float) -> str:
    return f"{value:g}"
