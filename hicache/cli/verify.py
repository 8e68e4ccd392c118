"""`hicache inspect` and `verify`: check stored pages, interactively or from cron."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ..backends.file.pages import NOT_REGULAR, page_name
from ..backends.tools.verify import (
    SPARED,
    Finding,
    PageReport,
    ScrubProgress,
    encoding_name,
    inspect_page,
    tag_name,
    verify_stored,
)
from ..errors import InvalidInput
from ..frame import NO_PARENT, Damage, FrameHeader
from ..units import counted, format_size
from .arguments import PATH, SIZE
from .main import FOUND_EXIT_CODE
from .progress import StepProgress, Work
from .stores import JSON, NAMED_STORE, PART, StorePart, amount, key_options, page_keys, parts_of, print_json

# The most damaged pages that are printed for each part: as many as fit on a screen. --json prints all.
_NAMED_MAX = 20
_COUNTS = ("pages", "bytes", "damaged", "unsupported", "unverifiable", "removed", "spared")
# Results of a check with a key that do not mean damage: other engines may use these pages.
_UNSUPPORTED = {
    "mac_key": "sealed with another MAC key than those passed",
    "encryption_key": "encrypted with another key than those passed",
    "tag_kind": "sealed with another kind of tag, which these keys cannot verify",
}


@click.command()
@click.argument("path", type=PATH)
@JSON
@key_options
def inspect(path: Path, as_json: bool, **key_files: tuple[Path, ...]) -> None:
    """Show the header of the stored page PATH, and whether the page is sound.

    Exit code 1 if it is damaged, is not a page, or does not match the keys.
    """
    if path.is_dir() and not path.is_symlink():
        raise InvalidInput(f"{path} is a directory; pass a page file in it")
    report = inspect_page(path, keys=page_keys(**key_files))
    if as_json:
        print_json(_report_json(report))
    else:
        for name, value in _report_lines(report):
            click.echo(f"{name + ':':<12} {value}")
    if report.damage is not None or report.unsupported is not None:
        raise click.exceptions.Exit(FOUND_EXIT_CODE)


@click.command()
@NAMED_STORE
@PART
@click.option("--rate", type=SIZE, help="Limit of bytes read per second, such as 200MiB.")
@click.option("--remove", is_flag=True, help="At the end, remove damaged pages, if they are not most. They are misses.")
@JSON
@key_options
def verify(
    store: Path, part: str | None, rate: int | None, remove: bool, as_json: bool, **key_files: tuple[Path, ...]
) -> None:
    """Read every page of STORE and report damage. Engines may use the store at the same time.

    STORE is the directory of a file store, or a configuration (*.yaml) whose section `storage` names a store; the
    default is the value of HICACHE_CONFIG_FILE. Changes nothing without --remove. Exit code 1 if damage was found, even
    if it was removed, or if pages do not match the keys; such pages are never removed. Ctrl-C prints the results so
    far.
    """
    keys = page_keys(**key_files)
    parts = parts_of(store, part)
    work, bad, documents = Work(), False, []
    for one in parts:
        with one.opened() as stored:
            steps = verify_stored(stored, keys=keys, rate_bytes_per_s=rate, remove=remove)
            last = work.follow(steps, "checking", _scrub_progress)
        documents.append(_scrub_json(one, last))
        if not as_json:
            click.echo("\n".join([*([f"{one.name}:"] if len(parts) > 1 else []), *_verdict(one, last)]))
        bad = bad or bool(last.damaged or last.unsupported)
        if work.interrupted:
            break
    if as_json:
        print_json({"parts": documents, "interrupted": work.interrupted})
    work.end(found=bad)


def _scrub_progress(step: ScrubProgress) -> StepProgress:
    if not step.pages:
        return StepProgress(step.pages_total, None, "listing")
    damaged = sum(step.damaged.values())
    return StepProgress(step.pages, step.pages_total, f"{format_size(step.bytes)}, {damaged} damaged")


def _state(report: PageReport) -> str:
    if report.damage in (Damage.NOT_A_FRAME, NOT_REGULAR):
        return f"not a HiCache page: {report.damage}"
    if report.damage is not None:
        return f"damaged: {report.damage}"
    if report.unsupported is not None:
        return f"not verified: {report.note}"
    return "sound" if report.is_proved else "sound as far as checked"


def _report_json(report: PageReport) -> dict[str, Any]:
    header = report.header
    return {
        "state": _state(report),
        "proved": report.is_proved,
        **{name: getattr(report, name) for name in ("damage", "unsupported", "note")},
        "bytes": report.size_bytes,
        "header": None if header is None else _header_json(header),
    }


def _header_json(header: FrameHeader) -> dict[str, Any]:
    return {
        "version": header.version,
        "tag": tag_name(header),
        "encoding": encoding_name(header),
        "payload_bytes": header.payload_bytes,
        "stored_bytes": header.stored_bytes,
        "key": header.page_key.hex(),
        "parent": None if header.parent_key == NO_PARENT else header.parent_key.hex(),
        "namespace": header.namespace.hex(),
        "label": header.label,
        "weights_epoch": header.weights_epoch,
        "stored_s": header.stored_s or None,
    }


def _report_lines(report: PageReport) -> Iterator[tuple[str, str]]:
    yield "page", _state(report)
    if report.note is not None and report.unsupported is None:
        yield "note", report.note
    yield "file", f"{format_size(report.size_bytes)} ({report.size_bytes} bytes)"
    header = report.header
    if header is None:
        return
    yield "version", str(header.version)
    yield "tag", tag_name(header)
    form = encoding_name(header)
    stored = "" if form == "plain" else f", stored as {form} in {header.stored_bytes}"
    yield "payload", f"{header.payload_bytes} bytes{stored}"
    yield "key", header.page_key.hex()
    yield "parent", "none: the first page of a chain" if header.parent_key == NO_PARENT else header.parent_key.hex()
    yield "namespace", header.namespace.hex()
    yield "stored", _time_text(header.stored_s)
    yield "model", f"{header.label or 'not named'}, weights epoch {header.weights_epoch}"


def _time_text(stored_s: int) -> str:
    """Return a Unix time in words; any number may be in a damaged header."""
    try:
        return f"{datetime.fromtimestamp(stored_s, UTC):%Y-%m-%d %H:%M:%S} UTC" if stored_s else "unknown"
    except (ValueError, OverflowError, OSError):
        return f"not a valid time: {stored_s}"


def _verdict(part: StorePart, last: ScrubProgress) -> Iterator[str]:
    damaged = sum(last.damaged.values())
    yield f"checked {amount(last.pages, last.bytes)}: {damaged or 'none'} damaged"
    for reason, count in sorted(last.damaged.items()):
        yield f"  {reason}: {count}"
    for found in itertools.islice(last.findings, _NAMED_MAX):
        note = f" ({found.note})" if found.note else ""
        yield f"  {_place(part, found)}: {found.damage}{note}"
    if damaged > _NAMED_MAX:
        yield f"  and {damaged - _NAMED_MAX:,} more; --json names them"
    for reason, count in sorted(last.unsupported.items()):
        yield f"{counted(count, 'page')} {'is' if count == 1 else 'are'} {_UNSUPPORTED[reason]}"
    if last.removed:
        yield f"removed {last.removed}"
    if last.spared:
        yield SPARED
    if last.unverifiable:
        how = "no tag, or a key is needed (--mac-key-file, --encryption-key-file)"
        yield f"{last.unverifiable} could not be verified: {how}"


def _place(part: StorePart, found: Finding) -> str:
    """Return the location of a page: its file, or in other stores the first digits of its namespace and key."""
    path = _path(part, found)
    page = found.page
    return str(path) if path is not None else f"namespace {page.namespace.hex()[:12]}, page {page.key.hex()[:16]}"


def _path(part: StorePart, found: Finding) -> Path | None:
    page = found.page
    return None if part.directory is None else part.directory / page_name(page.namespace.hex(), page.key)


def _scrub_json(part: StorePart, last: ScrubProgress) -> dict[str, Any]:
    return {
        "part": part.name,
        **{name: getattr(last, name) for name in _COUNTS},
        "damaged_pages": [
            {"namespace": found.page.namespace.hex(), "key": found.page.key.hex(), "damage": found.damage,
             "note": found.note, "path": None if (path := _path(part, found)) is None else str(path)}
            for found in last.findings
        ],
    }
