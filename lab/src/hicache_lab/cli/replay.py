"""`hicache replay`: a request trace through the real tree, controller and storage."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from hicache.cli.arguments import DURATION, FILE, read_dash
from hicache.cli.config import parse_settings
from hicache.cli.interrupts import noted_signals
from hicache.cli.log_options import LOG_OPTIONS, log_options, start_log
from hicache.cli.main import FOUND_EXIT_CODE, Failure, needs_of, output_failures
from hicache.cli.model_shapes import PRESETS
from hicache.cli.progress import followed
from hicache.config import HiCacheConfig, entry_of_variable, load_config
from hicache.config.publishing import LoggingConfig
from hicache.config.ready import ready_files
from hicache.config.section import TOKENS_MAX

from ..replay.hints import HintErrors
from ..replay.job import SYNTHETIC_REQUESTS, ReplayJob
from ..replay.report import html_report
from ..replay.result import ReplayResult, samples_csv
from ..speeds import Speeds
from ..traces.routing import Routing
from ..traces.trace import REQUESTS_MAX, line_count
from .arguments import DIRECTORY, SEED_MAX, Number
from .replay_diff import diff
from .replay_view import print_summary, progress_of
from .reports import REPORT_NAMES, check_reports, output_console, print_written, report_options, write_reports
from .speed_options import NAMES as SPEED_NAMES
from .speed_options import option_group, speed_options, speeds_of

REPLAY_CONFIG = ready_files()["replay"]
# The default speed of computing: fast enough for 2,000 real requests in two minutes, slow enough that copies and a
# local disk keep up.
PREFILL_TOKENS_PER_S = 250_000
# Larger numbers are mistakes; sums and products of smaller ones stay exact.
SPEED_UP_MIN, SPEED_UP_MAX = 1e-6, 1e9
PREFILL_RATE_MAX = 1e12
QUEUE_MAX = 1 << 20
# With one of these settings the user chooses the storage.
_STORE_ENTRIES = frozenset({"storage", "storage.type", "storage.options.path"})

_DESCRIPTIONS = {
    "tiny": "no real model: so little KV that a laptop replays real traces",
    "qwen2.5-7b": "Qwen2.5-7B: 28 layers, 4 KV heads of 128",
    "llama-3.1-8b": "Llama-3.1-8B: 32 layers, 8 KV heads of 128",
    "llama-3.1-70b-tp8": "Llama-3.1-70B on 8 ranks: 80 layers, 1 of 8 KV heads of 128",
    "llama-3.1-70b": "Llama-3.1-70B: 80 layers, 8 KV heads of 128",
    "qwen3-8b": "Qwen3-8B: 36 layers, 8 KV heads of 128",
    "qwen3-32b": "Qwen3-32B: 64 layers, 8 KV heads of 128",
    "gpt-oss-20b": "gpt-oss-20b: 24 layers, 8 KV heads of 64",
    "gpt-oss-120b": "gpt-oss-120b: 36 layers, 8 KV heads of 64",
    "deepseek-v3": "DeepSeek-V3 (MLA): 61 layers, a latent of 512 and 64 rotary dims",
}
_MODELS = "\n\n\b\nModels:\n" + "\n".join(f"  {name:18} {_DESCRIPTIONS[name]}" for name in PRESETS)


def _hint_errors(_context: click.Context, _option: click.Parameter, value: str | None) -> HintErrors | None:
    try:
        return None if value is None else HintErrors.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_ENGINE_OPTIONS = (
    click.option("--speed-up", type=Number(SPEED_UP_MIN, SPEED_UP_MAX), metavar="X",
                 help="Requests arrive X times as fast as recorded.  [default: as fast as they are served]"),
    click.option("--prefill-rate", type=Number(0, PREFILL_RATE_MAX), default=PREFILL_TOKENS_PER_S, show_default=True,
                 metavar="TOKENS", help="Prompt tokens computed per second; 0: computing is instant."),
    click.option("--decode-step", "decode_step_s", type=DURATION, default=0.0, metavar="DURATION",
                 help="Time of a forward of one token for each running request.  [default: no time]"),
    click.option("--running-max", type=click.IntRange(1, QUEUE_MAX), default=32, show_default=True,
                 help="Requests that run at once."),
    click.option("--waiting-max", type=click.IntRange(1, QUEUE_MAX), default=8, show_default=True,
                 help="Requests in the queue, whose pages are prefetched."),
    click.option("--hints", metavar="ERRORS", callback=_hint_errors,
                 help="Sessions say when they return, with these errors: exact, error=3, noise or missing=0.5."),
)


class _ReplayCommand(click.Command):
    """The command `replay`, or its subcommand `diff`. A trace of that name is written `./diff`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of the command that the arguments name."""
        if args[:1] == ["diff"]:
            return diff.make_context(f"{info_name} diff", args[1:], parent=parent, **extra)
        return super().make_context(info_name, args, parent=parent, **extra)


@click.command(cls=_ReplayCommand, epilog=_MODELS)
@click.argument("trace", required=False, type=FILE)
@click.option("-c", "--config", "config_file", type=FILE, help="Configuration.  [default: configs/replay.yaml]")
@click.option("--set", "settings", multiple=True, metavar="ENTRY=VALUE", help="Such as storage.type=memory.")
@click.option("--requests", type=click.IntRange(0, REQUESTS_MAX), metavar="N",
              help=f"Only the first N requests, 0: all.  [default: 0; {SYNTHETIC_REQUESTS} without TRACE]")
@click.option("--seed", type=click.IntRange(0, SEED_MAX), default=0, show_default=True, help="Synthetic trace.")
@click.option("--model", "preset", type=click.Choice(list(PRESETS)), default="tiny", show_default=True,
              help="The model for the KV geometry; see below.")
@click.option("--device-tokens", type=click.IntRange(1, TOKENS_MAX), metavar="N", help="Size of L1, as device.tokens.")
@click.option("--host-tokens", type=click.IntRange(1, TOKENS_MAX), metavar="N", help="Size of L2, as host.tokens.")
@click.option("--store", type=DIRECTORY, metavar="DIR",
              help="Directory for stored pages.  [default: a temporary directory]")
@option_group(*_ENGINE_OPTIONS)
@click.option("--virtual", is_flag=True,
              help="In virtual time: nothing moves, each operation takes as long as the speeds below say.")
@speed_options
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True,
              help="Engines on one store, each with its own tiers and a part of the requests.")
@click.option("--routing", type=click.Choice([one.value for one in Routing]), default=Routing.ROTATE.value,
              show_default=True, callback=lambda ctx, param, value: Routing(value),
              help="With --processes: how requests are divided.")
@click.option("--whole-trace-each", is_flag=True, help="With --processes: each engine replays all requests.")
@click.option("--device", default="cpu", show_default=True, help="Device of L1: cpu, cuda, cuda:1, ...")
@report_options("report", csv="the samples over time")
@log_options
def replay(
    *, prefill_rate: float, settings: tuple[str, ...], device_tokens: int | None, host_tokens: int | None,
    config_file: Path | None, store: Path | None, **options: Any,
) -> None:
    """Replay a request trace through the cache, and check every byte that comes back.

    TRACE is in the public Mooncake format (JSON lines with timestamp, input_length, output_length and hash_ids of
    512-token blocks), or - for standard input; by default a synthetic trace is generated. No model runs: pages get
    bytes derived from their keys, which are compared whenever they come back from a tier. With --virtual no bytes move
    and no time is waited for: the same scheduler, tree and controller run on one thread, and equal arguments make
    equal reports.

    `hicache replay diff A.json B.json` compares two reports.

    Ctrl-C ends the replay and prints the report so far. Exit code 1 if a byte was wrong, 2 if no request ran.
    """
    start_log(LoggingConfig(level="warning"), **{name: options.pop(name) for name in LOG_OPTIONS})
    files = [options.pop(name) for name in REPORT_NAMES]
    check_reports(*files)
    speeds = speeds_of(prefill_rate or None, *(options.pop(name) for name in SPEED_NAMES))
    _require_clock(options, store, speeds)
    console = output_console(*files)
    overrides = parse_settings(settings)
    for name, value in (("device.tokens", device_tokens), ("host.tokens", host_tokens)):
        if value is not None:
            overrides[name] = str(value)
    with noted_signals() as stop, _temporary_directory(console) as temporary, read_dash(options["trace"]) as trace:
        config = replay_config(overrides, os.environ, temporary, config_file, store)
        options |= {"trace": trace, "requests": options["requests"] or line_count(trace)}
        job = ReplayJob(config=config, speeds=speeds, **options)
        console.print(f"replaying {job.trace.name if job.trace else 'a synthetic trace'} ...", highlight=False)
        with needs_of("replay"):  # torch, which takes seconds: the help and the checks above do without it
            from ..replay.ideal import ideal_of  # noqa: PLC0415
            from ..replay.processes import start_engines  # noqa: PLC0415
        with closing(start_engines(job, lambda: bool(stop))) as engines:
            for _ in followed(engines.run(), "replay", lambda sample: progress_of(sample, job)):
                pass
            result = engines.result()
        result = replace(result, ideal=ideal_of(job, result))
        _report(console, result, *files)
    if not job.virtual:
        console.print(f"0 wrong bytes of {result.checked_bytes:,} compared", style="bold green", highlight=False)
    if stop:
        sys.exit(128 + stop[0])


def replay_config(
    overrides: Mapping[str, str],
    environ: Mapping[str, str],
    temporary: Path,
    config_file: Path | None = None,
    store: Path | None = None,
) -> HiCacheConfig:
    """Return the effective configuration, with storage in `temporary` unless the user sets it. Raises ConfigError."""
    overrides = dict(overrides)
    entries = {*overrides, *(".".join(entry_of_variable(variable) or ()) for variable in environ)}
    if store is not None:
        overrides |= {"storage.type": "file", "storage.options.path": os.path.realpath(store)}
    elif config_file is None and not entries & _STORE_ENTRIES:
        overrides["storage.options.path"] = str(temporary / "pages")
    return load_config(config_file or REPLAY_CONFIG, environ=environ, overrides=overrides)


def _report(
    console: Console, result: ReplayResult, json_file: Path | None, csv_file: Path | None, html_file: Path | None
) -> None:
    """Write the reports and print the summary, even if some of them fail. Then raise the error for the exit code;
    WrongBytes comes first."""
    files = (json_file, csv_file, html_file)
    written, problems = write_reports(result, zip(files, (ReplayResult.to_json, samples_csv, html_report), strict=True))
    try:
        with output_failures():
            print_summary(console, result)
            print_written(console, written)
    finally:
        if result.wrong_bytes:
            wrong = f"WRONG BYTES: {result.wrong_bytes:,} of {result.checked_bytes:,} compared"
            raise WrongBytes("\n  ".join([*problems, wrong]))
    if problems:
        raise Failure("\n  ".join(problems))
    if result.complete and result.requests.ended == 0:
        setup = result.setup
        raise Failure(
            f"replay: no request ran: all {result.requests.too_long:,} are longer than L1 "
            f"({setup.device_pages * setup.page_size:,} tokens); use more --device-tokens"
        )


def _require_clock(options: Mapping[str, Any], store: Path | None, speeds: Speeds) -> None:
    """Raise a usage error for options of the other kind of time."""
    if options["virtual"]:
        if store is not None or options["device"] != "cpu":
            raise click.UsageError("--virtual moves no bytes; remove --store and --device")
    elif speeds != Speeds(compute=speeds.compute):
        raise click.UsageError("--host-bandwidth, --storage and --like need --virtual: copies and stores have the "
                               "speed of this machine otherwise")


class WrongBytes(Failure):
    """A replay that found wrong bytes."""

    exit_code = FOUND_EXIT_CODE


@contextmanager
def _temporary_directory(console: Console) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hicache-replay-", ignore_cleanup_errors=True) as name:
        yield Path(name)
        if any(Path(name).iterdir()):
            console.print("removing the temporary store ...", style="dim")  # a hundred thousand files take a while
