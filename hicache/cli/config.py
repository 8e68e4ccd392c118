"""`hicache config`: write or check a configuration, or list all entries."""

from __future__ import annotations

import difflib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import yaml

from ..backends.registry import check_backend
from ..config import ENVIRON_PREFIX, FILE_VARIABLE, HiCacheConfig, load_config, read_key
from ..config.entries import EntryInfo, all_entries, part_entries
from ..config.ready import ready_files
from ..config.storage import STORAGE_SECTIONS
from ..errors import ConfigError
from ..events.security import check_events
from ..units import counted
from .arguments import FILE, PATH, is_dash, read_dash
from .main import FOUND_EXIT_CODE
from .progress import width

_MARKDOWN_HEAD = f"""\
# Configuration

This page is generated from the schema: `hicache config schema --markdown > docs/configuration.md`.

A configuration is a YAML file. The names below are paths in it: `host.size` is the entry `size` of the section `host`.

**Sources.** Each entry can also be a variable, in capitals and with two underscores for each dot
(`{ENVIRON_PREFIX}HOST__SIZE=4GiB`), or a flag (`--set host.size=4GiB`). Flags override variables, and variables the
file. An alternative (`size`, `tokens`, `ratio`) replaces the others of a weaker source; another `storage.type` replaces
the options of the old one. `null` unsets an entry. An empty variable or flag is empty text, which most entries reject.
A file has at most 10,000 names and values. Without a file, `{FILE_VARIABLE}` names it; `hicache demo` and
`hicache replay` have default files instead.

**Units.** Sizes are written `200GiB`, `64MB` or `512B`; durations `5s`, `250ms`, `2h` or `7d`. The unit is required,
except for 0; a program passes bytes and seconds as numbers. A tier or a store has at least 1 MiB. `~` in a path is the
home directory; a URL in place of a path is rejected. Numbers that YAML reads in base 8 or 60 (`064` would be 52, `1:30`
would be 90) are rejected in a file; as a variable or flag, `064` is 64.

**Secrets.** A secret is in a file of mode 0600, or in a variable that an `..._env` entry names. A file is safer,
because child processes inherit variables.

**Errors.** Unknown, invalid and duplicate entries are rejected, with the nearest valid name, or HiCache's name for an
entry of SGLang, LMCache or vLLM. An unknown `{ENVIRON_PREFIX}` variable is rejected if two underscores follow in its
name, unless an `..._env` entry names it. Others are ignored with a warning, because Kubernetes sets
`{ENVIRON_PREFIX}PORT` and more beside a service named `hicache`.

`-` as a default: not set.

"""
_TABLE_HEAD = """\
| Entry | Accepts | Default | Meaning |
|---|---|---|---|
"""
_MARKDOWN_TAIL = """
The entries `storage.options.*` above are those of the `file` backend; the other backends follow. Required entries are
required only in a configuration with `storage`. Entries inside a list, such as parts, can only be set in a file.
"""


@click.group()
def config() -> None:
    """Write a ready configuration, check one, or list all entries."""


@config.command(short_help="Write a ready configuration, with comments.")
@click.argument("name", required=False)
@click.option("-o", "--output", type=FILE, metavar="FILE",
              help="File to create.  [default: -, standard output]")  # fmt: skip
def init(name: str | None, output: Path | None) -> None:
    """Write the ready configuration NAME; its comments explain what to change. Without NAME, list them."""
    ready = ready_files()
    if name is None:
        for known, path in ready.items():
            click.echo(click.style(known, bold=True))
            click.echo(click.wrap_text(_first_sentence(path.read_text(encoding="utf-8")), width(), "    ", "    "))
        return
    if name not in ready:
        near = difflib.get_close_matches(name, ready, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ready)}"
        raise ConfigError(f"{name!r} is not a ready configuration; {hint}")
    text = ready[name].read_text(encoding="utf-8")
    if output is None or is_dash(output):
        click.echo(text, nl=False)
        return
    try:
        with open(output, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{output}: already exists; remove it or choose another file") from error
    click.echo(f"written to {output}; after changes run: hicache config check {output}", err=True)


def _first_sentence(text: str) -> str:
    """Return the first sentence of the comment at the head of a ready configuration."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    return " ".join(line.lstrip("# ") for line in lines).partition(". ")[0].rstrip(".") + "."


@config.command(short_help="Check a file, and print the effective configuration.")
@click.argument("file", type=PATH, required=False)
@click.option("--set", "settings", multiple=True, metavar="ENTRY=VALUE", help="Such as host.size=4GiB.")
@click.option("--json", "as_json", is_flag=True, help="Print the configuration as JSON instead of YAML.")
def check(file: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Check FILE together with HICACHE_* variables, and print the effective configuration as YAML.

    FILE may be -, for standard input; the default is the value of HICACHE_CONFIG_FILE. The check also imports the
    storage backend, reads the key files and checks the addresses of events. It does not open a store or a port. Exit
    code 1 if the configuration is rejected.
    """
    if file is None and FILE_VARIABLE not in os.environ:
        raise click.UsageError(f"pass a FILE, or set the variable {FILE_VARIABLE}")
    try:
        with read_dash(file) as path:
            loaded = load_config(path, environ=os.environ, overrides=parse_settings(settings))
        check_surroundings(loaded)
    except ConfigError as error:
        message = str(error) if path == file else str(error).replace(f"file {path}", "standard input")
        click.echo(f"hicache: {message}", err=True)
        raise click.exceptions.Exit(FOUND_EXIT_CODE) from error
    # On standard error, so that standard output can be loaded as YAML.
    click.echo("ok", err=True)
    if as_json:
        click.echo(json.dumps(loaded.model_dump(mode="json"), indent=2, ensure_ascii=False))
    else:
        click.echo(effective_yaml(loaded), nl=False)


@config.command()
@click.option("--markdown", "form", flag_value="markdown", help="Print docs/configuration.md.")
@click.option("--json", "form", flag_value="json", help="Print the JSON schema, for editors.")
def schema(form: str | None) -> None:
    """List every entry with its default and meaning."""
    if form == "markdown":
        click.echo(markdown(), nl=False)
    elif form == "json":
        click.echo(json.dumps(HiCacheConfig.model_json_schema(), indent=2))
    else:
        for title, entries in [("", all_entries()), *_other_entries()]:
            if title:
                click.echo(f"\n{title}\n")
            for entry in entries:
                click.echo(f"{click.style(entry.name, bold=True)}: {entry.accepts} [{entry.default}]")
                click.echo(click.wrap_text(entry.description, width(), "    ", "    "))


def _other_entries() -> Iterator[tuple[str, list[EntryInfo]]]:
    """Yield the entries that the list with `file` storage does not contain, each group with its title."""
    for kind in STORAGE_SECTIONS:
        if kind != "file":
            options = [entry for entry in all_entries(kind) if entry.name.startswith("storage.options.")]
            yield f"Storage of type {kind}", options
    yield "Parts of a composition, in addition to the entries of a storage section", list(part_entries())


def check_surroundings(loaded: HiCacheConfig) -> None:
    """Check the external references of a configuration: its storage backend, key files and event addresses.

    Imports the module of the backend; does not open a store or bind an address. Raises ConfigError.
    """
    problems = []
    if loaded.storage is not None:
        try:
            check_backend(loaded.storage.type, loaded.storage.options)
        except ConfigError as error:
            problems.append(f"storage: {error}")
    for entry, place in (*loaded.integrity.key_sources(), *loaded.storage_format.key_sources()):
        # Variables are not read: the user who checks a file may not have those of the user who runs it.
        if isinstance(place, Path):
            try:
                read_key(entry, place, {})
            except ConfigError as error:
                problems.append(f"{entry}: {error}")
    try:
        check_events(loaded.events)
    except ConfigError as error:
        problems.append(f"events: {str(error).removeprefix('events: ')}")
    if problems:
        raise ConfigError("\n  ".join([f"the configuration has {counted(len(problems), 'problem')}:", *problems]))


def parse_settings(settings: tuple[str, ...]) -> dict[str, str]:
    """Return `("host.size=4GiB",)` as a mapping. Raises ConfigError for a setting without `=`."""
    parsed = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {setting!r}: write it as ENTRY=VALUE, such as host.size=4GiB")
        parsed[name.strip()] = value.strip()
    return parsed


def effective_yaml(loaded: HiCacheConfig) -> str:
    """Return the whole configuration as YAML that loads to an equal one, with units for sizes and durations."""
    return yaml.safe_dump(
        loaded.model_dump(mode="json"), sort_keys=False, default_flow_style=False, allow_unicode=True, width=120
    )


def markdown() -> str:
    """Return the text of docs/configuration.md."""
    variants = "".join(f"\n## {title}\n\n{_table(entries)}" for title, entries in _other_entries())
    return _MARKDOWN_HEAD + _table(all_entries()) + _MARKDOWN_TAIL + variants


def _table(entries: Iterable[EntryInfo]) -> str:
    rows = [
        f"| `{name}` | {accepts} | {'-' if default == 'not set' else default} | {text} |\n"
        for name, accepts, default, text in entries
    ]
    return _TABLE_HEAD + "".join(rows)
