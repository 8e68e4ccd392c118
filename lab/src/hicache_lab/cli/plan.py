"""`hicache plan`: the sizes of the tiers for a trace, computed without running the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click

from hicache.cli.arguments import FILE, SIZE, Quantity, is_dash, read_dash
from hicache.cli.main import Failure
from hicache.cli.model_shapes import PRESETS, ModelShape, model_shape
from hicache.cli.progress import StepProgress, followed
from hicache.config import HiCacheConfig
from hicache.geometry import PAGE_SIZE_MAX
from hicache.units import exact_size, parse_size

from ..plan import Plan, PlanInputs, make_plan
from ..plan.report import csv_report, html_report
from ..plan.result import PRICES
from ..traces.request import TraceRequest
from ..traces.routing import Routing
from ..traces.trace import REQUESTS_MAX, line_count, read_trace
from .arguments import Number
from .plan_view import print_plan
from .reports import REPORT_NAMES, check_reports, output_console, print_written, report_options, write_reports
from .speed_options import NAMES as SPEED_NAMES
from .speed_options import RATE_MAX, speed_options, speeds_of

MODEL = "llama-3.1-8b"
NODES_MAX = 64
# No model has a larger KV per token; the largest tier has more pages than this.
TOKEN_BYTES_MAX = 1 << 30
PETABYTE = 10**15


def _storage_size(text: Any) -> Any:
    return {"unlimited": None, "none": 0}[text] if text in ("unlimited", "none") else parse_size(text)


def _prices(text: Any) -> Any:
    """Return prices by tier of text such as `host=1,storage=0.05`; for other tiers, those of `PRICES`."""
    if not isinstance(text, str):
        return text
    parts = [part.partition("=") for part in text.split(",")]
    if not all(tier in PRICES and price for tier, _, price in parts):
        raise ValueError(f"{text[:40]!r} is not a list of prices; write it like device=30,host=1,storage=0.03")
    return {**PRICES, **{tier: Number(1e-6, 1e6).convert(price, None, None) for tier, _, price in parts}}


@click.command()
@click.argument("trace", type=FILE)
@click.option("--requests", type=click.IntRange(0, REQUESTS_MAX), default=0, show_default=True, metavar="N",
              help="Only the first N requests, 0: all.")
@click.option("--model", metavar="NAME|PATH",
              help=f"{', '.join(PRESETS)}, or the path of a config.json.  [default: {MODEL}]")
@click.option("--token-bytes", type=click.IntRange(1, TOKEN_BYTES_MAX), metavar="N",
              help="KV bytes of one token in all layers, in place of --model.")
@click.option("--page-size", type=click.IntRange(1, PAGE_SIZE_MAX), default=HiCacheConfig().page_size,
              show_default=True, metavar="TOKENS", help="Tokens of a page, as page_size.")
@click.option("--device-size", "device_bytes", type=SIZE, default="40GiB", show_default=True, metavar="SIZE",
              help="L1, on each node.")
@click.option("--host-size", "host_bytes", type=SIZE, default="200GiB", show_default=True, metavar="SIZE",
              help="L2, on each node.")
@click.option("--storage-size", "storage_bytes", type=Quantity("size", _storage_size), default="2TiB",
              show_default=True, metavar="SIZE|unlimited|none", help="L3, which all nodes share.")
@click.option("--prefill-rate", type=Number(1, RATE_MAX), metavar="TOKENS",
              help="Prompt tokens that a node computes per second.  [default: times are not computed]")
@speed_options
@click.option("--endurance", type=Number(1e-6, 1e6), metavar="PBW",
              help="Petabytes that can be written to L3 before its disks are worn.")
@click.option("--nodes", type=click.IntRange(1, NODES_MAX), default=1, show_default=True, metavar="N",
              help="Nodes with their own L1 and L2; compares routings if there are several.")
@click.option("--routing", type=click.Choice([each.value for each in Routing]), default=Routing.PREFIX.value,
              show_default=True, help="The node of a request.")
@click.option("--prices", type=Quantity("prices", _prices), metavar="PRICES", show_default=True,
              default=",".join(f"{tier}={price:g}" for tier, price in PRICES.items()),
              help="Relative price of a GiB of each tier. The default is an assumption.")
@report_options("plan", csv="the found tokens over sizes")
def plan(
    *, trace: Path, requests: int, model: str | None, token_bytes: int | None, prefill_rate: float | None,
    endurance: float | None, routing: str, **options: Any,
) -> None:
    """Compute how large the tiers should be for a request trace, and what they are worth.

    TRACE is in a format of `hicache trace show`, or - for standard input. The trace is read once, and with several
    nodes once for each routing; no model and no cache run, so a million requests take a few minutes. The plan has
    found tokens over the size of each tier, times to first token, the break-even of storage, the bytes that each write
    policy writes, and a recommendation. docs/planning.md explains each figure.

    Ctrl-C ends the command without a plan.
    """
    files = [options.pop(name) for name in REPORT_NAMES]
    check_reports(*files)
    speeds = speeds_of(prefill_rate, *(options.pop(name) for name in SPEED_NAMES))
    inputs = PlanInputs(
        trace="standard input" if is_dash(trace) else trace.name,
        model=_model(model, token_bytes),
        routing=Routing(routing),
        speeds=speeds,
        endurance_bytes=None if endurance is None else round(endurance * PETABYTE),
        **options,
    )
    _require_pages(inputs)
    with read_dash(trace) as path, ExitStack() as passes:
        assert path is not None
        reader = _Reader(path, requests or None, passes)
        result = make_plan(reader.requests, inputs)
    console = output_console(*files)
    written, problems = write_reports(result, zip(files, (Plan.to_json, csv_report, html_report), strict=True))
    print_plan(console, result)
    print_written(console, written)
    if problems:
        raise Failure("\n  ".join(problems))


class _Reader:
    """Reads a trace several times and shows the progress of each pass. `passes` closes what an error leaves open."""

    def __init__(self, path: Path, requests_max: int | None, passes: ExitStack) -> None:
        self._path = path
        self._requests_max = requests_max
        lines = line_count(path)
        self._total = lines if lines is None or requests_max is None else min(lines, requests_max)
        self._passes = passes
        self._count = 0

    def requests(self) -> Iterator[TraceRequest]:
        """Return the requests from the first one on."""
        self._count += 1
        read = read_trace(self._path, self._requests_max)
        title = "plan" if self._count == 1 else f"plan, pass {self._count}"
        return self._passes.enter_context(closing(followed(read, title, self._progress_of)))

    def _progress_of(self, request: TraceRequest) -> StepProgress:
        return StepProgress(request.index + 1, self._total, "read", "requests")


def _model(named: str | None, token_bytes: int | None) -> ModelShape:
    """Return the model of the options. Raises UsageError for both, and ConfigError."""
    if token_bytes is None:
        return model_shape(named or MODEL)
    if named is not None:
        raise click.UsageError("--model and --token-bytes exclude each other; remove one")
    return ModelShape("unnamed model", token_bytes)


def _require_pages(inputs: PlanInputs) -> None:
    """Raise UsageError for a tier that is smaller than one page, but not 0."""
    page_bytes = inputs.page_size * inputs.model.token_bytes
    for tier in ("device", "host", "storage"):
        size = getattr(inputs, f"{tier}_bytes")
        if size is not None and 0 < size < page_bytes:
            raise click.UsageError(
                f"--{tier}-size {exact_size(size)} is smaller than one page ({exact_size(page_bytes)}); use a larger "
                "size, or 0 for a system without this tier"
            )
