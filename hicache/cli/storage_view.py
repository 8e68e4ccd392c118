"""`hicache ls` and `stat`: show the pages of a store, as text or JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ..backends.chains import parent_in, read_header
from ..backends.stored import StoredPages
from ..backends.tools.survey import NamespaceSurvey, StoreSurvey, survey
from ..errors import BackendError, ConfigError
from ..units import counted, format_share, format_size
from .main import USAGE_EXIT_CODE
from .progress import StepProgress, follow, format_age, width
from .stores import JSON, NAMED_STORE, NAMESPACE, PART, StorePart, amount, parts_of, print_json

SHORT_HEX = 12
_AGES = ("under 1 h", "under 1 d", "under 7 d", "under 30 d", "older", "unknown")
_BAR_CHARACTERS = 30


@click.command()
@NAMED_STORE
@PART
@NAMESPACE
@click.option("--pages", "with_pages", is_flag=True, help="List the pages instead of their namespaces.")
@JSON
def ls(store: Path, part: str | None, namespace: str, with_pages: bool, as_json: bool) -> None:
    """List the namespaces in STORE: their models, numbers of pages, and times of use.

    STORE is the directory of a file store, or a configuration (*.yaml) whose section `storage` names a store; the
    default is the value of HICACHE_CONFIG_FILE. Changes nothing; engines may use the store at the same time. Exit code
    2 if a part of it cannot be listed.
    """

    def show(one: StorePart, stored: StoredPages, heading: bool) -> dict[str, Any]:
        if with_pages:
            return _list_pages(one, heading, stored, namespace, as_json)
        found = _look(stored, namespace, with_chains=False)
        if not as_json:
            click.echo("\n".join(_ls_lines(one, heading, found)))
        return {"namespaces": [_namespace_json(n) for n in _sorted(found)]}

    _show_parts(store, part, as_json, show)


@click.command()
@NAMED_STORE
@PART
@NAMESPACE
@click.option("--chains", is_flag=True, help="Read every header, to count chains and unreachable pages.")
@JSON
def stat(store: Path, part: str | None, namespace: str, chains: bool, as_json: bool) -> None:
    """Summarize STORE, part by part: pages, bytes, capacity, ages, namespaces.

    STORE is the directory of a file store, or a configuration (*.yaml) whose section `storage` names a store; the
    default is the value of HICACHE_CONFIG_FILE. Changes nothing; engines may use the store at the same time. Exit code
    2 if a part of it cannot be listed.
    """

    def show(one: StorePart, stored: StoredPages, _: bool) -> dict[str, Any]:
        found = _look(stored, namespace, with_chains=chains)
        if not as_json:
            click.echo("\n".join(_stat_lines(one, found)))
        return _stat_json(one, found)

    _show_parts(store, part, as_json, show)


def _show_parts(
    store: Path, part: str | None, as_json: bool, show: Callable[[StorePart, StoredPages, bool], dict[str, Any]]
) -> None:
    """Let `show` print each part of a store, with a heading if there are several, or print its results as JSON.

    Reports a part that cannot be listed and continues with the next part; for a store of one part the command ends.
    """
    parts = parts_of(store, part)
    documents: list[dict[str, Any]] = []
    for one in parts:
        try:
            with one.opened() as stored:
                documents.append({"part": one.name, **show(one, stored, len(parts) > 1)})
        except (BackendError, ConfigError) as error:
            if len(parts) == 1:
                raise
            click.echo(f"hicache: part {one.name}: {error}", err=True)
            documents.append({"part": one.name, "error": str(error)})
    if as_json:
        print_json({"parts": documents})
    if any("error" in document for document in documents):
        raise click.exceptions.Exit(USAGE_EXIT_CODE)


def _look(stored: StoredPages, namespace: str, *, with_chains: bool) -> StoreSurvey:
    return follow(
        survey(stored, namespace, with_chains=with_chains),
        "looking",
        lambda found: StepProgress(found.pages, None, amount(found.pages, found.bytes)),
    )


def _sorted(found: StoreSurvey) -> list[NamespaceSurvey]:
    """Return the namespaces, the largest first."""
    return sorted(found.namespaces.values(), key=lambda one: (-one.bytes, one.namespace))


def _ls_lines(part: StorePart, heading: bool, found: StoreSurvey) -> Iterator[str]:
    if heading:
        yield f"{part.name}: {counted(len(found.namespaces), 'namespace')}, {amount(found.pages, found.bytes)}"
    elif not found.namespaces:
        yield "no pages"
    if found.namespaces:
        yield from _namespace_table(found)


def _namespace_table(found: StoreSurvey) -> Iterator[str]:
    """Yield two lines for each namespace, so that the name of a model fits into 80 columns."""
    yield f"{'NAMESPACE':<{SHORT_HEX}}  {'PAGES':>10}  {'SIZE':>10}  {'EPOCH':>6}  USED"
    for one in _sorted(found):
        epoch = "?" if one.sample is None else str(one.sample.weights_epoch)
        short = one.namespace.hex()[:SHORT_HEX]
        yield f"{short}  {one.pages:>10,}  {format_size(one.bytes):>10}  {epoch:>6}  {_used(one, found.taken_s)}"
        yield f"    {_details(one)}"


def _details(one: NamespaceSurvey) -> str:
    if one.sample is None:
        return "all checked pages are damaged: see `hicache verify`"
    label, size = one.sample.label or "model not named", format_size(one.sample.payload_bytes)
    return f"{label}, payload {size}, {_names(one.tags)}, {_names(one.encodings)}"


def _names(counts: dict[str, int]) -> str:
    return " and ".join(sorted(counts))


def _used(one: NamespaceSurvey, now_s: float) -> str:
    if one.newest_s is None or one.oldest_s is None:
        return "unknown"
    newest, oldest = (format_age(max(0.0, now_s - then_s)) for then_s in (one.newest_s, one.oldest_s))
    return f"{newest} ago" if newest == oldest else f"{newest} to {oldest} ago"


def _namespace_json(one: NamespaceSurvey) -> dict[str, Any]:
    return {
        "namespace": one.namespace.hex(),
        **{name: getattr(one.sample, name, None) for name in ("label", "weights_epoch", "payload_bytes")},
        "tags": sorted(one.tags),
        "encodings": sorted(one.encodings),
        "pages": one.pages,
        "bytes": one.bytes,
        "oldest_use": one.oldest_s,
        "newest_use": one.newest_s,
    }


def _list_pages(part: StorePart, heading: bool, stored: StoredPages, namespace: str, as_json: bool) -> dict[str, Any]:
    """Return the pages of one part as a document, or print them one by one and return it without pages."""
    now_s, documents = time.time(), []
    if not as_json:
        if heading:
            click.echo(f"{part.name}:")
        click.echo(f"{'SPACE':<8}  {'PAGE':<16}  {'BEHIND':<12}  {'SIZE':>9}  USED")
    for page in stored.pages(namespace):
        header = read_header(stored, page)
        parent = None if header is None else parent_in(header)
        space, key, parent_hex = page.namespace.hex(), page.key.hex(), None if parent is None else parent.hex()
        if as_json:
            documents.append({
                "namespace": space, "key": key, "parent": parent_hex, "bytes": page.bytes, "used": page.used_s,
                "damaged": header is None,
            })
            continue
        behind = "damaged" if header is None else (parent_hex or "-")[:12]
        used = "unknown" if page.used_s is None else f"{format_age(max(0.0, now_s - page.used_s))} ago"
        click.echo(f"{space[:8]}  {key[:16]:<16}  {behind:<12}  {format_size(page.bytes):>9}  {used}")
    return {"pages": documents}


def _stat_json(part: StorePart, found: StoreSurvey) -> dict[str, Any]:
    chains = found.chains
    return {
        "type": part.spec.type,
        "pages": found.pages,
        "bytes": found.bytes,
        "capacity_bytes": part.capacity_bytes,
        "bytes_by_age": dict(zip(_AGES, found.ages, strict=True)),
        "namespaces": [_namespace_json(one) for one in _sorted(found)],
        **({} if chains is None else {
            "heads": chains.heads(), "tails": chains.tails(), "orphans": chains.orphans(),
            "damaged": found.pages - len(chains),
        }),
    }


def _stat_lines(part: StorePart, found: StoreSurvey) -> Iterator[str]:
    named = part.name if part.name == part.spec.type else f"{part.name} ({part.spec.type})"
    yield f"{named}: {counted(len(found.namespaces), 'namespace')}, {amount(found.pages, found.bytes)}"
    capacity = part.capacity_bytes
    if capacity is None:
        yield "  capacity  none in the configuration"
    else:
        yield f"  capacity  {format_size(capacity)}, {format_share(found.bytes, capacity)} used"
    if not found.pages:
        return
    if found.chains is not None:
        chains = found.chains
        yield f"  chains    {counted(chains.heads(), 'head')}, {counted(chains.tails(), 'tail')}"
        orphans = f"{counted(chains.orphans(), 'page')} ({format_share(chains.orphans(), found.pages)})"
        yield f"  orphans   {orphans} with no parent in this part"
        if len(chains) < found.pages:
            yield f"  damaged   {counted(found.pages - len(chains), 'page')} without a sound header"
    yield "  bytes by last use"
    for name, size in zip(_AGES, found.ages, strict=True):
        if size or name != "unknown":
            # A store may contain only pages that were truncated to zero bytes.
            bar = "#" * round(min(_BAR_CHARACTERS, width() - 40) * size / max(1, found.bytes))
            yield f"    {name:<10}  {format_size(size):>10}  {format_share(size, found.bytes):>7}  {bar}".rstrip()
    yield ""
    yield from ("  " + line for line in _namespace_table(found))
