"""`hicache inspect`, `verify`, `purge`, `trim` and `copy`: tools for stores, for people and for cron.

Exit codes: 0 for sound, 1 for damage found or an answer of "no", 2 for whatever stopped the command.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from ..backends.file.pages import NOT_REGULAR
from ..backends.file.raw import inspect_page, make_store
from ..backends.raw import RawStore
from ..backends.tools.copying import CopyProgress, copy_raw
from ..backends.tools.removal import RemovalProgress, purge_raw, trim_raw
from ..backends.tools.survey import survey
from ..backends.tools.verify import PageReport, ScrubProgress, encoding_name, tag_name, verify_raw
from ..errors import InvalidInput
from ..frame import NO_PARENT, Damage
from ..units import counted, format_size
from .arguments import DURATION, PATH, SIZE
from .main import FOUND_EXIT_CODE
from .progress import Told, follow
from .stores import (
    DRY_RUN,
    NAMESPACE,
    PART,
    STORE,
    StorePart,
    amount,
    key_options,
    only_part,
    page_keys,
    parts_of,
)

# Found with a key, and nothing against the pages themselves: other engines may use them.
_UNSUPPORTED = {
    "mac_key": "sealed with another MAC key than those given",
    "encryption_key": "encrypted with another key than those given",
    "tag_kind": "sealed by other means than the given keys are for, so those prove nothing",
}


@click.command()
@click.argument("path", type=PATH)
@key_options
def inspect(path: Path, **key_files: tuple[Path, ...]) -> None:
    """Show the header of the stored page PATH, and whether the page is sound.

    Exit code 1 if it is damaged, is no page, or does not fit the keys that were given.
    """
    if path.is_dir() and not path.is_symlink():
        raise InvalidInput(f"{path} is a directory; name a page file in it")
    report = inspect_page(path, keys=page_keys(**key_files))
    for name, value in _report_lines(report):
        click.echo(f"{name + ':':<12} {value}")
    if report.damage is not None or report.unsupported is not None:
        raise click.exceptions.Exit(FOUND_EXIT_CODE)


@click.command()
@STORE
@PART
@click.option("--rate", type=SIZE, help="Bytes to read per second, such as 200MiB, to leave the store to others.")
@click.option("--remove", is_flag=True, help="Remove what is damaged. A removed page is a miss, nothing worse.")
@key_options
def verify(store: Path, part: str | None, rate: int | None, remove: bool, **key_files: tuple[Path, ...]) -> None:
    """Read every page of STORE and report damage. Engines may use the store meanwhile.

    STORE is the directory of a file store, or a configuration (*.yaml) whose section `storage` names a store. Changes
    nothing without --remove. Exit code 1 if damage was found, also if it was removed, or if pages do not fit the keys
    that were given; those are never removed.
    """
    keys = page_keys(**key_files)
    parts = parts_of(store, part)
    bad = False
    for one in parts:
        with one.opened() as raw:
            steps = verify_raw(raw, keys=keys, rate_bytes_per_s=rate, remove=remove)
            last = follow(steps, "checking", _tell_scrub)
        if len(parts) > 1:
            click.echo(f"{one.name}:")
        click.echo(_verdict(last))
        bad = bad or bool(last.damaged or last.unsupported)
    if bad:
        raise click.exceptions.Exit(FOUND_EXIT_CODE)


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
    chosen = ((one, prefix) for one in parts_of(store, part) for prefix in _prefixes(one, namespace, epoch))
    done = _removed(chosen, functools.partial(purge_raw, older_than_s=older_than), dry_run, yes)
    click.echo(f"removed {_total(done)}")


def _prefixes(part: StorePart, namespace: str, epoch: int | None) -> list[str]:
    """What to purge in a part: what begins with `namespace`, or the whole digests of those that are of `epoch`."""
    if epoch is None:
        return [namespace]
    with part.opened() as raw:
        found = follow(survey(raw, namespace), "looking", lambda seen: Told(seen.pages, None, format_size(seen.bytes)))
    samples = {digest: one.sample for digest, one in found.namespaces.items()}
    return [digest.hex() for digest, sample in samples.items() if sample is not None and sample.weights_epoch == epoch]


@click.command()
@STORE
@PART
@click.option("--to", "target_bytes", type=SIZE, required=True, help="What to leave, such as 100GiB, in each part.")
@NAMESPACE
@DRY_RUN
@click.option("--yes", is_flag=True, help="Do not ask.")
def trim(
    store: Path, part: str | None, target_bytes: int, namespace: str, dry_run: bool, yes: bool
) -> None:
    """Remove pages from STORE until it is no larger than a size: the tails of the chains unused for longest go first.

    STORE is the directory of a file store, or a configuration (*.yaml) whose section `storage` names a store. Engines
    may use it meanwhile; what is removed is a miss for them.
    """
    chosen = ((one, namespace) for one in parts_of(store, part))
    done = _removed(chosen, functools.partial(trim_raw, target_bytes=target_bytes), dry_run, yes)
    click.echo(f"removed {_total(done)}; {format_size(sum(one.left_bytes for one in done))} left")


@click.command()
@click.argument("source", metavar="FROM", type=PATH)
@click.argument("target", metavar="TO", type=PATH)
@click.option("--part", metavar="NAME", help="Only this part of FROM.")
@click.option("--to-part", metavar="NAME", help="The part of TO to copy to, if it has several.")
@NAMESPACE
@DRY_RUN
@click.option("--rate", type=SIZE, help="Bytes to copy per second, such as 200MiB, to leave the stores to others.")
@key_options
def copy(
    *,
    source: Path,
    target: Path,
    part: str | None,
    to_part: str | None,
    namespace: str,
    dry_run: bool,
    rate: int | None,
    **key_files: tuple[Path, ...],
) -> None:
    """Store the pages of FROM in TO as well. What is there already is skipped, so a copy that was stopped goes on.

    FROM and TO are directories of file stores (TO is made if it is missing) or configurations (*.yaml) whose section
    `storage` names a store. Pages are checked on the way; a chain comes head first, the one used last at first. Exit
    code 1 if pages were left out: damaged ones, and those without room.
    """
    keys = page_keys(**key_files)
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
        raise click.exceptions.Exit(FOUND_EXIT_CODE)


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


def _removed(
    chosen: Iterable[tuple[StorePart, str]],
    steps: Callable[..., Iterator[RemovalProgress]],
    dry_run: bool,
    yes: bool,
) -> list[RemovalProgress]:
    """Remove by `steps` from the chosen parts, of namespaces with a prefix each. If the command line does not say yes,
    that comes after a dry run and a question. Ends the command if nothing is to be removed or the answer is no.

    Raises UsageError, before it looks at any part, if there is no terminal to ask on.
    """
    if not (dry_run or yes or sys.stdin.isatty()):
        raise click.UsageError("there is no terminal to ask on; pass --yes to remove pages without being asked")
    places = list(chosen)

    def run(title: str, dry_run: bool) -> list[RemovalProgress]:
        done = []
        for one, prefix in places:
            with one.opened() as raw:
                done.append(follow(steps(raw, namespace=prefix, dry_run=dry_run), title, _tell_removal))
        return done

    if not yes or dry_run:
        found = run("looking", True)
        click.echo(f"to remove: {_total(found)}")
        if dry_run or not sum(one.pages for one in found):
            raise click.exceptions.Exit(0)
        click.echo("Remove them? [y/N]: ", nl=False, err=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):  # what is not a clear yes is a no
            click.echo("nothing removed")
            raise click.exceptions.Exit(FOUND_EXIT_CODE)
    return run("removing", False)


def _tell_removal(step: RemovalProgress) -> Told:
    return Told(step.seen, step.total, amount(step.pages, step.bytes))


def _total(found: list[RemovalProgress]) -> str:
    return amount(sum(one.pages for one in found), sum(one.bytes for one in found))


def _state(report: PageReport) -> str:
    if report.damage in (Damage.NOT_A_FRAME, NOT_REGULAR):
        return f"not a HiCache page: {report.damage}"
    if report.damage is not None:
        return f"damaged: {report.damage}"
    if report.unsupported is not None:
        return f"not proved: {report.note}"
    return "sound" if report.is_proved else "sound as far as checked"


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
    yield "model", f"{header.label or 'not named'}, weights epoch {header.weights_epoch}"


def _verdict(last: ScrubProgress) -> str:
    lines = [f"checked {amount(last.pages, last.bytes)}: {sum(last.damaged.values()) or 'none'} damaged"]
    lines += [f"  {reason}: {count}" for reason, count in sorted(last.damaged.items())]
    for reason, count in sorted(last.unsupported.items()):
        lines.append(f"{counted(count, 'page')} {'is' if count == 1 else 'are'} {_UNSUPPORTED[reason]}")
    if last.removed:
        lines.append(f"removed {last.removed}")
    if last.unverifiable:
        how = "no tag, or a key is needed (--mac-key-file, --encryption-key-file)"
        lines.append(f"{last.unverifiable} could not be proved: {how}")
    return "\n".join(lines)
