"""`hicache inspect`, `verify` and `purge`: tools for stores, for people and for cron.

Exit codes: 0 for sound, 1 for damage found or an answer of "no", 2 for whatever stopped the command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ..backends.file.pages import NOT_REGULAR
from ..backends.file.tools import PageKeys, PageReport, ScrubProgress, inspect_page, purge_store, verify_store
from ..backends.tools.removal import RemovalProgress, purge_raw
from ..backends.tools.scrub import verify_raw
from ..backends.tools.survey import survey
from ..errors import InvalidInput
from ..frame import Damage
from ..units import counted, format_size
from .arguments import DURATION, PATH, SIZE
from .progress import Told, follow
from .stores import (
    DAMAGE_EXIT_CODE,
    DRY_RUN,
    ENCRYPTION_KEYS,
    MAC_KEYS,
    NAMESPACE,
    PART,
    STORE,
    StorePart,
    amount,
    page_keys,
    parts_of,
)

# Found with a key, and nothing against the pages themselves: other engines may use them.
_MISFITS = {
    "mac_key": "sealed with another MAC key than those given",
    "encryption_key": "encrypted with another key than those given",
    "tag_kind": "sealed by other means than the given keys are for, so those prove nothing",
}


@click.command()
@click.argument("path", type=PATH)
@MAC_KEYS
@ENCRYPTION_KEYS
def inspect(path: Path, mac_key_files: tuple[Path, ...], encryption_key_files: tuple[Path, ...]) -> None:
    """Show the header of the stored page PATH, and whether the page is sound.

    Exit code 1 if it is damaged, is no page, or does not fit the keys that were given.
    """
    if path.is_dir() and not path.is_symlink():
        raise InvalidInput(f"{path} is a directory; name a page file in it")
    report = inspect_page(path, keys=page_keys(mac_key_files, encryption_key_files))
    for name, value in _report_lines(report):
        click.echo(f"{name + ':':<12} {value}")
    if report.damage is not None or report.misfit is not None:
        raise click.exceptions.Exit(DAMAGE_EXIT_CODE)


@click.command()
@STORE
@PART
@click.option("--rate", type=SIZE, help="Bytes to read per second, such as 200MiB, to leave the store to others.")
@click.option("--remove", is_flag=True, help="Remove what is damaged. A removed page is a miss, nothing worse.")
@MAC_KEYS
@ENCRYPTION_KEYS
def verify(
    store: Path,
    part: str | None,
    rate: int | None,
    remove: bool,
    mac_key_files: tuple[Path, ...],
    encryption_key_files: tuple[Path, ...],
) -> None:
    """Read every page of STORE and report damage. Engines may use the store meanwhile.

    STORE is the directory of a file store, or a configuration (*.yaml) whose section `storage` names a store. Changes
    nothing without --remove. Exit code 1 if damage was found, also if it was removed, or if pages do not fit the keys
    that were given; those are never removed.
    """
    keys = page_keys(mac_key_files, encryption_key_files)
    parts = parts_of(store, part)
    bad = False
    for one in parts:
        last = _verified(one, keys, rate, remove)
        if len(parts) > 1:
            click.echo(f"{one.name}:")
        click.echo(_verdict(last))
        bad = bad or bool(last.damaged or last.misfits)
    if bad:
        raise click.exceptions.Exit(DAMAGE_EXIT_CODE)


def _verified(part: StorePart, keys: PageKeys, rate: int | None, remove: bool) -> ScrubProgress:
    # The file store's own scrub sees what is no page at all, and removes only what it has read.
    if part.directory is not None:
        steps = verify_store(part.directory, keys=keys, rate_bytes_per_s=rate, remove=remove)
        return follow(steps, "checking", _tell_scrub)
    with part.opened() as raw:
        return follow(verify_raw(raw, keys=keys, rate_bytes_per_s=rate, remove=remove), "checking", _tell_scrub)


def _tell_scrub(step: ScrubProgress) -> Told:
    found = f"{format_size(step.bytes)}, {sum(step.damaged.values())} damaged"
    return Told(step.pages, step.pages_total, found)


@click.command()
@STORE
@PART
@NAMESPACE
@click.option(
    "--epoch", type=click.IntRange(0, (1 << 64) - 1), help="Only namespaces of this weights epoch; `ls` shows them."
)
@click.option("--older-than", type=DURATION, help="Only pages unused for this long, such as 7d.")
@DRY_RUN
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge(
    *,
    store: Path,
    part: str | None,
    namespace: str,
    epoch: int | None,
    older_than: float | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Remove pages from STORE: all of them, or those of a namespace, of a weights epoch, or of an age.

    STORE is the directory of a file store, or a configuration (*.yaml) whose section `storage` names a store. Engines
    may use it meanwhile; what is removed is a miss for them.
    """
    require_consent(dry_run, yes)
    chosen = [(one, prefix) for one in parts_of(store, part) for prefix in _prefixes(one, namespace, epoch)]
    if dry_run or not yes:
        found = [_purged(one, prefix, older_than, dry_run=True) for one, prefix in chosen]
        click.echo(f"to remove: {_sum(found)}")
        if dry_run or not sum(pages for pages, _ in found):
            return
        if not agreed("Remove them? [y/N]: "):
            click.echo("nothing removed")
            raise click.exceptions.Exit(DAMAGE_EXIT_CODE)
    click.echo(f"removed {_sum([_purged(one, prefix, older_than, dry_run=False) for one, prefix in chosen])}")


def _prefixes(part: StorePart, namespace: str, epoch: int | None) -> list[str]:
    """What to purge in a part: what begins with `namespace`, or the whole digests of those that are of `epoch`."""
    if epoch is None:
        return [namespace]
    with part.opened() as raw:
        found = follow(survey(raw, namespace), "looking", lambda seen: Told(seen.pages, None, format_size(seen.bytes)))
    samples = {digest: one.sample for digest, one in found.namespaces.items()}
    return [digest.hex() for digest, sample in samples.items() if sample is not None and sample.weights_epoch == epoch]


def _purged(part: StorePart, prefix: str, older_than: float | None, *, dry_run: bool) -> tuple[int, int]:
    """Pages and bytes that were removed, or would be."""
    # The file store's own purge sees damaged files too, and takes the index's word for what is old page by page.
    if part.directory is not None:
        done = purge_store(part.directory, namespace=prefix or None, older_than_s=older_than, dry_run=dry_run)
        return done.pages, done.bytes
    with part.opened() as raw:
        steps = purge_raw(raw, namespace=prefix, older_than_s=older_than, dry_run=dry_run)
        last = follow(steps, "looking" if dry_run else "removing", _tell_removal)
    return last.pages, last.bytes


def _tell_removal(step: RemovalProgress) -> Told:
    return Told(step.seen, step.total, amount(step.pages, step.bytes))


def _sum(found: list[tuple[int, int]]) -> str:
    return amount(sum(pages for pages, _ in found), sum(size for _, size in found))


def require_consent(dry_run: bool, yes: bool) -> None:
    """Raise UsageError if nobody could be asked and nobody has said yes."""
    if not (dry_run or yes or sys.stdin.isatty()):
        raise click.UsageError("there is no terminal to ask on; pass --yes to remove pages without being asked")


def agreed(question: str) -> bool:
    """Ask on the terminal; what is not a clear yes is a no."""
    click.echo(question, nl=False, err=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


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
    lines = [f"checked {amount(last.pages, last.bytes)}: {sum(last.damaged.values()) or 'none'} damaged"]
    lines += [f"  {reason}: {count}" for reason, count in sorted(last.damaged.items())]
    for reason, count in sorted(last.misfits.items()):
        lines.append(f"{counted(count, 'page')} {'is' if count == 1 else 'are'} {_MISFITS[reason]}")
    if last.removed:
        lines.append(f"removed {last.removed}")
    if last.unverifiable:
        how = "no tag, or a key is needed (--mac-key-file, --encryption-key-file)"
        lines.append(f"{last.unverifiable} could not be proved: {how}")
    return "\n".join(lines)
