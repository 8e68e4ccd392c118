"""`hicache copy`: pages into another store."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click

from ..backends.file.raw import make_store
from ..backends.raw import RawStore
from ..backends.tools.copying import CopyProgress, copy_raw
from ..units import counted
from .arguments import PATH, SIZE
from .progress import Told, follow
from .stores import (
    DAMAGE_EXIT_CODE,
    DRY_RUN,
    ENCRYPTION_KEYS,
    MAC_KEYS,
    NAMESPACE,
    StorePart,
    amount,
    only_part,
    page_keys,
    parts_of,
)


@click.command()
@click.argument("source", metavar="FROM", type=PATH)
@click.argument("target", metavar="TO", type=PATH)
@click.option("--part", metavar="NAME", help="Only this part of FROM.")
@click.option("--to-part", metavar="NAME", help="The part of TO to copy to, if it has several.")
@NAMESPACE
@DRY_RUN
@click.option("--rate", type=SIZE, help="Bytes to copy per second, such as 200MiB, to leave the stores to others.")
@MAC_KEYS
@ENCRYPTION_KEYS
def copy(  # noqa: PLR0913  one for each option
    *,
    source: Path,
    target: Path,
    part: str | None,
    to_part: str | None,
    namespace: str,
    dry_run: bool,
    rate: int | None,
    mac_key_files: tuple[Path, ...],
    encryption_key_files: tuple[Path, ...],
) -> None:
    """Store the pages of FROM in TO as well. What is there already is skipped, so a copy that was stopped goes on.

    FROM and TO are directories of file stores (TO is made if it is missing) or configurations (*.yaml) whose section
    `storage` names a store. Pages are checked on the way; a chain comes head first, the one used last at first. Exit
    code 1 if pages were left out: damaged ones, and those without room.
    """
    keys = page_keys(mac_key_files, encryption_key_files)
    done: list[CopyProgress] = []
    with contextlib.ExitStack() as stack:
        sources = [(one, stack.enter_context(one.opened())) for one in parts_of(source, part)]
        into = _target(only_part(target, to_part, "--to-part"), dry_run, stack)
        for one, raw in sources:
            if len(sources) > 1:
                click.echo(f"{one.name}:")
            steps = copy_raw(raw, into, namespace=namespace, keys=keys, rate_bytes_per_s=rate, dry_run=dry_run)
            done.append(follow(steps, "copying", _tell_copy))
            click.echo("\n".join(_copy_lines(done[-1], dry_run)))
    if not all(one.is_whole for one in done):
        raise click.exceptions.Exit(DAMAGE_EXIT_CODE)


def _target(part: StorePart, dry_run: bool, stack: contextlib.ExitStack) -> RawStore | None:
    """The store to copy to; None for one that a dry run does not make."""
    directory = part.directory
    if directory is not None and (not os.path.lexists(directory) or not _names_in(directory)):
        if dry_run:
            return None
        make_store(directory)
    return stack.enter_context(part.opened())


def _names_in(directory: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(directory)
    return ["unreadable"]  # whoever opens it says why


def _tell_copy(step: CopyProgress) -> Told:
    if step.total is None:
        return Told(step.seen, None, "listing")
    return Told(step.seen, step.total, f"{amount(step.copied, step.bytes)} copied")


def _copy_lines(last: CopyProgress, dry_run: bool) -> list[str]:
    lines = [f"{'to copy: ' if dry_run else 'copied '}{amount(last.copied, last.bytes)}"]
    for number, what in (
        (last.present, "there already"),
        (last.unproved, "copied without proof: no tag, or a key is needed (--mac-key-file, --encryption-key-file)"),
        (last.damaged, "damaged and left out"),
        (last.refused, "turned away: the target has no room, or somebody else stored it meanwhile"),
        (last.behind, "left out because the page before it is"),
        (last.gone, "gone from the source meanwhile"),
    ):
        if number:
            lines.append(f"  {counted(number, 'page')} {what}")
    return lines
