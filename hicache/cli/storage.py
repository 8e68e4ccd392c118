"""`hicache purge`, `trim` and `copy`: remove and copy stored pages, interactively or from cron.

Exit codes: 0 for done, 1 for skipped pages or the answer no, 2 for errors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from ..backends.file.inspection import make_store
from ..backends.shared_files.root import make_store as make_shared_store
from ..backends.stored import StoredPages
from ..backends.tools.copying import CopyProgress, copy_stored
from ..backends.tools.removal import RemovalProgress, purge_stored, trim_stored
from ..backends.tools.survey import survey
from ..units import counted, format_size
from .arguments import DURATION, PATH, SIZE
from .main import FOUND_EXIT_CODE
from .progress import StepProgress, Work, follow
from .stores import (
    DRY_RUN,
    JSON,
    NAMESPACE,
    PART,
    STORE,
    StorePart,
    amount,
    key_options,
    only_part,
    page_keys,
    parts_of,
    print_json,
)


@click.command()
@STORE
@PART
@NAMESPACE
@click.option(
    "--epoch", type=click.IntRange(0, (1 << 64) - 1), help="Only namespaces of this weights epoch; `ls` shows them."
)
@click.option("--older-than", type=DURATION, help="Only pages unused for this long, such as 7d.")
@DRY_RUN
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@JSON
def purge(
    *, store: Path, part: str | None, namespace: str, epoch: int | None, older_than: float | None, **how: bool,
) -> None:
    """Remove pages from STORE: all of them, or those of a namespace, of a weights epoch, or of an age.

    STORE is the directory of a file store, or a configuration (*.yaml) whose section `storage` names a store. Engines
    may use it at the same time; removed pages are misses for them.
    """
    removal = Removal(**how)
    chosen = ((one, prefix) for one in parts_of(store, part) for prefix in _prefixes(one, namespace, epoch))
    removal.run(chosen, functools.partial(purge_stored, older_than_s=older_than))


def _prefixes(part: StorePart, namespace: str, epoch: int | None) -> list[str]:
    """Return the prefixes to purge in a part: `namespace`, or the digests of the namespaces of `epoch`."""
    if epoch is None:
        return [namespace]
    with part.opened() as stored:
        found = follow(
            survey(stored, namespace), "looking", lambda seen: StepProgress(seen.pages, None, format_size(seen.bytes))
        )
    samples = {digest: one.sample for digest, one in found.namespaces.items()}
    return [digest.hex() for digest, sample in samples.items() if sample is not None and sample.weights_epoch == epoch]


@click.command()
@STORE
@PART
@click.option("--to", "target_bytes", type=SIZE, required=True, help="Remaining size of each part, such as 100GiB.")
@NAMESPACE
@DRY_RUN
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@JSON
def trim(store: Path, part: str | None, target_bytes: int, namespace: str, **how: bool) -> None:
    """Remove pages from STORE until it has at most the size --to: tails of the least recently used chains first.

    STORE is the directory of a file store, or a configuration (*.yaml) whose section `storage` names a store. Engines
    may use it at the same time; removed pages are misses for them.
    """
    removal = Removal(**how, shows_left=True)
    chosen = ((one, namespace) for one in parts_of(store, part))
    removal.run(chosen, functools.partial(trim_stored, target_bytes=target_bytes))


@click.command()
@click.argument("source", metavar="FROM", type=PATH)
@click.argument("target", metavar="TO", type=PATH)
@click.option("--part", metavar="NAME", help="Only this part of FROM.")
@click.option("--to-part", metavar="NAME", help="The part of TO to copy to, if it has several.")
@NAMESPACE
@DRY_RUN
@click.option("--rate", type=SIZE, help="Limit of bytes copied per second, such as 200MiB.")
@JSON
@key_options
def copy(
    *, source: Path, target: Path, part: str | None, to_part: str | None, namespace: str, dry_run: bool,
    rate: int | None, as_json: bool, **key_files: tuple[Path, ...],
) -> None:
    """Copy the pages of FROM to TO. Pages that TO already has are skipped, so an interrupted copy can be continued.

    FROM and TO are directories of file stores (TO is created if it is missing) or configurations (*.yaml) whose section
    `storage` names a store. Pages are verified. The most recently used chains come first, each with its head first.
    Exit code 1 if pages were skipped because they are damaged or TO is full. After Ctrl-C the target has whole
    prefixes.
    """
    keys = page_keys(**key_files)
    work, done = Work(), dict[str, CopyProgress]()
    with contextlib.ExitStack() as stack:
        sources = [(one, stack.enter_context(one.opened())) for one in parts_of(source, part)]
        into = _target(only_part(target, to_part, "--to-part"), dry_run, stack)
        for one, stored in sources:
            steps = copy_stored(stored, into, namespace=namespace, keys=keys, rate_bytes_per_s=rate, dry_run=dry_run)
            last = done[one.name] = work.follow(steps, "copying", _copy_progress)
            if not as_json:
                heading = [f"{one.name}:"] if len(sources) > 1 else []
                click.echo("\n".join([*heading, *_copy_lines(last, dry_run)]))
            if work.interrupted:
                break
    if as_json:
        parts = [{"part": name, **asdict(last)} for name, last in done.items()]
        print_json({"parts": parts, "dry_run": dry_run, "interrupted": work.interrupted})
    work.end(found=not all(one.is_whole for one in done.values()))


def _target(part: StorePart, dry_run: bool, stack: contextlib.ExitStack) -> StoredPages | None:
    """Return the store to copy to; None if a dry run would have to create it."""
    directory = part.directory
    if directory is not None and (not os.path.lexists(directory) or not _names_in(directory)):
        if dry_run:
            return None
        (make_shared_store if part.spec.type == "shared_files" else make_store)(directory)
    return stack.enter_context(part.opened())


def _names_in(directory: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(directory)
    return ["unreadable"]  # opening it reports the reason


def _copy_progress(step: CopyProgress) -> StepProgress:
    if step.total is None:
        return StepProgress(step.seen, None, "listing")
    return StepProgress(step.seen, step.total, f"{amount(step.copied, step.bytes)} copied")


def _copy_lines(last: CopyProgress, dry_run: bool) -> list[str]:
    lines = [f"{'to copy: ' if dry_run else 'copied '}{amount(last.copied, last.bytes)}"]
    for number, what in (
        (last.present, "there already"),
        (last.unproved, "copied unverified: no tag, or a key is needed (--mac-key-file, --encryption-key-file)"),
        (last.damaged, "damaged and skipped"),
        (last.refused, "rejected: the target is full, or another process has just stored the page"),
        (last.behind, "skipped because the page before it was"),
        (last.gone, "removed from the source during the copy"),
    ):
        if number:
            lines.append(f"  {counted(number, 'page')} {what}")
    return lines


class Removal:
    """A command that removes pages: it asks for confirmation without --yes, and prints the removed pages."""

    def __init__(self, *, dry_run: bool, yes: bool, as_json: bool, shows_left: bool = False) -> None:
        self._dry_run = dry_run
        self._yes = yes
        self._as_json = as_json
        self._shows_left = shows_left
        self._work = Work()

    def run(self, chosen: Iterable[tuple[StorePart, str]], steps: Callable[..., Iterator[RemovalProgress]]) -> None:
        """Remove pages by `steps` from the chosen parts, of namespaces with a prefix each. Without --yes, first make a
        dry run and ask. End the command if nothing matches or the answer is no.

        Raises UsageError, before any access, if it cannot ask for lack of a terminal.
        """
        if not (self._dry_run or self._yes or sys.stdin.isatty()):
            raise click.UsageError("cannot ask for confirmation without a terminal; pass --yes to remove pages")
        places = list(chosen)
        seen = None
        if not self._yes or self._dry_run:
            found = self._run(places, steps, "looking", None)
            pages = sum(one.pages for _, one in found)
            if self._dry_run or not pages or self._work.interrupted:
                self._tell("to remove: ", found)
                return
            click.echo(f"to remove: {_total(found)}", err=self._as_json)
            click.echo("Remove them? [y/N]: ", nl=False, err=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):  # every other answer is a no
                click.echo("nothing removed", err=self._as_json)
                raise click.exceptions.Exit(FOUND_EXIT_CODE)
            seen = [one.seen for _, one in found]
        self._tell("removed ", self._run(places, steps, "removing", seen))

    def _run(
        self, places: Sequence[tuple[StorePart, str]], steps: Callable[..., Iterator[RemovalProgress]], title: str,
        seen: Sequence[int] | None,
    ) -> list[tuple[str, RemovalProgress]]:
        """Visit the parts; `seen` are the page counts of a dry run, or None."""
        done: list[tuple[str, RemovalProgress]] = []
        for number, (one, prefix) in enumerate(places):
            progress_of = functools.partial(_removal_progress, expected=None if seen is None else seen[number])
            with one.opened() as stored:
                dry_run = title == "looking"
                made = steps(stored, namespace=prefix, dry_run=dry_run)
                done.append((one.name, self._work.follow(made, title, progress_of)))
            if self._work.interrupted:
                break
        return done

    def _tell(self, what: str, done: Sequence[tuple[str, RemovalProgress]]) -> None:
        if self._as_json:
            parts = [{"part": name, **asdict(one)} for name, one in done]
            print_json({"parts": parts, "dry_run": self._dry_run, "interrupted": self._work.interrupted})
        else:
            left_bytes = sum(one.left_bytes or 0 for _, one in done)
            shows_left = self._shows_left and what == "removed "
            left = f"; {format_size(left_bytes)} left" if shows_left else ""
            click.echo(f"{what}{_total(done)}{left}")
        self._work.end()


def _removal_progress(step: RemovalProgress, expected: int | None) -> StepProgress:
    return StepProgress(step.seen, expected if step.total is None else step.total, amount(step.pages, step.bytes))


def _total(found: Sequence[tuple[str, RemovalProgress]]) -> str:
    return amount(sum(one.pages for _, one in found), sum(one.bytes for _, one in found))
