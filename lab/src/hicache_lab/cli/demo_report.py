"""The output of the demo: a live table while it runs, and a summary at the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from hicache.cache import CacheStatistics
from hicache.cli.progress import PLAIN_INTERVAL_S
from hicache.cli.tables import table
from hicache.units import format_share, format_size

from ..engine import Engine
from ..tier_names import TIER_NAMES
from .demo_run import Answer

# The redraw interval of the table, which changes with every step.
REFRESH_PER_S = 8


class LiveTable:
    """The state of an engine's tiers, redrawn while it runs. Without a terminal it prints one line per phase and, in a
    long phase, another every few seconds."""

    def __init__(self, console: Console, title: str, engine: Engine, requests: int) -> None:
        self._console = console
        self._title = title
        self._engine = engine
        self._requests = requests
        self._shown_s = time.monotonic()
        self._live = Live(
            console=console, refresh_per_second=REFRESH_PER_S, get_renderable=self._render, transient=True
        )

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(f"{self._title} ...")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def answered(self) -> None:
        """Print the progress without a live table and the last line is old."""
        if not self._console.is_terminal and time.monotonic() - self._shown_s >= PLAIN_INTERVAL_S:
            self._shown_s = time.monotonic()
            self._console.print(self._heading(self._engine.cache.statistics()), highlight=False)

    def _heading(self, state: CacheStatistics) -> str:
        done = sum(self._engine.statistics().finished.values())
        hits = format_share(sum(state.hit_tokens.values()), state.prompt_tokens)
        return f"{self._title}: request {done} of {self._requests}, hit rate {hits} of prompt tokens"

    def _render(self) -> RenderableType:
        state = self._engine.cache.statistics()
        return Group(*(Text(part) for part in (self._heading(state), tier_table(state), queue_table(state))))


def tier_table(state: CacheStatistics) -> str:
    """Return hits, sizes and copies by tier. `hit rate` is of all prompt tokens, `moved in` are copies to the tier."""
    controller = state.controller
    backend, usage = controller.backend, controller.usage
    rows = [
        ("device", state.device.cached_pages, state.device.capacity_pages, controller.loaded_pages,
         state.device.page_bytes, state.evicted_pages.get("device", 0)),
        ("host", state.host.cached_pages, state.host.capacity_pages,
         controller.written_pages + controller.prefetched_pages, state.host.page_bytes,
         state.evicted_pages.get("host", 0)),
    ]
    if backend is not None and usage is not None:
        capacity = None if usage.capacity_bytes is None else usage.capacity_bytes // state.host.page_bytes
        rows.append(("storage", usage.pages, capacity or 0, controller.stored_pages, state.host.page_bytes,
                     backend.evicted_pages))
    cells = [
        (TIER_NAMES[tier], f"{state.hit_tokens.get(tier, 0):,}",
         format_share(state.hit_tokens.get(tier, 0), state.prompt_tokens), f"{held:,}",
         f"{capacity:,}" if capacity else "any", format_size(moved * page_bytes), f"{evicted:,}")
        for tier, held, capacity, moved, page_bytes, evicted in rows
    ]
    return "\n".join(table(["tier", "hits>", "rate>", "pages>", "of>", "moved in>", "evicted>"], cells))


def queue_table(state: CacheStatistics) -> str:
    """Return operations that are queued or in flight, by direction, and the pages of L2 that they hold."""
    queues = state.controller.queues
    ways = {"L1>L2": queues.write, "L2>L1": queues.load, "lookups": queues.prefetch, "L3>L2": queues.reads,
            "L2>L3": queues.backup, "pages reserved": queues.host_pages_reserved}
    return "in flight: " + ", ".join(f"{way} {depth:,}" for way, depth in ways.items())


def by_source(cached: Sequence[Answer], restarted: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Return answers of the cache to questions about documents, by the source of the prefix."""
    sources = {"computed": "none (a miss)", **TIER_NAMES}
    groups = {name: [a for a in cached if a.document and a.tier == tier] for tier, name in sources.items()}
    return groups | {"L3, restarted": [a for a in restarted if a.document and a.tier == "storage"]}


def time_table(cached: Sequence[Answer], restarted: Sequence[Answer]) -> str:
    """Return the time to first token of document questions, by the source of the prefix. Values are medians."""
    rows = []
    for name, answers in by_source(cached, restarted).items():
        times = median_times(answers)
        if times is None:
            rows.append((name, "-", "-", "-", "-", "0"))
            continue
        rows.append((
            name,
            f"{times['speed_up']:.1f} x",
            f"{1000 * times['cached_s']:.0f} ms",
            f"{1000 * times['computed_s']:.0f} ms",
            f"{statistics.median(sum(a.hit_tokens.values()) for a in answers):.0f}",
            str(len(answers)),
        ))
    length = statistics.median(len(a.prompt) for a in cached if a.document)
    columns = ["prefix from", "speed>", "cached>", "computed>", "reused>", "pairs>"]
    return "\n".join([
        f"time to first token, {length:.0f}-token prompts,",
        "computed and cached in turns: medians",
        *table(columns, rows),
    ])


def median_times(answers: Sequence[Answer]) -> dict[str, float] | None:
    """Return the median times to first token and the median of their ratios in pairs, or None without answers."""
    if not answers:
        return None
    return {
        "computed_s": statistics.median(a.computed_s for a in answers),
        "cached_s": statistics.median(a.time_to_first_token_s for a in answers),
        "speed_up": statistics.median(a.computed_s / a.time_to_first_token_s for a in answers),
    }


def gains(cached: Sequence[Answer], restarted: Sequence[Answer]) -> dict[str, Any]:
    """Return the gains of reuse. Times are of questions about documents."""
    return {
        "prompt_tokens": sum(len(answer.prompt) for answer in cached),
        "tokens_not_computed": {tier: sum(answer.hit_tokens[tier] for answer in cached) for tier in TIER_NAMES},
        "time_to_first_token": {name: median_times(found) for name, found in by_source(cached, restarted).items()},
    }


def gain_line(found: Mapping[str, Any]) -> str:
    """Return the tokens that were not computed as a line of text."""
    tokens, prompt = found["tokens_not_computed"], found["prompt_tokens"]
    tiers = ", ".join(f"{count:,} from {TIER_NAMES[tier]}" for tier, count in tokens.items())
    total = sum(tokens.values())
    return f"gained: {total:,} of {prompt:,} prompt tokens ({format_share(total, prompt)}) were not computed: {tiers}"


def differences(expected: Sequence[Answer], found: Sequence[Answer]) -> list[str]:
    """Return the differences between two runs of the same requests, in words."""
    lines = []
    for one, other in zip(expected, found, strict=True):
        if one.tokens != other.tokens:
            position = next(i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b)
            lines.append(
                f"{one.label}: output token {position} is {other.tokens[position]}, not {one.tokens[position]}"
            )
        elif one.kv_digest != other.kv_digest:
            lines.append(f"{one.label}: equal tokens, but the KV bytes differ")
    return lines
