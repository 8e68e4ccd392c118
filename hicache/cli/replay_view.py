"""What `hicache replay` shows: the tiers while it runs, and a summary at the end."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from ..errors import InvalidInput
from ..replay.job import ReplayJob
from ..replay.report import REASONS, WAY_NAMES, flattened_drops
from ..replay.result import TIER_NAMES, ReplayResult, Sample
from ..replay.timing import SchedulerTimes
from ..replay.tokens import TokenSource
from ..replay.trace import TraceRequest
from ..units import counted, format_share, format_size

# An eye takes in no more.
REFRESH_PER_S = 8
# Of a terminal: everything fits into so many columns.
WIDTH = 80


class LiveView:
    """The state of all engines, redrawn while they run; on something that is no terminal, one line at the start."""

    def __init__(self, console: Console, job: ReplayJob) -> None:
        count = job.request_count
        self._total = None if count is None else count * (job.processes if job.whole_trace_each else 1)
        self._title = f"replaying {job.trace.name if job.trace else 'a synthetic trace'}"
        self._console = console
        self._sample: Sample | None = None
        self._live = Live(
            console=console, refresh_per_second=REFRESH_PER_S, get_renderable=self._render, transient=True
        )

    def show(self, sample: Sample) -> None:
        """Show this state from now on."""
        self._sample = sample

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(f"{self._title} ...")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        sample = self._sample
        if sample is None:
            return f"{self._title}: starting"
        done = f"{sample.requests:,} of {counted(self._total, 'request')}" if self._total else (
            counted(sample.requests, "request"))  # fmt: skip
        wrong = f"[bold red]{sample.wrong_bytes:,} WRONG BYTES[/]" if sample.wrong_bytes else "0 wrong bytes"
        head = f"{self._title}: {done} in {sample.elapsed_s:.0f} s, {wrong}"
        bar = ProgressBar(total=self._total, completed=sample.requests, width=WIDTH)
        queue = f"{sample.waiting} waiting, {sample.running} running"
        return Group(head, bar, queue, state_table(sample, self._console.width))


def state_table(sample: Sample, width: int) -> Table:
    """Tokens by source, and how full the tiers are; the latter only where `width` columns have room for it."""
    hits = [sample.hit_tokens.get(tier, 0) for tier in TIER_NAMES]
    columns = dict(zip(("from L1", "from L2", "from L3"), map(shortened, hits), strict=True))
    columns["computed"] = shortened(sample.prompt_tokens - sum(hits))
    if width >= WIDTH:
        columns |= {"L1 pages": shortened(sample.device_pages), "L2 pages": shortened(sample.host_pages)}
    columns["stored"] = format_size(sample.storage_bytes)
    table = Table()
    for column in columns:
        table.add_column(column, justify="right")
    table.add_row(*columns.values())
    return table


def print_summary(console: Console, result: ReplayResult) -> None:
    """The report in words and tables."""
    requests, tokens = result.requests, result.tokens
    state = "" if result.complete else ", interrupted"
    console.print(
        f"{counted(requests.ended, 'request')}, {counted(tokens.prompt, 'prompt token')} "
        f"in {result.elapsed_s:.1f} s{state}",
        highlight=False,
    )
    left_out = {"too long for L1": requests.too_long, "unfinished": requests.unfinished,
                "preempted": requests.preempted}  # fmt: skip
    if any(left_out.values()):
        console.print(", ".join(f"{count:,} {what}" for what, count in left_out.items() if count), highlight=False)
    drops = [(REASONS.get(reason, reason), f"{count:,}") for reason, count in flattened_drops(result)]
    moved = [(WAY_NAMES[way], format_size(count)) for way, count in result.moved_bytes.items()]
    sources = ("source", "tokens", "share", "pages evicted")
    console.print(_table("where prompt tokens came from", sources, _source_rows(result)))
    console.print(_table("bytes moved", ("way", ""), moved))
    if drops:
        console.print(_table("work refused, skipped or failed", ("what", ""), drops))
    costs = ("", "count", "p50", "p90", "p99", "p99.9", "max")
    console.print(_table("what the cache costs the scheduler's thread, in ms", costs, _time_rows(result.scheduler)))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The first column holds names, the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold" if not number else "ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def _source_rows(result: ReplayResult) -> Iterator[Sequence[str]]:
    tokens = result.tokens
    for tier, name in TIER_NAMES.items():
        hits = tokens.hits.get(tier, 0)
        yield name, f"{hits:,}", format_share(hits, tokens.prompt), f"{result.evicted_pages.get(tier, 0):,}"
    yield "computed", f"{tokens.computed:,}", format_share(tokens.computed, tokens.prompt), ""
    seen = ("seen before in the trace", f"{tokens.seen:,}", format_share(tokens.seen, tokens.prompt))
    yield [f"[dim]{cell}" for cell in seen]


def _time_rows(times: SchedulerTimes) -> Iterator[Sequence[str]]:
    for name, found in times.distributions().items():
        values = (found.p50_us, found.p90_us, found.p99_us, found.p999_us, found.max_us)
        yield name, f"{found.count:,}", *(milliseconds(value) for value in values)


def shortened(number: int) -> str:
    """A count in at most eight characters up to a billion: `99,999`, `214.7 k`, `27.4 M`."""
    if number < 100_000:
        return f"{number:,}"
    return f"{number / 1e3:.1f} k" if number < 1_000_000 else f"{number / 1e6:,.1f} M"


def milliseconds(time_us: float) -> str:
    """A time in ms with at most three places, and the fewer the longer it is: `0.012`, `12.35`, `1,234`."""
    time_ms = time_us / 1000
    places = 3 if time_ms < 10 else 2 if time_ms < 100 else 1 if time_ms < 1000 else 0
    return f"{time_ms:,.{places}f}"


def trace_facts(requests: Iterable[TraceRequest]) -> Iterator[str]:
    """What is in a trace, in lines. Raises InvalidInput for a trace without requests."""
    source = TokenSource()
    prompts: list[int] = []
    outputs: list[int] = []
    blocks: set[int] = set()
    seen, end_ms = 0, 0.0
    for request in requests:
        seen += source.take(request).seen_tokens
        prompts.append(request.input_length)
        outputs.append(request.output_length)
        blocks.update(request.hash_ids)
        end_ms = max(end_ms, request.timestamp_ms)
    if not prompts:
        raise InvalidInput("trace: there is no request in it")
    yield f"requests            {len(prompts):,} within {end_ms / 1000:,.0f} s"
    for name, lengths in (("prompt tokens", prompts), ("output tokens", outputs)):
        yield (f"{name:19} {sum(lengths):,}, median {statistics.median(lengths):,.0f}, longest {max(lengths):,}")
    yield f"blocks of 512       {len(blocks):,} different ones"
    yield f"seen before         {seen:,} prompt tokens, {format_share(seen, sum(prompts))}"
