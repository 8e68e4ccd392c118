"""`hicache inspect`, `verify` and `purge`: tools for file stores, for people and for cron.

Exit codes: 0 for sound, 1 for damage found or an answer of "no", 2 for whatever stopped the command.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ..backends.file.pages import NOT_REGULAR
from ..backends.file.tools import PageKeys, PageReport, ScrubProgress, inspect_page, purge_store, verify_store
from ..config import read_key_file
from ..errors import InvalidInput
from ..frame import Damage
from ..units import counted, format_size, parse_duration, parse_size

DAMAGE_EXIT_CODE = 1
# Without a terminal, a line this often shows a log's reader that a scrub of hours is alive.
PLAIN_INTERVAL_S = 10.0

# Found with a key, and nothing against the pages themselves: other engines may use them.
_MISFITS = {
    "mac_key": "sealed with another MAC key than those given",
    "encryption_key": "encrypted with another key than those given",
    "tag_kind": "sealed by other means than the given keys are for, so those prove nothing",
}


class _Quantity(click.ParamType):  # type: ignore[type-arg]  # older clicks cannot be subscripted
    """A size or a duration as text with its unit."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


_SIZE = _Quantity("size", parse_size)
_DURATION = _Quantity("duration", parse_duration)
_STORE = click.argument("store", metavar="DIR", type=click.Path(path_type=Path))
_MAC_KEYS = click.option(
    "--mac-key-file", "mac_key_files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Key the pages were sealed with; twice while keys are being changed. Without it, keyed pages are checked as "
    "far as their headers go.",
)  # fmt: skip
_ENCRYPTION_KEYS = click.option(
    "--encryption-key-file", "encryption_key_files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="The same for encrypted pages.",
)  # fmt: skip


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@_MAC_KEYS
@_ENCRYPTION_KEYS
def inspect(path: Path, mac_key_files: tuple[Path, ...], encryption_key_files: tuple[Path, ...]) -> None:
    """Show the header of the stored page PATH, and whether the page is sound.

    Exit code 1 if it is damaged, is no page, or does not fit the keys that were given.
    """
    if path.is_dir() and not path.is_symlink():
        raise InvalidInput(f"{path} is a directory; name a page file in it")
    report = inspect_page(path, keys=_keys(mac_key_files, encryption_key_files))
    for name, value in _report_lines(report):
        click.echo(f"{name + ':':<12} {value}")
    if report.damage is not None or report.misfit is not None:
        raise click.exceptions.Exit(DAMAGE_EXIT_CODE)


@click.command()
@_STORE
@click.option("--rate", type=_SIZE, help="Bytes to read per second, such as 200MiB, to leave the disk to others.")
@click.option("--remove", is_flag=True, help="Remove what is damaged. A removed page is a miss, nothing worse.")
@_MAC_KEYS
@_ENCRYPTION_KEYS
def verify(
    store: Path,
    rate: int | None,
    remove: bool,
    mac_key_files: tuple[Path, ...],
    encryption_key_files: tuple[Path, ...],
) -> None:
    """Read every page of the file store DIR and report damage. Engines may use the store meanwhile.

    Changes nothing without --remove. Exit code 1 if damage was found, also if it was removed, or if pages do not fit
    the keys that were given; those are never removed.
    """
    steps = verify_store(store, keys=_keys(mac_key_files, encryption_key_files), rate_bytes_per_s=rate, remove=remove)
    last = _with_bar(steps) if sys.stderr.isatty() else _with_lines(steps)
    click.echo(_verdict(last))
    if last.damaged or last.misfits:
        raise click.exceptions.Exit(DAMAGE_EXIT_CODE)


@click.command()
@_STORE
@click.option("--namespace", metavar="HEX", help="Only namespaces whose digest starts so; `inspect` shows a page's.")
@click.option("--older-than", type=_DURATION, help="Only pages unused for this long, such as 7d.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge(store: Path, namespace: str | None, older_than: float | None, dry_run: bool, yes: bool) -> None:
    """Remove pages from the file store DIR: all of them, or those of a namespace or an age.

    Engines may use the store meanwhile; what is removed is a miss for them.
    """
    namespace = None if namespace is None else namespace.lower()
    if not (dry_run or yes or sys.stdin.isatty()):
        raise click.UsageError("there is no terminal to ask on; pass --yes to remove pages without being asked")
    if dry_run or not yes:
        found = purge_store(store, namespace=namespace, older_than_s=older_than, dry_run=True)
        click.echo(f"to remove: {_amount(found.pages, found.bytes)}")
        if dry_run or not found.pages:
            return
        if not _agreed("Remove them? [y/N]: "):
            click.echo("nothing removed")
            raise click.exceptions.Exit(DAMAGE_EXIT_CODE)
    removed = purge_store(store, namespace=namespace, older_than_s=older_than, dry_run=False)
    click.echo(f"removed {_amount(removed.pages, removed.bytes)}")


def _agreed(question: str) -> bool:
    """Ask on the terminal; what is not a clear yes is a no."""
    click.echo(question, nl=False, err=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _keys(mac_files: tuple[Path, ...], encryption_files: tuple[Path, ...]) -> PageKeys:
    return PageKeys(
        tuple(read_key_file(path, "MAC key file") for path in mac_files),
        tuple(read_key_file(path, "encryption key file") for path in encryption_files),
    )


def _amount(pages: int, size_bytes: int) -> str:
    return f"{counted(pages, 'page')}, {format_size(size_bytes)}"


def _state(report: PageReport) -> str:
    if report.damage in (Damage.NOT_A_FRAME, NOT_REGULAR):
        return f"not a HiCache page: {report.damage}"
    if report.damage is not None:
        return f"damaged: {report.damage}"
    if report.misfit is not None:
        return f"not proved: {report.note}"
    return "sound" if report.verified else "sound as far as checked"


def _report_lines(report: PageReport) -> Iterator[tuple[str, str]]:
    yield "page", _state(report)
    if report.note is not None and report.misfit is None:
        yield "note", report.note
    yield "file", f"{format_size(report.size_bytes)} ({report.size_bytes} bytes)"
    if report.version is None or report.payload_bytes is None:
        return
    yield "version", str(report.version)
    yield "tag", str(report.tag_kind)
    stored = "" if report.form == "plain" else f", stored as {report.form} in {report.stored_bytes}"
    yield "payload", f"{report.payload_bytes} bytes{stored}"
    yield "key", str(report.page_key)
    yield "parent", report.parent_key or "none: the first page of a chain"
    yield "namespace", str(report.namespace)
    yield "model", f"{report.label or 'not named'}, weights epoch {report.weights_epoch}"


def _verdict(last: ScrubProgress) -> str:
    lines = [f"checked {_amount(last.pages, last.bytes)}: {sum(last.damaged.values()) or 'none'} damaged"]
    lines += [f"  {reason}: {count}" for reason, count in sorted(last.damaged.items())]
    for reason, count in sorted(last.misfits.items()):
        lines.append(f"{counted(count, 'page')} {'is' if count == 1 else 'are'} {_MISFITS[reason]}")
    if last.removed:
        lines.append(f"removed {last.removed}")
    if last.unverifiable:
        how = "no tag, or a key is needed (--mac-key-file, --encryption-key-file)"
        lines.append(f"{last.unverifiable} could not be proved: {how}")
    return "\n".join(lines)


def _with_lines(steps: Iterator[ScrubProgress]) -> ScrubProgress:
    """Run through `steps` with a line on stderr now and then; the last step."""
    last = next(steps)
    told_s = time.monotonic()
    for last in steps:
        if time.monotonic() - told_s >= PLAIN_INTERVAL_S:
            told_s = time.monotonic()
            share = f"{last.pages} of {last.pages_total} pages"
            click.echo(f"checked {share}, {format_size(last.bytes)}, {sum(last.damaged.values())} damaged", err=True)
    return last


def _with_bar(steps: Iterator[ScrubProgress]) -> ScrubProgress:
    """Run through `steps` with a progress bar on the terminal; the last step."""
    from rich.console import Console  # noqa: PLC0415  not worth its import time where there is no terminal
    from rich.progress import Progress  # noqa: PLC0415

    columns = Progress.get_default_columns()
    with Progress(*columns, "{task.fields[found]}", console=Console(stderr=True)) as progress:
        last = next(steps)
        task = progress.add_task("checking", total=last.pages_total, found="")
        for last in steps:
            found = f"{format_size(last.bytes)}, {sum(last.damaged.values())} damaged"
            progress.update(task, completed=last.pages, total=last.pages_total, found=found)
    return last
