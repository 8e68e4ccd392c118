"""The text output of `hicache ctl`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..admin.models import BreakerStatus, Cause, Explanation, Job, Lookup, PinStatus, Quota, Status, StoreStatus
from ..backends.guard import HealthState, grouped
from ..hints import Outcome
from ..units import counted, format_share, format_size
from .main import printable
from .progress import format_age
from .tables import table

# Digits of a namespace and of a page key: enough to identify one.
_SPACE_HEX = 12
_KEY_HEX = 16


def status_lines(status: Status) -> Iterator[str]:
    """Yield a summary, then each table."""
    storage = "attached" if status.attached else "DETACHED (`hicache ctl attach`)"
    if not status.configured_stores:
        storage = "none configured"
    yield f"{status.kind} {status.version}, {status.state}, up {format_age(status.uptime_s)}, storage {storage}"
    for problem in grouped((one.name, one.namespace, one.health) for one in status.stores):
        where = f"; in {counted(len(problem.namespaces), 'namespace')}" if len(status.namespaces) > 1 else ""
        yield f"  PROBLEM: {problem}{where}"
    for store, mode in sorted(status.overrides.items()):
        yield f"  forced: {store.replace('*', 'all stores')} {mode.value}"
    yield ""
    yield from tier_lines(status)
    for lines in (namespace_lines(status), store_lines(status)):
        yield ""
        yield from lines
    if status.kind == "daemon":
        yield ""
        yield from client_lines(status)


def tier_lines(status: Status) -> Iterator[str]:
    """Yield one line for each tier."""
    rows = [
        (tier.name, format_size(tier.capacity_bytes), format_size(tier.used_bytes),
         format_share(tier.used_bytes, tier.capacity_bytes), format_size(tier.pinned_bytes), f"{tier.pages:,}")
        for tier in status.tiers
    ]
    yield from table(["tier", "size>", "used>", "share>", "pinned>", "pages>"], rows)


def namespace_lines(status: Status) -> Iterator[str]:
    """Yield one line for each namespace, the one with the most memory first."""
    rows = []
    for one in sorted(status.namespaces, key=lambda one: -one.pool_bytes):
        lookups = one.pool_hits + one.store_hits + one.misses
        quota = "-" if one.quota_bytes is None else format_size(one.quota_bytes)
        rows.append((
            one.namespace[:_SPACE_HEX], format_size(one.pool_bytes), quota, format_share(one.pool_hits, lookups),
            format_share(one.store_hits, lookups), str(one.weights_epoch), one.label,
        ))
    columns = ["namespace", "memory>", "quota>", "memory hits>", "store hits>", "epoch>", "model"]
    yield from table(columns, rows, "no namespaces are open; engines open them")


def store_lines(status: Status) -> Iterator[str]:
    """Yield one line for each store of each namespace."""
    rows = [
        (one.name, one.namespace[:_SPACE_HEX], "?" if one.pages is None else f"{one.pages:,}",
         "?" if one.bytes is None else format_size(one.bytes),
         "-" if one.capacity_bytes is None else format_size(one.capacity_bytes),
         _breaker(one.read), _writes(one), f"{one.errors:,}", f"{one.damaged:,}")
        for one in status.stores
    ]
    columns = ["store", "namespace", "pages>", "used>", "capacity>", "read", "write", "errors>", "damaged>"]
    yield from table(columns, rows, f"no stores are {'open' if status.configured_stores else 'configured'}")


def _writes(store: StoreStatus) -> str:
    text = _breaker(store.write)
    return store.health.words if store.health.state is HealthState.KEEPS_NOTHING and text in ("ok", "-") else text


def _breaker(found: BreakerStatus | None) -> str:
    if found is None:
        return "-"
    if found.override.value != "auto":
        return f"forced {found.override.value}"
    return "ok" if found.state == "closed" else f"{found.state.replace('_', ' ')} ({found.reason})"


def client_lines(status: Status) -> Iterator[str]:
    """Yield one line for each engine on this host."""
    rows = [
        (one.name, format_size(one.bytes), f"{one.operations:,}", "alive" if one.is_alive else "gone")
        for one in status.clients
    ]
    yield from table(["client", "memory>", "in flight>", "process"], rows, "no clients with shared memory")


def lookup_lines(found: Lookup) -> Iterator[str]:
    """Yield one line for each page."""
    rows = [
        (page.key[:_KEY_HEX], page.namespace[:_SPACE_HEX] or "-", ", ".join(page.places) or "nowhere")
        for page in found.pages
    ]
    yield from table(["page", "namespace", "where"], rows, "nothing found")
    if not found.complete:
        yield "not complete: too many pages, or the time was over; use more digits, or a longer --timeout"
    if found.unknown:
        yield f"did not answer: {', '.join(found.unknown)}"


def pin_lines(pins: Sequence[PinStatus]) -> Iterator[str]:
    """Yield one line for each pin."""
    if pins and not any(one.pages for one in pins):
        yield "nothing is pinned: none of these pages is in memory"
        return
    rows = [
        (one.id, one.namespace[:_SPACE_HEX], f"{one.pages:,}", f"{one.asked_pages:,}", format_age(one.expires_in_s))
        for one in pins
    ]
    yield from table(["pin", "namespace", "pages>", "requested>", "ends in>"], rows, "no pins")


def explanation_lines(found: Explanation, *, is_list: bool) -> Iterator[str]:
    """Yield one line for each request of a list, or for each source of a single account, in the order of the prompt."""
    if is_list:
        rows = [
            (printable(one.rid), format_age(one.ago_s), f"{one.tokens:,}", f"{one.device:,}", f"{one.host:,}",
             f"{one.storage:,}", "; ".join(f"{part} {part.tokens:,}" for part in one.computed))
            for one in found.accounts
        ]
        yield from table(["request", "ago>", "tokens>", "L1>", "L2>", "storage>", "computed"], rows, "no requests")
        return
    one = (*found.accounts, found.total)[0]
    sources = [("device", one.device), ("host", one.host), ("storage", one.storage)]
    sources += [(f"{'computed' if found.unit == 'tokens' else 'missing'}: {why}", why.tokens) for why in one.computed]
    yield f"{one.tokens:,} {found.unit}, {'the first ' * (one is found.total)}{format_age(one.ago_s)} ago"
    yield from table(["source", f"{found.unit}>", "share>"],
                     [(name, f"{count:,}", format_share(count, one.tokens)) for name, count in sources if count])
    if one.diverged_at is not None:
        yield f"equals another prompt up to token {one.diverged_at:,}"
    if one.age_s is not None:
        yield f"the first missing page left {format_age(one.age_s)} before"


def advice_lines(advice: Sequence[tuple[Cause, str]], tokens: int) -> Iterator[str]:
    """Yield two lines for each reason: its share of all tokens, and what to change."""
    if not advice:
        yield "nothing but the ends of prompts was computed in the last hour"
    for cause, text in advice:
        yield f"{cause}: {format_share(cause.tokens, tokens)} of {tokens:,}"
        yield f"  {text}"


def outcome_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield one line for each action of hints."""
    for one in outcomes:
        ttl = "" if one.ttl_s is None else f", {format_age(one.ttl_s)}"
        granted = f": {counted(one.pages, 'page')}{ttl}" if one.pages else ""
        yield f"{one.action_type}: {one.status.value}{granted}{one.detail and f'; {one.detail}'}"


def quota_lines(quotas: Sequence[Quota]) -> Iterator[str]:
    """Yield one line for each quota."""
    rows = [
        (one.namespace[:_SPACE_HEX], format_size(one.quota_bytes), format_size(one.pool_bytes),
         format_share(one.pool_bytes, one.quota_bytes))
        for one in quotas
    ]
    yield from table(["namespace", "quota>", "used>", "share>"], rows, "no quotas")


def job_lines(jobs: Sequence[Job]) -> Iterator[str]:
    """Yield one line for each job."""
    rows = [
        (one.id, one.state.value, format_age(one.elapsed_s),
         counted(one.progress.pages, "page") + ("" if one.progress.total is None else f" of {one.progress.total:,}"),
         str(sum(one.progress.damaged.values())), f"{one.progress.removed:,}", one.what)
        for one in jobs
    ]
    yield from table(["job", "state", "time>", "done>", "damaged>", "removed>", "what"], rows, "no jobs")
