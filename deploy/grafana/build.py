"""Write the dashboards in `dashboards/`, for Grafana 11 and later: `python deploy/grafana/build.py`.

Edit the tables here, not the written files. Each entry of a table is a panel: title, description, unit and expressions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA_VERSION = 39  # of Grafana 11.0; later versions read it
COLUMNS = 24
HERE = Path(__file__).parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Selects the series of the targets that the user has chosen.
OF = 'instance=~"$instance"'


class Panel(NamedTuple):
    """A panel. `queries` are pairs of an expression and a legend; `%s` in an expression stands for the chosen targets.
    `values` gives numbers that stand for states a text and a color. A `table` has a row for each series, the largest
    value first. A `row` is the heading of the panels up to the next one."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 12
    stacked: bool = False
    maximum: float | None = None
    values: tuple[tuple[int, str, str], ...] = ()


def rate(metric: str, *labels: str, where: str = "") -> str:
    """Return the expression of a counter's rate per second, summed over all labels except `labels` and the instance."""
    matchers = ",".join(filter(None, ("%s", where)))
    by = ", ".join(("instance", *labels))
    return f"sum by ({by}) (rate(hicache_{metric}{{{matchers}}}[$__rate_interval]))"


def quantile(share: float, metric: str, *labels: str) -> str:
    """Return the expression of a quantile of a histogram, by `labels` and instance."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', 'le', *labels)})"


HIT = 'outcome="hit"'
COMPUTED = 'source="computed"'
PROMPT = "(sum(rate(hicache_prompt_tokens_total{%s}[$__rate_interval])) > 0)"
BREAKER = ((0, "closed", "green"), (1, "half open", "yellow"), (2, "open", "red"))

TIERS = (
    Panel("Hit rate by tier", "Share of the prompt tokens whose KV was reused, by tier. The others were computed.",
          "percentunit",
          ((f"sum by (tier) (rate(hicache_hit_tokens_total{{%s}}[$__rate_interval])) / on () group_left () {PROMPT}",
            "{{tier}}"),), stacked=True, maximum=1),
    Panel("Prompt tokens", "Prompt tokens of the requests that have begun, per second.", "short",
          ((rate("prompt_tokens_total"), "{{instance}}"),)),
    Panel("What was computed, and why", "", "", (), kind="row", width=COLUMNS),
    Panel("Computed tokens, by reason", "Prompt tokens per second that were computed, by reason. docs/explain.md says "
          "what to do about each.", "short",
          ((f"sum by (reason) (rate(hicache_prompt_tokens_total{{%s,{COMPUTED}}}[$__rate_interval]))",
            "{{reason}}"),), stacked=True),
    Panel("Share of the prompt, by reason", "Computed tokens as a share of all prompt tokens. `new` and `tail` cannot "
          "be cached; the others could have been hits.", "percentunit",
          ((f"sum by (reason) (rate(hicache_prompt_tokens_total{{%s,{COMPUTED}}}[$__rate_interval])) / on () "
            f"group_left () {PROMPT}", "{{reason}}"),), stacked=True, maximum=1),
    Panel("Reasons and details", "Prompt tokens that were computed in the time shown, the most frequent reason first. "
          "The detail says which tier evicted a page, what was late, or why a page was not stored.", "short",
          ((f"sum by (reason, detail) (increase(hicache_prompt_tokens_total{{%s,{COMPUTED}}}[$__range])) > 0", ""),),
          kind="table", width=COLUMNS),
    Panel("Tiers and transfers", "", "", (), kind="row", width=COLUMNS),
    Panel("L1 and L2 in use", "Share of a tier's memory that is in use. A full tier evicts, which is normal while its "
          "hit rate is stable.", "percentunit",
          (("1 - hicache_tier_free_bytes{%s} / (hicache_tier_capacity_bytes{%s} > 0)", "{{instance}} {{tier}}"),),
          maximum=1),
    Panel("Cached and evictable", "Memory used by cached pages, and the part of it that can be evicted now. In a full "
          "tier with little evictable memory, requests wait for room.", "bytes",
          (("sum by (tier) (hicache_tier_cached_bytes{%s})", "{{tier}} cached"),
           ("sum by (tier) (hicache_tier_evictable_bytes{%s})", "{{tier}} evictable"))),
    Panel("Pages moved between tiers", "Backups to the host, loads to the device, reads from storage and writes to it.",
          "ops", ((rate("moved_pages_total", "direction"), "{{instance}} {{direction}}"),)),
    Panel("Pages evicted", "Pages evicted from a tier. If they rise while the hit rate falls, the tier is too small.",
          "ops", ((rate("evicted_pages_total", "tier"), "{{instance}} {{tier}}"),)),
    Panel("Skipped, by reason", "Work that the cache skipped. Each makes a request slower but does not fail it. "
          "docs/metrics.md explains the reasons.", "ops", ((rate("skipped_total", "reason"), "{{reason}}"),)),
    Panel("Fetch or compute", "Decisions to fetch a hit or store a page, by reason. `too_slow`: computing is faster. "
          "`partly`: only the first pages are fetched.", "ops",
          ((rate("break_even_decisions_total", "route", "reason"), "{{route}} {{reason}}"),)),
    Panel("Queues", "Operations of the controller that are queued or in flight.", "short",
          (("sum by (instance, queue) (hicache_queued_operations{%s})", "{{instance}} {{queue}}"),)),
    Panel("Refused by a limit", "Operations that a full queue rejected; the pages are computed instead. "
          "docs/runbooks.md has the limit of each queue.", "ops",
          ((rate("refused_operations_total", "queue"), "{{instance}} {{queue}}"),)),
    Panel("Scheduler time per step, p99", "Time that `poll` takes on the scheduler's thread in each step.", "s",
          ((quantile(0.99, "scheduler_step_seconds"), "{{instance}}"),)),
    Panel("Prefetch wait, p90", "How long requests waited for pages from storage.", "s",
          ((quantile(0.9, "prefetch_wait_seconds"), "{{instance}}"),)),
    Panel("Copies, p99", "Time of copies between L1 and L2, by direction.", "s",
          ((quantile(0.99, "copy_seconds", "direction"), "{{instance}} {{direction}}"),)),
    Panel("Lookups, by outcome", "Lookups in storage: did they find all, some or none of the missing pages?", "ops",
          ((rate("lookups_total", "outcome"), "{{instance}} {{outcome}}"),)),
    Panel("Sessions", "Sessions that are open, hold KV on the device, or run a turn. Empty without sessions.", "short",
          (("sum by (instance, state) (hicache_sessions{%s})", "{{instance}} {{state}}"),)),
    Panel("Turns", "Turns of sessions, and turns that continued the previous turn exactly.", "ops",
          ((rate("session_turns_total"), "{{instance}} turns"),
           (rate("session_continued_turns_total"), "{{instance}} continued"))),
)

STORAGE = (
    Panel("Hit rate", "Share of the requested pages that the store returned and that passed verification.",
          "percentunit",
          ((f"{rate('backend_get_pages_total', 'backend', where=HIT)} / "
            f"({rate('backend_get_pages_total', 'backend')} > 0)", "{{instance}} {{backend}}"),), maximum=1),
    Panel("Transfers", "Bytes of whole frames, read and written.", "Bps",
          ((rate("backend_transferred_bytes_total", "backend", "direction"),
            "{{instance}} {{backend}} {{direction}}"),)),
    Panel("Call time, p50", "Median time of a call, by verb. A call is a batch of pages.", "s",
          ((quantile(0.5, "backend_call_seconds", "backend", "verb"), "{{instance}} {{backend}} {{verb}}"),)),
    Panel("Call time, p99", "99th percentile of call times, by verb. Near the deadline (transfer.storage_deadline) "
          "calls fail.", "s",
          ((quantile(0.99, "backend_call_seconds", "backend", "verb"), "{{instance}} {{backend}} {{verb}}"),)),
    Panel("Stored", "Bytes stored by all processes that share the store, and its limit. At the limit the store evicts "
          "the least recently used pages.", "bytes",
          (("max by (instance, backend) (hicache_backend_stored_bytes{%s})", "{{instance}} {{backend}} stored"),
           ("max by (instance, backend) (hicache_backend_capacity_bytes{%s})", "{{instance}} {{backend}} limit"))),
    Panel("Breakers", "Closed: calls are made. Half open: the next call decides. Open: no calls are made; hits are "
          "lost, but requests succeed.", "short",
          (("max by (instance, backend, direction) (hicache_backend_breaker_state{%s})",
            "{{instance}} {{backend}} {{direction}}"),), kind="state-timeline", values=BREAKER),
    Panel("Keeps pages", "`nothing`: the store has kept none of the pages that it was given, because it is full, fails "
          "or is not open; the log and `hicache ctl status` have the reason. Without new pages the last value stays.",
          "short",
          (("max by (instance, backend) (hicache_backend_keeps_nothing{%s})", "{{instance}} {{backend}}"),),
          kind="state-timeline", values=((0, "keeps pages", "green"), (1, "nothing", "red"))),
    Panel("Pages read, by outcome", "`corrupt`: failed verification and removed. `error`: could not be read, or not in "
          "time.", "ops",
          ((rate("backend_get_pages_total", "backend", "outcome"), "{{instance}} {{backend}} {{outcome}}"),)),
    Panel("Pages written, by outcome", "`rejected`: the store has no room. `present`: the page is already stored.",
          "ops",
          ((rate("backend_set_pages_total", "backend", "outcome"), "{{instance}} {{backend}} {{outcome}}"),)),
    Panel("In flight", "Bytes of pages that are being read or written. At the limit (storage.guard.in_flight) calls "
          "wait.", "bytes",
          (("sum by (instance, backend) (hicache_backend_in_flight_bytes{%s})", "{{instance}} {{backend}}"),)),
    Panel("Calls in flight", "Calls that have not returned, and calls that hang past their deadline (overdue).",
          "short",
          (("sum by (instance, backend) (hicache_backend_in_flight_calls{%s})", "{{instance}} {{backend}}"),
           ("sum by (instance, backend) (hicache_backend_overdue_calls{%s})", "{{instance}} {{backend}} overdue"))),
    Panel("Copies between levels", "Pages copied to a part of a composition in the background, by outcome.",
          "ops", ((rate("backend_copies_total", "backend", "outcome"), "{{instance}} {{backend}} {{outcome}}"),)),
    Panel("Waiting copies", "Pages waiting to be copied to a part. If the number keeps rising, copies will be dropped.",
          "short", (("sum by (instance, backend) (hicache_backend_waiting_copies{%s})", "{{instance}} {{backend}}"),)),
    Panel("Evicted by the store", "Pages that the store removed to make room, or because they were too old (expired).",
          "ops",
          ((rate("backend_evicted_pages_total", "backend"), "{{instance}} {{backend}}"),
           (rate("backend_expired_pages_total", "backend"), "{{instance}} {{backend}} expired"))),
    Panel("Retries", "Calls that were retried, at most a tenth of all.", "ops",
          ((rate("backend_retried_calls_total", "backend", "direction"), "{{instance}} {{backend}} {{direction}}"),)),
)

HEALTH = (
    Panel("Targets", "1 while Prometheus reads the metrics of an engine or a daemon.", "short",
          (("up{%s}", "{{instance}}"),), kind="state-timeline", width=24,
          values=((0, "down", "red"), (1, "up", "green"))),
    Panel("Breakers opened in an hour", "Times that a guard stopped the calls to its store. More than a few per "
          "hour: the store answers probes but fails under load.", "short",
          (("sum by (instance, backend, direction) (increase(hicache_backend_breaker_opens_total{%s}[1h]))",
            "{{instance}} {{backend}} {{direction}}"),)),
    Panel("Damaged pages in an hour", "Pages that failed verification, by reason. They cost hits but are never used. "
          "Many: check the disk, the memory, the network and the keys.", "short",
          (("sum by (instance, backend, reason) (increase(hicache_backend_corrupt_pages_total{%s}[1h]))",
            "{{instance}} {{backend}} {{reason}}"),)),
    Panel("Errors of stores", "Failed operations, by class of error.", "ops",
          ((rate("backend_errors_total", "backend", "reason"), "{{instance}} {{backend}} {{reason}}"),)),
    Panel("Failed calls", "Calls that count as failed for the breaker, by reason.", "ops",
          ((rate("backend_failed_calls_total", "backend", "direction", "reason"),
            "{{instance}} {{backend}} {{direction}} {{reason}}"),)),
    Panel("Refused calls", "Calls that the guard did not make. `open`: the breaker was open. `busy`: the limit of "
          "bytes in flight was reached until the deadline.", "ops",
          ((rate("backend_refused_calls_total", "backend", "direction", "reason"),
            "{{instance}} {{backend}} {{direction}} {{reason}}"),)),
    Panel("Probes", "Test pages that the guard writes and reads to detect whether a store works.", "ops",
          ((rate("backend_probes_total", "backend", "direction", "outcome"),
            "{{instance}} {{backend}} {{direction}} {{outcome}}"),)),
    Panel("Overrides", "1 while a direction of a store is forced on or off. The breaker has no effect then.", "short",
          (("max by (instance, backend, direction) (hicache_backend_override{%s})",
            "{{instance}} {{backend}} {{direction}}"),)),
    Panel("Workers", "Threads of the controller that run and do not hang.", "short",
          (("hicache_workers_alive{%s}", "{{instance}}"),)),
    Panel("Workers restarted or failing", "Threads that died and were replaced, and exceptions in threads, in an "
          "hour. Both are bugs in HiCache, a backend or a library; see the log.", "short",
          (("increase(hicache_worker_restarts_total{%s}[1h])", "{{instance}} restarts"),
           ("sum by (instance, worker) (increase(hicache_worker_errors_total{%s}[1h]))", "{{instance}} {{worker}}"))),
    Panel("Storage that did not open", "Failed attempts to open storage, in an hour.", "short",
          (("increase(hicache_storage_open_failures_total{%s}[1h])", "{{instance}}"),)),
    Panel("KV events", "Events recorded, snapshots for readers that missed events, and batches missed by slow "
          "subscribers.", "ops",
          ((rate("events_total"), "{{instance}} events"), (rate("event_snapshots_total"), "{{instance}} snapshots"),
           (rate("event_slow_batches_total"), "{{instance}} slow batches"))),
)

DAEMON = (
    Panel("Pages, by source", "Pages that engines requested, by source: the host pool, a store, another engine's read "
          "in flight, or a miss: looked up and not found, or read in vain.", "ops",
          ((rate("daemon_pages_total", "source"), "{{instance}} {{source}}"),), stacked=True),
    Panel("Missed pages, by reason", "Pages that were looked up or read and not found, by reason and detail.", "ops",
          ((rate("daemon_missed_pages_total", "reason", "detail") + " > 0", "{{instance}} {{reason}} {{detail}}"),),
          stacked=True),
    Panel("Transfers with engines", "Bytes of frames sent to engines and received from them.", "Bps",
          ((rate("daemon_transferred_bytes_total", "direction"), "{{instance}} {{direction}}"),)),
    Panel("Requests", "Answers by operation and class of status. 5xx: back-pressure.", "reqps",
          ((rate("daemon_requests_total", "operation", "status") + " > 0", "{{instance}} {{operation}} {{status}}"),)),
    Panel("Request time, p50", "Median time of answers, from the head of the request on.", "s",
          ((quantile(0.5, "daemon_request_seconds", "operation"), "{{instance}} {{operation}}"),)),
    Panel("Request time, p99", "99th percentile of answer times. `get` and `set` include the time of the store.", "s",
          ((quantile(0.99, "daemon_request_seconds", "operation"), "{{instance}} {{operation}}"),)),
    Panel("Memory of engines", "Memory of engines that the daemon has mapped.", "bytes",
          (("hicache_daemon_client_memory_bytes{%s}", "{{instance}}"),)),
    Panel("Pool", "Memory of the pool of hot pages: its capacity, the used part, and the part used by pins.", "bytes",
          tuple((f"hicache_daemon_pool_{what}_bytes{{%s}}", f"{{{{instance}}}} {what}")
                for what in ("capacity", "used", "pinned"))),
    Panel("Pool, pages in and out", "Pages that entered the pool, and pages evicted from it. If both are high and "
          "pool hits are rare, the pool is too small for the load.", "ops",
          ((rate("daemon_pool_admitted_pages_total"), "{{instance}} in"),
           (rate("daemon_pool_evicted_pages_total"), "{{instance}} out"))),
    Panel("Clients", "Engines whose memory is mapped, ended engines whose memory is still mapped, and connections by "
          "listener with their limit.", "short",
          (("hicache_daemon_clients{%s}", "{{instance}} engines"),
           ("hicache_daemon_gone_clients{%s}", "{{instance}} ended engines"),
           ("hicache_daemon_connections{%s}", "{{instance}} connections, {{listener}}"),
           ("hicache_daemon_connections_max{%s}", "{{instance}} limit of connections, each"))),
    Panel("In flight", "Requests without an answer, and operations on memory of engines. If they stay above 0 without "
          "load, a store hangs.", "short",
          (("hicache_daemon_in_flight_requests{%s}", "{{instance}} requests"),
           ("hicache_daemon_client_operations{%s}", "{{instance}} operations on memory"))),
    Panel("Refused, by limit", "Requests and connections that a limit rejected or ended, by the name of the limit.",
          "ops", ((rate("daemon_refused_requests_total", "reason"), "{{instance}} {{reason}}"),)),
    Panel("Saved writes", "Pages that were not written because another engine was writing them.", "ops",
          ((rate("daemon_shared_writes_total"), "{{instance}}"),)),
)

DASHBOARDS = {
    "tiers": ("HiCache: tiers", "Where KV comes from, how full L1 and L2 are, and transfers between the tiers.", TIERS),
    "storage": ("HiCache: storage", "Each store: hit rate, speed, fill, breakers and waiting copies.", STORAGE),
    "daemon": ("HiCache: daemon", "A storage daemon: its engines, pool, requests and refusals.", DAEMON),
    "health": ("HiCache: health", "Current and recent faults. docs/runbooks.md says what to do.", HEALTH),
}


def height_of(panel: Panel) -> int:
    """Return the height of a panel, in units of Grafana's grid."""
    return 1 if panel.kind == "row" else 8


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """Return one panel in Grafana's schema."""
    if panel.kind == "row":
        return {"id": number, "type": "row", "title": panel.title, "collapsed": False, "panels": [],
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": height_of(panel)}}
    is_states = panel.kind == "state-timeline"
    custom: dict[str, Any] = {"fillOpacity": 80, "lineWidth": 0} if is_states else {
        "lineWidth": 1, "fillOpacity": 40 if panel.stacked else 8, "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom, "mappings": []}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.values:
        options = {str(value): {"text": text, "color": color, "index": value} for value, text, color in panel.values}
        defaults |= {"mappings": [{"type": "value", "options": options}], "color": {"mode": "fixed"}}
    legend = {"showLegend": True, "displayMode": "list" if is_states else "table", "placement": "bottom",
              "calcs": [] if is_states else ["lastNotNull", "max"]}
    made: dict[str, Any] = {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.description,
        "datasource": DATASOURCE, "gridPos": {"x": x, "y": y, "w": panel.width, "h": height_of(panel)},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": legend, "tooltip": {"mode": "multi" if not is_states else "single", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": DATASOURCE, "editorMode": "code", "range": True,
             "expr": expression.replace("%s", OF), "legendFormat": legend_format}
            for place, (expression, legend_format) in enumerate(panel.queries)
        ],
    }
    if panel.kind == "table":
        defaults["custom"] = {}
        made["options"] = {"showHeader": True, "sortBy": [{"displayName": "tokens", "desc": True}]}
        columns = {"excludeByName": {"Time": True}, "renameByName": {"Value": "tokens"}}
        made["transformations"] = [{"id": "organize", "options": columns}]
        for target in made["targets"]:
            target |= {"range": False, "instant": True, "format": "table"}
    return made


def dashboard_json(name: str) -> dict[str, Any]:
    """Return one dashboard: its panels in rows from left to right, and the choice of data source and targets."""
    title, description, panels = DASHBOARDS[name]
    placed, x, y = [], 0, 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS:
            x, y = 0, y + height_of(panels[number - 2])
        placed.append(panel_json(panel, number, x, y))
        x += panel.width
    instances = 'label_values({__name__=~"hicache_workers_alive|hicache_daemon_connections"}, instance)'
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0},
        {"name": "instance", "label": "Target", "type": "query", "datasource": DATASOURCE, "refresh": 2, "sort": 1,
         "query": {"query": instances, "refId": "instances"}, "definition": instances, "multi": True,
         "includeAll": True, "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}},
    ]
    return {
        "uid": f"hicache-{name}", "title": title, "description": description, "tags": ["hicache"],
        "schemaVersion": SCHEMA_VERSION, "version": 1, "editable": True, "graphTooltip": 1, "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"}, "timezone": "browser", "templating": {"list": variables},
        "annotations": {"list": []}, "panels": placed,
        "links": [{"type": "dashboards", "tags": ["hicache"], "title": "HiCache", "asDropdown": False,
                   "includeVars": True, "keepTime": True}],
    }


def text_of(name: str) -> str:
    """Return the file of one dashboard."""
    return json.dumps(dashboard_json(name), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for dashboard in DASHBOARDS:
        HERE.joinpath("dashboards", f"{dashboard}.json").write_text(text_of(dashboard))
