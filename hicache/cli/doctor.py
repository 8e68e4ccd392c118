"""`hicache doctor`: checks a machine and the stores of a configuration before the first request."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from logging.handlers import BufferingHandler
from pathlib import Path

import click

from .. import __version__
from ..backends.opening import StorageOpener
from ..config import FILE_VARIABLE, load_config
from ..geometry import DTYPE_BYTES
from .arguments import PATH, read_dash
from .config import parse_settings
from .doctor_machine import CHECKS, Row, Subject, Verdict, failures
from .doctor_probe import StoreCheck
from .doctor_sglang import SGLang, parse_flags
from .doctor_stores import CALL_S, certificates
from .interrupts import interrupted_by_signals, no_more_interrupts
from .main import FOUND_EXIT_CODE, printable
from .model_shapes import PRESETS, model_shape
from .stores import JSON, parts_of_storage, print_json
from .tables import table

# The check of a store that works takes a second, of one that works slowly some more.
_STORE_S = 4 * CALL_S
# The call in progress when the check is stopped, and the removal of the pages.
_END_S = 4 * CALL_S
_FINDING_MIN, _LOG_LINES_MAX = 30, 5


@click.command(epilog=f"Models by name: {', '.join(PRESETS)}.")
@click.option("-c", "--config", "path", type=PATH, required=True, envvar=FILE_VARIABLE, show_envvar=True,
              help="Configuration of an engine or of a daemon; - for standard input.")
@click.option("--set", "settings", multiple=True, metavar="ENTRY=VALUE", help="Such as host.size=4GiB.")
@click.option("--model", metavar="NAME|PATH", help="Model to estimate whether hits pay: a name, or its config.json.")
@click.option("--kv-dtype", type=click.Choice(sorted(DTYPE_BYTES)), help="Type of its KV.  [default: of the model]")
@click.option("--prefill", type=click.IntRange(1, 10**9), metavar="TOKENS/S", help="Speed of computing a prompt.")
@click.option("--sglang", "flags", metavar="FLAGS", help="Flags of an SGLang with HiCache as its tree, in quotes.")
@JSON
def doctor(  # noqa: PLR0917 - the options
    path: Path, settings: tuple[str, ...], model: str | None, kv_dtype: str | None, prefill: int | None,
    flags: str | None, as_json: bool,
) -> None:
    """Check this machine and the stores of a configuration before the first request.

    Compares all sizes with memory, /dev/shm, devices and volumes. Opens each store as an engine does, which creates
    a missing directory: run it as the engine's user. Writes pages of some MiB to each store in a namespace of its own,
    reads, compares and removes them. With --model and --prefill, says whether hits of each store pay. With --sglang,
    takes sizes and ranks from its flags, and names those that HiCache refuses or ignores. Exit code 1 if a check fails.
    """
    sglang = None if flags is None else SGLang(parse_flags(flags))
    if model is None and sglang is None and (prefill is not None or kv_dtype is not None):
        raise click.UsageError("--prefill and --kv-dtype need --model")
    with read_dash(path) as file:
        config = load_config(file, environ=os.environ, overrides=parse_settings(settings))
    parts = [] if config.storage is None else parts_of_storage(config.storage)
    if sglang is not None:
        subject = Subject(sglang.applied(config), parts, sglang.shape(model, kv_dtype), sglang.local_ranks)
    else:
        subject = Subject(config, parts, None if model is None else model_shape(model, kv_dtype))
    with _warnings() as records, interrupted_by_signals():
        rows = [] if sglang is None else [*sglang.rows(config, subject.model)]
        for check in (*CHECKS, certificates):
            with failures(rows, check.__name__.replace("_", " ")):
                rows += check(subject)
        if config.storage is None:
            rows.append(Row("storage", Verdict.INFO, "not configured: pages are not stored beyond host memory"))
        hung = _stores(subject, prefill, rows)
    failed = any(row.verdict is Verdict.FAIL for row in rows)
    rows += [] if failed else [Row("log", Verdict.WARN, one.getMessage()) for one in records[:_LOG_LINES_MAX]]
    if as_json:
        print_json({"version": __version__, "failed": failed, "rows": [asdict(row) for row in rows]})
    else:
        click.echo(printable("\n".join(_lines(rows))))
    if hung:  # a thread that hangs in a library would keep the process
        sys.stdout.flush()
        os._exit(FOUND_EXIT_CODE)
    if failed:
        raise click.exceptions.Exit(FOUND_EXIT_CODE)


def _stores(subject: Subject, prefill: int | None, rows: list[Row]) -> bool:
    """Add the rows of each store. Return True if the check of one hangs."""
    checks: list[StoreCheck] = []
    with failures(rows, "storage"):
        if subject.parts:
            opener = StorageOpener(subject.config)
            checks = [StoreCheck(part, opener, subject, prefill) for part in subject.parts]
    hung = False
    for check in checks:
        threading.Thread(target=check.run, name=f"doctor-{check.part.name}", daemon=True).start()
        try:
            check.ended.wait(_STORE_S)
        except KeyboardInterrupt:
            no_more_interrupts()
            raise
        finally:
            check.stop.set()
            has_ended = check.ended.wait(_END_S)
        rows += check.rows
        if not has_ended:
            hung = True
            late = f"did not answer for {_STORE_S + _END_S:.0f} s; its check was abandoned"
            rows.append(Row(check.part.name, Verdict.FAIL, late, "see whether the server works"))
    return hung


@contextmanager
def _warnings() -> Iterator[list[logging.LogRecord]]:
    """Collect the warnings in the log instead of writing them between the rows."""
    logger, handler = logging.getLogger("hicache"), BufferingHandler(sys.maxsize)
    handler.setLevel(logging.WARNING)
    was, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logger.removeHandler(handler)
        logger.propagate = was


def _lines(rows: list[Row]) -> Iterator[str]:
    """Yield a table in which findings and advice are wrapped to the terminal's width, and a summary."""
    names = max(len(row.check) for row in rows)
    room = max(_FINDING_MIN, shutil.get_terminal_size().columns - names - len("verdict") - 4)
    cells: list[tuple[str, str, str]] = []
    for row in rows:
        texts = textwrap.wrap(" ".join(row.finding.split()), room) or [""]
        texts += textwrap.wrap(row.advice, room, initial_indent="-> ", subsequent_indent="   ")
        firsts = [(row.verdict.value, row.check), *[("", "")] * (len(texts) - 1)]
        cells += [(verdict, name, text) for (verdict, name), text in zip(firsts, texts, strict=True)]
    yield from table(["verdict", "check", "finding, and advice"], cells)
    counts = [sum(row.verdict is verdict for row in rows) for verdict in (Verdict.FAIL, Verdict.WARN)]
    yield f"\n{counts[0]} failed, {counts[1]} with a warning, {len(rows)} rows"
