"""The stores of commands: a directory, or a configuration that names a store, possibly of several parts."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic_core import to_jsonable_python

from ..backends.registry import BackendSpec, leaf_specs, open_stored
from ..backends.shared_files.root import is_shared_store
from ..backends.stored import StoredPages
from ..backends.tools.verify import PageKeys
from ..config import FILE_VARIABLE, HiCacheConfig, entry_of_variable, load_config, read_key_file
from ..config.storage import FileStorageOptions, SharedFilesStorageOptions, StorageConfig
from ..errors import ConfigError
from ..units import counted, format_size, parse_size
from .arguments import PATH, NamespacePrefix

_YAML = (".yaml", ".yml")
Command = TypeVar("Command", bound=Callable[..., Any])


def _store_or_variable(context: click.Context, parameter: click.Parameter, store: Path | None) -> Path:
    """Return the argument of a command that removes nothing, or the value of the variable."""
    if store is not None:
        return store
    if not os.environ.get(FILE_VARIABLE):
        raise click.UsageError(f"pass a STORE, or set the variable {FILE_VARIABLE} to a configuration", context)
    return Path(PATH.convert(os.environ[FILE_VARIABLE], parameter, context))


def _is_configuration(store: Path) -> bool:
    named = os.path.expanduser(os.environ.get(FILE_VARIABLE, ""))
    return (store.suffix in _YAML or str(store) == named) and not store.is_dir()


STORE = click.argument("store", metavar="STORE", type=PATH)
NAMED_STORE = click.argument("store", metavar="[STORE]", type=PATH, required=False, callback=_store_or_variable)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with whole digests and numbers.")
PART = click.option("--part", metavar="NAME", help="Only this part of a composed store; `stat` lists the names.")
NAMESPACE = click.option(
    "--namespace", metavar="HEX", type=NamespacePrefix(), callback=lambda _context, _option, value: value or "",
    help="Only namespaces whose digest starts with these digits; `ls` lists them.",
)
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print the pages and bytes, and change nothing.")
_MAC_KEYS = click.option(
    "--mac-key-file", "mac", type=PATH, multiple=True,
    help="File with the MAC key of the pages; twice during a key change. Without it, only the headers of such pages "
    "are checked.",
)
_ENCRYPTION_KEYS = click.option(
    "--encryption-key-file", "encryption", type=PATH, multiple=True, help="The same for encrypted pages.",
)


@dataclass(frozen=True, slots=True)
class StorePart:
    """A store that can be opened: a whole store, or one part of a composition."""

    name: str
    spec: BackendSpec

    @property
    def capacity_bytes(self) -> int | None:
        """The configured limit, or None."""
        options = self.spec.options
        found = options.get("capacity") if isinstance(options, Mapping) else getattr(options, "capacity", None)
        with contextlib.suppress(ValueError):  # opening the store says so
            found = parse_size(found)
        return found if isinstance(found, int) else None

    @property
    def directory(self) -> Path | None:
        """The directory of a store of files; None for other stores."""
        options = self.spec.options
        return options.path if isinstance(options, FileStorageOptions | SharedFilesStorageOptions) else None

    def opened(self) -> contextlib.closing[StoredPages]:
        """Open the store for its operator. Raises ConfigError and BackendError."""
        return contextlib.closing(open_stored(self.spec))


def parts_of(store: Path, part: str | None = None) -> list[StorePart]:
    """Return the parts of a command's argument: the directory of a store, or a configuration `*.yaml` with `storage`.

    Memory parts of a composition are skipped, because another process has them. Opens nothing. Raises ConfigError.
    """
    found = _parts(_configured(store)) if _is_configuration(store) else [_directory(store)]
    if len(found) > 1:
        found = [one for one in found if one.spec.type != "memory"]
        if not found:
            raise ConfigError(f"{store}: all parts of the store are memory, which only the engine itself can access")
    if part is None:
        return found
    chosen = [one for one in found if one.name == part]
    if not chosen:
        raise ConfigError(f"{store} has no part {part!r}; it has: {', '.join(one.name for one in found)}")
    return chosen


def parts_of_storage(storage: StorageConfig) -> list[StorePart]:
    """Return the stores of a section `storage`: the parts of a composition, also those in memory. Opens nothing."""
    return _parts(BackendSpec.of(storage))


def _parts(spec: BackendSpec) -> list[StorePart]:
    return [StorePart(name, leaf) for name, leaf in leaf_specs(spec)]


def only_part(store: Path, part: str | None, option: str) -> StorePart:
    """Return the only part of a store. Raises ConfigError if there are several and `option` does not choose one."""
    found = parts_of(store, part)
    if len(found) != 1:
        names = ", ".join(one.name for one in found)
        raise ConfigError(f"{store} has {counted(len(found), 'part')}: {names}; choose one with {option}")
    return found[0]


def _configured(path: Path) -> BackendSpec:
    storage = load_config(path, environ=dict(_variables_of_entries()), overrides={}).storage
    if storage is None:
        raise ConfigError(f"{path}: has no section `storage`; add one, or pass the directory of a file store")
    return BackendSpec.of(storage)


def _directory(path: Path) -> StorePart:
    """Return the store in a directory, without limits: one of shared files if it has their marker."""
    with contextlib.suppress(OSError):  # opening the store reports the reason
        if is_shared_store(path):
            return StorePart("shared_files", BackendSpec("shared_files", SharedFilesStorageOptions(path=path)))
    return StorePart("file", BackendSpec("file", FileStorageOptions(path=path, capacity=None, free_space_floor=0)))


def _variables_of_entries() -> Iterator[tuple[str, str]]:
    """Yield the environment without `HICACHE_*` variables that are not entries of a configuration. An engine rejects
    them as typos; but with two stores they may be the credentials of the other configuration."""
    for name, value in os.environ.items():
        entry = entry_of_variable(name)
        if entry is None or entry[0] in HiCacheConfig.model_fields:
            yield name, value


def key_options(command: Command) -> Command:
    """Add the options for `page_keys` to a command."""
    return _MAC_KEYS(_ENCRYPTION_KEYS(command))


def page_keys(mac: tuple[Path, ...], encryption: tuple[Path, ...]) -> PageKeys:
    """Return the keys in these files. Raises ConfigError."""
    return PageKeys(
        tuple(key for path in mac for key in read_key_file(path, "MAC key file")),
        tuple(key for path in encryption for key in read_key_file(path, "encryption key file")),
    )


def amount(pages: int, size_bytes: int) -> str:
    """Return an amount as text: `4 pages, 16.0 KiB`."""
    return f"{counted(pages, 'page')}, {format_size(size_bytes)}"


def print_json(document: dict[str, Any]) -> None:
    """Print a document as JSON, in which a number that is not finite is null."""
    click.echo(json.dumps(to_jsonable_python(document, inf_nan_mode="null"), indent=2, allow_nan=False))
