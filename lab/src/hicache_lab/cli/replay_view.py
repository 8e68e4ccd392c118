"""The output of `hicache replay`: shares of the tiers while it runs, and a summary at the end."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from hicache.cli.progress import StepProgress
from hicache.cli.tables import table
from hicache.errors import InvalidInput
from hicache.units import counted, format_share, format_size

from ..replay.job import ReplayJob
from ..replay.report import REASONS, WAY_NAMES, flattened_drops, hint_rows, ideal_rows, reason_rows
from ..replay.result import ReplayResult, Sample
from ..replay.timing import SchedulerTimes
from ..tier_names import TIER_NAMES
from ..traces.formats import TraceFormat
from ..traces.request import BLOCK_TOKENS, TraceRequest
from ..traces.tokens import TokenSource


def progress_of(sample: Sample, job: ReplayJob) -> StepProgress:
    """Return the progress of a replay, with the sources of its prompt tokens so far."""
    count = job.request_count
    total = None if count is None else count * (job.processes if job.whole_trace_each else 1)
    shares = [f"{name.partition(' ')[0]} {format_share(sample.hit_tokens.get(tier, 0), sample.prompt_tokens)}"
              for tier, name in TIER_NAMES.items()]
    wrong = f"{sample.wrong_bytes:,} WRONG BYTES" if sample.wrong_bytes else "0 wrong bytes"
    last = f"{sample.elapsed_s:,.0f} s virtual" if job.virtual else wrong
    return StepProgress(sample.requests, total, ", ".join([*shares, last]), "requests")


def print_summary(console: Console, result: ReplayResult) -> None:
    """Print the report as text and tables."""
    requests, tokens = result.requests, result.tokens
    state = "" if result.complete else ", interrupted"
    console.print(
        f"{counted(requests.ended, 'request')}, {counted(tokens.prompt, 'prompt token')} "
        f"in {result.elapsed_s:,.1f} s{'' if result.setup.virtual is None else ' of virtual time'}{state}",
        highlight=False,
    )
    left_out = {"too long for L1": requests.too_long, "unfinished": requests.unfinished,
                "preempted": requests.preempted}
    if any(left_out.values()):
        console.print(", ".join(f"{count:,} {what}" for what, count in left_out.items() if count), highlight=False)
    drops = [(REASONS.get(reason, reason), f"{count:,}") for reason, count in flattened_drops(result)]
    moved = [(WAY_NAMES[way], format_size(count)) for way, count in result.moved_bytes.items()]
    costs = ("call", "count>", "p50>", "p90>", "p99>", "p99.9>", "max>")
    _print_table(console, "sources of prompt tokens", ("source", "tokens>", "share>", "pages evicted>"),
                 _source_rows(result))
    if reasons := reason_rows(result):
        _print_table(console, "tokens computed, by reason", ("reason", "tokens>", "share>"), reasons)
    first = result.first_token
    if first.count:
        times = (first.total_us / first.count, first.p50_us, first.p90_us, first.p99_us, first.max_us)
        _print_table(console, "time to first token, in ms", ("mean>", "p50>", "p90>", "p99>", "max>"),
                     [[milliseconds(value) for value in times]])
    _print_table(console, "bytes moved", ("way", "bytes>"), moved)
    if drops:
        _print_table(console, "work refused, skipped or failed", ("what", "count>"), drops)
    if result.hints is not None:
        _print_table(console, f"hints, {result.setup.hints}", ("action", "outcome", "count>"), hint_rows(result))
    if result.scheduler is not None:
        _print_table(console, "cost of the cache on the scheduler's thread, in ms", costs, _time_rows(result.scheduler))


def _print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = table(columns, rows, width=console.width)
    console.print("\n".join(["", title, *lines]), highlight=False, markup=False, soft_wrap=True)


def _source_rows(result: ReplayResult) -> Iterator[Sequence[str]]:
    tokens = result.tokens
    for tier, name in TIER_NAMES.items():
        hits = tokens.hits.get(tier, 0)
        yield name, f"{hits:,}", format_share(hits, tokens.prompt), f"{result.evicted_pages.get(tier, 0):,}"
    yield "computed", f"{tokens.computed:,}", format_share(tokens.computed, tokens.prompt), ""
    for name, count in ideal_rows(result):
        yield name, f"{count:,}", format_share(count, tokens.prompt), ""


def _time_rows(times: SchedulerTimes) -> Iterator[Sequence[str]]:
    for name, found in times.distributions().items():
        values = (found.p50_us, found.p90_us, found.p99_us, found.p999_us, found.max_us)
        yield name, f"{found.count:,}", *(milliseconds(value) for value in values)


def milliseconds(time_us: float) -> str:
    """Return a time in ms with at most three decimals, fewer for longer times: `0.012`, `12.35`, `1,234`."""
    time_ms = time_us / 1000
    places = 3 if time_ms < 10 else 2 if time_ms < 100 else 1 if time_ms < 1000 else 0
    return f"{time_ms:,.{places}f}"


def trace_facts(form: TraceFormat, requests: Iterable[TraceRequest]) -> dict[str, Any]:
    """Return facts about a trace of this format. Raises InvalidInput for a trace without requests."""
    source = TokenSource()
    prompts: list[int] = []
    outputs: list[int] = []
    blocks: set[int] = set()
    sessions: set[int] = set()
    seen, end_ms, block_tokens = 0, 0.0, BLOCK_TOKENS
    for request in requests:
        seen += source.take(request).seen_tokens
        prompts.append(request.input_length)
        outputs.append(request.output_length)
        blocks.update(request.hash_ids)
        if request.session is not None:
            sessions.add(request.session)
        block_tokens = request.block_tokens
        end_ms = max(end_ms, request.timestamp_ms)
    if not prompts:
        raise InvalidInput("trace: is empty; use a trace with at least one request")
    return {
        "format": form,
        "requests": len(prompts),
        "duration_s": end_ms / 1000,
        **{name: {"sum": sum(lengths), "median": statistics.median(lengths), "max": max(lengths)}
           for name, lengths in (("prompt_tokens", prompts), ("output_tokens", outputs))},
        "block_tokens": block_tokens,
        "blocks": len(blocks),
        "sessions": len(sessions),
        "seen_prompt_tokens": seen,
    }


def facts_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result of `trace_facts` as text."""
    yield f"format              {facts['format']}"
    yield f"requests            {facts['requests']:,} within {facts['duration_s']:,.0f} s"
    for name in ("prompt tokens", "output tokens"):
        found = facts[name.replace(" ", "_")]
        yield f"{name:19} {found['sum']:,}, median {found['median']:,.0f}, longest {found['max']:,}"
    yield f"{'blocks of ' + str(facts['block_tokens']):19} {facts['blocks']:,} different ones"
    if facts["sessions"]:
        yield f"sessions            {facts['sessions']:,}"
    seen = facts["seen_prompt_tokens"]
    yield f"seen before         {seen:,} prompt tokens, {format_share(seen, facts['prompt_tokens']['sum'])}"
