"""What the demo shows: a live table while it runs, and a summary at the end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from ..cache import CacheStatistics
from ..engine import Engine
from ..replay.result import TIER_NAMES
from ..units import format_size
from .demo_run import Answer

# The table changes by the step; this often is enough for an eye.
REFRESH_PER_S = 8


class LiveTable:
    """The state of an engine's tiers, redrawn while it runs; on something that is no terminal it prints one line per
    phase and nothing meanwhile."""

    def __init__(self, console: Console, title: str, engine: Engine, requests: int) -> None:
        self._console = console
        self._title = title
        self._engine = engine
        self._requests = requests
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

    def _render(self) -> RenderableType:
        state = self._engine.cache.statistics()
        done = sum(self._engine.statistics().finished.values())
        return Group(f"{self._title}: request {done} of {self._requests}", tier_table(state), queue_table(state))


def tier_table(state: CacheStatistics) -> Table:
    """Hits, moves and room by tier."""
    table = Table()
    for column in ("tier", "hit tokens", "pages held", "pages max", "pages in", "bytes in", "evicted"):
        table.add_column(column, justify="left" if column == "tier" else "right", no_wrap=column == "tier")
    controller = state.controller
    backend, usage = controller.backend, controller.usage
    rows = [
        ("device", state.device.cached_pages, state.device.capacity_pages, controller.loaded_pages,
         state.device.page_bytes, state.evicted_pages.get("device", 0)),
        ("host", state.host.cached_pages, state.host.capacity_pages,
         controller.written_pages + controller.prefetched_pages, state.host.page_bytes,
         state.evicted_pages.get("host", 0)),
    ]  # fmt: skip
    if backend is not None and usage is not None:
        capacity = None if usage.capacity_bytes is None else usage.capacity_bytes // state.host.page_bytes
        rows.append(("storage", usage.pages, capacity or 0, controller.stored_pages, state.host.page_bytes,
                     backend.evicted_pages))  # fmt: skip
    for tier, held, capacity, moved, page_bytes, evicted in rows:
        hits = state.hit_tokens.get(tier, 0)
        table.add_row(TIER_NAMES[tier], f"{hits:,}", f"{held:,}", f"{capacity:,}", f"{moved:,}",
                      format_size(moved * page_bytes), f"{evicted:,}")  # fmt: skip
    return table


def queue_table(state: CacheStatistics) -> Table:
    """Operations queued or under way."""
    queues = state.controller.queues
    table = Table()
    for name in ("write", "load", "prefetch", "reads", "backup", "pages lent"):
        table.add_column(name, justify="right")
    depths = (queues.write, queues.load, queues.prefetch, queues.reads, queues.backup, queues.host_pages_reserved)
    table.add_row(*(str(depth) for depth in depths))
    return table


def time_table(cold: Sequence[Answer], cached: Sequence[Answer], restarted: Sequence[Answer]) -> Table:
    """Time to first token of document questions, by where the prefix came from."""
    table = Table(title="time to first token, questions about documents")
    for column in ("prefix from", "requests", "prompt tokens", "reused tokens", "median", "speed-up"):
        table.add_column(
            column, justify="left" if column == "prefix from" else "right", no_wrap=column == "prefix from"
        )
    groups = [("computed, no reuse", [a for a in cold if a.document])]
    groups += [(name, [a for a in cached if a.document and a.tier == tier]) for tier, name in TIER_NAMES.items()]
    groups.append(("L3, after a restart", [a for a in restarted if a.document and a.tier == "storage"]))
    reference = statistics.median(a.time_to_first_token_s for a in groups[0][1])
    for name, answers in groups:
        if not answers:
            table.add_row(name, "0", "-", "-", "-", "-")
            continue
        median = statistics.median(a.time_to_first_token_s for a in answers)
        table.add_row(
            name,
            str(len(answers)),
            f"{statistics.median(len(a.prompt) for a in answers):.0f}",
            f"{statistics.median(sum(a.hit_tokens.values()) for a in answers):.0f}",
            f"{1000 * median:.1f} ms",
            f"{reference / median:.1f} x",
        )
    return table


def differences(expected: Sequence[Answer], found: Sequence[Answer]) -> list[str]:
    """Where two runs of the same requests differ, in words; empty if nowhere."""
    lines = []
    for one, other in zip(expected, found, strict=True):
        if one.prompt != other.prompt:
            lines.append(f"{one.label}: the prompts differ, because an earlier answer did")
        elif one.tokens != other.tokens:
            position = next(i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b)
            lines.append(
                f"{one.label}: output token {position} is {other.tokens[position]}, not {one.tokens[position]}"
            )
        elif one.kv_digest != other.kv_digest:
            lines.append(f"{one.label}: equal tokens, but the KV bytes differ")
    return lines
